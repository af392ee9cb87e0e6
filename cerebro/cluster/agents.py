"""What the executor needs from a cluster: nodes, agents on them, and a worker for each agent.

An *agent* is a process on a node that supervises one worker process; see
`cerebro.cluster.supervisor`. It connects to the coordinator, which calls it through
`cerebro.cluster.hub`. The protocols below hide who starts it, and what a node is: the machine of
agents that Ray starts (`cerebro.ray`), or else each agent by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cerebro.cluster.messages import Begin, JobResult, NodeReport, StateIn
from cerebro.cluster.states import HeldState
from cerebro.worker.messages import Job


class Node(Protocol):
    @property
    def id(self) -> str:
        """Its number in the cluster."""

    @property
    def address(self) -> str: ...

    def answers(self) -> bool:
        """Whether it still accepts connections."""


class Agent(Protocol):
    """The supervisor of a worker, as the coordinator calls it.

    It holds the states that its worker has made. The methods are those of
    `cerebro.cluster.supervisor.Supervisor`, by name. Every call returns at once; its future raises
    one of the cluster's `errors` if the method raises or the agent is lost.
    """

    @property
    def id(self) -> str:
        """Its number, different from all other agents' and nodes'."""

    @property
    def has_left(self) -> bool:
        """Whether it has said that it leaves, because it was told to end."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method after all earlier calls have ended."""

    def control(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method without waiting for earlier calls."""

    def run(self, job: Job, state: StateIn | None) -> tuple[Future[JobResult], Any]:
        """Run a job; return its future result, and a reference to the state that it will leave."""

    def kill(self, trouble: str | None = None) -> None:
        """End the agent and its worker process; `trouble` is why, if the run still needs them."""


class Cluster(Protocol):
    """Nodes, their agents, and the states that these hold."""

    errors: tuple[type[BaseException], ...]
    """The exceptions of agents' futures. ``cause`` is the method's exception, if it raised."""
    dials_in: bool
    """Whether nodes come and go with their agents, so that a new node replaces a lost one."""

    def choose_nodes(self, workers: int | None) -> Sequence[Node]:
        """Return the node of each first worker; None for `workers`: as many as fit.

        There may be fewer than `workers` if other nodes can join later. Raises InputError if the
        workers do not fit, or no node joins.
        """

    def nodes(self) -> Sequence[Node]:
        """Return the nodes that are alive, or are assumed to be."""

    def select_reachable(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return the nodes that answer."""

    def count_room(self, node: Node) -> int:
        """Return how many workers a new node takes."""

    def is_here(self, node: Node) -> bool:
        """Whether a node is the coordinator's machine, which has the data."""

    def acquire_agent(self, node: Node) -> Agent:
        """Start or take an agent on a node; return before it is ready.

        Raises WorkerError if the node has no agent left.
        """

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed`, in any thread, when a node joins or leaves, if the cluster knows."""

    def wait(self, seconds: float, others: Sequence[int]) -> set[int]:
        """Wait up to `seconds`; return which of the descriptors in `others` are readable.

        May return early, once an agent's future is done.
        """

    def release(self) -> None:
        """Prepare for a wait of this thread on futures, other than by `wait`."""

    def explain_no_more_nodes(self) -> str | None:
        """Return why no more nodes will join; None: some may."""

    def put(self, packed: bytes) -> Any:
        """Hold a state at the coordinator; return a reference to it."""

    def fetch_to_file(self, held: HeldState, gone: Collection[str], path: Path) -> None:
        """Write a state to a file; see `cerebro.cluster.states`."""

    def describe_cause(self, error: BaseException) -> str:
        """Return the cause of one of `errors`, as one line."""

    def advise_on_late_node(self, node: Node) -> str:
        """Return what to do about a node that has not started a worker in time."""

    def close(self) -> None:
        """End everything else that was started for the run; the agents have ended already."""


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
