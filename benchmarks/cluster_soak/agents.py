"""The cluster without Ray: nodes with one agent each, on this machine.

Agents belong to one search. They are started before each leg and end with it; one that is killed is
started again, as a batch system would. A node is a cache folder, which outlives its agents.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster_soak.nodes import NODES, parent, worker_processes
from benchmarks.faults import processes
from benchmarks.faults.models import EVENTS
from benchmarks.peers import free_port
from cerebro.cluster.keys import read_key_file

PATIENCE_SECONDS = 15
"""How long an agent looks for a coordinator. One that comes too late for a leg ends then."""


@dataclass(eq=False)
class AgentNode:
    """A node: its cache folder and its agent, if one was started."""

    folder: Path
    agent: subprocess.Popen[bytes] | None = None


class Agents:
    """Nodes with agents, used like `benchmarks.cluster_soak.nodes.Nodes`.

    Parameters
    ----------
    folder
        For the key and the nodes' caches, which are not shared.
    mark, pipe
        Inherited by all agents and their workers.
    """

    def __init__(self, folder: Path, mark: str, pipe: Path) -> None:
        self._folder = folder
        self._mark = mark
        self._variables = {processes.MARK: mark, EVENTS: str(pipe)}
        self._numbers = itertools.count()
        self._started: list[subprocess.Popen[bytes]] = []
        self._runs = False
        self.key: Path | None = folder / "cluster.key"
        self.address = ""
        self.nodes: list[AgentNode] = []
        read_key_file(self.key, create=True)
        self.restore()

    def restore(self) -> None:
        """Restore the initial number of nodes, for a new run."""
        self._runs = False
        while len(self.nodes) < NODES:
            self.add()
        while len(self.nodes) > NODES:
            self.remove(self.nodes[0])

    def begin(self) -> None:
        """Choose where the next coordinator listens, and start an agent on each node."""
        self.address = f"127.0.0.1:{free_port()}"
        self._runs = True
        for node in self.nodes:
            self._start(node)

    def end(self) -> None:
        """Start no more agents: the coordinator has ended."""
        self._runs = False

    def add(self) -> None:
        node = AgentNode(self._folder / f"node-{next(self._numbers)}")
        self.nodes.append(node)
        if self._runs:
            self._start(node)

    def remove(self, node: AgentNode) -> None:
        """Kill a node's processes and delete its disk, as in the loss of a machine."""
        self.nodes.remove(node)
        if node.agent is not None:
            workers = [p for p in worker_processes(self._mark) if parent(p) == node.agent.pid]
            for pid in [node.agent.pid, *workers]:
                processes.send(pid, signal.SIGKILL)
            node.agent.wait()
            processes.wait_gone(workers, 5.0)
        shutil.rmtree(node.folder, ignore_errors=True)

    def of(self, actor: int) -> AgentNode | None:
        """The node of an agent; None: it is gone."""
        found = (n for n in self.nodes if n.agent is not None and n.agent.pid == actor)
        return next(found, None)

    def kill(self, actor: int) -> bool:
        """Kill an agent, and start another on its node."""
        node = self.of(actor)
        if node is None or node.agent is None or not processes.send(actor, signal.SIGKILL):
            return False
        node.agent.wait()
        self._start(node)
        return True

    def actors(self) -> dict[int, str]:
        """The agents that have not ended."""
        return {agent.pid: "alive" for agent in self._started if agent.poll() is None}

    def close(self) -> None:
        self.end()
        for agent in self._started:
            agent.kill()
            agent.wait()

    def _start(self, node: AgentNode) -> None:
        command = [sys.executable, "-m", "cerebro", "agent", "--connect", self.address]
        command += ["--key", str(self.key), "--patience", str(PATIENCE_SECONDS)]
        variables = self._variables | {"CEREBRO_CACHE": str(node.folder)}
        node.agent = subprocess.Popen(
            command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL
        )
        self._started.append(node.agent)
