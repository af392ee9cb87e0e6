"""Run units on the nodes of a cluster: what all kinds of clusters share.

Each worker is an agent (`cerebro.cluster.hub.RemoteAgent`) with one worker process. Only the
coordinator knows about units, so no layer below it restarts an agent's work or repeats a call. See
docs/design/cluster.md.
"""

from __future__ import annotations

import contextlib
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cerebro.arguments import check_whole_number
from cerebro.cluster.admission import START_SECONDS, Admission, describe_run, remove_old_tokens
from cerebro.cluster.derived_shards import MadeShards, make_context
from cerebro.cluster.engine import check_gpus
from cerebro.cluster.hub import AgentError, Hub, Node, describe_cause
from cerebro.cluster.messages import JobResult, StateIn, Traffic
from cerebro.cluster.states import Blob, HeldState, HeldStates
from cerebro.cluster.supply import EVERYWHERE, Supply, Transfers, fetch_shard, find_fatal_error
from cerebro.cluster.workers import Call, Events, Membership, RemoteWorker
from cerebro.data.derivation import ARRIVING, Order, ShardMakers
from cerebro.errors import InputError, WorkerError, text_of
from cerebro.executors.base import Wake
from cerebro.machine.devices import ALL, CPU, MAX_WORKERS
from cerebro.machine.files import open_plain, path_of
from cerebro.machine.local import LOCAL, Machine
from cerebro.machine.objects import is_url
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
KEEP_SECONDS = 60.0  # the time for nodes to keep the shards that they have made
PATIENCE_SECONDS = 60.0
"""The time to wait for another node after the last one was lost, if the cluster starts them."""
LOOK_SECONDS = 5.0  # how often to look for new nodes and to ping busy workers
SILENT_LOOKS = 6  # the number of unanswered pings in a row after which a worker is lost


class ClusterExecutor(ABC):
    """Runs a search on a cluster, which a subclass joins in `_join`.

    See `cerebro.cluster.Executor` for the parameters. With ``workers=None``, as many are used as
    fit. `gpus` is each worker's share of a GPU, or None. Subclasses add to `_arguments`, with which
    an executor is shown, copied and pickled, as an unused one.
    """

    public_name = "cerebro.cluster.Executor"

    def __init__(
        self,
        workers: int | None,
        replicas: int,
        shared_path: str | os.PathLike[str] | None,
        gpus: float | None = None,
        machine: Machine = LOCAL,
    ) -> None:
        self._machine = machine
        self.workers = check_whole_number("workers", workers, 1, MAX_WORKERS, optional=True)
        self._replicas = check_whole_number("replicas", replicas, 1)
        self._shared_path: Path | str | None = None
        if isinstance(shared_path, str) and is_url(shared_path):
            self._shared_path = shared_path
        elif shared_path is not None:
            self._shared_path = path_of("shared_path", shared_path).absolute()
        self._gpu_share = check_gpus(gpus)
        self._arguments: dict[str, Any] = {
            "workers": workers,
            "replicas": replicas,
            "shared_path": None if shared_path is None else str(self._shared_path),
        }
        self._hub: Hub | None = None
        self._is_refused = False
        self.traffic = Traffic()
        self._members = Membership()
        self._states = HeldStates()

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._arguments.items())
        return f"{self.public_name}({arguments})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._arguments), ()

    @abstractmethod
    def _join(self, context: RunContext) -> Hub:
        """Join or start the cluster for a run; raise InputError if this fails."""

    @property
    def devices(self) -> tuple[str, ...]:
        return (ALL if self._gpu_share else CPU,)

    # --- the protocol ------------------------------------------------------

    def start(self, context: RunContext, one_kind: str | None = None) -> list[int]:
        """Start a run; `one_kind` is the GPU that all workers must have, as for `Admission`."""
        if self._hub is not None:
            self._is_refused = True
            raise InputError("this executor runs a different search: make one for each")
        self.traffic = Traffic()
        self._context = context
        run = describe_run(context, self._gpu_share)
        self._hub = hub = self._join(context)
        self._events = Events(self._machine.tasks)
        supply = Supply(
            hub, context, self._shared_path, self._replicas, self.traffic, self._events.fetch_pool
        )
        self._admission = Admission(hub, supply, context, run, one_kind, self._machine.disk)
        self._transfers = Transfers(supply, self._events, self._resume_waiting)
        try:
            self._start_workers(hub)
        except BaseException:
            self.close(kill=True)
            raise
        return sorted(self._members.workers)

    def submit(self, worker: int, task: Job) -> None:
        remote = self._members.workers.get(worker)
        if remote is None:  # lost, but the caller has not been notified yet
            return
        call = remote.call = Call(task)
        self._events.is_training |= isinstance(task, (Task, ShardTask))
        if isinstance(task, Task):
            for trial in task.ended:
                self._states.forget(trial)
        self._send_when_loaded(remote, call)

    def queue(self, worker: int, task: Task) -> None:
        remote = self._members.workers.get(worker)
        if remote is None or remote.call is None:  # lost, but the caller was not notified yet
            return
        call = remote.queued = Call(task)
        # The unit before it may still wait for its shards.
        if remote.call.is_sent and self._transfers.is_there(remote, self._find_lot(task)):
            # It begins with the state that the unit before it leaves there.
            self._dispatch(remote, call, self._adapt_task(task, task.ended), None)
        else:
            call.is_dropped = True  # so that it is sent when its turn comes

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> Sequence[News]:
        now = self._machine.clock.monotonic
        end = math.inf if timeout is None else now() + timeout
        events, workers = self._events, self._members.workers
        while True:
            events.process()
            is_busy = bool(self._states.keeping) or any(r.call for r in workers.values())
            if events.now or not (is_busy or wake is not None):
                break
            time = now()
            if time >= end:
                break
            if time >= self._next_look:
                self._check_workers()
                continue  # it may have put calls to make
            descriptors = [events.fileno()] + ([] if wake is None else [wake.fileno()])
            ready = self._cluster.wait(min(self._next_look, end) - time, descriptors)
            if wake is not None and wake.fileno() in ready:
                events.process()
                break
        return events.take()

    def cancel(self, worker: int) -> None:
        remote = self._members.workers.get(worker)
        if remote is not None:
            remote.agent.control("cancel")

    def replace(self, worker: int) -> int:
        lost = self._members.lost.pop(worker)
        if lost.node_is_gone or not lost.node.answers():
            return self._await_replacement(lost)
        agent = lost.agent
        if lost.is_gone:
            agent = self._cluster.acquire_agent(lost.node)
            agent.call("begin", lost.begin)
        else:
            agent.call("restart")
        return self._add_worker(
            RemoteWorker(-1, agent, lost.node, lost.report, lost.place, lost.reads_all, lost.begin)
        )

    def holders(self) -> Mapping[int, Sequence[int]] | None:
        """Return the workers that can read each pool; None: all read all."""
        return None if self._hub is None else self._transfers.holders()

    def load(self, worker: int, pool: int) -> None:
        """Make a pool readable for a worker and all others on its node."""
        remote = self._members.workers.get(worker)
        if remote is not None:
            self._transfers.load(remote, pool)

    @contextlib.contextmanager
    def shard_makers(self, order: Order) -> Iterator[ShardMakers]:
        """Start the workers for a `Dataset.derive`, with the errors of a search."""
        context = make_context(order)
        try:
            yield MadeShards(self, order, self.start(context, order.gpu))
        except BaseException:
            self.close(kill=True)
            raise
        self.close()

    def keep_made(self, manifest: bytes) -> None:
        """Have nodes keep the shards that they have made, so that a search need not send them."""
        self._cluster.release()
        jobs = [
            remote.agent.call("keep_made", manifest, remote.made)
            for remote in self._members.workers.values()
            if remote.made
        ]
        # A shard that is not kept is sent like any other.
        self._cluster.wait_for_calls(jobs, KEEP_SECONDS)

    def close(self, *, kill: bool = False) -> None:
        if self._is_refused:  # the run that uses this executor closes it
            self._is_refused = False
            return
        hub = self._hub
        if hub is None:
            return
        members = self._members
        remotes = [*members.workers.values(), *(r for r in members.lost.values() if not r.is_gone)]
        if not kill:
            hub.release()
            hub.wait_for_calls([r.agent.call("end") for r in remotes], END_SECONDS)
        for remote in remotes:
            with contextlib.suppress(Exception):
                remote.agent.kill()
        self._events.fetch_pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(Exception):
            hub.close()
        self._hub = None
        self._events.close()
        # One that could not be removed would stay in the run's folder.
        remove_old_tokens(Path(self._context.folders.states), self._machine)
        self._admission.supply.close()
        self._members, self._states = Membership(), HeldStates()

    def nodes(self) -> dict[int, str]:
        """Return the id of each worker's node."""
        return {number: r.node.id for number, r in sorted(self._members.workers.items())}

    @property
    def _cluster(self) -> Hub:
        assert self._hub is not None, "the executor has not been started"
        return self._hub

    # --- starting ----------------------------------------------------------

    def _start_workers(self, hub: Hub) -> None:
        remove_old_tokens(Path(self._context.folders.states), self._machine)
        # A node that joins while nodes are chosen is not known, so that it is greeted later.
        nodes = {node.id: node for node in hub.nodes()}
        hosts = hub.choose_nodes(self.workers)
        nodes |= {node.id: node for node in hosts}
        taken = Counter(node.id for node in hosts)
        spare = {number for number, node in nodes.items() if hub.count_room(node) > taken[number]}
        self._members.know(nodes, spare)
        remotes, notes = self._admission.admit(hosts, self._members, first=True)
        self._events.later += notes
        for remote in remotes:
            self._add_worker(remote)
        self._next_look = self._machine.clock.monotonic() + LOOK_SECONDS
        if hub.dials_in:  # else the cluster is asked for its nodes
            hub.changed = lambda: self._events.put(self._check_nodes)

    def _add_worker(self, remote: RemoteWorker, *, with_node: bool = False) -> int:
        self._members.add(remote)
        self._transfers.add_worker(remote, with_node=with_node)
        return remote.number

    # --- dispatching ---------------------------------------------------------

    def _send_when_loaded(self, remote: RemoteWorker, call: Call, *, damaged: bool = False) -> None:
        lot = self._find_lot(call.job)
        if lot is None or self._transfers.is_there(remote, lot):
            self._send(remote, call)
        else:
            self._transfers.wait_for(remote, lot, damaged=damaged)

    def _find_lot(self, job: Job) -> int | None:
        if isinstance(job, ShardTask):
            return job.shard
        if not isinstance(job, Task):
            return None
        return EVERYWHERE if job.part < 0 else self._context.order().pool_of_part[job.part]

    def _send(self, remote: RemoteWorker, call: Call) -> None:
        job, state = call.job, None
        if isinstance(job, Task):
            try:
                state = self._find_state(job)
            except LookupError as error:
                remote.stale.update(job.ended)  # with its next task
                self._lose_state(remote, job, str(error))
                return
            ended = {*job.ended, *remote.stale} - {job.trial}
            remote.stale.clear()
            job = self._adapt_task(job, tuple(sorted(ended)))
        self._dispatch(remote, call, job, state)

    def _adapt_task(self, task: Task, ended: tuple[int, ...]) -> Task:
        keep = task.keep_state and self._admission.shares_run
        if (ended, keep) == (task.ended, task.keep_state):
            return task
        return replace(task, ended=ended, keep_state=keep)

    def _dispatch(self, remote: RemoteWorker, call: Call, job: Job, state: StateIn | None) -> None:
        call.is_sent = True
        answer, call.packed = remote.agent.run(job, state)
        self._events.when_done(answer, self._handle_answer, remote, call)

    def _send_dropped(self, remote: RemoteWorker, call: Call) -> None:
        """Send a queued unit like any other: the worker has not begun it by itself."""
        assert isinstance(call.job, Task)
        call.job = replace(call.job, after=None)
        self._send_when_loaded(remote, call)

    def _find_state(self, task: Task) -> StateIn | None:
        """Return the state to fetch for a unit, if any; raise LookupError if it is lost."""
        stored = task.clone_of or task.origin
        if stored is not None:
            if self._admission.shares_run:
                return None
            blob = Blob("", 0, read_state(stored, self._machine.disk))
            return StateIn(blob, stored.state_hash)
        if task.position == 0:
            return None
        held = self._states.find_state(task.trial, task.position)
        if held is None:
            raise LookupError("its state was lost with its agent")
        return StateIn(held.ref, held.state_hash, held.agent)

    # --- results -------------------------------------------------------------

    def _handle_answer(self, remote: RemoteWorker, call: Call, done: Any) -> None:
        if remote.call is not call:
            return  # too late: the worker is considered lost
        remote.silent_looks = 0
        error = done.exception()
        if error is not None:
            self._handle_failed_agent(remote, error)
            return
        remote.has_answered = True
        answer: JobResult = done.result()
        if answer.is_full:
            self._events.trouble = OSError(
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
            self._lose_state(remote, job, f"its state cannot be fetched ({answer.missing})")
        elif isinstance(event, UnitDone):
            assert isinstance(job, Task)
            remote.call, remote.queued = remote.queued, None
            self._record_unit(remote, job, call.packed, event)
            if remote.call is not None and remote.call.is_dropped:
                self._send_dropped(remote, remote.call)
        elif isinstance(event, ShardMade):
            self._collect_shard(remote, call, event)
        elif isinstance(event, WorkerLost):
            self._remove_worker(remote, replace(event, worker=remote.number))
        elif isinstance(event, CheckDone):
            self._finish(remote, replace(event, worker=remote.number))
        elif self._resend(remote, call, event):
            pass  # it will be answered again
        elif isinstance(event, ShardFailed):
            self._finish(remote, replace(event, worker=remote.number, node=remote.name))
        else:
            assert isinstance(job, Task)
            message = self._locate_failure(remote, event)
            event = replace(event, message=message, worker=remote.number, task=job)
            self._finish(remote, event)

    def _finish(self, remote: RemoteWorker, event: News) -> None:
        """Deliver what came of a worker's call, which is idle from now on."""
        remote.call = remote.queued = None
        self._events.now.append(event)

    def _locate_failure(self, remote: RemoteWorker, event: UnitFailed) -> str:
        """Return the message of a failure, with the node if its files are to blame."""
        if event.kind == "data":
            return f"node {remote.name}: {event.message}"
        if event.kind != "storage":
            return event.message
        keeps = "keeps states in its cache folder ($CEREBRO_CACHE)"
        if self._admission.shares_run:
            keeps = "writes to the run's folder and its own cache folder ($CEREBRO_CACHE)"
        return f"node {remote.name}, which {keeps}: {event.message}"

    def _record_unit(self, remote: RemoteWorker, task: Task, ref: Any, event: UnitDone) -> None:
        workers = self._members.workers
        before = self._states.find_newest(task.trial)
        if before is not None and before.worker != remote.number and before.worker in workers:
            workers[before.worker].stale.add(task.trial)
        held = HeldState(
            position=task.position + 1,
            ref=ref,
            node=remote.node.id,
            agent=remote.agent.id,
            worker=remote.number,
            state_hash=event.state.hash,
            nbytes=event.state.nbytes,
        )
        self._states.add(task.trial, held)
        self._transfers.pace.add(remote.number, task.trial, event.total.rows, event.seconds)
        # Clocks of nodes differ: take the time of a unit from the coordinator's.
        started = self._machine.clock.time() - event.seconds
        event = replace(event, worker=remote.number, task=task, started=started)
        if event.metrics is not None and task.keep_state and not self._admission.shares_run:
            file = epoch_state_file(task.trial, task.epoch)
            event = replace(event, state=replace(event.state, file=file), is_kept=False)
            self._keep_state(task.trial, held, file)
        self._events.now.append(event)

    def _keep_state(self, trial: int, held: HeldState, file: str) -> None:
        self._states.keeping[trial] = held.position
        path = Path(self._context.folders.states, unpublished_name(file, held.state_hash))
        job = self._events.fetch_pool.submit(
            self._cluster.fetch_to_file, held, self._members.gone_agents, path
        )
        self._events.when_done(job, self._finish_keeping, trial, held)

    def _finish_keeping(self, trial: int, held: HeldState, done: Any) -> None:
        if self._states.keeping.get(trial) != held.position:
            return  # a later one of the trial replaces it
        del self._states.keeping[trial]
        error = done.exception()
        if error is None:
            self.traffic.kept_bytes += held.nbytes
            self._events.now.append(StateKept(trial))
        elif isinstance(error, OSError):
            self._events.trouble = error  # the run's disk
        else:
            position = self._states.remove_lost_state(trial, held.position)
            reason = f"the state at its epoch's end is lost: {text_of(error)}"
            self._events.now.append(StateLost(trial, reason, position=position))

    def _collect_shard(self, remote: RemoteWorker, call: Call, event: ShardMade) -> None:
        """Fetch the files of a shard; the worker counts as busy until they arrive."""
        shard = event.task.shard
        folder = Path(self._context.folders.slots, f"{ARRIVING}{remote.number}-{shard}")
        event = replace(event, worker=remote.number, node=remote.name, folder=str(folder))
        job = self._events.fetch_pool.submit(fetch_shard, remote.agent, shard, event.files, folder)
        self._events.when_done(job, self._finish_collecting, remote, call, event)

    def _finish_collecting(
        self, remote: RemoteWorker, call: Call, event: ShardMade, done: Any
    ) -> None:
        if remote.call is not call:
            return  # too late: the worker is considered lost
        error = done.exception()
        if isinstance(error, AgentError):
            self._handle_failed_agent(remote, error)
        elif error is not None:
            self._events.trouble = error  # such as a full disk of this machine
        else:
            self.traffic.made_bytes += done.result()
            if remote.reads_all:  # its node will read the finished dataset in the same way
                remote.agent.control("drop_made", event.task.shard)
            else:
                remote.made.append(event.task.shard)
            self._finish(remote, event)

    def _lose_state(self, remote: RemoteWorker, task: Task, reason: str) -> None:
        held = self._states.find_state(task.trial, task.position)
        position: int | None = task.position
        if held is None or not held.is_here:  # else it was handed over while it was fetched
            position = self._states.remove_lost_state(task.trial, task.position)
        self._finish(remote, StateLost(task.trial, reason, remote.number, position))

    def _write_log(self, trial: int, text: bytes) -> None:
        try:
            path = log_path(self._context.folders.logs, trial)
            with os.fdopen(open_plain(path, APPEND), "ab") as log:
                log.write(text)
        except OSError as error:
            self._events.trouble = error

    # --- data that arrive during the run ---------------------------------------

    def _resume_waiting(
        self, receiver: RemoteWorker, lot: int, error: BaseException | None, workers: Sequence[int]
    ) -> None:
        """Send the calls of workers that have waited for a lot, or find out what its loss means."""
        for worker in workers:
            remote = self._members.workers.get(worker)
            if remote is None or remote.call is None:
                continue
            if error is None:
                self._send(remote, remote.call)
            elif trouble := find_fatal_error(receiver, lot, error):
                self._events.trouble = trouble
            elif remote is receiver:
                self._handle_failed_agent(remote, error)
            else:  # it can receive the shard itself
                self._send_when_loaded(remote, remote.call)

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
        if remote.queued is not None:  # the worker has dropped it
            remote.queued.is_dropped = True
        what = self._transfers.mark_damaged(remote, lot)
        text = f"node {remote.name}: {event.message}: {what} sent again"
        self._events.now.append(Note("shard damaged", text))
        self._send_when_loaded(remote, call, damaged=True)
        return True

    # --- lost workers --------------------------------------------------------

    def _handle_failed_agent(self, remote: RemoteWorker, error: BaseException) -> None:
        for lost in self._members.mark_gone(remote):
            self._states.remove_agent(lost.agent.id)
            for other in self._members.workers.values():
                if other is not lost:
                    other.agent.control("mark_agent_lost", lost.agent.id)
        cause = describe_cause(error)
        reason = f"worker {remote.number} on node {remote.name} is gone: {cause}"
        if remote.node_is_gone or remote.agent.has_left:
            reason = remote.describe_loss()
        with contextlib.suppress(Exception):
            remote.agent.kill(cause)
        # An agent that never answered, or has no process, has not begun its task.
        began = remote.has_answered and not isinstance(getattr(error, "cause", None), WorkerError)
        event = WorkerLost(
            remote.number,
            reason,
            began=began,
            with_machine=remote.node_is_gone,
            has_left=remote.agent.has_left,
        )
        self._remove_worker(remote, event)

    def _remove_worker(self, remote: RemoteWorker, event: WorkerLost) -> None:
        self._members.remove(remote)
        place_is_gone = remote.node_is_gone and not self._members.is_used(remote.place)
        self._transfers.remove_worker(remote, with_place=place_is_gone)
        self._events.now.append(event)

    def _await_replacement(self, lost: RemoteWorker) -> int:
        """Return a worker on a node that joins, or has room, after the last one was lost.

        Raises WorkerError if other workers remain, or if no node joins in time.
        """
        events, hub, workers = self._events, self._cluster, self._members.workers
        others_are_left = bool(workers)
        failure = None
        now = self._machine.clock.monotonic
        end = now() + PATIENCE_SECONDS
        while not workers and failure is None and now() < end:
            self._check_nodes()
            events.make_calls()
            if not workers:
                if not (hub.dials_in or self._members.arriving):
                    break
                hub.wait(1.0, [events.fileno()])
                events.make_calls()
            failure = hub.engine.failure()
        joined = next((e for e in events.later if isinstance(e, WorkerJoined)), None)
        if others_are_left or joined is None:
            what_next = ""
            if failure is not None:
                what_next = f", and {failure}"
            elif hub.dials_in:
                what_next = ", until another is started"
            raise WorkerError(f"{lost.describe_loss()}{what_next}")
        events.later.remove(joined)  # it replaces the lost one
        return joined.worker

    # --- regular checks --------------------------------------------------------

    def _check_workers(self) -> None:
        self._next_look = self._machine.clock.monotonic() + LOOK_SECONDS
        for remote in list(self._members.workers.values()):
            # An idle worker, too: others may wait for a state that it holds.
            if remote.has_answered or remote.call is not None:
                self._ping_worker(remote)
        self._check_nodes()
        if self._events.is_training:
            self._transfers.rebalance(list(self._members.workers.values()))

    def _check_nodes(self) -> None:
        alive = self._cluster.nodes()
        for remote in self._members.drop_dead_nodes(alive):
            self._handle_failed_agent(remote, WorkerError("its node has left the cluster"))
        for node in self._cluster.select_reachable(self._members.find_unknown(alive)):
            room = self._cluster.count_room(node)
            count = self._members.reserve(node, room, self.workers)
            if count > 0:
                job = self._events.fetch_pool.submit(
                    self._admission.admit, [node] * count, self._members
                )
                self._events.when_done(job, self._finish_admission, node, count)

    def _ping_worker(self, remote: RemoteWorker) -> None:
        remote.silent_looks += 1
        seconds = remote.silent_looks * LOOK_SECONDS
        if remote.silent_looks > SILENT_LOOKS and (remote.has_answered or seconds > START_SECONDS):
            self._handle_failed_agent(remote, WorkerError(f"no heartbeat for {seconds:g} seconds"))
            return

        def reset_silence(done: Any) -> None:
            if done.exception() is None:
                remote.silent_looks = 0
                remote.has_answered = True

        self._events.when_done(remote.agent.control("ping"), reset_silence)

    def _finish_admission(self, node: Node, count: int, done: Any) -> None:
        self._members.arriving -= count
        error = done.exception()
        if error is not None:
            text = f"node {node.address} ({node.id[:8]}) has joined and is not used: "
            self._events.later.append(Note("node not used", text + text_of(error)))
            return
        remotes, notes = done.result()
        self._events.later += notes
        for remote in remotes:
            number = self._add_worker(remote, with_node=True)
            self._events.later.append(WorkerJoined(number))
