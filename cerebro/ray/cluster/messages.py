"""What travels between coordinator and actors, and workers as the coordinator sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cerebro.ray.cluster.connection import Node
from cerebro.worker.messages import Event, Job


@dataclass(frozen=True)
class NodeReport:
    """What an actor says about the node that it is on."""

    node: str
    """The node's number in the cluster, hexadecimal."""
    host: str
    place: str
    """Which cache folder it uses: actors that share one have the same."""
    pid: int
    cores: int
    environment: Mapping[str, Any]
    """See `cerebro.machine.environment.describe`."""
    reads_run: bool
    """Whether it sees the run's folder under the same path."""
    at: tuple[str | None, ...] = ()
    """Where it can read each data set that it was asked about, None: nowhere."""
    gpu: str = ""
    """What the maker calls the GPU that Ray has given the worker, if it is to use one;"""
    no_gpu: str = ""
    """or why it cannot."""

    @property
    def name(self) -> str:
        """The node, for people."""
        return f"{self.host} ({self.node[:8]})"


@dataclass(frozen=True)
class DataAt:
    """A view of a data set, and where it is on a node."""

    spec: Mapping[str, Any]
    """As of `Dataset.spec`; its path is the node's."""
    in_parts: bool
    """Whether only some shards are there."""


@dataclass(frozen=True)
class Begin:
    """What a worker needs to know about a run."""

    build: bytes
    """A pickle for its process."""
    settings: Mapping[str, Any]
    """Fields of `RunContext`, as in the coordinator."""
    train: DataAt
    validation: DataAt | None
    shares_run: bool
    """Whether states and logs go straight into the run's folder."""
    path: tuple[str, ...]
    """The coordinator's `sys.path`,"""
    argv: tuple[str, ...]
    """its arguments,"""
    directory: str
    """and its working directory: used where they exist."""
    workers_here: int
    """Workers on this node, which share its memory and cores."""
    folds: Mapping[str, Any] | None = None
    """Of the training data, as of `Folds.to_json`."""
    gpu_share: float = 0.0
    """What of a GPU Ray has given the worker."""


@dataclass(frozen=True)
class StateIn:
    """The state that a unit begins with."""

    refs: tuple[Any, ...]
    """One reference to its bytes. In a tuple, because Ray would fetch a bare one also where
    the worker has the model in memory."""
    state_hash: str
    node: str = ""
    """Where it was made; empty: in the coordinator."""
    is_clone: bool = False


@dataclass(frozen=True)
class Answer:
    """What came of a task."""

    event: Event | None
    """None: the state that it was to begin with could not be fetched."""
    missing: str = ""
    """Why."""
    is_full: bool = False
    """Because there was no room for it in the object store."""
    log: bytes = b""
    """What the trial has printed since the last answer, where logs do not go into the run."""
    fetched: int = 0
    """Bytes of state that were fetched for it."""


@dataclass
class Traffic:
    """What has been moved so far; bytes."""

    data_bytes: int = 0
    """Of shards and validation rows, from the coordinator to nodes."""
    shards: dict[tuple[str, int], int] = field(default_factory=dict)
    """How often a place was sent a shard; -1 stands for the validation rows."""
    state_bytes: int = 0
    """Of states, from worker to worker."""
    states: int = 0
    """How many that were."""
    kept_bytes: int = 0
    """Of states at epochs' ends, to the coordinator."""


@dataclass
class Hand:
    """A worker as the coordinator sees it."""

    number: int
    actor: Any
    node: Node
    name: str
    """The node's, for people."""
    place: str
    reads_all: bool
    """Whether it reads all shards where they are."""
    begin: Begin
    stale: set[int] = field(default_factory=set)
    """Trials of which another worker has made a newer state."""
    silent_looks: int = 0
    has_answered: bool = False
    is_gone: bool = False
    """Whether the actor, and not only its process, is lost."""
    node_is_gone: bool = False


@dataclass
class Call:
    """What a worker has been given."""

    serial: int
    job: Job
    packed: Any = None
    """Reference to the state that it will leave."""
    reloaded: bool = False
    """Whether its shard was damaged on the node and has been sent again."""
