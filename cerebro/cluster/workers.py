"""What the coordinator knows of a run: its workers, what they report, and which shards they have.

A *place* holds lots, shards that stay together (`cerebro.cluster.supply`): it is the cache folder
of a node, which all workers of the node read. `Placement` assigns each lot to the place with the
fewest rows per worker, and to `replicas` places in all. Copies from an earlier run are used unless
they give a place more than its share.

During the run, slow places are relieved, and new ones get work: `Placement.choose_lot_to_copy`
names one lot to copy to a different place, so that its units can also run there. Copies are never
removed, because they are harmless. `Placement` only decides; `cerebro.cluster.supply` sends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cerebro.cluster.hub import Node, RemoteAgent
from cerebro.cluster.messages import Begin, NodeReport
from cerebro.machine.local import LOCAL, Tasks
from cerebro.worker.messages import Job, News

PIECES = 16  # the parts into which a lot at several places is divided to estimate their work
MARGIN = 1.15  # a place is relieved when its work exceeds its share by this factor


@dataclass
class Call:
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
    stale: set[int] = field(default_factory=set)  # trials whose newest state another worker made
    made: list[int] = field(default_factory=list)  # shards that its node could keep
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


class Events:
    """Events for the coordinator, and the calls and background work that they come from."""

    def __init__(self, tasks: Tasks = LOCAL.tasks) -> None:
        self.fetch_pool = tasks.pool(4, "cerebro-cluster")
        self.now: list[News] = []
        self.later: list[News] = []  # delivered when training has begun
        self.is_training = False
        self.trouble: BaseException | None = None  # an error that ends the run
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pipe = tasks.wake_pipe()
        self._reader = 0  # the thread that made calls last

    def fileno(self) -> int:
        """Return the descriptor that is readable while other threads have put calls."""
        return self._pipe.fileno()

    def put(self, call: Callable[[], None]) -> None:
        """Have the coordinator's thread make a call; any thread may ask, even after `close`."""
        self._calls.put(call)
        if threading.get_ident() != self._reader:  # which looks before it waits again
            self._pipe.wake()

    def when_done(self, future: Future[Any], handle: Callable[..., None], *arguments: Any) -> None:
        """Have the coordinator's thread call ``handle(*arguments, future)`` once that is done."""
        future.add_done_callback(lambda done: self.put(partial(handle, *arguments, done)))

    def make_calls(self) -> None:
        """Make the calls that threads have put; this thread is the reader from now on."""
        self._reader = threading.get_ident()
        self._pipe.clear()
        while not self._calls.empty():  # one may put another one
            self._calls.get()()

    def process(self) -> None:
        """Make all calls; raise the trouble that they have brought, if any."""
        self.make_calls()
        if self.is_training and self.later:
            self.now += self.later
            self.later = []
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble

    def take(self) -> list[News]:
        events, self.now = self.now, []
        return events

    def close(self) -> None:
        self._pipe.close()


@dataclass
class Placement:
    """The lots of a run, with their rows, and their places."""

    rows: Sequence[int]
    workers: dict[int, str] = field(default_factory=dict)  # the place of each worker
    lots: dict[str, set[int]] = field(default_factory=dict)  # those that a place has or will have

    def add_worker(self, worker: int, place: str) -> None:
        """Add a worker that reads the lots of a place, which may be new."""
        self.workers[worker] = place
        self.lots.setdefault(place, set())

    def remove_place(self, place: str) -> None:
        self.lots.pop(place, None)
        self.workers = {w: p for w, p in self.workers.items() if p != place}

    def add_lot(self, place: str, lot: int) -> None:
        self.lots.setdefault(place, set()).add(lot)

    def has_lot(self, place: str, lot: int) -> bool:
        return lot in self.lots.get(place, ())

    def holders(self) -> dict[int, list[int]]:
        return {
            lot: [w for w, place in sorted(self.workers.items()) if self.has_lot(place, lot)]
            for lot in range(len(self.rows))
        }

    def assign_lots(
        self, replicas: int = 1, cached: Mapping[str, Collection[int]] | None = None
    ) -> dict[str, list[int]]:
        """Return each place's lots: each lot gets `replicas` places, first those in `cached`."""
        places = self._count_workers()
        order = list(places)
        copies = min(replicas, len(places))
        share = copies * sum(self.rows) / sum(places.values())
        load = dict.fromkeys(places, 0.0)
        largest_first = sorted(range(len(self.rows)), key=lambda s: (-self.rows[s], s))

        def after(place: str, lot: int) -> float:
            return load[place] + self.rows[lot] / places[place]

        def give(place: str, lot: int) -> None:
            load[place] = after(place, lot)
            self.add_lot(place, lot)

        for lot in largest_first:
            have = [p for p in order if cached and lot in cached.get(p, ())]
            have = [p for p in have if after(p, lot) <= MARGIN * share]
            for place in sorted(have, key=lambda p: load[p])[:copies]:
                give(place, lot)
        for lot in largest_first:
            while sum(self.has_lot(place, lot) for place in places) < copies:
                others = [place for place in order if not self.has_lot(place, lot)]
                give(min(others, key=lambda p: (after(p, lot), order.index(p))), lot)
        return {place: sorted(self.lots[place]) for place in places}

    def choose_lot_to_copy(self, speeds: Mapping[int, float]) -> tuple[int, str] | None:
        """Return a lot and the place to copy it to, if one needs relief; `speeds` are relative."""
        places = self._count_workers(speeds)
        if len(places) < 2:
            return None
        load, alone = self._compute_loads(places)
        mean = sum(self.rows) / sum(places.values())
        # Ties go to the first, so that the result does not depend on the order of a set.
        slow = max(load, key=lambda p: load[p])
        fast = min(load, key=lambda p: load[p])
        if load[slow] <= MARGIN * mean:
            return None
        lots = [s for s in sorted(alone[slow]) if not self.has_lot(fast, s)]
        gap = (load[slow] - load[fast]) * places[fast]
        fitting = [s for s in lots if self.rows[s] / PIECES <= gap]
        if not fitting:
            return None
        return max(fitting, key=lambda s: (self.rows[s], -s)), fast

    def _count_workers(self, speeds: Mapping[int, float] | None = None) -> dict[str, float]:
        counts: dict[str, float] = {}
        for worker, place in sorted(self.workers.items()):
            counts[place] = counts.get(place, 0.0) + (speeds or {}).get(worker, 1.0)
        return counts

    def _compute_loads(
        self, places: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, set[int]]]:
        """Return each place's time for an epoch, and the lots that contribute to it."""
        load = dict.fromkeys(places, 0.0)
        of: dict[str, set[int]] = {place: set() for place in places}
        at = {s: [p for p in places if self.has_lot(p, s)] for s in range(len(self.rows))}
        for lot in sorted(at, key=lambda s: (len(at[s]), -self.rows[s], s)):
            pieces = 1 if len(at[lot]) == 1 else PIECES  # each taken by the first idle place
            for _ in range(pieces if at[lot] else 0):
                rows = self.rows[lot] / pieces
                place = min(at[lot], key=lambda p: load[p] + rows / places[p])
                load[place] += rows / places[place]
                of[place].add(lot)
        return load, of


class Pace:
    """The speed of each worker, compared with the others on the same trials."""

    def __init__(self) -> None:
        self._trials: dict[int, float] = {}  # seconds per row, moving means
        self._workers: dict[int, tuple[int, float]] = {}  # units, and seconds relative to that

    def add(self, worker: int, trial: int, rows: int, seconds: float) -> None:
        if rows <= 0 or seconds <= 0:
            return
        rate = seconds / rows
        units, factor = self._workers.get(worker, (0, 1.0))
        if units > 0 and trial in self._trials:  # the first unit includes starting frameworks
            weight = 1 / min(units, 16)
            factor += weight * (rate / self._trials[trial] - factor)
        self._workers[worker] = units + 1, factor
        if units > 0:
            before = self._trials.get(trial, rate)
            self._trials[trial] = before + (rate - before) / 8

    def forget(self, worker: int) -> None:
        self._workers.pop(worker, None)

    def speeds(self) -> dict[int, float]:
        """Return the speed of each worker that has done a few units; 1 is the average."""
        return {w: 1 / factor for w, (units, factor) in self._workers.items() if units > 3}
