"""Ray clusters on this machine: nodes with one CPU each, and small stores."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

import psutil
import pytest

import cerebro

STORE_BYTES = 80_000_000


class Cluster:
    """A cluster whose nodes have separate caches, as on several machines.

    The head has no CPU: this process is on it, and reads the data in place.
    """

    def __init__(self, folder, nodes=3, **head):
        from ray.cluster_utils import Cluster as RayCluster

        self.folder = folder
        self.cluster = RayCluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "env_vars": {"CEREBRO_CACHE": str(folder / "head")},
                **head,
            },
        )
        self.address = self.cluster.address
        self.nodes = []
        self.restore(nodes)

    def restore(self, nodes=3):
        """Restore this number of nodes after a test, with empty caches."""
        while len(self.nodes) < nodes:
            self.add()
        while len(self.nodes) > nodes:
            self.kill(self.nodes[-1])
        for data in self.folder.glob("node-*/data"):
            shutil.rmtree(data)

    def add(self, **options):
        number = len(list(self.folder.glob("node-*")))
        cache = self.folder / f"node-{number}"
        cache.mkdir()
        options = {"num_cpus": 1, "object_store_memory": STORE_BYTES} | options
        variables = {"CEREBRO_CACHE": str(cache), "NODE": cache.name}
        self.nodes.append(self.cluster.add_node(env_vars=variables, **options))

    def kill(self, node):
        """Kill a node's processes, as in a power loss.

        Ray kills only its own; actors would live until they notice that these are gone.
        """
        self.nodes.remove(node)
        kill_raylet(psutil.Process(node.all_processes["raylet"][0].process.pid))
        self.cluster.remove_node(node, allow_graceful=False)

    def executor(self, **options):
        return cerebro.ray.Executor(address=self.address, **options)

    def close(self):
        import ray

        ray.shutdown()
        self.cluster.shutdown()


@contextlib.contextmanager
def running(folder, **options):
    pytest.importorskip("ray")
    before = os.environ.get("CEREBRO_CACHE")
    os.environ["CEREBRO_CACHE"] = str(folder / "coordinator")
    cluster = Cluster(folder, **options)
    try:
        yield cluster
    finally:
        cluster.close()
        if before is None:
            del os.environ["CEREBRO_CACHE"]
        else:
            os.environ["CEREBRO_CACHE"] = before


def living_actors():
    """The actors of this process's cluster."""
    from ray._private.state import actors

    return [actor for actor in actors().values() if actor["State"] != "DEAD"]


def kill_raylet(raylet):
    """Kill a node's raylet and all processes that it has started."""
    for process in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def wait_until(condition):
    """Poll until other processes reach a condition, on their events or after short pauses."""
    for _ in range(600):
        if condition():
            return
        threading.Event().wait(0.1)
    raise AssertionError("it did not happen within a minute")


def content(folder):
    """Every file below a folder."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def bytes_of(data):
    """The bytes of all shards of a dataset."""
    return sum(
        entry.bytes for shard in data.shards.manifest.shards for entry in shard.files.values()
    )
