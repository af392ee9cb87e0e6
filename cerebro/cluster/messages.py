"""The messages between coordinator and agents, from the first one of a connection."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cerebro.executors.wire import unpickle
from cerebro.machine.environment import version
from cerebro.worker.messages import Event


class Sent:
    """A pickle of `cloudpickle` that an agent passes on; unpickling this object opens it.

    An agent supervises a worker process and never trains. Only the process imports the modules of
    the user's ``build``, when it unpickles the message that contains the pickle.
    """

    def __init__(self, message: bytes) -> None:
        self.message = message

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return unpickle, (self.message,)

    def __call__(self, *args: Any) -> Any:
        raise TypeError("this is a placeholder for a function that only worker processes have")


@dataclass(frozen=True)
class NodeReport:
    node: str  # the node's number in the cluster, hexadecimal
    host: str  # containers of one machine have names of their own, and other limits
    place: str  # the identity of its cache folder; agents that share the folder have the same
    machine: str  # the identity of its machine, as in the hello of agents
    environment: Mapping[str, Any]  # see `cerebro.machine.environment.describe`
    shares_run: bool
    """Whether it sees the run's folder at the same path, and writes there as the script does."""
    at: tuple[str | None, ...] = ()  # the path at which it can read each dataset; None: it cannot
    gpu: str = ""  # the model of the worker's GPU, if it uses one
    no_gpu: str = ""  # why the worker's GPU cannot be used

    @property
    def name(self) -> str:
        """The node's name in messages."""
        return f"{self.host} ({self.node[:8]})"


@dataclass(frozen=True)
class DataAt:
    """A view of a dataset on a node."""

    spec: Mapping[str, Any]  # the result of `Dataset.spec`, with the path on the node
    in_parts: bool  # whether the node has only some shards


@dataclass(frozen=True)
class Begin:
    """The description of a run for a worker."""

    build: bytes  # a pickle for its process
    settings: Mapping[str, Any]  # fields of the coordinator's `RunContext`
    folds: Mapping[str, Any] | None  # of the training data, as from `Folds.to_json`
    gpu_share: float  # the share of a GPU that the cluster has given the worker
    path: tuple[str, ...]  # the coordinator's `sys.path`; only entries that exist are used
    argv: tuple[str, ...]  # the coordinator's arguments
    directory: str  # the coordinator's working directory, which is used if it exists
    # What depends on the node:
    data: tuple[DataAt, ...] = ()  # for training and, if any, for validation
    shares_run: bool = False  # whether the worker writes states and logs into the run's folder
    workers_here: int = 1  # workers on this node's machine, which share its memory and cores


@dataclass(frozen=True)
class StateIn:
    """The state that a unit begins with."""

    ref: Any  # a reference to its bytes; see `cerebro.cluster.states.Blob`
    state_hash: str
    agent: str = ""  # the number of the agent that holds it; empty: the coordinator


@dataclass(frozen=True)
class JobResult:
    event: Event | None  # None: the task was dropped, or the state it begins with is missing
    missing: str = ""  # why it could not be fetched
    is_full: bool = False  # whether it could not be stored because the node's disk is full
    is_dropped: bool = False
    """Whether it was queued, and the unit before it did not succeed or the agent leaves."""
    log: bytes = b""  # the trial's new output, unless the worker writes it into the run
    fetched: int = 0  # bytes of the state that was fetched for the task


@dataclass
class Traffic:
    """The data moved so far, in bytes."""

    data_bytes: int = 0  # bytes of shards and validation rows, from the coordinator to nodes
    shards: dict[tuple[str, int], int] = field(default_factory=dict)
    """The number of times that each shard was sent to a place; -1 means the validation rows."""
    state_bytes: int = 0  # bytes of states, from worker to worker
    states: int = 0  # the number of these states
    kept_bytes: int = 0  # bytes of states at epochs' ends, to the coordinator
    made_bytes: int = 0  # bytes of shards that nodes have made, to the coordinator


PROTOCOL = 6  # increased when messages change


def list_versions() -> dict[str, str]:
    """Return the versions that both ends must share to understand messages."""
    return {
        "protocol": str(PROTOCOL),
        "cerebro": version(),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def read_machine_id() -> str:
    """Return the identity of this machine since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{os.uname().nodename} {uuid.getnode()}"
