"""The cluster: a head without processors and a few nodes with one each, on this machine.

It outlives runs; nodes that were removed are replaced, for starting one takes longer than a
short search.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from benchmarks.faults import processes
from benchmarks.faults.models import EVENTS

NODES = 2
STORE_BYTES = 80_000_000


class Nodes:
    """A running cluster.

    Parameters
    ----------
    folder
        For the nodes' caches, one each: they share nothing.
    mark, pipe
        Inherited by all processes of the cluster.
    """

    def __init__(self, folder: Path, mark: str, pipe: Path) -> None:
        from ray.cluster_utils import Cluster

        self._folder = folder
        self._variables = {processes.MARK: mark, EVENTS: str(pipe)}
        self._numbers = itertools.count()
        self._cluster = Cluster(
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
        """Have as many nodes as in the beginning."""
        while len(self.nodes) < NODES:
            self.add()
        while len(self.nodes) > NODES:
            self.remove(self.nodes[0])

    def add(self) -> None:
        name = f"node-{next(self._numbers)}"
        self.nodes.append(self._cluster.add_node(num_cpus=1, **self._options(name)))

    def remove(self, node: Any) -> None:
        """End a node's processes at once, as a loss of power does."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def of(self, actor: int) -> Any | None:
        """The node that an actor's process is on; None: it is gone."""
        raylet = parent(actor)
        for node in self.nodes:
            if node.all_processes["raylet"][0].process.pid == raylet:
                return node
        return None

    def actors(self) -> dict[int, str]:
        """The processes of actors that the cluster counts as living, and their states."""
        actors = self._cluster.global_state.actor_table(None).values()
        living = [actor for actor in actors if actor["State"] != "DEAD"]
        return {actor["Pid"]: actor["State"] for actor in living}

    def close(self) -> None:
        self._cluster.shutdown()


def parent(pid: int) -> int:
    """The process that started another; 0 if that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def is_actor(pid: int) -> bool:
    """Whether a process is one of our actors; Ray writes its class where arguments were."""
    try:
        return b"WorkerActor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def worker_processes(mark: str) -> list[int]:
    """Worker processes of the cluster with a mark."""
    return [pid for pid in processes.marked(mark) if processes.is_worker(pid)]


def store_bytes() -> int:
    """What the object stores of this process's cluster held a moment ago, all nodes together.

    Without copies that other nodes have fetched, which go when there is no room.
    """
    import ray

    name = "object_store_memory"
    return int(ray.cluster_resources().get(name, 0) - ray.available_resources().get(name, 0))


def cached_bytes(folder: Path) -> int:
    """What the caches of nodes below a folder hold of data."""
    return sum(f.stat().st_size for f in folder.glob("node-*/data/*/shard-*/*"))
