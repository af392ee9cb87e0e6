"""The loop of a run: ask the searcher, train by the scheduler, report, record.

The coordinator decides nothing about order itself: which unit runs where is the
C scheduler's answer, which trial goes on is the searcher's, and carrying it out
is the executor's. What it adds is the bookkeeping between them.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cerebro import _core
from cerebro.errors import CorruptDataError, InputError, RunError
from cerebro.executors.base import Executor
from cerebro.report.snapshot import Snapshot, TrialRow
from cerebro.searchers.base import DONE, Decision, Searcher, Suggestion
from cerebro.settings import Settings
from cerebro.store import Store, decode, encode
from cerebro.trial import ENDED, EpochRecord, Status, TrialRecord, best_trial
from cerebro.unit import RunContext, Task, UnitDone, UnitFailed, WorkerLost

PROGRESS_SECONDS = 0.25
PROGRESS_SPACING = 50
"""Progress takes at most about one part in so many of the coordinator's time."""
MAX_PATIENCE = 86_400.0
"""Seconds; the system's own waits end at some 24 days."""
ALIKE_FAILURES = 3
TIMED_WIDTH = 64


@dataclass
class LiveTrial:
    """A trial's record and what only matters while it trains."""

    record: TrialRecord
    position: int = 0
    dispatches: int = 0
    epoch_seconds: float = 0.0
    rows_per_second: float | None = None
    worker: int | None = None
    last_worker: int | None = None
    """Whoever wrote the state that is committed."""
    workers: set[int] = field(default_factory=set)
    """Whoever may still have the model or the slots open."""
    deaths: Counter[tuple[int, int]] = field(default_factory=Counter)
    kept: dict[int, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    """What `EarlyStopping` reads."""


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
        first: Suggestion,
    ) -> None:
        self.settings = settings
        self.context = context
        self.searcher = searcher
        self.executor = executor
        self.store = store
        self.trials: dict[int, LiveTrial] = {}
        self._progress = progress
        self._result = result
        result.saved.before_reading = store.flush
        self._started = time.perf_counter()
        self._wall_started = time.time()
        self._schedule = self._make_schedule()
        self._schedule_worker: dict[int, int] = {}
        self._executor_worker: dict[int, int] = {}
        self._in_flight: dict[int, Task] = {}
        self._ended: dict[int, list[int]] = {}  # trials of which a worker has not heard it yet
        self._first: Suggestion | None = first
        self._exhausted = False
        self.out_of_time = False
        self._first_unit: float | None = None  # when it was dispatched
        self._busy_seconds = 0.0
        self._units_done = 0
        self._units_planned = 0
        self._active = 0
        self._next_progress = 0.0
        self._first_failures: list[TrialRecord] = []
        self._any_unit_done = False

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
        self._ask()
        self._progress.run_started(self.snapshot())
        while True:
            self._check_time()
            self._dispatch()
            if not self._in_flight:
                if self._exhausted or self.out_of_time or not self._ask():
                    break
                continue
            for event in self.executor.wait(self._patience()):
                if isinstance(event, UnitDone):
                    self._unit_done(event)
                elif isinstance(event, UnitFailed):
                    self._unit_failed(event)
                elif isinstance(event, WorkerLost):
                    self._worker_lost(event)
            self._ask()
            self._show()
        self.end_open_trials()
        self._raise_if_all_failed()

    def snapshot(self) -> Snapshot:
        """What progress displays draw."""
        seconds = self._now()
        share = min(1.0, self._units_done / max(1, self._units_planned))
        # Workers' start-up is not training: it counts neither as work nor as idleness.
        training = 0.0 if self._first_unit is None else seconds - self._first_unit
        capacity = training * max(1, len(self._schedule_worker))
        settings = self.settings
        return Snapshot(
            trials=[self._row(trial) for trial in self.trials.values()],
            share_done=share,
            seconds=seconds,
            seconds_left=training * (1 - share) / share if share > 0.02 else None,
            busy=min(1.0, self._busy_seconds / capacity) if capacity > 0 else 0.0,
            workers=len(self._schedule_worker),
            best=self._best(),
            metric=settings.metric,
            mode=settings.mode,
            path=str(settings.folder),
        )

    # --- asking ----------------------------------------------------------

    def _ask(self) -> bool:
        """Take suggestions while there is room; False if the searcher has none now."""
        asked = False
        while not self._exhausted and not self.out_of_time and self._active < self._width():
            if self._has_all_trials():
                self._exhausted = True
                break
            suggestion, self._first = self._first or self.searcher.suggest(), None
            if suggestion is DONE:
                self._exhausted = True
            elif suggestion is None:
                break
            else:
                assert isinstance(suggestion, Suggestion)
                self._add_trial(suggestion)
                asked = True
        return asked

    def _width(self) -> int:
        """Trials live at a time: a searcher that listens gets `width`, others need no limit."""
        if self.searcher.adaptive:
            return self.settings.width
        # A search that only time ends must not be asked for all its trials at once.
        timed = self.settings.n_trials is None and self.settings.time_limit is not None
        return TIMED_WIDTH if timed else sys.maxsize

    def _has_all_trials(self) -> bool:
        n_trials = self.settings.n_trials
        return n_trials is not None and len(self.trials) >= n_trials

    def _add_trial(self, suggestion: Suggestion) -> None:
        if suggestion.trial is not None or suggestion.parent is not None:
            raise InputError(
                "the searcher resumes or clones a trial, which this version cannot do: suggest "
                "new configurations only"
            )
        number = len(self.trials)
        # As it will be read back, so that a replay sees the same configuration.
        config = decode(encode(suggestion.config))
        check_batch_size(config, self.settings.batch_size, number)
        epochs = suggestion.epochs or self.settings.epochs
        record = TrialRecord(number, config, target_epochs=epochs, parent=suggestion.parent)
        self.trials[number] = LiveTrial(record)
        self.store.add_trial(number, config, record.status, epochs, suggestion.parent)
        self._schedule.add_trial(number, epochs=epochs)
        self._units_planned += epochs * self.context.units_per_epoch
        self._active += 1

    # --- dispatching -----------------------------------------------------

    def _dispatch(self) -> None:
        while not self.out_of_time:
            command = self._schedule.next(self._now())
            if command is None:
                return
            assert command[0] == "run", "shards are shared: there is nothing to load"
            _, worker, trial_number, epoch, step, shard, attempt = command
            trial = self.trials[trial_number]
            if trial.record.status == "waiting":
                self._set_status(trial, "running")
                self._tell_of(trial, "on_trial_start")
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
                ended=tuple(self._ended.pop(number, ())),
            )
            trial.dispatches += 1
            if self._first_unit is None:
                self._first_unit = self._now()
            self._in_flight[number] = task
            self.executor.submit(number, task)

    def _join(self, worker: int) -> None:
        ours = self._schedule.add_worker(self._now())
        self._schedule_worker[worker] = ours
        self._executor_worker[ours] = worker

    # --- events ----------------------------------------------------------

    def _unit_done(self, event: UnitDone) -> None:
        task = event.task
        trial = self.trials[task.trial]
        self._release(event.worker)
        self._schedule.unit_done(self._schedule_worker[event.worker], self._now())
        self._forget(event.worker, event.dropped)
        trial.position += 1
        trial.worker = None
        trial.epoch_seconds += event.seconds
        if task.step < self.context.train.num_shards and event.seconds > 0:
            trial.rows_per_second = event.rows / event.seconds
        self._busy_seconds += event.seconds
        self._units_done += 1
        self._any_unit_done = True
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
        means = {name: s / w for name, (s, w) in event.sums.items() if w}
        self._tell_of(trial, "on_unit_end", means)
        if event.metrics is not None:
            self._epoch_done(trial, event)

    def _epoch_done(self, trial: LiveTrial, event: UnitDone) -> None:
        record = trial.record
        metrics = event.metrics
        assert metrics is not None and event.state_hash is not None
        if not self._is_reported(metrics):
            if event.state_file is not None:
                Path(self.context.epoch_dir, event.state_file + ".new").unlink(missing_ok=True)
            self._end_trial(trial, "failed", self._no_metric(metrics))
            return
        epoch = event.task.epoch
        file = event.state_file
        publish = None
        if file is not None:
            folder = Path(self.context.epoch_dir)
            publish = (folder / (file + ".new"), folder / file)
            trial.kept[epoch] = file
        record.epochs.append(
            EpochRecord(epoch, metrics, trial.epoch_seconds, event.state_hash, file)
        )
        self.store.add_epoch(
            record.number, epoch, metrics, trial.epoch_seconds, event.state_hash, file, publish
        )
        trial.history.append(record.epochs[-1].to_history())
        trial.epoch_seconds = 0.0
        self._retire_states(trial)
        self._tell_of(trial, "on_epoch_end", metrics)
        decision = self.searcher.report(record.number, epoch, metrics)
        if decision is Decision.PAUSE:
            raise InputError(
                "the searcher pauses a trial, which this version cannot do: continue or stop it"
            )
        if epoch + 1 >= record.target_epochs:
            self._end_trial(trial, "finished")
        elif decision is Decision.STOP or (
            self.settings.stop is not None and self.settings.stop.should_stop(trial.history)
        ):
            self._end_trial(trial, "stopped")

    def _is_reported(self, metrics: Mapping[str, float]) -> bool:
        """Whether what ranks trials is there: with validation, from validation."""
        name = self.settings.metric
        only_training = f"train_{name}" in metrics and f"val_{name}" not in metrics
        return name in metrics and not (only_training and self.context.validation is not None)

    def _no_metric(self, metrics: Mapping[str, float]) -> str:
        name = self.settings.metric
        if name in metrics:
            return (
                f"the model reports no metric {name!r} in validation: return it from eval_batch "
                f"too, or rank by metric='train_{name}'"
            )
        names = ", ".join(sorted(metrics)) or "none"
        return (
            f"the model reports no metric {name!r}; it reports {names}: return it from train_batch "
            "and eval_batch, or choose another metric="
        )

    def _unit_failed(self, event: UnitFailed) -> None:
        trial = self.trials[event.task.trial]
        worker = self._schedule_worker[event.worker]
        self._release(event.worker)
        self._schedule.unit_failed(worker, self._now())
        self._forget(event.worker, event.dropped)
        trial.worker = None
        if event.kind == "data":
            raise CorruptDataError(event.message)
        if event.kind == "storage":
            raise OSError(event.message)
        if event.kind == "cancelled":
            return
        status: Status = "diverged" if event.kind == "diverged" else "failed"
        self._end_trial(trial, status, event.message, event.traceback)

    def _worker_lost(self, event: WorkerLost) -> None:
        ours = self._schedule_worker.pop(event.worker)
        del self._executor_worker[ours]
        self._ended.pop(event.worker, None)
        task = self._in_flight.pop(event.worker, None)
        self._schedule.remove_worker(ours, self._now())
        if task is not None:
            if event.reason.endswith("SIGBUS"):
                # It touched the mapping of a file that was cut: the trial is not to blame.
                self.context.check_files()
            trial = self.trials[task.trial]
            trial.worker = None
            unit = (task.epoch, task.step)
            trial.deaths[unit] += 1
            self.store.add_event(self._now(), "worker lost", event.reason, task.trial)
            if trial.deaths[unit] > self.settings.max_retries:
                self._end_trial(
                    trial,
                    "failed",
                    f"{event.reason} in epoch {task.epoch}, shard {task.shard}, "
                    f"{trial.deaths[unit]} times",
                )
        self._join(self.executor.replace(event.worker))

    def _release(self, worker: int) -> None:
        del self._in_flight[worker]

    def _forget(self, worker: int, dropped: Sequence[int]) -> None:
        for trial in dropped:
            self._schedule.forget_live(self._schedule_worker[worker], trial)

    # --- trials ----------------------------------------------------------

    def _end_trial(
        self, trial: LiveTrial, status: Status, error: str = "", traceback: str = ""
    ) -> None:
        record = trial.record
        record.error = error or None
        record.traceback = traceback or None
        self._schedule.drop_trial(record.number)
        self._units_planned -= record.target_epochs * self.context.units_per_epoch - trial.position
        self._active -= 1
        self._set_status(trial, status)
        self._remove_slots(record.number)
        for worker in trial.workers:
            if worker in self._schedule_worker:
                self._ended.setdefault(worker, []).append(record.number)
        if status in ("failed", "diverged"):
            # Worst of all, so that a searcher that listens turns away from it.
            worst = math.inf if self.settings.mode == "min" else -math.inf
            self.searcher.report(record.number, len(record.epochs), {self.settings.metric: worst})
        self._tell_of(trial, "on_trial_end")
        if status == "failed":
            self._count_failure(record)

    def _set_status(self, trial: LiveTrial, status: Status) -> None:
        trial.record.status = status
        self.store.set_status(
            trial.record.number, status, trial.record.error or "", trial.record.traceback or ""
        )

    def _retire_states(self, trial: LiveTrial) -> None:
        """Delete kept states that `keep` no longer asks for; the last one always stays."""
        if self.settings.keep == "all" or not trial.kept:
            return
        record = trial.record
        wanted = {record.epochs[-1].epoch}
        if self.settings.keep == "best":
            best = record.best_epoch(self.settings.metric, self.settings.mode)
            if best is not None:
                wanted.add(best)
        for epoch in sorted(set(trial.kept) - wanted):
            file = Path(self.context.epoch_dir, trial.kept.pop(epoch))
            record.epochs[epoch].state_file = None
            self.store.retire_state(record.number, epoch, file)

    def _remove_slots(self, number: int) -> None:
        for suffix in (".a", ".b", ".slots"):
            Path(self.context.state_dir, f"{number}{suffix}").unlink(missing_ok=True)

    def end_open_trials(self) -> None:
        """Mark the trials that the run left unfinished as stopped."""
        for trial in self.trials.values():
            if trial.record.status not in ENDED:
                self._set_status(trial, "stopped")

    # --- failures --------------------------------------------------------

    def _count_failure(self, record: TrialRecord) -> None:
        """Stop early if nothing but the same failure has happened yet."""
        if self._any_unit_done and not self._reports_nothing(record):
            return
        self._first_failures.append(record)
        causes = {failure_kind(r.error or "") for r in self._first_failures}
        if len(self._first_failures) >= ALIKE_FAILURES and len(causes) == 1:
            raise RunError(
                f"the first {len(self._first_failures)} trials failed alike: "
                f"{self._first_failures[0].error}"
            )

    def _reports_nothing(self, record: TrialRecord) -> bool:
        return (record.error or "").startswith("the model reports no metric")

    def _raise_if_all_failed(self) -> None:
        records = [t.record for t in self.trials.values()]
        failed = [r for r in records if r.status in ("failed", "diverged")]
        if records and len(failed) == len(records):
            raise RunError(f"all {len(records)} trials failed; the first: {failed[0].error}")
        if not records:
            raise RunError("the searcher suggested no trial")

    # --- time and display ------------------------------------------------

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _check_time(self) -> None:
        limit = self.settings.time_limit
        if limit is not None and not self.out_of_time and self._now() >= limit:
            self.out_of_time = True
            self.store.add_event(self._now(), "time limit", f"{limit} seconds are over")

    def _patience(self) -> float | None:
        """How long to wait for events: until something else is due."""
        if self.settings.time_limit is None or self.out_of_time:
            return None
        return min(max(0.0, self.settings.time_limit - self._now()), MAX_PATIENCE)

    def _show(self) -> None:
        before = self._now()
        if before >= self._next_progress:
            self._progress.update(self.snapshot())
            # With thousands of trials a picture takes a while: it is drawn less often then.
            after = self._now()
            self._next_progress = after + max(PROGRESS_SECONDS, PROGRESS_SPACING * (after - before))

    def _row(self, trial: LiveTrial) -> TrialRow:
        record = trial.record
        return TrialRow(
            number=record.number,
            config=record.config,
            status=record.status,
            epoch=len(record.epochs),
            epochs=record.target_epochs,
            metrics=record.epochs[-1].metrics if record.epochs else {},
            rows_per_second=trial.rows_per_second,
            worker=trial.worker,
            error=record.error,
        )

    def _best(self) -> int | None:
        return best_trial(
            [trial.record for trial in self.trials.values()],
            self.settings.metric,
            self.settings.mode,
            self.settings.select,
        )

    def tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback that has it."""
        for method in self._hooks(hook):
            method(*arguments)

    def _tell_of(self, trial: LiveTrial, hook: str, *arguments: Any) -> None:
        """Call a hook with the trial as it is now, which is a copy: made only if one listens."""
        methods = self._hooks(hook)
        if methods:
            view = self._result.trial_of(trial.record)
            for method in methods:
                method(view, *arguments)

    def _hooks(self, hook: str) -> list[Callable[..., None]]:
        found = (getattr(callback, hook, None) for callback in self.settings.callbacks)
        return [method for method in found if method is not None]

    def _make_schedule(self) -> _core.Schedule:
        train, validation = self.context.train, self.context.validation
        return _core.Schedule(
            shards=[float(rows) for rows in train.shard_rows()],
            stagger=self.context.stagger,
            # Evaluating a row costs about a third of training on it.
            eval_cost=0.0 if validation is None else validation.num_rows / 3,
            live_models=self.context.live_models or 8,
        )


def check_batch_size(config: dict[str, Any], default: int | None, trial: int) -> None:
    """The batch size is given once: in the configuration or to the search."""
    if "batch_size" in config and default is not None:
        raise InputError(
            "batch_size is given twice, to search() and in the space: leave out one of them"
        )
    value = config.get("batch_size", default)
    if value is None:
        raise InputError(
            "batch_size is missing: give it to search(batch_size=...) or put it into the space"
        )
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise InputError(
            f"trial {trial}: batch_size must be a whole number from 1 to {2**31 - 1}, not {value!r}"
        )


def failure_kind(message: str) -> str:
    """What makes two failures alike: the exception's type and where it was raised."""
    kind, _, rest = message.partition(":")
    return kind + rest[rest.rfind("(") :] if "(" in rest else message
