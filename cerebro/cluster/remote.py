"""Workers, and the tasks that they run, as the coordinator sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cerebro.cluster.agents import Agent, Node
from cerebro.cluster.messages import Begin, NodeReport
from cerebro.worker.messages import Job


@dataclass
class RemoteWorker:
    """A worker as the coordinator sees it."""

    number: int
    agent: Agent
    node: Node
    report: NodeReport
    place: str
    reads_all: bool
    """Whether it reads all shards without a copy."""
    begin: Begin
    stale: set[int] = field(default_factory=set)
    """Trials whose newest state was made by a different worker."""
    silent_looks: int = 0
    has_answered: bool = False
    is_gone: bool = False
    """Whether the agent, and not only its process, is lost."""
    node_is_gone: bool = False

    @property
    def name(self) -> str:
        return self.report.name


@dataclass
class Call:
    serial: int
    job: Job
    packed: Any = None
    """A reference to the state that the task will leave."""
    reloaded: bool = False
    """Whether its shard was damaged on the node and has been sent again."""
    is_sent: bool = False
    is_dropped: bool = False
    """Whether it was queued, and must be sent again when its turn comes."""
