"""Run the main loop: ask the searcher, dispatch units, record results, report them.

The coordinator itself decides no order: the C scheduler decides which unit runs where, the searcher
decides which trials continue, and the executor runs the units. The coordinator keeps the records
that they share.
"""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import cerebro.control as control
from cerebro.coordinator.callbacks import Hooks
from cerebro.coordinator.commands import Commands
from cerebro.coordinator.event_book import EventBook
from cerebro.coordinator.failures import (
    ALIKE_FAILURES,
    LostWorkers,
    asks_to_stop,
    explain_missing_metric,
    raise_if_alike,
    raise_if_all_failed,
)
from cerebro.coordinator.folds import FoldedTrials
from cerebro.coordinator.forecast import EpochParts, Forecaster, ToCome
from cerebro.coordinator.overview import Overview
from cerebro.coordinator.restore import RestoredRun
from cerebro.coordinator.schedule import evaluation_cost, make_schedule
from cerebro.coordinator.search_loop import SearchLoop
from cerebro.coordinator.trial import LiveTrial
from cerebro.coordinator.trials import LiveTrials
from cerebro.errors import CorruptDataError, InputError, WorkerError, text_of
from cerebro.executors.base import Executor, as_placing, as_queueing
from cerebro.model import Words
from cerebro.report.snapshot import Snapshot
from cerebro.run.records import (
    ENDED,
    NOTHING_RAISED,
    EpochRecord,
    Raised,
    Status,
    find_clash,
)
from cerebro.run.settings import Settings
from cerebro.run.store import Store
from cerebro.searchers.base import Searcher, Suggestion, expected_trials
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
    WorkerJoined,
    WorkerLost,
)

QUEUED_SECONDS = 0.5
"""Only units shorter than this are queued at a busy worker: a longer one would delay a user's
command, and the time between units does not matter to it.
"""

MAX_LOST_STATES = 10
"""How often a trial may go back within one epoch because a machine failed."""


class Coordinator:
    """Trains one run to its end.

    Until nothing is left to do, it carries out the user's commands, sends workers the units that
    the scheduler chose, records events, and reports finished epochs to the searcher.
    """

    def __init__(
        self,
        settings: Settings,
        context: RunContext,
        searcher: Searcher,
        executor: Executor,
        store: Store,
        hooks: Hooks,
        progress: Any,
        first: Suggestion | None = None,
        restored: RestoredRun | None = None,
    ) -> None:
        self.settings = settings
        self.context = context
        self.executor = executor
        self.store = store
        before = 0.0 if restored is None else restored.seconds
        self._begun = time.perf_counter()
        self._started = self._begun - before  # the run's clock continues
        self._wall_started = time.time() - before
        self._restored = restored
        self._hooks = hooks
        folds = None if settings.folds is None else len(settings.folds)
        self.events = EventBook(store, self._read_clock, settings.build, folds)
        self._overview = Overview(
            settings.ranking,
            settings.folder,
            progress,
            self._read_clock,
            Forecaster(_divide_epoch(context), settings.limits.epochs),
            self._count_work_to_come,
            settings.limits.time_limit,
        )
        self._places = as_placing(executor)  # None: every worker reads every shard
        self._queue = as_queueing(executor)
        self._schedule = make_schedule(
            context.order(),
            context.views(0)[1],
            exclusive=self._places is not None,
            live_models=context.limits.live_models,
        )
        self._folded = self._make_folded_trials(searcher)
        self._trials = self._make_trials(searcher) if self._folded is None else self._folded.folds
        self._searched = self._trials if self._folded is None else self._folded
        self._loop = SearchLoop(settings, searcher, store, hooks, self._searched, first)
        self._schedule_worker: dict[int, int] = {}
        self._executor_worker: dict[int, int] = {}
        self._in_flight: dict[int, Task] = {}
        self._queued: dict[int, Task] = {}  # by worker: the trial's unit after the one in flight
        self._unqueued: list[int] = []  # workers that have begun a unit since units were queued
        # By trial: the last unit of an epoch whose state is being copied.
        self._awaiting_state: dict[int, UnitDone] = {}
        self._warming: set[int] = set()  # workers that are still importing
        self._libraries: set[str] = set()
        self._lost_workers = LostWorkers(settings.limits.max_retries)
        self.words = Words()
        """What the model's users call its methods, for messages."""
        # A build that the user has not written may belong to a run that its caller removes.
        self._kept_in = settings.folder if getattr(settings.build, "keeps_run", True) else None
        self.out_of_time = False
        self._commands = Commands(
            settings.folder / control.FOLDER, partial(self.events.add, "command")
        )
        if restored is not None:
            self._searched.restore(restored.trials, restored.decisions)
            restored.trials.clear()  # else trials would stay in memory after they end

    def _make_trials(self, searcher: Searcher) -> LiveTrials:
        return LiveTrials(
            self.settings,
            self.context,
            self.store,
            self._schedule,
            self._overview,
            self._overview.ended,
            self._hooks.notify_of,
            stepwise=searcher.adaptive,
            pinned=searcher.pinned,
        )

    def _make_folded_trials(self, searcher: Searcher) -> FoldedTrials | None:
        if self.settings.folds is None:
            return None
        return FoldedTrials(
            self.settings,
            self.context,
            self.store,
            self._schedule,
            self._overview,
            self._hooks,
            pinned=searcher.pinned,
        )

    def _count_work_to_come(self) -> ToCome:
        """Return the work of trials that the searcher has not suggested yet."""
        searcher, folds = self._loop.searcher, self.settings.trials_each
        if self._loop.is_exhausted:
            return ToCome(trials=0)
        epochs, trials = searcher.epochs_to_come(), searcher.trials_to_come()
        if trials is None:
            expected = expected_trials(searcher, self.settings.limits.n_trials)
            trials = None if expected is None else max(0, expected - self._loop.begun)
        return ToCome(
            None if epochs is None else epochs * folds, None if trials is None else trials * folds
        )

    # --- the run ---------------------------------------------------------

    def run(self, workers: Sequence[int]) -> None:
        """Train until no trial is left.

        Raise RunError if every trial fails or the first ones fail alike, and CorruptDataError if a
        data file is damaged.
        """
        for worker in workers:
            self._add_worker(worker)
        if self._restored is not None:
            self._resume_run(self._restored)
        self._advance_searcher()
        self._overview.show_start(self.trials.values(), len(self._schedule_worker))
        with closing(self._commands):
            self._train()
        self._loop.finish()
        if not self.is_stopped:
            self._searched.end_paused()
        self.end_open_trials()
        self.events.note_unread_names()
        records = [trial.record for trial in self.trials.values()]
        raise_if_all_failed(records, self._searched.forgotten, self._kept_in)

    def _train(self) -> None:
        while True:
            self._check_time()
            self._take_commands()
            self._dispatch_units()
            self._queue_units()
            if not self._in_flight and not self._awaiting_state and not self._awaits_worker():
                if not self._advance_searcher() and (self.is_stopped or not self._wait_to_resume()):
                    break
                continue
            if self._commands.gave_up:
                break
            for event in self.executor.wait(self._seconds_to_wait()):
                self._handle(event)
            self._advance_searcher()
            self._overview.show(self.trials.values(), len(self._schedule_worker))

    def _handle(self, event: News) -> None:
        if isinstance(event, UnitDone):
            self._handle_unit_done(event)
        elif isinstance(event, UnitFailed):
            self._handle_unit_failed(event)
        elif isinstance(event, WorkerLost):
            self._handle_worker_lost(event)
        elif isinstance(event, CheckDone):
            if event.worker in self._warming:
                self._warming.remove(event.worker)
                self._add_worker(event.worker)
        else:
            self._handle_cluster_event(event)

    def _resume_run(self, restored: RestoredRun) -> None:
        self._loop.restore(restored.loop, restored.decision_count)
        for number, epochs in restored.lost.items():
            trial = self._trials.by_number[number]
            seconds = trial.epoch_seconds  # of the epoch in progress, not of recovered ones
            for epoch in epochs:
                if trial.record.status not in ENDED:
                    self._add_epoch(trial, epoch, report=False)
            trial.epoch_seconds = seconds
        if self._folded is not None:
            self._folded.update_all()
        self._loop.arrive_again()
        for trial in list(self._trials.by_number.values()):
            if asks_to_stop(trial.record.raised):
                self._stop_siblings(trial)

    def _wait_to_resume(self) -> bool:
        """Wait for what can resume the run; return False if nothing is left to do."""
        all_trials = self._trials.by_number.values()
        trials = [trial for trial in all_trials if trial.record.status not in ENDED]
        rests = any(trial.held and not trial.paused_by_searcher for trial in trials)
        if self._commands.paused and (trials or not self._loop.is_exhausted):
            rests = True
        waits = self._loop.searcher.waits and not self._loop.is_exhausted
        if rests or waits:
            self.store.flush()  # the store then has everything that the display shows
            self._overview.show_waiting(self.trials.values(), len(self._schedule_worker))
            before = self._read_clock()
            if waits:  # an event for the searcher ends the executor's wait
                for event in self.executor.wait(self._seconds_to_wait()):
                    self._handle(event)
            else:
                time.sleep(self._seconds_to_wait())
            self._overview.waited += self._read_clock() - before
        return rests or waits

    # --- the searcher ----------------------------------------------------

    def _advance_searcher(self) -> bool:
        """Report to the searcher and ask it for trials; return False if there was nothing to do."""
        advanced = self._loop.advance(ask=not self.is_stopped)
        first = [self.trials[n] for n in range(min(ALIKE_FAILURES, len(self.trials)))]
        # Do not check trials that had already failed before the run was resumed.
        new = self._restored is None or any(trial.started for trial in first)
        if new and not self._loop.searcher.expects_failures:
            raise_if_alike([trial.record for trial in first], self._kept_in)
        for number in self._searched.forget_ended(self._loop.rounds.expects):
            self.events.forget(number)
        return advanced

    def _report(self, trial: LiveTrial) -> None:
        """Report to the searcher that a trial has finished an epoch, or ended without it."""
        reported = trial if self._folded is None else self._folded.update_from(trial)
        if reported is None:  # other folds have not finished the epoch
            return
        if reported.record.status not in ENDED:
            epoch = reported.record.epochs[-1]
            self._loop.epoch_done(reported, epoch.epoch, epoch.metrics)
        elif not reported.paused_by_searcher:
            self._loop.trial_ended(reported)

    # --- dispatching -----------------------------------------------------

    def _dispatch_units(self) -> None:
        while not (self.is_stopped or self._commands.paused):
            command = self._schedule.next(self._read_clock())
            if command is None:
                return
            if command[0] == "load":
                assert self._places is not None, "shards are shared: there is nothing to load"
                pool = self.context.order().pool_of_part[command[2]]
                self._places.load(self._executor_worker[command[1]], pool)
                self._update_holders()
                continue
            _, worker, trial_number, epoch, step, part, attempt = command
            trial = self._trials.by_number[trial_number]
            self._trials.start(trial)
            number = self._executor_worker[worker]
            trial.worker = number
            trial.workers.add(number)
            is_first = trial.position == trial.first_position
            task = self._make_task(
                trial,
                epoch,
                step,
                part,
                trial.position,
                attempt=attempt,
                origin=trial.origin,
                clone_of=trial.clone_of if is_first else None,
                notes_reads=is_first and self.events.unread.asks_about(trial.record.config),
                ended=self._trials.take_ended(number),
            )
            self._overview.unit_begins(trial_number, number)
            self._in_flight[number] = task
            self._unqueued.append(number)
            self.executor.submit(number, task)

    def _make_task(
        self, trial: LiveTrial, epoch: int, step: int, part: int, position: int, **more: Any
    ) -> Task:
        """Return the task of a trial's unit, with the number of its dispatch."""
        task = Task(
            trial=trial.record.number,
            config=trial.record.config,
            epoch=epoch,
            step=step,
            part=part,
            position=position,
            dispatch=trial.dispatches,
            epochs=trial.info_epochs,
            **more,
        )
        trial.dispatches += 1
        return task

    def _queue_units(self) -> None:
        """Queue the next unit of short ones at busy workers, which then need not wait for it."""
        begun, self._unqueued = self._unqueued, []
        if self._queue is None or self.is_stopped or self._commands.paused:
            return
        for worker in begun:
            task = self._in_flight.get(worker)
            if task is None or worker in self._queued:
                continue
            trial = self._trials.by_number[task.trial]
            if not 0 < trial.unit_seconds < QUEUED_SECONDS:
                continue
            following = self._schedule.next_here(self._schedule_worker[worker])
            if following is None:
                continue
            self._queued[worker] = self._make_task(
                trial, *following, task.position + 1, attempt=0, after=task.dispatch
            )
            self._queue.queue(worker, self._queued[worker])

    def _awaits_worker(self) -> bool:
        """Return whether units are due and a worker will soon be ready to run them."""
        halted = self.is_stopped or self._commands.paused
        return bool(self._warming) and not halted and not self._schedule.finished

    # --- units and epochs ------------------------------------------------

    def _handle_unit_done(self, event: UnitDone) -> None:
        task = event.task
        trial = self._trials.by_number[task.trial]
        following = self._finish_in_flight(event.worker)
        trial.unit_seconds = event.seconds
        self.events.add_read_names(event)
        self._forget_live_models(event.worker, event.dropped)
        trial.position += 1
        trial.origin = None
        trial.epoch_seconds += event.seconds
        if task.part >= 0 and event.seconds > 0:
            trial.rows_per_second = event.rows / event.seconds
        self._overview.unit_done(event.worker, task.step, event.seconds)
        self.store.add_unit(
            trial=task.trial,
            epoch=task.epoch,
            step=task.step,
            part=task.part,
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
        self._lost_workers.unit_done(event.worker, task)
        self._libraries.update(event.libraries)
        self.events.watch_memory(event)
        self.events.note_not_exact(trial, event.not_exact)
        self.events.note_moved_batches(event.moved)
        if event.unlike:
            self.events.note_wrong_step(trial, event.unlike)
        self.events.note_warnings(trial, event.warned)
        means = {name: s / w for name, (s, w) in event.sums.items() if w}
        self._hooks.notify_of(trial.record, "on_unit_end", means)
        if event.metrics is not None and event.is_kept:
            self._add_epoch(trial, _make_epoch(trial, event))
        elif event.metrics is not None:
            self._awaiting_state[task.trial] = event
            self._trials.await_state(trial, True)
        if following is None:
            trial.worker = None
            self._apply_commands(trial)
        else:
            self._overview.unit_begins(following.trial, event.worker)

    def _finish_in_flight(self, worker: int) -> Task | None:
        """Report a unit as done; return the queued one, which the worker has begun."""
        ours = self._schedule_worker[worker]
        following = self._queued.pop(worker, None)
        if following is None:
            del self._in_flight[worker]
            self._schedule.unit_done(ours, self._read_clock())
        else:
            self._in_flight[worker] = following
            self._unqueued.append(worker)
            self._schedule.unit_continued(ours, self._read_clock())
        return following

    def _drop_in_flight(self, worker: int) -> Task | None:
        """Forget the unit that a worker has not completed, and what was queued behind it."""
        self._queued.pop(worker, None)
        self._overview.unit_lost(worker)
        return self._in_flight.pop(worker, None)

    def _add_epoch(self, trial: LiveTrial, epoch: EpochRecord, *, report: bool = True) -> None:
        """Record a finished epoch; fail the trial if its ranking metric is missing."""
        missing = explain_missing_metric(
            self.settings.ranking.metric,
            epoch.metrics,
            validated=self.context.validates,
            words=self.words,
        )
        if missing is None and self._folded is not None:
            missing = find_clash(epoch.metrics)
        if missing is not None:
            self._trials.states.discard(epoch.state_file, epoch.state_hash)
            since = f"epoch {epoch.epoch}, unlike before: " if trial.record.epochs else ""
            self._end_trial(trial, "failed", since + missing)
            return
        before = trial.expected.pop(epoch.epoch, epoch.state_hash)
        if before != epoch.state_hash:
            text = f"epoch {epoch.epoch} was trained again and gave a different state"
            self.events.add("not the same", text, trial.record.number)
            warnings.warn(f"trial {trial.record.number}: {text}", stacklevel=2)
        trial.lost_states = 0
        self._trials.add_epoch(trial, epoch)
        self.events.note_not_finite(trial, epoch.epoch)
        if report:
            self._report(trial)

    # --- failures --------------------------------------------------------

    def _handle_unit_failed(self, event: UnitFailed) -> None:
        trial = self._trials.by_number[event.task.trial]
        worker = self._schedule_worker[event.worker]
        self._drop_in_flight(event.worker)
        self._schedule.unit_failed(worker, self._read_clock())
        self._forget_live_models(event.worker, event.dropped)
        trial.worker = None
        self.events.note_warnings(trial, event.warned)
        self.events.add_read_names(event)
        if event.kind == "data":
            raise CorruptDataError(event.message)
        if event.kind == "storage":
            raise OSError(event.message)
        if event.kind == "cancelled":
            self._apply_commands(trial)
            return
        raised = Raised(event.bases, event.place)
        if asks_to_stop(raised):
            self._trials.end(trial, "stopped", event.message, event.traceback, raised)
            self._stop_siblings(trial)
            self._report(trial)
            return
        status: Status = "diverged" if event.kind == "diverged" else "failed"
        self._end_trial(trial, status, event.message, event.traceback, raised)

    def _stop_siblings(self, trial: LiveTrial) -> None:
        """End the other folds of the configuration if one fold asked to stop."""
        if self._folded is None:
            return
        self._stop_trials(self._folded.folds_beside(trial))

    def _end_trial(
        self,
        trial: LiveTrial,
        status: Status,
        error: str = "",
        traceback: str = "",
        raised: Raised = NOTHING_RAISED,
    ) -> None:
        """End a trial without asking the searcher, which is sent the worst metric."""
        self._trials.end(trial, status, error, traceback, raised)
        self._report(trial)

    # --- workers ---------------------------------------------------------

    def _add_worker(self, worker: int) -> None:
        ours = self._schedule.add_worker(self._read_clock())
        self._schedule_worker[worker] = ours
        self._executor_worker[ours] = worker
        self._update_holders()

    def _warm_up(self, worker: int) -> None:
        """Let a new worker import the libraries that units need before it gets a unit."""
        self.executor.submit(worker, WarmTask(tuple(sorted(self._libraries))))
        self._warming.add(worker)

    def _update_holders(self) -> None:
        """Tell the scheduler which workers have which parts, unless every worker has all."""
        holders = None if self._places is None else self._places.holders()
        if holders is None:
            return
        for part, pool in enumerate(self.context.order().pool_of_part):
            workers = holders[pool]
            there = [self._schedule_worker[w] for w in workers if w in self._schedule_worker]
            if there:  # else the scheduler already knows, or learns it when the worker is lost
                self._schedule.set_holders(part, there)

    def _handle_worker_lost(self, event: WorkerLost) -> None:
        self._warming.discard(event.worker)
        task = self._drop_in_flight(event.worker)
        ours = self._schedule_worker.pop(event.worker, None)
        if ours is not None:
            del self._executor_worker[ours]
            self._schedule.remove_worker(ours, self._read_clock())
        self._trials.forget_worker(event.worker)
        if event.signal == signal.SIGBUS:
            # The worker read a memory-mapped file that was truncated: the trial is not to blame.
            self.context.check_files()
        verdict = self._lost_workers.add(event, task)
        number = None if task is None else task.trial
        kind = "worker left" if event.has_left else "worker lost"
        self.events.add(kind, verdict.text, number)
        if task is not None:
            trial = self._trials.by_number[task.trial]
            trial.worker = None
            if verdict.error is not None:
                self._end_trial(trial, "failed", verdict.error)
            self._apply_commands(trial)
        self._replace_worker(event)

    def _replace_worker(self, lost: WorkerLost) -> None:
        """Replace a lost worker, or continue with the remaining workers."""
        cause = lost.reason
        if self._lost_workers.may_replace:
            try:
                worker = self.executor.replace(lost.worker)
                if self._places is None:
                    # Until the new worker is ready, the lost worker's unit may run on a different
                    # one.
                    self._warm_up(worker)
                else:  # waiting for the new worker is faster than loading its shards elsewhere
                    self._add_worker(worker)
                return
            except WorkerError as error:
                cause = text_of(error)
        if not self._schedule_worker and not self._warming:
            raise WorkerError(f"no worker process is left, and none can be started: {cause}")
        text = f"a worker process is missing from now on: {cause}"
        self.events.add("worker not replaced", text)
        warnings.warn(text, stacklevel=2)

    def _forget_live_models(self, worker: int, dropped: Sequence[int]) -> None:
        for number in dropped:
            trial = self._trials.by_number.get(number)
            if trial is not None and trial.scheduled:
                self._schedule.forget_live(self._schedule_worker[worker], number)

    # --- machines of a cluster -------------------------------------------

    def _handle_cluster_event(self, event: News) -> None:
        """Handle the events that only executors for several machines send."""
        if isinstance(event, WorkerJoined):
            self.events.add("worker joined", f"worker {event.worker}")
            self._warm_up(event.worker)
        elif isinstance(event, ShardsPlaced):
            self._update_holders()
        elif isinstance(event, StateKept):
            trial = self._trials.by_number[event.trial]
            self._add_epoch(trial, _make_epoch(trial, self._awaiting_state.pop(event.trial)))
            self._trials.await_state(trial, False)
            self._apply_commands(trial)
        elif isinstance(event, StateLost):
            self._handle_state_lost(event)
        elif isinstance(event, Note):
            self.events.add(event.kind, event.text)
            warnings.warn(event.text, stacklevel=2)

    def _handle_state_lost(self, event: StateLost) -> None:
        trial = self._trials.by_number[event.trial]
        if event.worker is not None:
            worker = self._schedule_worker[event.worker]
            self._drop_in_flight(event.worker)
            self._schedule.unit_failed(worker, self._read_clock())
            trial.worker = None
        self._awaiting_state.pop(event.trial, None)
        trial.lost_states += 1
        if trial.lost_states > MAX_LOST_STATES:
            cause = f"its state was lost {trial.lost_states} times in an epoch: {event.reason}"
            trial.awaits_state = False
            self._end_trial(trial, "failed", cause)
            return
        before = trial.position
        self._trials.go_back(trial, event.position)
        lost = before - trial.position
        text = f"{event.reason}; {lost} unit(s) of trial {event.trial} are trained again"
        self.events.add("state lost", text, event.trial)
        self._apply_commands(trial)

    # --- the user's commands ---------------------------------------------

    def pause_trial(self, number: int) -> None:
        """Pause a trial after its current or queued unit, until :meth:`continue_trial`.

        Raise InputError if there is no such trial, or it has ended.
        """
        whole, trials = self._searched.find_open(number, "paused")
        whole.held = True
        for trial in trials:
            self._trials.hold(trial)
            self._apply_commands(trial)

    def continue_trial(self, number: int) -> None:
        """Continue a trial; raise InputError if :meth:`pause_trial` has not paused it."""
        whole, trials = self._searched.find_open(number, "continued")
        if not whole.held:
            raise InputError(f"trial {number} is {whole.record.status}: no command has paused it")
        whole.held = False
        for trial in trials:
            self._trials.release(trial)

    def stop_trial(self, number: int) -> None:
        """End a trial permanently after its current or queued unit.

        Raise InputError if there is no such trial, or it has ended.
        """
        whole, trials = self._searched.find_open(number, "stopped")
        whole.stopping = True
        self._stop_trials(trials)

    def _stop_trials(self, trials: Sequence[LiveTrial]) -> None:
        """End trials permanently, each after its current unit."""
        for trial in trials:
            trial.stopping = True
            self._trials.hold(trial)
            self._apply_commands(trial)

    def cancel_units(self) -> None:
        """End the units in flight at their next batch, if the executor supports it."""
        cancel = getattr(self.executor, "cancel", None)
        if cancel is not None:
            for worker in list(self._in_flight):
                cancel(worker)

    def _take_commands(self) -> None:
        self._commands.carry_out(self)
        if self._commands.paused != self._overview.paused:
            self._overview.paused = self._commands.paused
            self.store.set_meta("paused", self._commands.paused)

    def _apply_commands(self, trial: LiveTrial) -> None:
        """Stop or pause a trial as the user commanded, unless one of its units is running."""
        if trial.worker is not None or trial.awaits_state or trial.record.status in ENDED:
            return
        if trial.stopping:
            self._end_trial(trial, "stopped")
        elif trial.held and trial.record.status != "paused":
            self._trials.set_status(trial, "paused")

    # --- time ------------------------------------------------------------

    def _read_clock(self) -> float:
        return time.perf_counter() - self._started

    def _elapsed_seconds(self) -> float:
        return time.perf_counter() - self._begun

    def _check_time(self) -> None:
        limit = self.settings.limits.time_limit
        if limit is not None and not self.out_of_time and self._elapsed_seconds() >= limit:
            self.out_of_time = True
            self.events.add("time limit", f"{limit} seconds are over")

    def _seconds_to_wait(self) -> float:
        """Return how long to wait for events before something else is due."""
        limit = self.settings.limits.time_limit
        rest = (
            None if limit is None or self.out_of_time else max(0.0, limit - self._elapsed_seconds())
        )
        return self._commands.wait_seconds(rest)

    # --- the state of the run --------------------------------------------

    @property
    def trials(self) -> Mapping[int, LiveTrial]:
        """The run's trials by number, except forgotten ones; with folds, the configurations."""
        return self._searched.by_number

    def status_of(self, number: int) -> Status | None:
        """Return a trial's status; None if there is no such trial."""
        return self._searched.status_of(number)

    def snapshot(self) -> Snapshot:
        """Return the data that progress displays draw."""
        return self._overview.snapshot(self.trials.values(), len(self._schedule_worker))

    @property
    def is_stopped(self) -> bool:
        """Whether the time limit or a command ends the run with work left."""
        return self.out_of_time or self._commands.stopping

    @property
    def status(self) -> str:
        """The run's status after :meth:`run` has returned."""
        trained = self._trials.by_number.values()
        unfinished = self.is_stopped or any(trial.record.is_open for trial in trained)
        partly = self._restored is not None and self._restored.partly
        return "stopped" if unfinished or partly or self._loop.searcher.cut_short else "finished"

    def end_open_trials(self) -> None:
        self._trials.mark_open_as_stopped()


def _divide_epoch(context: RunContext) -> EpochParts:
    """Return how an epoch of the run is divided into parts."""
    train, validation = context.views(0)
    evaluation = evaluation_cost(validation)
    return EpochParts(context.order().num_parts, evaluation / (train.num_rows + evaluation))


def _make_epoch(trial: LiveTrial, last: UnitDone) -> EpochRecord:
    assert last.metrics is not None and last.state_hash is not None
    return EpochRecord(
        last.task.epoch, last.metrics, trial.epoch_seconds, last.state_hash, last.state_file
    )
