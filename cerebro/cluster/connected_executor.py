"""Searches on agents that connect: `cerebro.cluster.Executor`, and the base of other engines'."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path

from cerebro.cluster.engine import Engine, Processes, assign_gpus, collect_variables
from cerebro.cluster.executor import ClusterExecutor
from cerebro.cluster.hub import Hub
from cerebro.cluster.keys import (
    Keys,
    Ticket,
    find_listening_host,
    format_address,
    parse_address,
    read_key_file,
)
from cerebro.errors import InputError
from cerebro.machine.devices import is_gpu
from cerebro.machine.files import path_of
from cerebro.machine.resources import usable_cores
from cerebro.worker.messages import RunContext


class EngineExecutor(ClusterExecutor):
    """Runs a search on agents that an engine starts; subclasses choose the engine."""

    _at: tuple[str, int] | None = None  # the host and port to listen at; None: any free port
    _key_file: Path | None = None  # the file with the key; None: a new key for each run

    @abstractmethod
    def _make_engine(self, context: RunContext) -> Engine:
        """Return the engine that starts the agents of this run."""

    def _find_gpu_share(self, context: RunContext) -> float:
        """Return the share of a GPU that each worker uses in this run; 0: none."""
        return self._gpu_share if self._gpu_share and is_gpu(context.device) else 0.0

    def _find_own_host(self) -> str:
        """Return the host to which the agents that the engine starts connect."""
        return "127.0.0.1"

    def _join(self, context: RunContext) -> Hub:
        engine = self._make_engine(context)
        dialed = self._find_own_host()
        inside = find_listening_host(dialed)
        host, port = self._at or (inside, 0)
        path = self._key_file
        keys = Keys.generate() if path is None else Keys(read_key_file(path, create=True))
        hub = Hub(keys, engine, host, port)
        try:
            address = format_address(dialed, hub.port)
            engine.start(Ticket(address, keys.key, collect_variables(), inside))
        except BaseException:
            hub.close()
            raise
        return hub


class Executor(EngineExecutor):
    """Runs a search on agents; give it to `cerebro.search` as ``executor=``.

    Without `listen`, it starts the agents itself, on this machine. With `listen`, others start
    them, on any machine that reaches this one: ``python -m cerebro agent --connect HOST:PORT --key
    FILE``.

    Parameters
    ----------
    workers
        The number of workers, each of which is one agent. None: with `listen`, all that connect,
        also later; else as many as fit on this machine.
    listen
        ``"host:port"`` of this machine to which agents connect, such as ``"0.0.0.0:7070"``.
    key
        A file with the key that this process and the agents share. It is created, readable for its
        owner only, if it does not exist. Required with `listen`.
    replicas
        The number of nodes that get each shard.
    shared_path
        A path at which all nodes can read the data, such as on a network file system: the dataset's
        folder or its parent; or a URL in object storage, from which each node copies the
        shards that it works on. None: each node receives them, once, and keeps them for later
        searches; of a dataset that is in object storage, it copies them from there.
    gpus
        1: each worker trains on a GPU, which it sees alone, as ``cuda:0``. Without `listen`, those
        of this machine, in turn; else the GPU that its agent was given (``--device``, or the only
        one in ``CUDA_VISIBLE_DEVICES``). A part of one, such as 0.5: several workers share a GPU.
        None: on the CPU.

    Attributes
    ----------
    traffic
        The bytes moved so far; see `cerebro.cluster.messages.Traffic`.
    devices
        ``("cuda",)`` if its workers have GPUs, else ``("cpu",)``.

    Raises
    ------
    InputError
        If an argument is invalid. At the start of a search: if pyzmq is not installed, no agent
        connects, agents have other versions, nodes would compute different results, a node cannot
        read the data, or an agent has no GPU that it can use.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        listen: str | None = None,
        key: str | os.PathLike[str] | None = None,
        replicas: int = 1,
        shared_path: str | os.PathLike[str] | None = None,
        gpus: float | None = None,
    ) -> None:
        super().__init__(workers, replicas, shared_path, gpus)
        if (listen is None) != (key is None):
            raise InputError("listen= and key= belong together: give both, or neither")
        self._at = None if listen is None else parse_address(listen, f"listen={listen!r}")
        self._key_file = None if key is None else path_of("key", key)
        self._arguments |= {"listen": listen, "key": key, "gpus": gpus}

    def _make_engine(self, context: RunContext) -> Engine:
        if self._at is not None:
            return Engine()
        if share := self._find_gpu_share(context):
            return Processes(assign_gpus(self.workers, share))
        fitting = max(1, usable_cores() // context.exactness.threads)
        return Processes([{}] * (self.workers or fitting))
