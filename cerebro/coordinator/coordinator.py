"""The loop of a run: ask the searcher, train by the scheduler, report, record.

The coordinator decides nothing about order itself: which unit runs where is the
C scheduler's answer, which trial goes on is the searcher's, and carrying it out
is the executor's. What it adds is the bookkeeping between them.
"""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import cerebro._core as _core
import cerebro.control as control
from cerebro.coordinator.callbacks import Hooks
from cerebro.coordinator.commands import Remote
from cerebro.coordinator.failures import (
    ALIKE_FAILURES,
    Losses,
    asks_to_stop,
    missing_metric,
    not_finite,
    raise_if_alike,
    raise_if_all_failed,
)
from cerebro.coordinator.folds import FoldedTrials
from cerebro.coordinator.overview import EndedTrials, Meter
from cerebro.coordinator.restore import Restored
from cerebro.coordinator.search_loop import SearchLoop
from cerebro.coordinator.trial import LiveTrial
from cerebro.coordinator.trials import LiveTrials
from cerebro.data import depots
from cerebro.errors import CorruptDataError, InputError, WorkerError, text_of
from cerebro.executors.base import Executor, placing
from cerebro.report.snapshot import Snapshot
from cerebro.run.records import ENDED, NOT_EXACT, NOTHING_RAISED, EpochRecord, Raised, Status, clash
from cerebro.run.settings import Settings
from cerebro.run.store import Store
from cerebro.searchers.base import Searcher, Suggestion, expected_trials
from cerebro.worker.growth import Growth
from cerebro.worker.messages import (
    CheckDone,
    News,
    Note,
    RunContext,
    ShardsPlaced,
    StateKept,
    StateLost,
    Task,
    UnitDone,
    UnitFailed,
    WarmTask,
    Warned,
    WorkerJoined,
    WorkerLost,
)
from cerebro.worker.trial_warnings import EVENT, Told

MAX_LOST_STATES = 10
"""Times that a trial may go back in one epoch because a machine was lost."""


class Coordinator:
    """Runs one search to its end; see the module's text."""

    def __init__(
        self,
        settings: Settings,
        context: RunContext,
        searcher: Searcher,
        executor: Executor,
        store: Store,
        progress: Any,
        result: Any,
        first: Suggestion | None = None,
        restored: Restored | None = None,
    ) -> None:
        self.settings = settings
        self.context = context
        self.executor = executor
        self.store = store
        result.saved.before_reading = store.flush
        before = 0.0 if restored is None else restored.seconds
        self._begun = time.perf_counter()
        self._started = self._begun - before  # the run's clock goes on
        self._wall_started = time.time() - before
        self._restored = restored
        self._hooks = Hooks(settings.callbacks, result.trial_of)
        self._meter = Meter(settings, progress, self._now)
        self._places = placing(executor)  # None: every worker reads every shard
        self._schedule = self._make_schedule()
        self._trials = self._make_trials(searcher)
        self._trials.states.pinned = getattr(searcher, "pinned", ())
        self._folded = (
            None
            if settings.folds is None
            else FoldedTrials(settings, self._trials, self._meter, self._hooks)
        )
        self._searched = self._trials if self._folded is None else self._folded
        self._loop = SearchLoop(settings, searcher, store, self._hooks, self._searched, first)
        self._schedule_worker: dict[int, int] = {}
        self._executor_worker: dict[int, int] = {}
        self._in_flight: dict[int, Task] = {}
        self._unkept: dict[int, UnitDone] = {}  # ends of epochs whose states are on their way
        self._warming: set[int] = set()  # workers that are not ready for units yet
        self._libraries: set[str] = set()
        self._losses = Losses(settings.max_retries)
        self._growth = Growth()
        self._moved: set[str] = set()  # why PyTorch moves batches to GPUs
        self._told = Told()
        self.out_of_time = False
        self._remote = Remote(settings.folder / control.FOLDER, self._note_command)
        if restored is not None:
            self._searched.restore(restored.trials, restored.answers)
            restored.trials.clear()  # those that end are forgotten

    # --- the loop --------------------------------------------------------

    def run(self, workers: Sequence[int]) -> None:
        """Train until no trial is left.

        Raises
        ------
        RunError
            If the first trials all failed alike, or every trial failed.
        CorruptDataError
            If a data file is damaged; the message names it.
        """
        for worker in workers:
            self._join(worker)
        if self._restored is not None:
            self._go_on(self._restored)
        self._advance()
        self._meter.started(self.trials.values(), len(self._schedule_worker))
        with closing(self._remote):
            self._train()
        self._loop.finish()
        if not self.is_stopped:
            self._searched.end_paused()
        self.end_open_trials()
        records = [trial.record for trial in self.trials.values()]
        raise_if_all_failed(records, self._searched.forgotten)

    def _train(self) -> None:
        while True:
            self._check_time()
            self._obey()
            self._dispatch()
            if not self._in_flight and not self._unkept and not self._awaits_worker():
                if not self._advance() and (self.is_stopped or not self._rest()):
                    break
                continue
            if self._remote.gave_up:
                break
            for event in self.executor.wait(self._patience()):
                self._hear(event)
            self._advance()
            self._meter.show(self.trials.values(), len(self._schedule_worker))

    def _hear(self, event: News) -> None:
        if isinstance(event, UnitDone):
            self._unit_done(event)
        elif isinstance(event, UnitFailed):
            self._unit_failed(event)
        elif isinstance(event, WorkerLost):
            self._worker_lost(event)
        elif isinstance(event, CheckDone):
            if event.worker in self._warming:
                self._warming.remove(event.worker)
                self._join(event.worker)
        else:
            self._hear_of_machines(event)

    @property
    def status(self) -> str:
        """What the run is when `run` has returned."""
        trained = self._trials.by_number.values()
        left = self.is_stopped or any(trial.record.is_open for trial in trained)
        partly = self._restored is not None and self._restored.partly
        cut_short = getattr(self._loop.searcher, "cut_short", False)
        return "stopped" if left or partly or cut_short else "finished"

    @property
    def trials(self) -> Mapping[int, LiveTrial]:
        """The run's trials by number, without those that are forgotten; see `LiveTrials`.

        With folds, the configurations.
        """
        return self._searched.by_number

    def status_of(self, number: int) -> Status | None:
        """What a trial is; None where there is none."""
        return self._searched.status_of(number)

    def snapshot(self) -> Snapshot:
        """What progress displays draw."""
        return self._meter.snapshot(self.trials.values(), len(self._schedule_worker))

    def notify(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback that has it."""
        self._hooks.notify(hook, *arguments)

    def cause_of(self, error: BaseException) -> str:
        """One line about an error that ended the run; it names the callback that raised it."""
        return self._hooks.cause_of(error)

    # --- the user's commands -----------------------------------------------

    def pause_trial(self, number: int) -> None:
        """Give a trial no further unit until it is continued; the one that runs ends first.

        Raises
        ------
        InputError
            If there is no such trial, or it has ended.
        """
        whole, trials = self._searched.named(number, "paused")
        whole.held = True
        for trial in trials:
            self._trials.hold(trial)
            self._settle(trial)

    def continue_trial(self, number: int) -> None:
        """Let a trial go on that was paused by :meth:`pause_trial`.

        Raises
        ------
        InputError
            If there is no such trial, it has ended, or the user has not paused it.
        """
        whole, trials = self._searched.named(number, "continued")
        if not whole.held:
            raise InputError(f"trial {number} is {whole.record.status}: nobody has paused it")
        whole.held = False
        for trial in trials:
            self._trials.release(trial)

    def stop_trial(self, number: int) -> None:
        """End a trial for good, after the unit that runs.

        Raises
        ------
        InputError
            If there is no such trial, or it has ended.
        """
        whole, trials = self._searched.named(number, "stopped")
        whole.stopping = True
        for trial in trials:
            trial.stopping = True
            self._trials.hold(trial)
            self._settle(trial)

    def cancel_units(self) -> None:
        """Have the units in flight end at their next batch, where the executor can."""
        cancel = getattr(self.executor, "cancel", None)
        if cancel is not None:
            for worker in list(self._in_flight):
                cancel(worker)

    @property
    def is_stopped(self) -> bool:
        """Whether the run ends with work left: by time, or by a command."""
        return self.out_of_time or self._remote.stopping

    def _obey(self) -> None:
        """Carry out the commands that have arrived."""
        self._remote.obey(self)
        if self._remote.paused != self._meter.paused:
            self._meter.paused = self._remote.paused
            self.store.set_meta("paused", self._remote.paused)

    def _note_command(self, text: str) -> None:
        self.store.add_event(self._now(), "command", text)

    def _rest(self) -> bool:
        """Wait where only a command, or whoever the searcher listens to, lets the run go on.

        False where nothing is left to do.
        """
        known = self._trials.by_number.values()
        trials = [trial for trial in known if trial.record.status not in ENDED]
        rests = any(trial.held and not trial.asleep for trial in trials)
        if self._remote.paused and (trials or not self._loop.is_exhausted):
            rests = True
        waits = getattr(self._loop.searcher, "waits", False) and not self._loop.is_exhausted
        if rests or waits:
            self.store.flush()  # whoever is told of the rest finds it in the store
            self._meter.rest(self.trials.values(), len(self._schedule_worker))
            before = self._now()
            if waits:  # which ends the executor's wait
                for event in self.executor.wait(self._patience()):
                    self._hear(event)
            else:
                time.sleep(self._patience())
            self._meter.rested += self._now() - before
        return rests or waits

    def _settle(self, trial: LiveTrial) -> None:
        """Do what the user wants of a trial, unless a unit of it runs."""
        if trial.worker is not None or trial.unkept or trial.record.status in ENDED:
            return
        if trial.stopping:
            self._end_trial(trial, "stopped")
        elif trial.held and trial.record.status != "paused":
            self._trials.set_status(trial, "paused")

    def _go_on(self, restored: Restored) -> None:
        """Take up a run where another process has left it."""
        self._loop.restore(restored.loop, restored.said)
        for number, epochs in restored.lost.items():
            trial = self._trials.by_number[number]
            seconds = trial.epoch_seconds  # of the epoch in progress, after these
            for epoch in epochs:
                if trial.record.status not in ENDED:
                    self._add_epoch(trial, epoch)
            trial.epoch_seconds = seconds
        if self._folded is not None:
            self._folded.take_up()
        self._loop.arrive_again()
        for trial in list(self._trials.by_number.values()):
            if asks_to_stop(trial.record.raised):
                self._stop_others(trial)

    # --- the searcher ----------------------------------------------------

    def _advance(self) -> bool:
        """Let the searcher hear and decide; False if it had nothing to say."""
        news = self._loop.advance(ask=not self.is_stopped)
        first = [self.trials[n] for n in range(min(ALIKE_FAILURES, len(self.trials)))]
        # Not again where they had failed before the run was resumed.
        new = self._restored is None or any(trial.started for trial in first)
        if new and not getattr(self._loop.searcher, "expects_failures", False):
            raise_if_alike([trial.record for trial in first])
        for number in self._searched.forget_ended(self._loop.rounds.expects):
            self._growth.forget(number)
        return news

    # --- dispatching -----------------------------------------------------

    def _dispatch(self) -> None:
        while not (self.is_stopped or self._remote.paused):
            command = self._schedule.next(self._now())
            if command is None:
                return
            if command[0] == "load":
                assert self._places is not None, "shards are shared: there is nothing to load"
                self._places.load(self._executor_worker[command[1]], command[2])
                self._place()
                continue
            _, worker, trial_number, epoch, step, shard, attempt = command
            trial = self._trials.by_number[trial_number]
            self._trials.start(trial)
            number = self._executor_worker[worker]
            trial.worker = number
            trial.workers.add(number)
            task = Task(
                trial=trial_number,
                config=trial.record.config,
                epoch=epoch,
                step=step,
                shard=shard,
                attempt=attempt,
                position=trial.position,
                dispatch=trial.dispatches,
                epochs=trial.info_epochs,
                origin=trial.origin,
                clone_of=trial.clone_of if trial.position == trial.first_position else None,
                ended=self._trials.ended_for(number),
            )
            trial.dispatches += 1
            self._meter.unit_begins()
            self._in_flight[number] = task
            self.executor.submit(number, task)

    def _join(self, worker: int) -> None:
        ours = self._schedule.add_worker(self._now())
        self._schedule_worker[worker] = ours
        self._executor_worker[ours] = worker
        self._place()

    def _place(self) -> None:
        """Tell the scheduler which workers hold which shards, where not all hold all."""
        holders = None if self._places is None else self._places.holders()
        for shard, workers in (holders or {}).items():
            there = [self._schedule_worker[w] for w in workers if w in self._schedule_worker]
            if there:  # else the scheduler knows as much, or will when a loss is heard of
                self._schedule.set_holders(shard, there)

    # --- events ----------------------------------------------------------

    def _unit_done(self, event: UnitDone) -> None:
        task = event.task
        trial = self._trials.by_number[task.trial]
        self._release(event.worker)
        self._schedule.unit_done(self._schedule_worker[event.worker], self._now())
        self._forget(event.worker, event.dropped)
        trial.position += 1
        trial.origin = None
        trial.epoch_seconds += event.seconds
        if task.step < self.context.train.num_shards and event.seconds > 0:
            trial.rows_per_second = event.rows / event.seconds
        self._meter.unit_done(event.seconds)
        self.store.add_unit(
            trial=task.trial,
            epoch=task.epoch,
            step=task.step,
            shard=task.shard,
            worker=event.worker,
            attempt=task.attempt,
            started=event.started - self._wall_started,
            seconds=event.seconds,
            rows=event.rows,
            batches=event.batches,
            hopped=event.loaded and trial.last_worker not in (None, event.worker),
            state_bytes=event.state_bytes,
        )
        trial.last_worker = event.worker
        self._losses.unit_done(event.worker, task)
        self._libraries.update(event.libraries)
        self._watch_memory(event)
        self._note_not_exact(trial, event.not_exact)
        self._note_moved(event.moved)
        self._note_warnings(trial, event.warned)
        means = {name: s / w for name, (s, w) in event.sums.items() if w}
        self._hooks.tell_of(trial.record, "on_unit_end", means)
        if event.metrics is not None and event.is_kept:
            self._epoch_done(trial, event)
        elif event.metrics is not None:
            self._unkept[task.trial] = event
            self._trials.await_state(trial, True)
        trial.worker = None
        self._settle(trial)

    def _watch_memory(self, event: UnitDone) -> None:
        """Name a trial whose epochs each leave more memory behind; see `cerebro.worker.growth`."""
        task = event.task
        self._growth.add(task.trial, event.grown)
        if event.metrics is not None:
            text = self._growth.end_epoch(task.trial, task.epoch, event.resident)
            if text is not None:
                self.store.add_event(self._now(), "memory grows", text, task.trial)
                warnings.warn(text, stacklevel=2)

    def _note_not_exact(self, trial: LiveTrial, operations: Sequence[str]) -> None:
        """Mark a trial whose states may be others another time, with the operation's name."""
        for name in operations:
            if name not in trial.not_exact:
                trial.not_exact.add(name)
                number = trial.record.number
                self.store.add_event(self._now(), NOT_EXACT, name, number)
                warnings.warn(
                    f"trial {number} is not exact: {name} has no deterministic version on its "
                    "device, so that its states may differ from run to run",
                    stacklevel=2,
                )

    def _note_moved(self, why: str) -> None:
        """Warn, once in a run, of a GPU that PyTorch moves batches to; each reason is an event."""
        if not why or why in self._moved:
            return
        self._moved.add(why)
        self.store.add_event(self._now(), "batches are moved", why)
        if len(self._moved) == 1:
            warnings.warn(depots.moving(why), stacklevel=2)

    def note_first_warnings(self, warned: Sequence[Warned]) -> None:
        """Show and record the warnings of the dry run, whose configuration is that of trial 0."""
        for each in warned:
            self.store.add_event(self._now(), EVENT, str(each))
        self._told.show(warned, self._named(0))

    def _note_warnings(self, trial: LiveTrial, warned: Sequence[Warned]) -> None:
        """Record what a trial warns of, and show what no other has warned of before."""
        number = trial.record.number
        for each in warned:
            if each not in trial.warned:  # on another worker
                trial.warned.add(each)
                self.store.add_event(self._now(), EVENT, str(each), number)
        self._told.show(warned, self._named(number))

    def _named(self, number: int) -> str:
        """What the user calls a trial, which with folds is one of a configuration's."""
        folds = self.settings.folds
        if folds is None:
            return f"trial {number}"
        return f"trial {number // len(folds)}, fold {number % len(folds)}"

    def _epoch_done(self, trial: LiveTrial, event: UnitDone) -> None:
        assert event.metrics is not None and event.state_hash is not None
        epoch = EpochRecord(
            event.task.epoch, event.metrics, trial.epoch_seconds, event.state_hash, event.state_file
        )
        if self._add_epoch(trial, epoch):
            self._tell_searcher(trial)

    def _tell_searcher(self, trial: LiveTrial) -> None:
        """Let the searcher know that a trial has finished an epoch, or ended without it."""
        told = trial if self._folded is None else self._folded.hear(trial)
        if told is None:  # other folds are still to do so
            return
        if told.record.status not in ENDED:
            epoch = told.record.epochs[-1]
            self._loop.epoch_done(told, epoch.epoch, epoch.metrics)
        elif not told.asleep:
            self._loop.ended(told)

    def _add_epoch(self, trial: LiveTrial, epoch: EpochRecord) -> bool:
        """Record a finished epoch; False if it lacks what ranks trials, which fails its trial."""
        missing = missing_metric(
            self.settings.metric, epoch.metrics, validated=self.context.validates
        )
        if missing is None and self._folded is not None:
            missing = clash(epoch.metrics)
        if missing is not None:
            self._trials.states.discard(epoch.state_file, epoch.state_hash)
            since = f"epoch {epoch.epoch}, unlike before: " if trial.record.epochs else ""
            self._end_trial(trial, "failed", since + missing)
            return False
        before = trial.expected.pop(epoch.epoch, epoch.state_hash)
        if before != epoch.state_hash:
            text = f"epoch {epoch.epoch} was trained again and gave another state than at first"
            self.store.add_event(self._now(), "not the same", text, trial.record.number)
            warnings.warn(f"trial {trial.record.number}: {text}", stacklevel=2)
        trial.lost_states = 0
        self._trials.add_epoch(trial, epoch)
        self._note_not_finite(trial, epoch.epoch)
        return True

    def _note_not_finite(self, trial: LiveTrial, epoch: int) -> None:
        """Record the first epoch whose validation gave no finite number; training goes on."""
        said = not_finite(trial.record.epochs[-1].metrics)
        if said and not trial.not_finite:
            trial.not_finite = True
            text = f"trial {trial.record.number}, epoch {epoch}: {said}"
            self.store.add_event(self._now(), "not finite", text, trial.record.number)

    def _unit_failed(self, event: UnitFailed) -> None:
        trial = self._trials.by_number[event.task.trial]
        worker = self._schedule_worker[event.worker]
        self._release(event.worker)
        self._schedule.unit_failed(worker, self._now())
        self._forget(event.worker, event.dropped)
        trial.worker = None
        self._note_warnings(trial, event.warned)
        if event.kind == "data":
            raise CorruptDataError(event.message)
        if event.kind == "storage":
            raise OSError(event.message)
        if event.kind == "cancelled":
            self._settle(trial)
            return
        raised = Raised(event.bases, event.place)
        if asks_to_stop(raised):
            self._trials.end(trial, "stopped", event.message, event.traceback, raised)
            self._stop_others(trial)
            self._tell_searcher(trial)
            return
        status: Status = "diverged" if event.kind == "diverged" else "failed"
        self._end_trial(trial, status, event.message, event.traceback, raised)

    def _stop_others(self, trial: LiveTrial) -> None:
        """End the other folds of a fold that asked to be stopped."""
        if self._folded is None:
            return
        for other in self._folded.siblings(trial):
            other.stopping = True
            self._trials.hold(other)
            self._settle(other)

    def _hear_of_machines(
        self, event: WorkerJoined | ShardsPlaced | StateKept | StateLost | Note
    ) -> None:
        """What only executors tell that have other machines than this one."""
        if isinstance(event, WorkerJoined):
            self.store.add_event(self._now(), "worker joined", f"worker {event.worker}")
            self._warm(event.worker)
        elif isinstance(event, ShardsPlaced):
            self._place()
        elif isinstance(event, StateKept):
            trial = self._trials.by_number[event.trial]
            self._epoch_done(trial, self._unkept.pop(event.trial))
            self._trials.await_state(trial, False)
            self._settle(trial)
        elif isinstance(event, StateLost):
            self._state_lost(event)
        else:
            self.store.add_event(self._now(), event.kind, event.text)
            warnings.warn(event.text, stacklevel=2)

    def _state_lost(self, event: StateLost) -> None:
        trial = self._trials.by_number[event.trial]
        if event.worker is not None:
            worker = self._schedule_worker[event.worker]
            self._release(event.worker)
            self._schedule.unit_failed(worker, self._now())
            trial.worker = None
        self._unkept.pop(event.trial, None)
        trial.lost_states += 1
        if trial.lost_states > MAX_LOST_STATES:
            cause = f"its state was lost {trial.lost_states} times in an epoch: {event.reason}"
            trial.unkept = False
            self._end_trial(trial, "failed", cause)
            return
        before = trial.position
        self._trials.go_back(trial, event.position)
        lost = before - trial.position
        text = f"{event.reason}; {lost} unit(s) of trial {event.trial} are trained again"
        self.store.add_event(self._now(), "state lost", text, event.trial)
        self._settle(trial)

    def _awaits_worker(self) -> bool:
        """Whether there are units to run, and a worker that will soon be there for them."""
        halted = self.is_stopped or self._remote.paused
        return bool(self._warming) and not halted and not self._schedule.finished

    def _worker_lost(self, event: WorkerLost) -> None:
        self._warming.discard(event.worker)
        task = self._in_flight.pop(event.worker, None)
        ours = self._schedule_worker.pop(event.worker, None)
        if ours is not None:
            del self._executor_worker[ours]
            self._schedule.remove_worker(ours, self._now())
        self._trials.forget_worker(event.worker)
        if event.signal == signal.SIGBUS:
            # It touched the mapping of a file that was cut: the trial is not to blame.
            self.context.check_files()
        loss = self._losses.add(event, task)
        number = None if task is None else task.trial
        self.store.add_event(self._now(), "worker lost", loss.text, number)
        if task is not None:
            trial = self._trials.by_number[task.trial]
            trial.worker = None
            if loss.error is not None:
                self._end_trial(trial, "failed", loss.error)
            self._settle(trial)
        self._replace(event)

    def _replace(self, lost: WorkerLost) -> None:
        """Start a worker in place of a lost one, or go on with those that are left."""
        cause = lost.reason
        if self._losses.may_replace:
            try:
                worker = self.executor.replace(lost.worker)
                if self._places is None:
                    # Until it can begin, its predecessor's unit is better off with another one.
                    self._warm(worker)
                else:  # to wait for it is quicker than to load its shards elsewhere
                    self._join(worker)
                return
            except WorkerError as error:
                cause = text_of(error)
        if not self._schedule_worker and not self._warming:
            raise WorkerError(f"no worker process is left, and none can be started: {cause}")
        text = f"a worker process is missing from now on: {cause}"
        self.store.add_event(self._now(), "worker not replaced", text)
        warnings.warn(text, stacklevel=2)

    def _warm(self, worker: int) -> None:
        """Have a new worker import what units will need, before it is given any."""
        self.executor.submit(worker, WarmTask(tuple(sorted(self._libraries))))
        self._warming.add(worker)

    def _release(self, worker: int) -> None:
        del self._in_flight[worker]

    def _forget(self, worker: int, dropped: Sequence[int]) -> None:
        for number in dropped:
            trial = self._trials.by_number.get(number)
            if trial is not None and trial.scheduled:
                self._schedule.forget_live(self._schedule_worker[worker], number)

    # --- trials ----------------------------------------------------------

    def _end_trial(
        self,
        trial: LiveTrial,
        status: Status,
        error: str = "",
        traceback: str = "",
        raised: Raised = NOTHING_RAISED,
    ) -> None:
        """End a trial without asking the searcher, who is told the worst."""
        self._trials.end(trial, status, error, traceback, raised)
        self._tell_searcher(trial)

    def end_open_trials(self) -> None:
        """Mark the trials that the run leaves unfinished as stopped."""
        self._trials.mark_open_as_stopped()

    # --- time ------------------------------------------------------------

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _check_time(self) -> None:
        limit = self.settings.time_limit
        if limit is not None and not self.out_of_time and self._own_seconds() >= limit:
            self.out_of_time = True
            self.store.add_event(self._now(), "time limit", f"{limit} seconds are over")

    def _patience(self) -> float:
        """How long to wait for events: until something else is due."""
        limit = self.settings.time_limit
        left = None if limit is None or self.out_of_time else max(0.0, limit - self._own_seconds())
        return self._remote.patience(left)

    def _own_seconds(self) -> float:
        """Seconds that this process has been at it; the run's clock may be older."""
        return time.perf_counter() - self._begun

    def _make_trials(self, searcher: Searcher) -> LiveTrials:
        settings = self.settings
        expected = None if searcher.adaptive else expected_trials(searcher, settings.n_trials)
        return LiveTrials(
            *(settings, self.context, self.store, self._schedule, self._meter, self._hooks),
            stepwise=searcher.adaptive or settings.folds is not None,
            expected=None if expected is None else expected * settings.trials_each,
            ended=None if settings.folds is None else EndedTrials.of(settings),
        )

    def _make_schedule(self) -> _core.Schedule:
        train, validation = self.context.views(0)
        return _core.Schedule(
            shards=[float(rows) for rows in train.shard_rows()],
            exclusive=self._places is not None,
            stagger=self.context.stagger,
            # Evaluating a row costs about a third of training on it.
            eval_cost=0.0 if validation is None else validation.num_rows / 3,
            live_models=self.context.live_models or 8,
        )
