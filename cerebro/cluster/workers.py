"""The workers of a run as the coordinator sees them: who they are, and what they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro.cluster.hub import Node, RemoteAgent
from cerebro.cluster.messages import Begin, NodeReport
from cerebro.worker.messages import Job


@dataclass
class Call:
    """A job of a worker."""

    job: Job
    packed: Any = None  # a reference to the state that the task will leave
    reloaded: bool = False  # whether its shard was damaged on the node and has been sent again
    is_sent: bool = False
    is_dropped: bool = False  # whether it was queued, and must be sent again when its turn comes


@dataclass
class RemoteWorker:
    """A worker: the process of an agent."""

    number: int
    agent: RemoteAgent
    node: Node
    report: NodeReport
    place: str
    reads_all: bool  # whether it reads all shards without a copy
    begin: Begin
    call: Call | None = None  # what it runs, or what waits until its shards are there
    queued: Call | None = None  # the unit after that one
    stale: set[int] = field(default_factory=set)
    """Trials whose newest state was made by a different worker."""
    made: list[int] = field(default_factory=list)
    """Shards that it has made, which its node could keep."""
    silent_looks: int = 0
    has_answered: bool = False
    is_gone: bool = False  # whether the agent, and not only its process, is lost
    node_is_gone: bool = False

    @property
    def name(self) -> str:
        return self.report.name

    def describe_loss(self) -> str:
        """Return why its node is not there any more."""
        if self.agent.has_left:
            return f"node {self.name} has left: its agent was told to end"
        return f"node {self.name} is gone"


class Membership:
    """Who takes part in a run: workers by number, the lost ones, and nodes that may get some."""

    def __init__(self) -> None:
        self.workers: dict[int, RemoteWorker] = {}
        self.lost: dict[int, RemoteWorker] = {}
        self.arriving = 0  # workers of nodes that are being admitted
        self.gone_agents: set[str] = set()
        self._gone_nodes: set[str] = set()
        self._known_nodes: set[str] = set()
        self._spare_nodes: set[str] = set()  # those that have room for more workers
        self._next = 0

    def know(self, nodes: Iterable[str], spare: set[str]) -> None:
        """Consider nodes known, `spare` among them with room for more workers."""
        self._known_nodes.update(nodes)
        self._spare_nodes = spare

    def add(self, remote: RemoteWorker) -> None:
        """Add a worker, which gets the next number."""
        remote.number = self._next
        self._next += 1
        self.workers[remote.number] = remote

    def remove(self, remote: RemoteWorker) -> None:
        """Move a worker to the lost ones; a known node may now replace it."""
        self.lost[remote.number] = self.workers.pop(remote.number)
        remote.call = remote.queued = None
        self._known_nodes -= self._spare_nodes
        self._spare_nodes.clear()

    def is_used(self, place: str) -> bool:
        """Whether a worker on a node that is not gone reads the shards of a place."""
        return any(
            remote.place == place and remote.node.id not in self._gone_nodes
            for remote in self.workers.values()
        )

    def list_reports(self) -> list[NodeReport]:
        """Return the reports of all workers; may be called by any thread."""
        return [remote.report for remote in list(self.workers.values())]

    def mark_gone(self, remote: RemoteWorker) -> list[RemoteWorker]:
        """Note that an agent is gone, and perhaps its node; return all workers lost with it."""
        remote.is_gone = True
        remote.node_is_gone = remote.node.id in self._gone_nodes or not remote.node.answers()
        if remote.node_is_gone:
            self._gone_nodes.add(remote.node.id)
        lost = [
            other
            for other in self.workers.values()
            if other.agent.id not in self.gone_agents
            and (other is remote or (remote.node_is_gone and other.node.id == remote.node.id))
        ]
        self.gone_agents.update(other.agent.id for other in lost)
        return lost

    def drop_dead_nodes(self, alive: Sequence[Node]) -> Iterator[RemoteWorker]:
        """Note that all other nodes are gone, and yield each of their workers."""
        numbers = {node.id for node in alive}
        for remote in [r for r in self.workers.values() if r.node.id not in numbers]:
            self._gone_nodes.add(remote.node.id)
            yield remote

    def find_unknown(self, alive: Sequence[Node]) -> list[Node]:
        return [node for node in alive if node.id not in self._known_nodes]

    def reserve(self, node: Node, room: int, limit: int | None) -> int:
        """Return how many workers a new node gets, which then count as arriving."""
        self._known_nodes.add(node.id)
        room -= sum(remote.node.id == node.id for remote in self.workers.values())
        if limit is not None:
            free = limit - len(self.workers) - self.arriving
            if free < room:
                self._spare_nodes.add(node.id)
            room = min(room, free)
        self.arriving += max(0, room)
        return max(0, room)
