"""Runs units on the nodes of a Ray cluster: `cerebro.ray.Executor`.

One actor for each worker, one worker process for each actor. Ray starts them, carries
their messages and holds their states; what it does about failures is turned off, because
only the coordinator knows what a unit is: actors are not restarted and calls not
repeated. See docs/design/ray.md.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import numpy as np

from cerebro.arguments import whole_number
from cerebro.errors import CorruptDataError, InputError, WorkerError, text_of
from cerebro.executors.base import Wake
from cerebro.executors.local import packed as pickled
from cerebro.machine.devices import ALL, CPU
from cerebro.machine.files import open_plain, path_of
from cerebro.ray.cluster.connection import (
    Connection,
    Node,
    alive_nodes,
    cause_of,
    connect,
    reachable,
    spread,
)
from cerebro.ray.cluster.hiring import GPU, START_SECONDS, Hired, Hiring, check_resources
from cerebro.ray.cluster.mailbox import Mailbox
from cerebro.ray.cluster.messages import (
    Answer,
    Begin,
    Call,
    DataAt,
    Hand,
    NodeReport,
    StateIn,
    Traffic,
)
from cerebro.ray.cluster.placement import Pace, Placement
from cerebro.ray.cluster.states import HeldState, HeldStates, StoreFull, fetch_to_file
from cerebro.ray.cluster.supply import EVERYWHERE, Supply
from cerebro.run.settings import MAX_WORKERS
from cerebro.run.states import epoch_state_file, read_state, unpublished
from cerebro.worker.log import APPEND, log_path
from cerebro.worker.messages import (
    CheckDone,
    Job,
    News,
    Note,
    RunContext,
    ShardsPlaced,
    StateKept,
    StateLost,
    Task,
    UnitDone,
    UnitFailed,
    WorkerJoined,
    WorkerLost,
)

END_SECONDS = 10.0
LOOK_SECONDS = 5.0
"""How often the cluster is asked for new nodes, and busy workers for a sign of life."""
SILENT_LOOKS = 6
"""Looks in a row without a sign of life after which a worker is given up."""
STORE_FULL = (
    "Ray's object store is full on a node, and so is the disk that it writes to then: free some "
    "there, start Ray with more --object-store-memory, or keep fewer trials live (width=)"
)


class Executor:
    """Runs a search on a Ray cluster; give it to `cerebro.search` as ``executor=``.

    Parameters
    ----------
    address
        ``"auto"`` or ``"host:port"`` of a cluster; None: the one that this process belongs to
        or ``$RAY_ADDRESS`` names, else a new one on this machine, which ends with the search.
    workers
        How many, dealt over the nodes in turn; None: as many as fit. New nodes are used when
        they come, up to this number.
    resources
        Ray resources of each worker; ``"CPU"`` is the search's ``threads`` unless given. With
        ``{"GPU": 1}`` each worker trains on the GPU that Ray gives it, which it sees alone, as
        ``cuda:0``; with ``{"GPU": 0.5}`` two of them share one.
    replicas
        On how many nodes each shard is to lie. With more than one, the loss of a node needs
        no copying, and slow nodes get less work at once.
    shared_path
        Where all nodes read the data, such as a network file system: the data set's folder,
        or one that it is in. Nothing is copied then. None: nodes are sent the shards that they
        work on, once, and keep them for later searches.

    Attributes
    ----------
    traffic
        What was moved, in bytes; see `cerebro.ray.cluster.messages.Traffic`.
    devices
        ``("cuda",)`` where its workers have GPUs, else ``("cpu",)``.

    Raises
    ------
    InputError
        For arguments that are wrong, here; when a search begins, if Ray is not installed,
        there is no cluster, workers do not fit on it, nodes differ in what changes results,
        or a node cannot read the data.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        resources: Mapping[str, float] | None = None,
        replicas: int = 1,
        shared_path: str | os.PathLike[str] | None = None,
    ) -> None:
        if address is not None and (not isinstance(address, str) or not address):
            raise InputError(f"address must be 'auto', 'host:port' or None, not {address!r}")
        self._address = address
        self.workers = whole_number("workers", workers, 1, MAX_WORKERS, optional=True)
        self._resources = check_resources(resources)
        self._replicas = whole_number("replicas", replicas, 1)
        self._shared_path = (
            None if shared_path is None else path_of("shared_path", shared_path).absolute()
        )
        self._connection: Connection | None = None
        self._is_refused = False
        self._reset()

    def __repr__(self) -> str:
        return (
            f"cerebro.ray.Executor(address={self._address!r}, workers={self.workers!r}, "
            f"resources={self._resources!r}, replicas={self._replicas!r}, "
            f"shared_path={None if self._shared_path is None else str(self._shared_path)!r})"
        )

    def __reduce__(self) -> tuple[type[Executor], tuple[Any, ...]]:
        """Pickled or copied it is one that has not been used."""
        given = self._address, self.workers, self._resources, self._replicas, self._shared_path
        return type(self), given

    @property
    def devices(self) -> tuple[str, ...]:
        return (ALL if GPU in self._resources else CPU,)

    def _reset(self) -> None:
        self.traffic = Traffic()
        self._hands: dict[int, Hand] = {}
        self._lost: dict[int, Hand] = {}
        self._out: dict[int, Call] = {}
        self._parked: dict[tuple[str, int], list[int]] = {}  # workers whose shard is coming
        self._loading: set[tuple[str, int]] = set()
        self._supply: Supply | None = None
        self._placement: Placement | None = None
        self._pace = Pace()
        self._states = HeldStates()
        self._keeping: dict[int, int] = {}  # trial -> position of a state on its way to the disk
        self._events: list[News] = []
        self._later: list[News] = []  # for when training has begun
        self._trouble: BaseException | None = None
        self._is_training = False
        self._next = 0
        self._serial = 0
        self._known: set[str] = set()
        self._gone: set[str] = set()  # nodes
        self._next_look = 0.0

    # --- the protocol ------------------------------------------------------

    def start(self, context: RunContext) -> list[int]:
        if self._connection is not None:
            self._is_refused = True
            raise InputError("this executor runs another search: make one for each")
        self._reset()
        self._context = context
        self._build = pickled(context.build)
        self._folds = None if context.folds is None else context.folds.to_json()
        self._needs = {"CPU": float(context.threads), **self._resources}
        cpus = None if self.workers is None else self.workers * self._needs["CPU"]
        self._mailbox = Mailbox()
        self._porters = ThreadPoolExecutor(4, "cerebro-ray")
        self._connection = connect(self._address, cpus)
        where = self._shared_path, self._connection.node
        self._supply = Supply(self._ray, context, *where, self.traffic)
        self._hiring = Hiring(self._ray, context, self._needs)
        try:
            self._start()
        except BaseException:
            self.close(kill=True)
            raise
        return sorted(self._hands)

    def submit(self, worker: int, task: Job) -> None:
        self._serial += 1
        call = self._out[worker] = Call(self._serial, task)
        hand = self._hands.get(worker)
        if hand is None:  # lost, which the caller has not heard yet
            return
        if isinstance(task, Task):
            self._is_training = True
            for trial in task.ended:
                self._states.forget(trial)
        self._send_when_loaded(hand, call)

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> Sequence[News]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._open_mail()
            if self._events or not (self._out or self._keeping or wake is not None):
                break
            now = time.monotonic()
            if end is not None and now >= end:
                break
            if now >= self._next_look:
                self._look()
            due = min(self._next_look, self._next_look if end is None else end)
            descriptors = [self._mailbox.fileno()] + ([] if wake is None else [wake.fileno()])
            ready = wait_for_any(descriptors, max(0.0, due - now))
            if wake is not None and wake.fileno() in ready:
                self._open_mail()
                break
        events, self._events = self._events, []
        return events

    def cancel(self, worker: int) -> None:
        """Tell a worker to stop its unit at the next batch."""
        hand = self._hands.get(worker)
        if hand is not None:
            hand.actor.cancel.options(concurrency_group="control").remote()

    def replace(self, worker: int) -> int:
        hand = self._lost.pop(worker)
        if hand.node_is_gone:
            raise WorkerError(f"node {hand.name} is gone")
        actor = hand.actor
        if hand.is_gone:
            actor = self._hiring.hire(hand.node)
            actor.begin.remote(hand.begin)
        else:
            actor.restart.remote()
        new = self._take_on(
            Hand(-1, actor, hand.node, hand.name, hand.place, hand.reads_all, hand.begin)
        )
        return new.number

    def holders(self) -> Mapping[int, Sequence[int]] | None:
        """Return the workers that can read each shard; None: all read all."""
        return None if self._placement is None else self._placement.holders()

    def load(self, worker: int, shard: int) -> None:
        """Make a shard readable for a worker, and so for all on its node."""
        hand = self._hands.get(worker)
        if hand is not None and self._placement is not None:
            self._placement.add_shard(hand.place, shard)
            self._fetch_shard(hand, shard)

    def close(self, *, kill: bool = False) -> None:
        if self._is_refused:  # whoever was refused closes what it has not begun
            self._is_refused = False
            return
        if self._connection is None:
            return
        ray = self._ray
        hands = [*self._hands.values(), *(h for h in self._lost.values() if not h.is_gone)]
        self._out.clear()
        if not kill:
            ends = [h.actor.end.remote() for h in hands]
            with contextlib.suppress(Exception):
                ray.wait(ends, num_returns=max(1, len(ends)), timeout=END_SECONDS)
        for hand in hands:
            with contextlib.suppress(Exception):
                ray.kill(hand.actor, no_restart=True)
        self._porters.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(Exception):
            self._connection.close()
        self._connection = None
        self._mailbox.close()
        if self._supply is not None:
            self._supply.close()
        traffic = self.traffic
        self._reset()
        self.traffic = traffic

    def nodes(self) -> dict[int, str]:
        """Return the number, in the cluster, of the node that each worker is on."""
        return {number: hand.node.id for number, hand in sorted(self._hands.items())}

    @property
    def _full(self) -> tuple[type[BaseException], ...]:
        """What Ray raises when there is no room for a state."""
        return self._ray.exceptions.ObjectStoreFullError, self._ray.exceptions.OutOfDiskError

    @property
    def _the_supply(self) -> Supply:
        assert self._supply is not None, "the executor has not been started"
        return self._supply

    @property
    def _ray(self) -> Any:
        assert self._connection is not None, "the executor has not been started"
        return self._connection.ray

    # --- starting ----------------------------------------------------------

    def _start(self) -> None:
        assert self._connection is not None
        nodes = reachable(alive_nodes(self._ray))
        self._known = {node.id for node in nodes}
        chosen = spread(nodes, self._needs, self.workers, self._connection.node)
        hired = [(node, self._hiring.hire(node)) for node in chosen]
        try:
            reports = self._hiring.reports(hired, self._the_supply)
            self._later += self._hiring.check(reports)
            for hand in self._brief(hired, reports):
                hand.actor.begin.remote(hand.begin)
                self._take_on(hand)
        except BaseException:
            self._hiring.dismiss(hired)
            raise
        self._next_look = time.monotonic() + LOOK_SECONDS

    def _brief(self, hired: Hired, reports: Sequence[NodeReport]) -> list[Hand]:
        """Place the data, and say to every worker what it needs to know."""
        self._shares_run = all(report.reads_run for report in reports)
        for report in reports:
            self._the_supply.check_reads(report)
        hands = [
            self._hand(node, actor, report, sum(r.node == report.node for r in reports))
            for (node, actor), report in zip(hired, reports, strict=True)
        ]
        self._placement = self._the_supply.deal(hands, self._replicas, self._porters)
        return [self._the_supply.with_data(hand) for hand in hands]

    def _hand(self, node: Node, actor: Any, report: NodeReport, workers_here: int) -> Hand:
        context = self._context
        reads_all = all(path is not None for path in report.at)
        begin = Begin(
            build=self._build,
            settings=self._settings,
            train=DataAt({**context.train.spec(), "path": report.at[0] or ""}, not reads_all),
            validation=None
            if context.validation is None
            else DataAt({**context.validation.spec(), "path": report.at[1] or ""}, False),
            folds=self._folds,
            gpu_share=self._resources.get(GPU, 0.0),
            shares_run=self._shares_run,
            path=tuple(sys.path),
            argv=tuple(sys.argv),
            directory=os.getcwd(),  # noqa: PTH109
            workers_here=workers_here,
        )
        place = f"{report.node} itself" if reads_all else report.place
        return Hand(-1, actor, node, report.name, place, reads_all, begin)

    @property
    def _settings(self) -> dict[str, Any]:
        """What workers are told of the run besides its data, folds and ``build``."""
        left_out = {"build", "train", "validation", "folds", "live_bytes", "loader_threads"}
        names = [f.name for f in fields(RunContext) if f.name not in left_out]
        return {name: getattr(self._context, name) for name in names}

    def _take_on(self, hand: Hand) -> Hand:
        """Give a worker its number."""
        hand.number = self._next
        self._next += 1
        self._hands[hand.number] = hand
        if self._placement is not None:
            self._placement.add_worker(hand.number, hand.place)
        return hand

    # --- giving out ----------------------------------------------------------

    def _send_when_loaded(self, hand: Hand, call: Call, *, damaged: bool = False) -> None:
        job = call.job
        if isinstance(job, Task) and not self._the_supply.is_there(hand, job.shard):
            self._parked.setdefault((hand.place, job.shard), []).append(hand.number)
            self._fetch_shard(hand, job.shard, damaged=damaged)
        else:
            self._send(hand, call)

    def _fetch_shard(self, hand: Hand, shard: int, *, damaged: bool = False) -> None:
        """Have a shard sent to a worker's node, unless it is there or on its way."""
        key = hand.place, shard
        if self._the_supply.is_there(hand, shard) or key in self._loading:
            return
        self._loading.add(key)
        if damaged:
            job = self._porters.submit(self._the_supply.mend, hand, shard)
        else:
            job = self._porters.submit(self._the_supply.send, hand, [shard])
        job.add_done_callback(lambda done: self._mailbox.put(partial(self._loaded, key, done)))

    def _send(self, hand: Hand, call: Call) -> None:
        job, state = call.job, None
        if isinstance(job, Task):
            try:
                state = self._state_for(job)
            except LookupError as error:
                self._lose_state(hand.number, job, str(error))
                return
            ended = {*job.ended, *hand.stale} - {job.trial}
            hand.stale.clear()
            keep = job.keep_state and self._shares_run
            job = replace(job, ended=tuple(sorted(ended)), keep_state=keep)
        answer, call.packed = hand.actor.run.options(num_returns=2).remote(job, state)
        serial = call.serial
        answer.future().add_done_callback(
            lambda done: self._mailbox.put(partial(self._answered, hand.number, serial, done))
        )

    def _state_for(self, task: Task) -> StateIn | None:
        """What a unit begins with, if it is not read from the run's folder.

        Raises
        ------
        LookupError
            If it is lost.
        """
        kept = task.clone_of or task.origin
        if kept is not None:
            if self._shares_run:
                return None
            ref = self._ray.put(np.frombuffer(read_state(kept), np.uint8))
            return StateIn((ref,), kept.state_hash, is_clone=task.clone_of is not None)
        if task.position == 0:
            return None
        held = self._states.at(task.trial, task.position)
        if held is None:
            raise LookupError("its state was lost with a node")
        return StateIn((held.ref,), held.state_hash, held.node)

    # --- hearing -------------------------------------------------------------

    def _open_mail(self) -> None:
        for letter in self._mailbox.take():
            letter()
        if self._is_training and self._later:
            self._events += self._later
            self._later = []
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble

    def _answered(self, worker: int, serial: int, done: Any) -> None:
        call, hand = self._out.get(worker), self._hands.get(worker)
        if call is None or hand is None or call.serial != serial:
            return  # it comes too late: the worker was given up
        hand.silent_looks = 0
        error = done.exception()
        if isinstance(error, self._full) or (error is None and done.result().is_full):
            self._trouble = OSError(STORE_FULL)
            return
        if error is not None:
            with contextlib.suppress(Exception):  # the same error, which Ray would print otherwise
                self._ray.get(call.packed, timeout=0)
            self._actor_failed(hand, error)
            return
        hand.has_answered = True
        answer: Answer = done.result()
        self.traffic.state_bytes += answer.fetched
        self.traffic.states += answer.fetched > 0
        event, job = answer.event, call.job
        if answer.log and isinstance(job, Task):
            self._write_log(job.trial, answer.log)
        if event is None:
            assert isinstance(job, Task)
            self._lose_state(worker, job, f"its state cannot be fetched ({answer.missing})")
        elif isinstance(event, UnitFailed) and self._reload(hand, call, event):
            return
        else:
            self._out.pop(worker)
            if isinstance(event, UnitDone):
                self._unit_done(hand, call, event)
            elif isinstance(event, UnitFailed):
                if event.kind == "data":
                    event = replace(event, message=f"node {hand.name}: {event.message}")
                self._events.append(replace(event, worker=worker, task=call.job))  # type: ignore[arg-type]
            elif isinstance(event, CheckDone):
                self._events.append(replace(event, worker=worker))
            else:
                self._lose(hand, replace(event, worker=worker))

    def _unit_done(self, hand: Hand, call: Call, event: UnitDone) -> None:
        task = call.job
        assert isinstance(task, Task)
        before = self._states.newest(task.trial)
        if before is not None and before.worker != hand.number and before.worker in self._hands:
            self._hands[before.worker].stale.add(task.trial)
        held = HeldState(
            position=task.position + 1,
            ref=call.packed,
            node=hand.node.id,
            worker=hand.number,
            state_hash=event.packed_hash,
            nbytes=event.state_bytes,
        )
        self._states.add(task.trial, held)
        self._pace.add(hand.number, task.trial, event.rows, event.seconds)
        # Clocks of nodes differ; the coordinator's tells when a unit was.
        event = replace(event, worker=hand.number, task=task, started=time.time() - event.seconds)
        if event.metrics is not None and task.keep_state and not self._shares_run:
            file = epoch_state_file(task.trial, task.epoch)
            event = replace(event, state_file=file, is_kept=False)
            self._keep(task.trial, held, file)
        self._events.append(event)

    def _keep(self, trial: int, held: HeldState, file: str) -> None:
        """Bring the state at an epoch's end to this machine's disk, beside the training."""
        self._keeping[trial] = held.position
        path = Path(self._context.epoch_dir, unpublished(file, held.state_hash))
        job = self._porters.submit(fetch_to_file, held, self._gone, path)
        job.add_done_callback(
            lambda done: self._mailbox.put(partial(self._kept, trial, held, done))
        )

    def _kept(self, trial: int, held: HeldState, done: Any) -> None:
        if self._keeping.get(trial) != held.position:
            return
        del self._keeping[trial]
        error = done.exception()
        if error is None:
            self.traffic.kept_bytes += held.nbytes
            self._events.append(StateKept(trial))
        elif isinstance(error, OSError):
            self._trouble = error  # the run's disk
        elif isinstance(error, StoreFull):
            self._trouble = OSError(STORE_FULL)
        else:
            position = self._states.lose(trial, held.position)
            reason = f"the state at its epoch's end is lost: {text_of(error)}"
            self._events.append(StateLost(trial, reason, position=position))

    def _lose_state(self, worker: int, task: Task, reason: str) -> None:
        """The state that a unit was to begin with is gone."""
        del self._out[worker]
        position = self._states.lose(task.trial, task.position)
        self._events.append(StateLost(task.trial, reason, worker, position))

    def _write_log(self, trial: int, text: bytes) -> None:
        try:
            with os.fdopen(open_plain(log_path(self._context.log_dir, trial), APPEND), "ab") as log:
                log.write(text)
        except OSError as error:
            self._trouble = error

    # --- data that come while the run goes on ----------------------------------

    def _loaded(self, key: tuple[str, int], done: Any) -> None:
        """A shard has come to a place, or not."""
        self._loading.discard(key)
        place, shard = key
        error = done.exception()
        if error is None:
            self._the_supply.arrived.setdefault(place, set()).add(shard)
            placement = None if shard == EVERYWHERE else self._placement
            if placement is not None and not placement.has(place, shard):
                placement.add_shard(place, shard)
                self._events.append(ShardsPlaced())
        for worker in self._parked.pop(key, ()):
            hand, call = self._hands.get(worker), self._out.get(worker)
            if hand is None or call is None:
                continue
            if error is None:
                self._send(hand, call)
            elif isinstance(error, (CorruptDataError, OSError)):
                self._trouble = CorruptDataError(text_of(error))
            else:
                self._actor_failed(hand, error)

    def _reload(self, hand: Hand, call: Call, event: UnitFailed) -> bool:
        """Send a shard again that is damaged on a node, once; False: that is no help."""
        job = call.job
        assert isinstance(job, Task)
        if event.kind != "data" or hand.reads_all or call.reloaded:
            return False
        call.reloaded = True
        self._the_supply.arrived[hand.place].discard(job.shard)
        what = self._the_supply.called(job.shard)
        text = f"node {hand.name}: {event.message}: {what} sent again"
        self._events.append(Note("shard damaged", text))
        self._send_when_loaded(hand, call, damaged=True)
        return True

    # --- losing --------------------------------------------------------------

    def _actor_failed(self, hand: Hand, error: BaseException) -> None:
        """An actor is gone, or cannot go on."""
        hand.is_gone = True
        hand.node_is_gone = hand.node.id in self._gone or not hand.node.answers()
        reason = f"worker {hand.number} on node {hand.name} is gone: {cause_of(error)}"
        if hand.node_is_gone:
            reason = f"node {hand.name} is gone"
            self._node_is_gone(hand.node.id)
        with contextlib.suppress(Exception):
            self._ray.kill(hand.actor, no_restart=True)
        # One that never said anything has begun nothing, and neither has one without a process.
        began = hand.has_answered and not isinstance(getattr(error, "cause", None), WorkerError)
        self._out.pop(hand.number, None)
        self._lose(
            hand,
            WorkerLost(hand.number, reason, began=began, with_machine=hand.node_is_gone),
        )

    def _node_is_gone(self, node: str) -> None:
        if node in self._gone:
            return
        self._gone.add(node)
        self._states.lose_node(node)
        for hand in self._hands.values():
            if hand.node.id != node:
                hand.actor.node_is_gone.options(concurrency_group="control").remote(node)

    def _lose(self, hand: Hand, event: WorkerLost) -> None:
        del self._hands[hand.number]
        self._lost[hand.number] = hand
        self._pace.forget(hand.number)
        if self._placement is not None:
            self._placement.remove_worker(hand.number)
            if hand.node_is_gone:
                self._placement.remove_place(hand.place)
        if hand.node_is_gone:
            self._the_supply.arrived.pop(hand.place, None)
        self._events.append(event)

    # --- looking around --------------------------------------------------------

    def _look(self) -> None:
        """Ask busy workers for a sign of life, and the cluster for nodes that are new or gone."""
        self._next_look = time.monotonic() + LOOK_SECONDS
        for worker in list(self._out):
            hand = self._hands.get(worker)
            if hand is not None:
                self._ask(hand)
        alive = {node.id: node for node in alive_nodes(self._ray)}
        for hand in [h for h in self._hands.values() if h.node.id not in alive]:
            self._node_is_gone(hand.node.id)
            self._actor_failed(hand, WorkerError("its node has left the cluster"))
        for node in reachable([node for node in alive.values() if node.id not in self._known]):
            self._known.add(node.id)
            self._greet(node)
        self._relieve()

    def _ask(self, hand: Hand) -> None:
        hand.silent_looks += 1
        seconds = hand.silent_looks * LOOK_SECONDS
        if hand.silent_looks > SILENT_LOOKS and (hand.has_answered or seconds > START_SECONDS):
            self._actor_failed(hand, WorkerError(f"no sign of life for {seconds:g} seconds"))
            return

        def heard() -> None:
            hand.silent_looks = 0
            hand.has_answered = True

        answer = hand.actor.ping.options(concurrency_group="control").remote()
        answer.future().add_done_callback(
            lambda done: self._mailbox.put(heard) if done.exception() is None else None
        )

    def _relieve(self) -> None:
        """Copy a shard to where it is of use, one at a time."""
        if self._placement is None or self._loading or not self._is_training:
            return
        wish = self._placement.relief(self._pace.speeds())
        if wish is not None:
            shard, place = wish
            hand = next(h for h in self._hands.values() if h.place == place)
            if self._the_supply.is_there(hand, shard):
                self._placement.add_shard(place, shard)
                self._events.append(ShardsPlaced())
            else:
                self._fetch_shard(hand, shard)

    def _greet(self, node: Node) -> None:
        """Take in a node that has joined the cluster."""
        room = node.room_for(self._needs)
        if self.workers is not None:
            room = min(room, self.workers - len(self._hands))
        if room > 0:
            job = self._porters.submit(self._admit, node, room)
            job.add_done_callback(
                lambda done: self._mailbox.put(partial(self._admitted, node, done))
            )

    def _admit(self, node: Node, count: int) -> tuple[list[Hand], list[Note]]:
        """Start workers on a new node and send it what all nodes have; in a thread of its own."""
        hired = [(node, self._hiring.hire(node)) for _ in range(count)]
        try:
            reports = self._hiring.reports(hired, self._the_supply)
            notes = self._hiring.check(reports)
            if self._shares_run and not all(report.reads_run for report in reports):
                raise InputError(f"node {reports[0].name} does not see the run's folder")
            self._the_supply.check_reads(reports[0])
            hands = [
                self._hand(node, actor, report, count)
                for (_, actor), report in zip(hired, reports, strict=True)
            ]
            if not hands[0].reads_all:
                self._the_supply.admit(hands[0], whole=self._placement is None)
            for hand in hands:
                self._the_supply.with_data(hand).actor.begin.remote(hand.begin)
            return hands, notes
        except BaseException:
            self._hiring.dismiss(hired)
            raise

    def _admitted(self, node: Node, done: Any) -> None:
        error = done.exception()
        if error is not None:
            text = f"node {node.address} ({node.id[:8]}) has joined and is not used: "
            self._later.append(Note("node not used", text + text_of(error)))
            return
        hands, notes = done.result()
        self._later += notes
        for hand in hands:
            self._take_on(hand)
            if self._placement is not None:
                for shard in self._the_supply.arrived.get(hand.place, set()) - {EVERYWHERE}:
                    self._placement.add_shard(hand.place, shard)
            self._later.append(WorkerJoined(hand.number))
