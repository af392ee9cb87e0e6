"""Run units on the nodes of a Ray cluster: `cerebro.ray.Executor`.

Each worker is an actor with one worker process. Ray starts the actors, carries their messages
and holds their states. Ray's own fault tolerance is off, because only the coordinator knows about
units: actors are not restarted, and calls are not repeated. See docs/design/ray.md.
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
    ClusterNode,
    Connection,
    alive_nodes,
    cause_of,
    connect,
    reachable,
    spread,
)
from cerebro.ray.cluster.hiring import GPU, START_SECONDS, Hired, Hiring, check_resources
from cerebro.ray.cluster.mailbox import Mailbox
from cerebro.ray.cluster.messages import (
    Begin,
    Call,
    DataAt,
    JobResult,
    NodeReport,
    RemoteWorker,
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
"""How often to look for new nodes and to ping busy workers."""
SILENT_LOOKS = 6
"""The number of unanswered pings in a row after which a worker is lost."""
STORE_FULL = (
    "Ray's object store is full on a node, and so is the disk behind it: free some space "
    "there, start Ray with more --object-store-memory, or keep fewer trials live (width=)"
)


class Executor:
    """Runs a search on a Ray cluster; give it to `cerebro.search` as ``executor=``.

    Parameters
    ----------
    address
        ``"auto"`` or ``"host:port"`` of a cluster. None: the one that this process belongs to or
        ``$RAY_ADDRESS`` names, else a new one on this machine, which ends with the search.
    workers
        The number of workers, spread over the nodes in turn; None: as many as fit. New nodes
        are used when they join, up to this number.
    resources
        Ray resources of each worker; ``"CPU"`` defaults to the search's ``threads``. With ``{"GPU":
        1}`` each worker trains on the GPU that Ray gives it, and sees only that one, as ``cuda:0``.
        With ``{"GPU": 0.5}`` two workers share a GPU.
    replicas
        The number of nodes that get each shard. With more than one, the loss of a node requires
        no copying, and slow nodes get less work at once.
    shared_path
        A path at which all nodes can read the data, such as on a network file system: the data
        set's folder or its parent. Nothing is copied then. None: each node receives the shards that
        it works on, once, and keeps them for later searches.

    Attributes
    ----------
    traffic
        The bytes moved so far; see `cerebro.ray.cluster.messages.Traffic`.
    devices
        ``("cuda",)`` if its workers have GPUs, else ``("cpu",)``.

    Raises
    ------
    InputError
        If an argument is invalid. At the start of a search: if Ray is not installed, there is no
        cluster, the workers do not fit on it, nodes would compute different results, or a node
        cannot read the data.
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
        """Pickle or copy this executor as an unused one."""
        given = self._address, self.workers, self._resources, self._replicas, self._shared_path
        return type(self), given

    @property
    def devices(self) -> tuple[str, ...]:
        return (ALL if GPU in self._resources else CPU,)

    def _reset(self) -> None:
        self.traffic = Traffic()
        self._remotes: dict[int, RemoteWorker] = {}
        self._lost: dict[int, RemoteWorker] = {}
        self._out: dict[int, Call] = {}
        self._parked: dict[tuple[str, int], list[int]] = {}  # workers that wait for their shard
        self._loading: set[tuple[str, int]] = set()
        self._supply: Supply | None = None
        self._placement: Placement | None = None
        self._pace = Pace()
        self._states = HeldStates()
        self._keeping: dict[int, int] = {}  # trial -> position of a state that is being written
        self._events: list[News] = []
        self._later: list[News] = []  # delivered when training has begun
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
            raise InputError("this executor runs a different search: make one for each")
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
        return sorted(self._remotes)

    def submit(self, worker: int, task: Job) -> None:
        self._serial += 1
        call = self._out[worker] = Call(self._serial, task)
        remote = self._remotes.get(worker)
        if remote is None:  # lost, but the caller has not been notified yet
            return
        if isinstance(task, Task):
            self._is_training = True
            for trial in task.ended:
                self._states.forget(trial)
        self._send_when_loaded(remote, call)

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
        """Stop a worker's unit at the next batch."""
        remote = self._remotes.get(worker)
        if remote is not None:
            remote.actor.cancel.options(concurrency_group="control").remote()

    def replace(self, worker: int) -> int:
        remote = self._lost.pop(worker)
        if remote.node_is_gone:
            raise WorkerError(f"node {remote.name} is gone")
        actor = remote.actor
        if remote.is_gone:
            actor = self._hiring.hire(remote.node)
            actor.begin.remote(remote.begin)
        else:
            actor.restart.remote()
        new = self._take_on(
            RemoteWorker(
                -1, actor, remote.node, remote.name, remote.place, remote.reads_all, remote.begin
            )
        )
        return new.number

    def holders(self) -> Mapping[int, Sequence[int]] | None:
        """Return the workers that can read each shard; None: all read all."""
        return None if self._placement is None else self._placement.holders()

    def load(self, worker: int, shard: int) -> None:
        """Make a shard readable for a worker and all others on its node."""
        remote = self._remotes.get(worker)
        if remote is not None and self._placement is not None:
            self._placement.add_shard(remote.place, shard)
            self._fetch_shard(remote, shard)

    def close(self, *, kill: bool = False) -> None:
        if self._is_refused:  # the run that uses this executor closes it
            self._is_refused = False
            return
        if self._connection is None:
            return
        ray = self._ray
        remotes = [*self._remotes.values(), *(h for h in self._lost.values() if not h.is_gone)]
        self._out.clear()
        if not kill:
            ends = [h.actor.end.remote() for h in remotes]
            with contextlib.suppress(Exception):
                ray.wait(ends, num_returns=max(1, len(ends)), timeout=END_SECONDS)
        for remote in remotes:
            with contextlib.suppress(Exception):
                ray.kill(remote.actor, no_restart=True)
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
        """Return the cluster's number of each worker's node."""
        return {number: remote.node.id for number, remote in sorted(self._remotes.items())}

    @property
    def _full(self) -> tuple[type[BaseException], ...]:
        """The exceptions that Ray raises when there is no room for a state."""
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
            for remote in self._brief(hired, reports):
                remote.actor.begin.remote(remote.begin)
                self._take_on(remote)
        except BaseException:
            self._hiring.dismiss(hired)
            raise
        self._next_look = time.monotonic() + LOOK_SECONDS

    def _brief(self, hired: Hired, reports: Sequence[NodeReport]) -> list[RemoteWorker]:
        """Place the data and describe the run to every worker."""
        self._shares_run = all(report.reads_run for report in reports)
        for report in reports:
            self._the_supply.check_reads(report)
        remotes = [
            self._remote_worker(node, actor, report, sum(r.node == report.node for r in reports))
            for (node, actor), report in zip(hired, reports, strict=True)
        ]
        self._placement = self._the_supply.deal(remotes, self._replicas, self._porters)
        return [self._the_supply.with_data(remote) for remote in remotes]

    def _remote_worker(
        self, node: ClusterNode, actor: Any, report: NodeReport, workers_here: int
    ) -> RemoteWorker:
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
        return RemoteWorker(-1, actor, node, report.name, place, reads_all, begin)

    @property
    def _settings(self) -> dict[str, Any]:
        """Return the settings for workers, apart from data, folds and ``build``."""
        left_out = {"build", "train", "validation", "folds", "live_bytes", "loader_threads"}
        names = [f.name for f in fields(RunContext) if f.name not in left_out]
        return {name: getattr(self._context, name) for name in names}

    def _take_on(self, remote: RemoteWorker) -> RemoteWorker:
        """Give a worker its number."""
        remote.number = self._next
        self._next += 1
        self._remotes[remote.number] = remote
        if self._placement is not None:
            self._placement.add_worker(remote.number, remote.place)
        return remote

    # --- dispatching ---------------------------------------------------------

    def _send_when_loaded(self, remote: RemoteWorker, call: Call, *, damaged: bool = False) -> None:
        job = call.job
        if isinstance(job, Task) and not self._the_supply.is_there(remote, job.shard):
            self._parked.setdefault((remote.place, job.shard), []).append(remote.number)
            self._fetch_shard(remote, job.shard, damaged=damaged)
        else:
            self._send(remote, call)

    def _fetch_shard(self, remote: RemoteWorker, shard: int, *, damaged: bool = False) -> None:
        """Send a shard to a worker's node, unless it is there or being sent."""
        key = remote.place, shard
        if self._the_supply.is_there(remote, shard) or key in self._loading:
            return
        self._loading.add(key)
        if damaged:
            job = self._porters.submit(self._the_supply.mend, remote, shard)
        else:
            job = self._porters.submit(self._the_supply.send, remote, [shard])
        job.add_done_callback(lambda done: self._mailbox.put(partial(self._loaded, key, done)))

    def _send(self, remote: RemoteWorker, call: Call) -> None:
        job, state = call.job, None
        if isinstance(job, Task):
            try:
                state = self._state_for(job)
            except LookupError as error:
                self._lose_state(remote.number, job, str(error))
                return
            ended = {*job.ended, *remote.stale} - {job.trial}
            remote.stale.clear()
            keep = job.keep_state and self._shares_run
            job = replace(job, ended=tuple(sorted(ended)), keep_state=keep)
        answer, call.packed = remote.actor.run.options(num_returns=2).remote(job, state)
        serial = call.serial
        answer.future().add_done_callback(
            lambda done: self._mailbox.put(partial(self._answered, remote.number, serial, done))
        )

    def _state_for(self, task: Task) -> StateIn | None:
        """Return the state that a unit begins with; None if it reads it from the run's folder.

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

    # --- results -------------------------------------------------------------

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
        call, remote = self._out.get(worker), self._remotes.get(worker)
        if call is None or remote is None or call.serial != serial:
            return  # too late: the worker is considered lost
        remote.silent_looks = 0
        error = done.exception()
        if isinstance(error, self._full) or (error is None and done.result().is_full):
            self._trouble = OSError(STORE_FULL)
            return
        if error is not None:
            with contextlib.suppress(Exception):  # the same error; unfetched, Ray prints it
                self._ray.get(call.packed, timeout=0)
            self._actor_failed(remote, error)
            return
        remote.has_answered = True
        answer: JobResult = done.result()
        self.traffic.state_bytes += answer.fetched
        self.traffic.states += answer.fetched > 0
        event, job = answer.event, call.job
        if answer.log and isinstance(job, Task):
            self._write_log(job.trial, answer.log)
        if event is None:
            assert isinstance(job, Task)
            self._lose_state(worker, job, f"its state cannot be fetched ({answer.missing})")
        elif isinstance(event, UnitFailed) and self._reload(remote, call, event):
            return
        else:
            self._out.pop(worker)
            if isinstance(event, UnitDone):
                self._unit_done(remote, call, event)
            elif isinstance(event, UnitFailed):
                if event.kind == "data":
                    event = replace(event, message=f"node {remote.name}: {event.message}")
                self._events.append(replace(event, worker=worker, task=call.job))  # type: ignore[arg-type]
            elif isinstance(event, CheckDone):
                self._events.append(replace(event, worker=worker))
            else:
                self._lose(remote, replace(event, worker=worker))

    def _unit_done(self, remote: RemoteWorker, call: Call, event: UnitDone) -> None:
        task = call.job
        assert isinstance(task, Task)
        before = self._states.newest(task.trial)
        if before is not None and before.worker != remote.number and before.worker in self._remotes:
            self._remotes[before.worker].stale.add(task.trial)
        held = HeldState(
            position=task.position + 1,
            ref=call.packed,
            node=remote.node.id,
            worker=remote.number,
            state_hash=event.packed_hash,
            nbytes=event.state_bytes,
        )
        self._states.add(task.trial, held)
        self._pace.add(remote.number, task.trial, event.rows, event.seconds)
        # Clocks of nodes differ: take the time of a unit from the coordinator's.
        event = replace(event, worker=remote.number, task=task, started=time.time() - event.seconds)
        if event.metrics is not None and task.keep_state and not self._shares_run:
            file = epoch_state_file(task.trial, task.epoch)
            event = replace(event, state_file=file, is_kept=False)
            self._keep(task.trial, held, file)
        self._events.append(event)

    def _keep(self, trial: int, held: HeldState, file: str) -> None:
        """Copy the state at an epoch's end to this machine's disk while training continues."""
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
        """Report that the state that a unit begins with is lost."""
        del self._out[worker]
        position = self._states.lose(task.trial, task.position)
        self._events.append(StateLost(task.trial, reason, worker, position))

    def _write_log(self, trial: int, text: bytes) -> None:
        try:
            with os.fdopen(open_plain(log_path(self._context.log_dir, trial), APPEND), "ab") as log:
                log.write(text)
        except OSError as error:
            self._trouble = error

    # --- data that arrive during the run ---------------------------------------

    def _loaded(self, key: tuple[str, int], done: Any) -> None:
        """Handle the end of a shard's transfer to a place."""
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
            remote, call = self._remotes.get(worker), self._out.get(worker)
            if remote is None or call is None:
                continue
            if error is None:
                self._send(remote, call)
            elif isinstance(error, (CorruptDataError, OSError)):
                self._trouble = CorruptDataError(text_of(error))
            else:
                self._actor_failed(remote, error)

    def _reload(self, remote: RemoteWorker, call: Call, event: UnitFailed) -> bool:
        """Send a shard again that is damaged on a node, once; return False if that cannot help."""
        job = call.job
        assert isinstance(job, Task)
        if event.kind != "data" or remote.reads_all or call.reloaded:
            return False
        call.reloaded = True
        self._the_supply.arrived[remote.place].discard(job.shard)
        what = self._the_supply.called(job.shard)
        text = f"node {remote.name}: {event.message}: {what} sent again"
        self._events.append(Note("shard damaged", text))
        self._send_when_loaded(remote, call, damaged=True)
        return True

    # --- lost workers --------------------------------------------------------

    def _actor_failed(self, remote: RemoteWorker, error: BaseException) -> None:
        """Handle an actor that is lost or cannot continue."""
        remote.is_gone = True
        remote.node_is_gone = remote.node.id in self._gone or not remote.node.answers()
        reason = f"worker {remote.number} on node {remote.name} is gone: {cause_of(error)}"
        if remote.node_is_gone:
            reason = f"node {remote.name} is gone"
            self._node_is_gone(remote.node.id)
        with contextlib.suppress(Exception):
            self._ray.kill(remote.actor, no_restart=True)
        # An actor that never answered, or has no process, has not begun its task.
        began = remote.has_answered and not isinstance(getattr(error, "cause", None), WorkerError)
        self._out.pop(remote.number, None)
        self._lose(
            remote,
            WorkerLost(remote.number, reason, began=began, with_machine=remote.node_is_gone),
        )

    def _node_is_gone(self, node: str) -> None:
        if node in self._gone:
            return
        self._gone.add(node)
        self._states.lose_node(node)
        for remote in self._remotes.values():
            if remote.node.id != node:
                remote.actor.node_is_gone.options(concurrency_group="control").remote(node)

    def _lose(self, remote: RemoteWorker, event: WorkerLost) -> None:
        del self._remotes[remote.number]
        self._lost[remote.number] = remote
        self._pace.forget(remote.number)
        if self._placement is not None:
            self._placement.remove_worker(remote.number)
            if remote.node_is_gone:
                self._placement.remove_place(remote.place)
        if remote.node_is_gone:
            self._the_supply.arrived.pop(remote.place, None)
        self._events.append(event)

    # --- regular checks --------------------------------------------------------

    def _look(self) -> None:
        """Ping busy workers, and look for new and lost nodes."""
        self._next_look = time.monotonic() + LOOK_SECONDS
        for worker in list(self._out):
            remote = self._remotes.get(worker)
            if remote is not None:
                self._ask(remote)
        alive = {node.id: node for node in alive_nodes(self._ray)}
        for remote in [h for h in self._remotes.values() if h.node.id not in alive]:
            self._node_is_gone(remote.node.id)
            self._actor_failed(remote, WorkerError("its node has left the cluster"))
        for node in reachable([node for node in alive.values() if node.id not in self._known]):
            self._known.add(node.id)
            self._greet(node)
        self._relieve()

    def _ask(self, remote: RemoteWorker) -> None:
        remote.silent_looks += 1
        seconds = remote.silent_looks * LOOK_SECONDS
        if remote.silent_looks > SILENT_LOOKS and (remote.has_answered or seconds > START_SECONDS):
            self._actor_failed(remote, WorkerError(f"no sign of life for {seconds:g} seconds"))
            return

        def heard() -> None:
            remote.silent_looks = 0
            remote.has_answered = True

        answer = remote.actor.ping.options(concurrency_group="control").remote()
        answer.future().add_done_callback(
            lambda done: self._mailbox.put(heard) if done.exception() is None else None
        )

    def _relieve(self) -> None:
        """Copy a shard to a place that needs relief, one at a time."""
        if self._placement is None or self._loading or not self._is_training:
            return
        wish = self._placement.relief(self._pace.speeds())
        if wish is not None:
            shard, place = wish
            remote = next(h for h in self._remotes.values() if h.place == place)
            if self._the_supply.is_there(remote, shard):
                self._placement.add_shard(place, shard)
                self._events.append(ShardsPlaced())
            else:
                self._fetch_shard(remote, shard)

    def _greet(self, node: ClusterNode) -> None:
        """Begin to use a node that has joined the cluster."""
        room = node.room_for(self._needs)
        if self.workers is not None:
            room = min(room, self.workers - len(self._remotes))
        if room > 0:
            job = self._porters.submit(self._admit, node, room)
            job.add_done_callback(
                lambda done: self._mailbox.put(partial(self._admitted, node, done))
            )

    def _admit(self, node: ClusterNode, count: int) -> tuple[list[RemoteWorker], list[Note]]:
        """Start workers on a new node and send it the common data; called in a separate thread."""
        hired = [(node, self._hiring.hire(node)) for _ in range(count)]
        try:
            reports = self._hiring.reports(hired, self._the_supply)
            notes = self._hiring.check(reports)
            if self._shares_run and not all(report.reads_run for report in reports):
                raise InputError(f"node {reports[0].name} does not see the run's folder")
            self._the_supply.check_reads(reports[0])
            remotes = [
                self._remote_worker(node, actor, report, count)
                for (_, actor), report in zip(hired, reports, strict=True)
            ]
            if not remotes[0].reads_all:
                self._the_supply.admit(remotes[0], whole=self._placement is None)
            for remote in remotes:
                self._the_supply.with_data(remote).actor.begin.remote(remote.begin)
            return remotes, notes
        except BaseException:
            self._hiring.dismiss(hired)
            raise

    def _admitted(self, node: ClusterNode, done: Any) -> None:
        error = done.exception()
        if error is not None:
            text = f"node {node.address} ({node.id[:8]}) has joined and is not used: "
            self._later.append(Note("node not used", text + text_of(error)))
            return
        remotes, notes = done.result()
        self._later += notes
        for remote in remotes:
            self._take_on(remote)
            if self._placement is not None:
                for shard in self._the_supply.arrived.get(remote.place, set()) - {EVERYWHERE}:
                    self._placement.add_shard(remote.place, shard)
            self._later.append(WorkerJoined(remote.number))
