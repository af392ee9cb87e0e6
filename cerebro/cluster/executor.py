"""Run units on the nodes of a cluster: what all kinds of clusters share.

Each worker is an agent (`cerebro.cluster.agents`) with one worker process. Only the coordinator
knows about units, so no layer below it restarts an agent's work or repeats a call. See
docs/design/cluster.md.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from cerebro.arguments import check_whole_number
from cerebro.cluster.admission import START_SECONDS, Hired, Hiring, kill_agents, remove_old_tokens
from cerebro.cluster.agents import Agent, Call, Cluster, Node, RemoteWorker
from cerebro.cluster.derived_shards import MadeShards, make_context
from cerebro.cluster.mailbox import Mailbox
from cerebro.cluster.messages import Begin, DataAt, JobResult, NodeReport, StateIn, Traffic
from cerebro.cluster.opaque_pickle import Sent
from cerebro.cluster.placement import Pace, Placement, check_gpus
from cerebro.cluster.states import HeldState, HeldStates
from cerebro.cluster.supply import EVERYWHERE, Supply, fetch_shard
from cerebro.data.shard_work import ARRIVING, Order, ShardMakers
from cerebro.errors import CorruptDataError, InputError, WorkerError, text_of
from cerebro.executors.base import Wake
from cerebro.executors.local import pickle_context as pickled
from cerebro.machine.devices import ALL, CPU, MAX_WORKERS
from cerebro.machine.files import open_plain, path_of
from cerebro.machine.objects import is_url
from cerebro.machine.wake_pipe import wait_for
from cerebro.run.states import epoch_state_file, read_state, unpublished_name
from cerebro.worker.log import APPEND, log_path
from cerebro.worker.messages import (
    CheckDone,
    Job,
    News,
    Note,
    RunContext,
    ShardFailed,
    ShardMade,
    ShardsPlaced,
    ShardTask,
    StateKept,
    StateLost,
    Task,
    UnitDone,
    UnitFailed,
    WorkerJoined,
    WorkerLost,
)

END_SECONDS = 10.0
KEEP_SECONDS = 60.0
"""The time for nodes to keep the shards that they have made."""
PATIENCE_SECONDS = 60.0
"""The time to wait for another node after the last one was lost, if the cluster starts them."""
LOOK_SECONDS = 5.0
"""How often to look for new nodes and to ping busy workers."""
SILENT_LOOKS = 6
"""The number of unanswered pings in a row after which a worker is lost."""


class ClusterExecutor(ABC):
    """Runs a search on a cluster, which a subclass joins in `_join`.

    See `cerebro.cluster.Executor` for the parameters. With ``workers=None``, as many are used as
    fit. `gpus` is each worker's share of a GPU, or None.
    """

    def __init__(
        self,
        workers: int | None,
        replicas: int,
        shared_path: str | os.PathLike[str] | None,
        gpus: float | None = None,
    ) -> None:
        self.workers = check_whole_number("workers", workers, 1, MAX_WORKERS, optional=True)
        self._replicas = check_whole_number("replicas", replicas, 1)
        self._shared_path: Path | str | None = None
        if isinstance(shared_path, str) and is_url(shared_path):
            self._shared_path = shared_path
        elif shared_path is not None:
            self._shared_path = path_of("shared_path", shared_path).absolute()
        self._gpu_share = check_gpus(gpus)
        self._one_kind = ""  # the GPU of all workers that derive a dataset; empty: not given
        self._joined: Cluster | None = None
        self._is_refused = False
        self._reset()

    @abstractmethod
    def _join(self, context: RunContext) -> Cluster:
        """Join or start the cluster for a run; raise InputError if this fails."""

    @property
    def devices(self) -> tuple[str, ...]:
        return (ALL if self._gpu_share else CPU,)

    def _reset(self) -> None:
        self.traffic = Traffic()
        self._remotes: dict[int, RemoteWorker] = {}
        self._lost: dict[int, RemoteWorker] = {}
        self._out: dict[int, Call] = {}
        self._queued: dict[int, Call] = {}  # by worker: the unit after the one that it runs
        self._parked: dict[tuple[str, int], list[int]] = {}  # workers that wait for their shard
        self._loading: set[tuple[str, int]] = set()
        self._supply: Supply | None = None
        self._placement: Placement | None = None
        self._pace = Pace()
        self._states = HeldStates()
        self._keeping: dict[int, int] = {}  # trial -> position of a state that is being written
        self._derives = False  # whether the tasks are shards, not units of trials
        self._made: dict[int, list[int]] = {}  # shards that a worker's node could keep
        self._events: list[News] = []
        self._later: list[News] = []  # delivered when training has begun
        self._trouble: BaseException | None = None
        self._is_training = False
        self._next = 0
        self._serial = 0
        self._known: set[str] = set()  # nodes
        self._spare: set[str] = set()  # those that have room for more workers
        self._arriving = 0  # workers of nodes that are being admitted
        self._gone: set[str] = set()  # agents
        self._gone_nodes: set[str] = set()
        self._next_look = 0.0

    # --- the protocol ------------------------------------------------------

    def start(self, context: RunContext) -> list[int]:
        if self._joined is not None:
            self._is_refused = True
            raise InputError("this executor runs a different search: make one for each")
        self._reset()
        self._context = context
        self._derives = isinstance(context.build, Sent)
        self._build = pickled(context.build)
        self._folds = None if context.folds is None else context.folds.to_json()
        self._joined = self._join(context)
        self._mailbox = Mailbox()
        self._porters = ThreadPoolExecutor(4, "cerebro-cluster")
        try:
            lots = context.order().pools
            if self._derives:
                lots = [[shard] for shard in range(context.train.num_shards)]
            self._supply = Supply(self._joined, context, lots, self._shared_path, self.traffic)
            kind = self._one_kind if self._derives else None
            self._hiring = Hiring(self._joined, context, kind)
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
        self._is_training |= isinstance(task, (Task, ShardTask))
        if isinstance(task, Task):
            for trial in task.ended:
                self._states.forget(trial)
        self._send_when_loaded(remote, call)

    def queue(self, worker: int, task: Task) -> None:
        remote, before = self._remotes.get(worker), self._out.get(worker)
        if remote is None or before is None:  # lost, but the caller has not been notified yet
            return
        self._serial += 1
        call = self._queued[worker] = Call(self._serial, task)
        # The unit before it may still wait for its shards.
        lot = self._find_lot(task)
        if before.is_sent and (lot is None or self._the_supply.is_there(remote, lot)):
            self._send_queued(remote, call)
        else:
            call.is_dropped = True  # so that it is sent when its turn comes

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> Sequence[News]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._process_mailbox()
            if self._events or not (self._out or self._keeping or wake is not None):
                break
            now = time.monotonic()
            if end is not None and now >= end:
                break
            if now >= self._next_look:
                self._check_workers()
                continue  # it may have put messages into the mailbox
            due = min(self._next_look, self._next_look if end is None else end)
            descriptors = [self._mailbox.fileno()] + ([] if wake is None else [wake.fileno()])
            ready = self._cluster.wait(max(0.0, due - now), descriptors)
            if wake is not None and wake.fileno() in ready:
                self._process_mailbox()
                break
        events, self._events = self._events, []
        return events

    def cancel(self, worker: int) -> None:
        remote = self._remotes.get(worker)
        if remote is not None:
            remote.agent.control("cancel")

    def replace(self, worker: int) -> int:
        remote = self._lost.pop(worker)
        if remote.node_is_gone:
            return self._await_replacement(remote)
        agent = remote.agent
        if remote.is_gone:
            agent = self._cluster.acquire_agent(remote.node)
            agent.call("begin", remote.begin)
        else:
            agent.call("restart")
        new = self._add_remote(
            RemoteWorker(
                -1, agent, remote.node, remote.report, remote.place, remote.reads_all, remote.begin
            )
        )
        return new.number

    def _await_replacement(self, lost: RemoteWorker) -> int:
        """Return a worker on a node that joins, or has room, after the last one was lost.

        Raises WorkerError if other workers remain, or if no node joins in time.
        """
        others_are_left = bool(self._remotes)
        failure = None
        end = time.monotonic() + PATIENCE_SECONDS
        while not self._remotes and failure is None and time.monotonic() < end:
            self._check_nodes()
            self._handle_messages()
            if not self._remotes:
                if not (self._cluster.dials_in or self._arriving):
                    break
                wait_for([self._mailbox.fileno()], 1.0)
                self._handle_messages()
            failure = self._cluster.explain_no_more_nodes()
        joined = next((e for e in self._later if isinstance(e, WorkerJoined)), None)
        if others_are_left or joined is None:
            what_next = ""
            if failure is not None:
                what_next = f", and {failure}"
            elif self._cluster.dials_in:
                what_next = ", until another is started"
            raise WorkerError(f"{_describe_loss(lost)}{what_next}")
        self._later.remove(joined)  # it replaces the lost one
        return joined.worker

    def holders(self) -> Mapping[int, Sequence[int]] | None:
        """Return the workers that can read each pool; None: all read all."""
        return None if self._placement is None else self._placement.holders()

    def load(self, worker: int, pool: int) -> None:
        """Make a pool readable for a worker and all others on its node."""
        remote = self._remotes.get(worker)
        if remote is not None and self._placement is not None:
            self._placement.add_lot(remote.place, pool)
            self._fetch_lot(remote, pool)

    @contextlib.contextmanager
    def shard_makers(self, order: Order) -> Iterator[ShardMakers]:
        """Start the workers for a `Dataset.derive`; see `cerebro.data.shard_work`.

        Raises InputError or WorkerError as a search does, or if the function cannot be sent to
        workers.
        """
        context = make_context(order)
        self._one_kind = order.gpu
        try:
            yield MadeShards(self, order, self.start(context))
        except BaseException:
            self.close(kill=True)
            raise
        self.close()

    def keep_made(self, manifest: bytes) -> None:
        """Have nodes keep the shards that they have made, so that a search need not send them."""
        self._cluster.release()
        jobs = [
            self._remotes[worker].agent.call("keep_made", manifest, shards)
            for worker, shards in self._made.items()
            if worker in self._remotes
        ]
        wait_for_all(jobs, timeout=KEEP_SECONDS)  # a shard that is not kept is sent like any other

    def close(self, *, kill: bool = False) -> None:
        if self._is_refused:  # the run that uses this executor closes it
            self._is_refused = False
            return
        if self._joined is None:
            return
        remotes = [*self._remotes.values(), *(h for h in self._lost.values() if not h.is_gone)]
        self._out.clear()
        self._queued.clear()
        if not kill:
            self._joined.release()
            wait_for_all([h.agent.call("end") for h in remotes], timeout=END_SECONDS)
        for remote in remotes:
            with contextlib.suppress(Exception):
                remote.agent.kill()
        self._porters.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(Exception):
            self._joined.close()
        self._joined = None
        self._mailbox.close()
        if self._supply is not None:
            self._supply.close()
        traffic = self.traffic
        self._reset()
        self.traffic = traffic

    def nodes(self) -> dict[int, str]:
        """Return the id of each worker's node."""
        return {number: remote.node.id for number, remote in sorted(self._remotes.items())}

    @property
    def _the_supply(self) -> Supply:
        assert self._supply is not None, "the executor has not been started"
        return self._supply

    @property
    def _cluster(self) -> Cluster:
        assert self._joined is not None, "the executor has not been started"
        return self._joined

    # --- starting ----------------------------------------------------------

    def _start(self) -> None:
        remove_old_tokens(Path(self._context.folders.states))
        # A node that joins while nodes are chosen is not known, so that it is greeted later.
        nodes = {node.id: node for node in self._cluster.nodes()}
        hosts = self._cluster.choose_nodes(self.workers)
        nodes |= {node.id: node for node in hosts}
        self._known = set(nodes)
        taken = Counter(node.id for node in hosts)
        self._spare = {n for n, node in nodes.items() if self._cluster.count_room(node) > taken[n]}
        hired = [(node, self._cluster.acquire_agent(node)) for node in hosts]
        try:
            reports = self._hiring.collect_reports(hired, self._the_supply)
            self._later += self._hiring.check(reports)
            for remote in self._prepare_workers(hired, reports):
                remote.agent.call("begin", remote.begin)
                self._add_remote(remote)
        except BaseException:
            kill_agents(hired)
            raise
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._cluster.watch(lambda: self._mailbox.put(self._check_nodes))

    def _prepare_workers(self, hired: Hired, reports: Sequence[NodeReport]) -> list[RemoteWorker]:
        """Place the data and describe the run to every worker."""
        # The files of derived shards are sent here: nodes need not see the folder.
        self._shares_run = not self._derives and all(report.shares_run for report in reports)
        for report in reports:
            self._the_supply.check_reads(report)
        remotes = [
            self._make_remote(node, agent, report, sum(r.is_local_to(report) for r in reports))
            for (node, agent), report in zip(hired, reports, strict=True)
        ]
        self._placement = self._the_supply.distribute_lots(
            remotes, self._replicas, self._porters, derives=self._derives
        )
        return [self._the_supply.set_data_paths(remote) for remote in remotes]

    def _make_remote(
        self, node: Node, agent: Agent, report: NodeReport, workers_here: int
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
            gpu_share=self._gpu_share,
            shares_run=self._shares_run,
            path=tuple(sys.path),
            argv=tuple(sys.argv),
            directory=os.getcwd(),  # noqa: PTH109
            workers_here=workers_here,
        )
        place = f"{report.node} itself" if reads_all else report.place
        return RemoteWorker(-1, agent, node, report, place, reads_all, begin)

    @property
    def _settings(self) -> dict[str, Any]:
        left_out = {"build", "train", "validation", "folds", "share"}
        names = [f.name for f in fields(RunContext) if f.name not in left_out]
        return {name: getattr(self._context, name) for name in names}

    def _add_remote(self, remote: RemoteWorker) -> RemoteWorker:
        remote.number = self._next
        self._next += 1
        self._remotes[remote.number] = remote
        if self._placement is not None:
            self._placement.add_worker(remote.number, remote.place)
        return remote

    # --- dispatching ---------------------------------------------------------

    def _send_when_loaded(self, remote: RemoteWorker, call: Call, *, damaged: bool = False) -> None:
        lot = self._find_lot(call.job)
        if lot is None or self._the_supply.is_there(remote, lot):
            self._send(remote, call)
            return
        self._parked.setdefault((remote.place, lot), []).append(remote.number)
        self._fetch_lot(remote, lot, damaged=damaged)

    def _find_lot(self, job: Job) -> int | None:
        if isinstance(job, ShardTask):
            return job.shard
        if not isinstance(job, Task):
            return None
        return EVERYWHERE if job.part < 0 else self._context.order().pool_of_part[job.part]

    def _fetch_lot(self, remote: RemoteWorker, lot: int, *, damaged: bool = False) -> None:
        """Send a lot to a worker's node, unless it is there or on its way."""
        key = remote.place, lot
        if self._the_supply.is_there(remote, lot) or key in self._loading:
            return
        self._loading.add(key)
        if damaged:
            job = self._porters.submit(self._the_supply.resend_damaged, remote, lot)
        else:
            job = self._porters.submit(self._the_supply.send, remote, [lot])
        job.add_done_callback(
            lambda done: self._mailbox.put(partial(self._finish_loading, key, remote, done))
        )

    def _send(self, remote: RemoteWorker, call: Call) -> None:
        job, state = call.job, None
        if isinstance(job, Task):
            try:
                state = self._find_state(job)
            except LookupError as error:
                remote.stale.update(job.ended)  # with its next task
                self._lose_state(remote.number, job, str(error))
                return
            ended = {*job.ended, *remote.stale} - {job.trial}
            remote.stale.clear()
            job = self._adapt_task(job, tuple(sorted(ended)))
        self._dispatch(remote, call, job, state)

    def _send_queued(self, remote: RemoteWorker, call: Call) -> None:
        assert isinstance(call.job, Task)
        # It begins with the state that the unit before it leaves there.
        self._dispatch(remote, call, self._adapt_task(call.job, call.job.ended), None)

    def _adapt_task(self, task: Task, ended: tuple[int, ...]) -> Task:
        keep = task.keep_state and self._shares_run
        if (ended, keep) == (task.ended, task.keep_state):
            return task
        return replace(task, ended=ended, keep_state=keep)

    def _dispatch(self, remote: RemoteWorker, call: Call, job: Job, state: StateIn | None) -> None:
        call.is_sent = True
        answer, call.packed = remote.agent.run(job, state)
        worker, serial = remote.number, call.serial
        answer.add_done_callback(
            lambda done: self._mailbox.put(partial(self._handle_answer, worker, serial, done))
        )

    def _begin_queued(self, remote: RemoteWorker) -> None:
        """After a unit is done, expect the answer of the unit that was queued behind it."""
        call = self._queued.pop(remote.number, None)
        if call is None:
            return
        self._out[remote.number] = call
        if call.is_dropped:
            self._send_dropped(remote, call)

    def _send_dropped(self, remote: RemoteWorker, call: Call) -> None:
        """Send a queued unit like any other: the worker has not begun it by itself."""
        assert isinstance(call.job, Task)
        call.job = replace(call.job, after=None)
        self._send_when_loaded(remote, call)

    def _find_state(self, task: Task) -> StateIn | None:
        """Return the state that the worker must fetch for a unit, if any.

        Raises LookupError if the state is lost.
        """
        stored = task.clone_of or task.origin
        if stored is not None:
            if self._shares_run:
                return None
            ref = self._cluster.put(read_state(stored))
            return StateIn(ref, stored.state_hash, is_clone=task.clone_of is not None)
        if task.position == 0:
            return None
        held = self._states.find_state(task.trial, task.position)
        if held is None:
            raise LookupError("its state was lost with its agent")
        return StateIn(held.ref, held.state_hash, held.agent)

    # --- results -------------------------------------------------------------

    def _handle_messages(self) -> None:
        while letters := self._mailbox.take():  # a letter may put another one
            for letter in letters:
                letter()

    def _process_mailbox(self) -> None:
        self._handle_messages()
        if self._is_training and self._later:
            self._events += self._later
            self._later = []
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble

    def _handle_answer(self, worker: int, serial: int, done: Any) -> None:
        call, remote = self._out.get(worker), self._remotes.get(worker)
        if call is None or remote is None or call.serial != serial:
            return  # too late: the worker is considered lost
        remote.silent_looks = 0
        error = done.exception()
        if error is not None:
            self._handle_failed_agent(remote, error)
            return
        remote.has_answered = True
        answer: JobResult = done.result()
        if answer.is_full:
            self._trouble = OSError(
                f"node {remote.name} has no room for a state ({answer.missing}): free some space "
                "on the disk of its cache folder ($CEREBRO_CACHE), and resume the run"
            )
            return
        self.traffic.state_bytes += answer.fetched
        self.traffic.states += answer.fetched > 0
        event, job = answer.event, call.job
        if answer.is_dropped:  # by an agent that leaves
            self._send_dropped(remote, call)
            return
        if answer.log and isinstance(job, Task):
            self._write_log(job.trial, answer.log)
        if event is None:
            assert isinstance(job, Task)
            self._lose_state(worker, job, f"its state cannot be fetched ({answer.missing})")
        elif isinstance(event, (UnitFailed, ShardFailed)) and self._resend(remote, call, event):
            return
        elif isinstance(event, ShardMade):
            self._collect_shard(remote, call, event)
        else:
            self._out.pop(worker)
            if isinstance(event, UnitDone):
                self._record_unit(remote, call, event)
                self._begin_queued(remote)
                return
            self._queued.pop(worker, None)
            if isinstance(event, UnitFailed):
                if event.kind == "data":
                    event = replace(event, message=f"node {remote.name}: {event.message}")
                elif event.kind == "storage":
                    message = f"node {remote.name}, {self._stores_in}: {event.message}"
                    event = replace(event, message=message)
                self._events.append(replace(event, worker=worker, task=call.job))  # type: ignore[arg-type]
            elif isinstance(event, ShardFailed):
                self._events.append(replace(event, worker=worker, node=remote.name))
            elif isinstance(event, CheckDone):
                self._events.append(replace(event, worker=worker))
            else:
                self._remove_lost_worker(remote, replace(event, worker=worker))

    def _record_unit(self, remote: RemoteWorker, call: Call, event: UnitDone) -> None:
        task = call.job
        assert isinstance(task, Task)
        before = self._states.find_newest(task.trial)
        if before is not None and before.worker != remote.number and before.worker in self._remotes:
            self._remotes[before.worker].stale.add(task.trial)
        held = HeldState(
            position=task.position + 1,
            ref=call.packed,
            node=remote.node.id,
            agent=remote.agent.id,
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
            self._keep_state(task.trial, held, file)
        self._events.append(event)

    def _keep_state(self, trial: int, held: HeldState, file: str) -> None:
        self._keeping[trial] = held.position
        path = Path(self._context.folders.states, unpublished_name(file, held.state_hash))
        job = self._porters.submit(self._cluster.fetch_to_file, held, self._gone, path)
        job.add_done_callback(
            lambda done: self._mailbox.put(partial(self._finish_keeping, trial, held, done))
        )

    def _finish_keeping(self, trial: int, held: HeldState, done: Any) -> None:
        if self._keeping.get(trial) != held.position:
            return
        del self._keeping[trial]
        error = done.exception()
        if error is None:
            self.traffic.kept_bytes += held.nbytes
            self._events.append(StateKept(trial))
        elif isinstance(error, OSError):
            self._trouble = error  # the run's disk
        else:
            position = self._states.remove_lost_state(trial, held.position)
            reason = f"the state at its epoch's end is lost: {text_of(error)}"
            self._events.append(StateLost(trial, reason, position=position))

    def _collect_shard(self, remote: RemoteWorker, call: Call, event: ShardMade) -> None:
        """Fetch the files of a shard; the worker counts as busy until they arrive."""
        worker, serial, shard = remote.number, call.serial, event.task.shard
        folder = Path(self._context.folders.slots, f"{ARRIVING}{serial}")
        event = replace(event, worker=worker, node=remote.name, folder=str(folder))
        job = self._porters.submit(fetch_shard, remote.agent, shard, event.files, folder)
        job.add_done_callback(
            lambda done: self._mailbox.put(partial(self._finish_collecting, serial, event, done))
        )

    def _finish_collecting(self, serial: int, event: ShardMade, done: Any) -> None:
        call, remote = self._out.get(event.worker), self._remotes.get(event.worker)
        if call is None or remote is None or call.serial != serial:
            return  # too late: the worker is considered lost
        error = done.exception()
        if isinstance(error, self._cluster.errors):
            self._handle_failed_agent(remote, error)
        elif error is not None:
            self._trouble = error  # such as a full disk of this machine
        else:
            self._out.pop(event.worker)
            self.traffic.made_bytes += done.result()
            if remote.reads_all:  # its node will read the finished dataset in the same way
                remote.agent.control("drop_made", event.task.shard)
            else:
                self._made.setdefault(event.worker, []).append(event.task.shard)
            self._events.append(event)

    def _lose_state(self, worker: int, task: Task, reason: str) -> None:
        del self._out[worker]
        self._queued.pop(worker, None)
        held = self._states.find_state(task.trial, task.position)
        if held is not None and held.is_here:  # handed over while it was fetched
            position: int | None = task.position
        else:
            position = self._states.remove_lost_state(task.trial, task.position)
        self._events.append(StateLost(task.trial, reason, worker, position))

    def _write_log(self, trial: int, text: bytes) -> None:
        try:
            path = log_path(self._context.folders.logs, trial)
            with os.fdopen(open_plain(path, APPEND), "ab") as log:
                log.write(text)
        except OSError as error:
            self._trouble = error

    # --- data that arrive during the run ---------------------------------------

    def _finish_loading(self, key: tuple[str, int], receiver: RemoteWorker, done: Any) -> None:
        self._loading.discard(key)
        place, lot = key
        error = done.exception()
        if error is None:
            self._the_supply.arrived.setdefault(place, set()).add(lot)
            placement = None if lot == EVERYWHERE else self._placement
            if placement is not None and not placement.has_lot(place, lot):
                placement.add_lot(place, lot)
                self._events.append(ShardsPlaced())
        for worker in self._parked.pop(key, ()):
            remote, call = self._remotes.get(worker), self._out.get(worker)
            if remote is None or call is None:
                continue
            if error is None:
                self._send(remote, call)
            elif trouble := self._find_fatal_error(receiver, lot, error):
                self._trouble = trouble
            elif remote is receiver:
                self._handle_failed_agent(remote, error)
            else:  # it can receive the shard itself
                self._send_when_loaded(remote, call)

    def _find_fatal_error(
        self, receiver: RemoteWorker, lot: int, error: BaseException
    ) -> Exception | None:
        """Return what ends the run after a failed transfer; None: only the agent has failed."""
        if isinstance(error, (CorruptDataError, OSError)):  # the files here
            return CorruptDataError(text_of(error))
        cause = getattr(error, "cause", None)
        if isinstance(cause, CorruptDataError):
            return CorruptDataError(f"node {receiver.name}: {text_of(cause)}")
        if isinstance(cause, OSError):
            what = "the validation rows" if lot == EVERYWHERE else "its shards"
            return OSError(
                f"node {receiver.name} cannot store {what} ({text_of(cause)}): make room in its "
                "cache folder ($CEREBRO_CACHE), or give it access to the data, and resume the run"
            )
        return None

    def _resend(self, remote: RemoteWorker, call: Call, event: UnitFailed | ShardFailed) -> bool:
        """Send a damaged shard to the node again, if a task has failed because of it.

        Returns False, and does nothing, if the failure has another cause, if the node reads shards
        from files, or if the task's shards have already been sent again.
        """
        lot = self._find_lot(call.job)
        assert lot is not None
        if event.kind != "data" or remote.reads_all or call.reloaded:
            return False
        call.reloaded = True
        if remote.number in self._queued:  # the worker has dropped it
            self._queued[remote.number].is_dropped = True
        self._the_supply.arrived[remote.place].discard(lot)
        what = self._the_supply.describe_lot(lot)
        text = f"node {remote.name}: {event.message}: {what} sent again"
        self._events.append(Note("shard damaged", text))
        self._send_when_loaded(remote, call, damaged=True)
        return True

    @property
    def _stores_in(self) -> str:
        if self._shares_run:
            return "which writes to the run's folder and its own cache folder ($CEREBRO_CACHE)"
        return "which keeps states in its cache folder ($CEREBRO_CACHE)"

    # --- lost workers --------------------------------------------------------

    def _handle_failed_agent(self, remote: RemoteWorker, error: BaseException) -> None:
        remote.is_gone = True
        remote.node_is_gone = remote.node.id in self._gone_nodes or not remote.node.answers()
        cause = self._cluster.describe_cause(error)
        reason = f"worker {remote.number} on node {remote.name} is gone: {cause}"
        if remote.node_is_gone or remote.agent.has_left:
            reason = _describe_loss(remote)
        if remote.node_is_gone:
            self._gone_nodes.add(remote.node.id)
        self._drop_lost_states(remote)
        with contextlib.suppress(Exception):
            remote.agent.kill(cause)
        # An agent that never answered, or has no process, has not begun its task.
        began = remote.has_answered and not isinstance(getattr(error, "cause", None), WorkerError)
        self._out.pop(remote.number, None)
        self._queued.pop(remote.number, None)
        self._remove_lost_worker(
            remote,
            WorkerLost(
                remote.number,
                reason,
                began=began,
                with_machine=remote.node_is_gone,
                has_left=remote.agent.has_left,
            ),
        )

    def _drop_lost_states(self, lost: RemoteWorker) -> None:
        """Drop the states of a lost agent and, if its node is gone, those of all agents there."""
        for remote in list(self._remotes.values()):
            agent = remote.agent.id
            is_lost = remote is lost or (lost.node_is_gone and remote.node.id == lost.node.id)
            if is_lost and agent not in self._gone:
                self._gone.add(agent)
                self._states.remove_agent(agent)
                for other in self._remotes.values():
                    if other is not remote:
                        other.agent.control("mark_agent_lost", agent)

    def _remove_lost_worker(self, remote: RemoteWorker, event: WorkerLost) -> None:
        del self._remotes[remote.number]
        self._lost[remote.number] = remote
        self._pace.forget(remote.number)
        if self._placement is not None:
            self._placement.remove_worker(remote.number)
        if remote.node_is_gone and not self._is_used(remote.place):
            if self._placement is not None:
                self._placement.remove_place(remote.place)
            self._the_supply.forget(remote.place)
        self._known -= self._spare  # one of them may replace the lost one
        self._spare.clear()
        self._events.append(event)

    def _is_used(self, place: str) -> bool:
        return any(
            remote.place == place and remote.node.id not in self._gone_nodes
            for remote in self._remotes.values()
        )

    # --- regular checks --------------------------------------------------------

    def _check_workers(self) -> None:
        self._next_look = time.monotonic() + LOOK_SECONDS
        for worker, remote in list(self._remotes.items()):
            # An idle worker, too: others may wait for a state that it holds.
            if remote.has_answered or worker in self._out:
                self._ping_worker(remote)
        self._check_nodes()
        self._rebalance_lots()

    def _check_nodes(self) -> None:
        alive = {node.id: node for node in self._cluster.nodes()}
        for remote in [h for h in self._remotes.values() if h.node.id not in alive]:
            self._gone_nodes.add(remote.node.id)
            self._handle_failed_agent(remote, WorkerError("its node has left the cluster"))
        unknown = [node for node in alive.values() if node.id not in self._known]
        for node in self._cluster.select_reachable(unknown):
            self._known.add(node.id)
            self._start_admission(node)

    def _ping_worker(self, remote: RemoteWorker) -> None:
        remote.silent_looks += 1
        seconds = remote.silent_looks * LOOK_SECONDS
        if remote.silent_looks > SILENT_LOOKS and (remote.has_answered or seconds > START_SECONDS):
            self._handle_failed_agent(remote, WorkerError(f"no heartbeat for {seconds:g} seconds"))
            return

        def reset_silence() -> None:
            remote.silent_looks = 0
            remote.has_answered = True

        remote.agent.control("ping").add_done_callback(
            lambda done: self._mailbox.put(reset_silence) if done.exception() is None else None
        )

    def _rebalance_lots(self) -> None:
        if self._placement is None or self._loading or not self._is_training or self._derives:
            return
        wish = self._placement.choose_lot_to_copy(self._pace.speeds())
        if wish is not None:
            lot, place = wish
            remote = next(h for h in self._remotes.values() if h.place == place)
            if self._the_supply.is_there(remote, lot):
                self._placement.add_lot(place, lot)
                self._events.append(ShardsPlaced())
            else:
                self._fetch_lot(remote, lot)

    def _start_admission(self, node: Node) -> None:
        room = self._cluster.count_room(node)
        room -= sum(remote.node.id == node.id for remote in self._remotes.values())
        if self.workers is not None:
            free = self.workers - len(self._remotes) - self._arriving
            if free < room:
                self._spare.add(node.id)
            room = min(room, free)
        if room > 0:
            self._arriving += room
            job = self._porters.submit(self._admit_node, node, room)
            job.add_done_callback(
                lambda done: self._mailbox.put(partial(self._finish_admission, node, room, done))
            )

    def _finish_admission(self, node: Node, room: int, done: Any) -> None:
        self._arriving -= room
        self._add_admitted_workers(node, done)

    def _admit_node(self, node: Node, count: int) -> tuple[list[RemoteWorker], list[Note]]:
        """Start workers on a new node and send it the common data; called in a separate thread."""
        hired = [(node, self._cluster.acquire_agent(node)) for _ in range(count)]
        try:
            reports = self._hiring.collect_reports(hired, self._the_supply)
            notes = self._hiring.check(reports)
            if self._shares_run and not all(report.shares_run for report in reports):
                raise InputError(
                    f"node {reports[0].name} cannot write to the run's folder as the other nodes "
                    f"do ({Path(self._context.folders.states).parent}): mount it there, writable, "
                    "and start the worker there as the script's user"
                )
            self._the_supply.check_reads(reports[0])
            before = list(self._remotes.values())
            remotes = [
                self._make_remote(
                    node, agent, report, count + sum(r.report.is_local_to(report) for r in before)
                )
                for (_, agent), report in zip(hired, reports, strict=True)
            ]
            if not remotes[0].reads_all:
                self._the_supply.supply_new_node(remotes[0], whole=self._placement is None)
            for remote in remotes:
                self._the_supply.set_data_paths(remote).agent.call("begin", remote.begin)
            return remotes, notes
        except BaseException:
            kill_agents(hired)
            raise

    def _add_admitted_workers(self, node: Node, done: Any) -> None:
        error = done.exception()
        if error is not None:
            text = f"node {node.address} ({node.id[:8]}) has joined and is not used: "
            self._later.append(Note("node not used", text + text_of(error)))
            return
        remotes, notes = done.result()
        self._later += notes
        for remote in remotes:
            self._add_remote(remote)
            if self._placement is not None:
                for lot in self._the_supply.arrived.get(remote.place, set()) - {EVERYWHERE}:
                    self._placement.add_lot(remote.place, lot)
            self._later.append(WorkerJoined(remote.number))


def _describe_loss(remote: RemoteWorker) -> str:
    if remote.agent.has_left:
        return f"node {remote.name} has left: its agent was told to end"
    return f"node {remote.name} is gone"
