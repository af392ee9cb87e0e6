"""The Ray cluster: a head without CPUs and a few nodes with one each, on this machine.

It outlives runs, because starting one takes longer than a short search; removed nodes are replaced.
"""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any, Protocol

from benchmarks.faults import processes
from benchmarks.faults.models import EVENTS

NODES = 2
STORE_BYTES = 80_000_000


class Cluster(Protocol):
    """What a run needs from the nodes of an engine, whose agents are called actors here."""

    key: Path | None
    """The key that agents and coordinators share; None: the cluster is Ray's."""
    nodes: list[Any]

    @property
    def address(self) -> str:
        """Where the next coordinator finds its workers, or listens for them."""

    def restore(self) -> None:
        """Restore the initial number of nodes, for a new run."""

    def begin(self) -> None:
        """Prepare for a coordinator, which starts next."""

    def end(self) -> None:
        """The coordinator has ended."""

    def add(self) -> None:
        """Add a node."""

    def remove(self, node: Any) -> None:
        """Kill a node's processes, as in a power loss."""

    def of(self, actor: int) -> Any | None:
        """Return the node of an actor's process; None: it is gone."""

    def kill(self, actor: int) -> bool:
        """Kill an actor, which the engine may replace; False: it is gone."""

    def actors(self) -> dict[int, str]:
        """Return the processes of actors that are alive, and their states."""

    def close(self) -> None:
        """End the cluster."""


class Nodes:
    """A running cluster of Ray.

    Parameters
    ----------
    folder
        For the nodes' caches, one per node, not shared.
    mark, pipe
        Inherited by all processes of the cluster.
    """

    def __init__(self, folder: Path, mark: str, pipe: Path) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self._folder = folder
        self._variables = {processes.MARK: mark, EVENTS: str(pipe)}
        self._numbers = itertools.count()
        self.key: Path | None = None
        self._cluster = RayCluster(
            initialize_head=True, head_node_args={"num_cpus": 0, **self._options("head")}
        )
        self.nodes: list[Any] = []
        try:
            self.restore()
        except BaseException:
            self.close()
            raise

    def _options(self, name: str) -> dict[str, Any]:
        variables = self._variables | {"CEREBRO_CACHE": str(self._folder / name)}
        return {
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "env_vars": variables,
        }

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def restore(self) -> None:
        """Restore the initial number of nodes."""
        while len(self.nodes) < NODES:
            self.add()
        while len(self.nodes) > NODES:
            self.remove(self.nodes[0])

    def begin(self) -> None:
        """Do nothing: the cluster outlives coordinators."""

    def end(self) -> None:
        """Do nothing: Ray ends the actors of a coordinator."""

    def kill(self, actor: int) -> bool:
        """Kill an actor; the coordinator has Ray start another."""
        return is_actor(actor) and processes.send(actor, signal.SIGKILL)

    def add(self) -> None:
        name = f"node-{next(self._numbers)}"
        self.nodes.append(self._cluster.add_node(num_cpus=1, **self._options(name)))

    def remove(self, node: Any) -> None:
        """Kill a node's processes, as in a power loss."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def of(self, actor: int) -> Any | None:
        """The node of an actor's process; None: it is gone."""
        raylet = parent(actor)
        for node in self.nodes:
            if node.all_processes["raylet"][0].process.pid == raylet:
                return node
        return None

    def actors(self) -> dict[int, str]:
        """The processes of actors that the cluster considers alive, and their states."""
        actors = self._cluster.global_state.actor_table(None).values()
        living = [actor for actor in actors if actor["State"] != "DEAD"]
        return {actor["Pid"]: actor["State"] for actor in living}

    def close(self) -> None:
        self._cluster.shutdown()


def parent(pid: int) -> int:
    """A process's parent; 0 if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def is_actor(pid: int) -> bool:
    """Whether a process is an agent, or an actor: Ray replaces its command line with the class."""
    command = processes.command_of(pid)
    return "WorkerActor" in command or "-m cerebro agent " in command


def worker_processes(mark: str) -> list[int]:
    """Worker processes of the cluster with a mark."""
    return [pid for pid in processes.marked(mark) if processes.is_worker(pid)]


def held_bytes(agent: int) -> int:
    """The bytes of states that the process of an agent has mapped, also if their file is gone."""
    total = 0
    for line in Path(f"/proc/{agent}/maps").read_text().splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if "/slots/" in name:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            total += end - begin
    return total


def cached_bytes(folder: Path) -> int:
    """The data in the nodes' caches below a folder."""
    return sum(f.stat().st_size for f in folder.glob("node-*/data/*/shard-*/*"))
