"""Run the main loop: ask the searcher, dispatch units, record results, report them.

The coordinator itself decides no order: the C scheduler decides which unit runs where, the searcher
decides which trials continue, and the executor runs the units. The coordinator keeps the records
that they share.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from cerebro.control import FOLDER
from cerebro.coordinator.dispatcher import Dispatcher, evaluation_cost
from cerebro.coordinator.event_book import EventBook
from cerebro.coordinator.failures import (
    ALIKE_FAILURES,
    asks_to_stop,
    explain_missing_metric,
    raise_if_alike,
    raise_if_all_failed,
)
from cerebro.coordinator.folds import FoldedTrials
from cerebro.coordinator.overview import EpochParts, Forecaster, Overview, ToCome
from cerebro.coordinator.restore import RestoredRun
from cerebro.coordinator.search_loop import SearchLoop
from cerebro.coordinator.steering import Steering
from cerebro.coordinator.trial import LiveTrial
from cerebro.coordinator.trials import LiveTrials
from cerebro.coordinator.user import Commands, Hooks
from cerebro.errors import CorruptDataError, InputError
from cerebro.executors.base import Executor
from cerebro.machine.local import Clock
from cerebro.model import Words
from cerebro.report.progress import Snapshot
from cerebro.run.records import ENDED, EpochRecord, Raised, Status, find_clash
from cerebro.run.settings import Settings
from cerebro.run.store import Store
from cerebro.searchers.base import Searcher, Suggestion, expected_trials
from cerebro.worker import messages

QUEUED_SECONDS = 0.5
"""Only units shorter than this are queued at a busy worker: a longer one would delay a user's
command, and the time between units does not matter to it.
"""

MAX_LOST_STATES = 10
"""How often a trial may go back within one epoch because a machine failed."""


class RunClock:
    """A run's clock, which continues in a resumed run, and the time limit of this process."""

    def __init__(self, clock: Clock, before: float, limit: float | None) -> None:
        self.sleep, self._seconds = clock.sleep, clock.perf_counter
        self._begun = self._seconds()
        self._started = self._begun - before
        self.wall_started = clock.time() - before
        self.limit = limit
        self.is_over = False  # whether the time limit has been noticed; see :meth:`check`

    def now(self) -> float:
        """Return the seconds since the run's start, without those between its processes."""
        return self._seconds() - self._started

    def check(self) -> bool:
        """Return whether the time limit is over, once."""
        if self.seconds_left() != 0:  # None without a limit, and once this has returned True
            return False
        self.is_over = True
        return True

    def seconds_left(self) -> float | None:
        """Return the seconds until the time limit; None without a limit, or once it has passed."""
        if self.limit is None or self.is_over:
            return None
        return max(0.0, self.limit - (self._seconds() - self._begun))


class Coordinator:
    """Trains one run to its end."""

    def __init__(
        self,
        settings: Settings,
        context: messages.RunContext,
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
        self.store = store
        limits = settings.limits
        before = 0.0 if restored is None else restored.seconds
        self.clock = RunClock(store.machine.clock, before, limits.time_limit)
        self._restored = restored
        self._hooks = hooks
        self.events = EventBook(store, self.clock.now, settings)
        self._dispatcher = Dispatcher(executor, context, self.clock.now)
        train, validation = context.views(0)
        evaluation = evaluation_cost(validation)
        parts = EpochParts(context.order().num_parts, evaluation / (train.num_rows + evaluation))
        forecaster = Forecaster(parts, limits.epochs)
        self._overview = Overview(
            settings, progress, self.clock.now, forecaster, self._count_work_to_come
        )
        shared = settings, context, store, self._dispatcher.schedule, self._overview
        self._searched: LiveTrials | FoldedTrials  # the trials that the searcher and the user see
        if settings.folds is None:
            self._searched = self._trials = LiveTrials(
                *shared,
                self._overview.ended,
                hooks.notify_of,
                stepwise=searcher.adaptive,
                pinned=searcher.pinned,
            )
        else:
            self._searched = FoldedTrials(*shared, hooks, searcher.pinned)
            self._trials = self._searched.folds
        self._loop = SearchLoop(settings, searcher, store, hooks, self._searched, first)
        # By trial: the last unit of an epoch whose state is being copied.
        self._awaiting_state: dict[int, messages.UnitDone] = {}
        self.words = Words()  # what the model's users call its methods, for messages
        steering = Steering(
            settings,
            context,
            store,
            self._dispatcher,
            self._searched,
            self._trials,
            self._loop,
            self.clock.now,
            self.events.add,
        )
        note = partial(self.events.add, "command")
        self._commands = Commands(settings.folder / FOLDER, note, store.machine, steering)
        if restored is not None:
            self._searched.restore(restored.trials, restored.decisions)
            restored.trials.clear()  # else trials would stay in memory after they end
            self._commands.know_requests(action.request for action in restored.actions)
            steering.take_first(restored.requests)

    def _count_work_to_come(self) -> ToCome:
        searcher, folds = self._loop.searcher, self.settings.trials_per_config
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

    def run(self, workers: Sequence[int], starting: Sequence[int] = ()) -> None:
        """Train until no trial is left.

        Workers that are `starting` join when they have answered the task in progress. Raise
        RunError if every trial fails or the first ones fail alike, and CorruptDataError if a data
        file is damaged.
        """
        are_ready = self._restored is None or self.settings.executor is not None
        for worker in workers:
            if are_ready:
                self._dispatcher.add(worker)
            else:
                self._dispatcher.start(worker)
        for worker in starting:
            self._dispatcher.expect(worker)
        if self._restored is not None:
            self._resume_run(self._restored)
        self._advance_searcher()
        self._overview.show_start(self.trials.values(), len(self._dispatcher))
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
            if self.clock.check():
                self.events.add("time limit", f"{self.clock.limit} seconds are over")
            self._take_commands()
            if self.refused is not None:
                break
            self._dispatch_units()
            self._queue_units()
            awaits_worker = self._dispatcher.awaits_worker and not self._is_halted
            awaits_worker |= self._dispatcher.is_warming and self._steering.is_busy
            if self._dispatcher.is_idle and not self._awaiting_state and not awaits_worker:
                if not self._advance_searcher() and (self.is_stopped or not self._wait_to_resume()):
                    break
                continue
            if self._commands.gave_up:
                break
            self._handle_events()
            self._advance_searcher()
            self._overview.show(self.trials.values(), len(self._dispatcher))

    def _handle_events(self) -> None:
        for event in self._dispatcher.executor.wait(self._seconds_to_wait()):
            if isinstance(event, messages.UnitDone):
                self._handle_unit_done(event)
            elif isinstance(event, messages.UnitFailed):
                self._handle_unit_failed(event)
            elif isinstance(event, messages.WorkerLost):
                self._handle_worker_lost(event)
            elif isinstance(event, messages.CheckDone):
                self._dispatcher.end_warming(event.worker)
                self._steering.finish_check(event)
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
        self._searched.update_all()
        self._loop.arrive_again()
        for number in restored.paused:
            if self.status_of(number) not in (None, *ENDED):
                self.pause_trial(number)
        for trial in list(self._trials.by_number.values()):
            if asks_to_stop(trial.record.raised):
                self._stop_trials(self._searched.folds_beside(trial))

    def _wait_to_resume(self) -> bool:
        """Wait for what can resume the run; return False if nothing is left to do."""
        all_trials = self._trials.by_number.values()
        trials = [trial for trial in all_trials if trial.record.status not in ENDED]
        rests = any(trial.held and not trial.paused_by_searcher for trial in trials)
        rests |= self._commands.paused  # even if no trial is left: the user may clone one
        waits = self._loop.searcher.waits and not self._loop.is_exhausted
        if rests or waits:
            self.store.flush()  # the store then has everything that the display shows
            self._overview.show_waiting(self.trials.values(), len(self._dispatcher))
            before = self.clock.now()
            if waits:  # an event for the searcher ends the executor's wait
                self._handle_events()
            else:
                self.clock.sleep(self._seconds_to_wait())
            self._overview.waited += self.clock.now() - before
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
        reported = self._searched.update_from(trial)
        if reported is None:  # other folds have not finished the epoch
            return
        if reported.record.status not in ENDED:
            epoch = reported.record.epochs[-1]
            self._loop.epoch_done(reported, epoch.epoch, epoch.metrics)
        elif not reported.paused_by_searcher:
            self._loop.trial_ended(reported)

    # --- dispatching -----------------------------------------------------

    @property
    def _is_halted(self) -> bool:
        return self.is_stopped or self._commands.paused

    def _dispatch_units(self) -> None:
        while not self._is_halted and (unit := self._dispatcher.next_unit()) is not None:
            worker, number, epoch, step, part, attempt = unit
            trial = self._trials.by_number[number]
            self._trials.start(trial)
            trial.worker = worker
            is_first = trial.position == trial.record.first_epoch * self.context.units_per_epoch
            task = self._make_task(
                trial,
                epoch,
                step,
                part,
                trial.position,
                attempt=attempt,
                origin=trial.origin,
                clone_of=trial.clone_of if is_first else None,
                notes_reads=is_first and self.events.unread.has_unread_name(trial.record.config),
                ended=self._trials.held.take(worker, number),
            )
            self._overview.unit_begins(number, worker)
            self._dispatcher.submit(worker, task)

    def _make_task(
        self, trial: LiveTrial, epoch: int, step: int, part: int, position: int, **more: Any
    ) -> messages.Task:
        first = 0 if self._restored is None else self._restored.first_dispatch
        dispatch = max(trial.dispatches, first)
        task = messages.Task(
            trial=trial.record.number,
            stream=trial.record.stream,
            config=trial.record.config,
            epoch=epoch,
            step=step,
            part=part,
            position=position,
            dispatch=dispatch,
            epochs=trial.record.info_epochs(position, self.context.limits.epochs),
            **more,
        )
        trial.dispatches = dispatch + 1
        return task

    def _queue_units(self) -> None:
        """Queue the next unit of short ones at busy workers, which then need not wait for it."""
        for worker, task in self._dispatcher.take_begun():
            last = self._trials.by_number[task.trial].last_unit
            if (
                self._is_halted
                or self._steering.wants_worker  # it would wait until the end of the epoch
                or last is None
                or not 0 < last.seconds < QUEUED_SECONDS
            ):
                continue
            following = self._dispatcher.next_behind(worker)
            if following is not None:
                trial = self._trials.by_number[task.trial]
                queued = self._make_task(
                    trial, *following, task.position + 1, attempt=0, after=task.dispatch
                )
                self._dispatcher.queue(worker, queued)

    # --- units and epochs ------------------------------------------------

    def _handle_unit_done(self, event: messages.UnitDone) -> None:
        task = event.task
        trial = self._trials.by_number[task.trial]
        last, following = trial.last_unit, self._dispatcher.finish(event)
        self._forget_live_models(event.worker, event.dropped)
        trial.position += 1
        trial.origin = None
        trial.epoch_seconds += event.seconds
        if task.part >= 0 and event.seconds > 0:
            trial.rows_per_second = event.total.rows / event.seconds
        self._overview.unit_ends(event.worker, task.step, event.seconds)
        self.store.add_unit(
            trial=task.trial,
            epoch=task.epoch,
            step=task.step,
            part=task.part,
            worker=event.worker,
            attempt=task.attempt,
            started=event.started - self.clock.wall_started,
            seconds=event.seconds,
            rows=event.total.rows,
            batches=event.total.batches,
            hopped=event.loaded and last is not None and last.worker != event.worker,
            state_bytes=event.state.nbytes,
        )
        trial.last_unit = event
        self.events.note_unit(trial, event)
        means = {name: s / w for name, (s, w) in event.total.sums.items() if w}
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

    def _add_epoch(self, trial: LiveTrial, epoch: EpochRecord, *, report: bool = True) -> None:
        """Record a finished epoch; fail the trial if its ranking metric is missing."""
        missing = explain_missing_metric(
            self.settings.ranking.metric,
            epoch.metrics,
            validated=self.context.validates,
            words=self.words,
        )
        if missing is None and self.settings.folds is not None:
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

    def _drop_unit(self, worker: int, trial: LiveTrial) -> None:
        self._overview.unit_ends(worker)
        self._dispatcher.fail(worker)
        trial.worker = None

    def _handle_unit_failed(self, event: messages.UnitFailed) -> None:
        trial = self._trials.by_number[event.task.trial]
        self._drop_unit(event.worker, trial)
        self._forget_live_models(event.worker, event.dropped)
        self.events.note_failed_unit(trial, event)
        if event.kind == "data":
            raise CorruptDataError(event.message)
        if event.kind == "storage":
            folder = self.settings.folder
            if not self.store.disk.exists(folder):
                raise OSError(f"{folder} is gone: the run's folder was deleted or renamed")
            raise OSError(event.message)
        if event.kind == "cancelled":
            self._apply_commands(trial)
            return
        raised = Raised(event.bases, event.place)
        status: Status = "diverged" if event.kind == "diverged" else "failed"
        if asks_to_stop(raised):
            status = "stopped"
        self._trials.end(trial, status, event.message, event.traceback, raised)
        if status == "stopped":
            self._stop_trials(self._searched.folds_beside(trial))
        self._report(trial)

    def _end_trial(self, trial: LiveTrial, status: Status, error: str = "") -> None:
        """End a trial without asking the searcher, which is sent the worst metric."""
        self._trials.end(trial, status, error)
        self._report(trial)

    def _handle_worker_lost(self, event: messages.WorkerLost) -> None:
        self._overview.unit_ends(event.worker)
        task, verdict = self._dispatcher.remove(event)
        self._steering.worker_lost(event.worker)
        self._trials.held.forget_worker(event.worker)
        if event.signal == signal.SIGBUS:
            # The worker read a memory-mapped file that was truncated: the trial is not to blame.
            self.context.check_files()
        number = None if task is None else task.trial
        kind = "worker left" if event.has_left else "worker lost"
        self.events.add(kind, verdict.text, number)
        if task is not None:
            trial = self._trials.by_number[task.trial]
            trial.worker = None
            if verdict.error is not None:
                self._end_trial(trial, "failed", verdict.error)
            self._apply_commands(trial)
        text = self._dispatcher.replace(event)
        if text is not None:
            self.events.add("worker not replaced", text)
            warnings.warn(text, stacklevel=2)

    def _forget_live_models(self, worker: int, dropped: Sequence[int]) -> None:
        for number in dropped:
            trial = self._trials.by_number.get(number)
            if trial is not None and trial.scheduled:
                self._dispatcher.forget_live(worker, number)

    # --- machines of a cluster -------------------------------------------

    def _handle_cluster_event(self, event: messages.News) -> None:
        """Handle the events that only executors for several machines send."""
        if isinstance(event, messages.WorkerJoined):
            self.events.add("worker joined", f"worker {event.worker}")
            self._dispatcher.warm_up(event.worker)
        elif isinstance(event, messages.ShardsPlaced):
            self._dispatcher.update_holders()
        elif isinstance(event, messages.StateKept):
            trial = self._trials.by_number[event.trial]
            self._add_epoch(trial, _make_epoch(trial, self._awaiting_state.pop(event.trial)))
            self._trials.await_state(trial, False)
            self._apply_commands(trial)
        elif isinstance(event, messages.StateLost):
            self._handle_state_lost(event)
        elif isinstance(event, messages.Note):
            self.events.add(event.kind, event.text)
            warnings.warn(event.text, stacklevel=2)

    def _handle_state_lost(self, event: messages.StateLost) -> None:
        trial = self._trials.by_number[event.trial]
        if event.worker is not None:
            self._drop_unit(event.worker, trial)
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
        """Pause a trial after its current or queued unit; raise InputError if it is not open."""
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
        """End a trial permanently after its current unit; raise InputError if it is not open."""
        whole, trials = self._searched.find_open(number, "stopped")
        whole.stopping = True
        self._stop_trials(trials)

    def _stop_trials(self, trials: Sequence[LiveTrial]) -> None:
        for trial in trials:
            trial.stopping = True
            self._trials.hold(trial)
            self._apply_commands(trial)

    def cancel_units(self) -> None:
        """End the units in flight at their next batch, if the executor supports it."""
        self._dispatcher.cancel_units()

    def _take_commands(self) -> None:
        self._commands.carry_out(self)
        if not self.is_stopped:
            self._steering.proceed()
        self._overview.waits_for = self._loop.explain_waiting()
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

    def _seconds_to_wait(self) -> float:
        return self._commands.wait_seconds(self.clock.seconds_left())

    # --- the state of the run --------------------------------------------

    @property
    def trials(self) -> Mapping[int, LiveTrial]:
        """The run's trials by number, except forgotten ones; with folds, the configurations."""
        return self._searched.by_number

    def status_of(self, number: int) -> Status | None:
        return self._searched.status_of(number)

    def snapshot(self) -> Snapshot:
        return self._overview.snapshot(self.trials.values(), len(self._dispatcher))

    @property
    def _steering(self) -> Steering:
        steering: Steering = self._commands.steering
        return steering

    @property
    def refused(self) -> str | None:
        """Why a request that came with `cerebro.resume` was refused; the run then ends at once."""
        return self._steering.refused

    @property
    def is_stopped(self) -> bool:
        """Whether the time limit or a command ends the run with work left."""
        return self.clock.is_over or self._commands.stopping or self.refused is not None

    @property
    def status(self) -> str:
        """The run's status after :meth:`run` has returned."""
        trained = self._trials.by_number.values()
        is_open = any(trial.record.is_open for trial in trained)
        if self.refused is not None and self._loop.is_exhausted and not is_open:
            return "finished"  # as it was before
        unfinished = self.is_stopped or is_open
        partly = self._restored is not None and self._restored.partly
        return "stopped" if unfinished or partly or self._loop.searcher.cut_short else "finished"

    @property
    def _kept_in(self) -> Path | None:
        """The run's folder, unless the run may be removed by the caller that made its build."""
        return self.settings.folder if getattr(self.settings.build, "keeps_run", True) else None

    def end_open_trials(self) -> None:
        self._trials.mark_open_as_stopped()


def _make_epoch(trial: LiveTrial, last: messages.UnitDone) -> EpochRecord:
    assert last.metrics is not None
    return EpochRecord(
        last.task.epoch, last.metrics, trial.epoch_seconds, last.state.hash, last.state.file
    )
