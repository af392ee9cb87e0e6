"""Track a run's progress: work done and left, busy workers, and the ended trials worth showing.

The details of ended trials are in the store. A run of 100,000 trials must not keep 100,000
configurations and histories in memory only to count them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cerebro.coordinator.trial import LiveTrial
from cerebro.report import format as fmt
from cerebro.report.progress import Silent, Snapshot, TrialRow
from cerebro.run.records import ENDED, Ranking, Status, TrialRecord, best_score
from cerebro.run.settings import Settings

PROGRESS_SECONDS = 0.25
PROGRESS_SPACING = 50
"""Displays take at most about 1 / `PROGRESS_SPACING` of the coordinator's time."""

MIN_UNITS = 2  # how many units per worker must be timed before a forecast is made


@dataclass(frozen=True)
class EpochParts:
    """An epoch's training units, of equal size, and its validation's share of the work."""

    train_units: int
    evaluation: float = 0.0

    @property
    def units(self) -> int:
        return self.train_units + (self.evaluation > 0)

    def share_of_unit(self, step: int) -> float:
        if step >= self.train_units:
            return self.evaluation
        return (1.0 - self.evaluation) / self.train_units

    def count_epochs(self, position: int) -> float:
        epochs, step = divmod(position, self.units)
        return epochs + step * self.share_of_unit(0)  # the validation comes last


@dataclass(frozen=True)
class ToCome:
    """The work of trials not suggested yet: epochs beyond the targets so far, else trials."""

    epochs: float | None = None
    trials: float | None = None


@dataclass(frozen=True)
class Forecast:
    """The remaining work of a run, in epochs of one trial and in seconds; None if unknown."""

    epochs: float | None = None
    seconds: float | None = None


class Forecaster:
    """Observes a run's units and trials, and forecasts the work and the time that are left.

    Work is counted in epochs of one trial. Open trials train until their target epochs, and the
    searcher announces how many epochs are still to come, or how many trials. Trials that are pruned
    train less: where only trials are known, the rest is multiplied by the mean share of their
    epochs that ended and paused trials have trained. The time left is the work multiplied by the
    mean seconds per epoch, and divided by the number of workers, which stay as busy as they have
    been; but at least the time of the longest trial alone.
    """

    def __init__(self, parts: EpochParts, epochs: int) -> None:
        self.parts = parts
        self._epochs = epochs
        self._began: dict[int, tuple[int, float]] = {}  # by worker: trial, start of its unit
        self._warm: set[int] = set()  # workers that have done a unit
        self._busy = 0.0  # seconds of ended units, summed over the workers
        self._timed_units = 0
        self._timed_seconds = 0.0
        self._timed_epochs = 0.0
        self._ended_trials = 0
        self._ended_share = 0.0  # of their epochs, summed over the ended trials
        self.done = 0.0  # the number of epochs trained so far, including those of earlier processes

    def unit_begins(self, trial: int, worker: int, now: float) -> None:
        self._began[worker] = trial, now

    def unit_ends(self, worker: int, now: float, step: int | None = None) -> None:
        """Note that a worker's unit has ended; without `step`, the unit failed or was lost."""
        _, began = self._began.pop(worker, (None, now))
        self._busy += now - began
        if step is not None:
            share = self.parts.share_of_unit(step)
            if worker in self._warm:  # the first unit also imports libraries
                self._time_units(1, now - began, share)
            self._warm.add(worker)
            self.done += share

    def trial_went_back(self, before: int, position: int) -> None:
        """Note that a trial lost units; positions are counted as in `LiveTrial`."""
        self.done -= self.parts.count_epochs(before) - self.parts.count_epochs(position)

    def trial_restored(self, trial: LiveTrial) -> None:
        record = trial.record
        if record.epochs and record.epochs[-1].seconds > 0:
            self._time_units(self.parts.units, record.epochs[-1].seconds, 1.0)
        if record.status in ENDED:
            self.trial_ended(trial)
        # Ended trials have no position.
        trained = max(self.parts.count_epochs(trial.position), record.done)
        self.done += trained - record.first_epoch

    def trial_ended(self, trial: LiveTrial) -> None:
        self._ended_trials += 1
        self._ended_share += self._share_trained(trial)

    def _time_units(self, units: int, seconds: float, epochs: float) -> None:
        self._timed_units += units
        self._timed_seconds += seconds
        self._timed_epochs += epochs

    def _share_trained(self, trial: LiveTrial) -> float:
        return min(1.0, trial.record.done / self._epochs)

    def forecast(
        self,
        trials: Iterable[LiveTrial],
        to_come: ToCome,
        workers: int,
        now: float,
        capacity: float,
    ) -> Forecast:
        """Return what is left; `capacity` is how many seconds workers could have worked so far."""
        unended = [trial for trial in trials if trial.record.is_open]
        paused = [trial for trial in unended if trial.paused_by_searcher]
        active = {t.record.number: t for t in unended if not t.paused_by_searcher}
        if to_come.epochs is not None:
            coming, share = to_come.epochs, 1.0
        elif to_come.trials is not None:
            # One trial that is not pruned keeps the first few from deciding alone.
            shares = self._ended_share + sum(map(self._share_trained, paused)) + 1.0
            share = shares / (self._ended_trials + len(paused) + 1)
            coming = to_come.trials * self._epochs * share
        else:
            return Forecast()
        left = {}
        for number, trial in active.items():
            rest = trial.record.target_epochs - self.parts.count_epochs(trial.position)
            left[number] = share * max(0.0, rest)
        work = coming + sum(left.values())
        if not self._timed_epochs or self._timed_units < MIN_UNITS * workers:
            return Forecast(work)
        pace = self._timed_seconds / self._timed_epochs
        seconds = {number: epochs * pace for number, epochs in left.items()}
        for number, began in self._began.values():
            if number in seconds:
                step = active[number].position % self.parts.units
                passed = min(pace * self.parts.share_of_unit(step), now - began)
                seconds[number] = max(0.0, seconds[number] - passed)
        in_flight = sum(now - began for _, began in self._began.values())
        busy = (self._busy + in_flight) / capacity if capacity > 0 else 1.0
        rate = max(1, workers) * min(1.0, max(0.05, busy))
        together = (sum(seconds.values()) + coming * pace) / rate
        return Forecast(work, max(together, *seconds.values(), 0.0))


class Overview:
    """Counts the work of a run and shows it, at most a few times per second."""

    def __init__(
        self,
        settings: Settings,
        progress: Any,
        now: Callable[[], float],
        forecaster: Forecaster,
        to_come: Callable[[], ToCome],
    ) -> None:
        self._ranking = settings.ranking
        self._folder = settings.folder
        self._progress = progress
        self.now = now
        self.forecaster = forecaster
        self._to_come = to_come
        self._begun = now()
        self._time_limit = settings.limits.time_limit
        self._share = 0.0  # the largest share shown so far
        self._next_show = 0.0
        self.ended = EndedTrials(settings.ranking)
        self.first_unit: float | None = None  # the time at which the first unit was dispatched
        self.busy_seconds = 0.0
        self.paused = False  # whether a command has paused the run
        self.waits_for = ""  # which paused trials others wait for
        self.waited = 0.0  # the seconds that the run spent waiting to be resumed

    def unit_begins(self, trial: int, worker: int) -> None:
        now = self.now()
        if self.first_unit is None:
            self.first_unit = now
        self.forecaster.unit_begins(trial, worker, now)

    def unit_ends(self, worker: int, step: int | None = None, seconds: float = 0.0) -> None:
        """Note that a unit took `seconds` on the worker's clock; without `step`, it was lost."""
        self.busy_seconds += seconds
        self.forecaster.unit_ends(worker, self.now(), step)

    def show_start(self, trials: Iterable[LiveTrial], workers: int) -> None:
        self._progress.run_started(self.snapshot(trials, workers))
        self.ended.mark_shown()

    def show(self, trials: Iterable[LiveTrial], workers: int) -> None:
        if isinstance(self._progress, Silent):
            self.ended.mark_shown()
            return
        before = self.now()
        if before >= self._next_show:
            self._progress.update(self.snapshot(trials, workers))
            self.ended.mark_shown()
            # Drawing thousands of trials is slow, so it is done less often.
            after = self.now()
            self._next_show = after + max(PROGRESS_SECONDS, PROGRESS_SPACING * (after - before))

    def show_waiting(self, trials: Iterable[LiveTrial], workers: int) -> None:
        """Show a run that is idle until a command or the searcher resumes it."""
        self._progress.update(self.snapshot(trials, workers))

    def snapshot(self, trials: Iterable[LiveTrial], workers: int) -> Snapshot:
        ended = self.ended
        live = [trial for trial in trials if trial.record.number not in ended]
        shown, unshown = _select_shown(live)
        rows = sorted(
            [*ended.list_rows(), *(t.row(self._ranking) for t in shown)], key=lambda row: row.number
        )
        seconds = self.now()
        # Exclude the workers' startup and the time spent waiting from idle time.
        training = 0.0
        if self.first_unit is not None:
            training = max(0.0, seconds - self.first_unit - self.waited)
        capacity = training * max(1, workers)
        trained = [fold for trial in live for fold in trial.in_training]
        forecast = self.forecaster.forecast(trained, self._to_come(), workers, seconds, capacity)
        leaders = ended.leader, best_score([trial.record for trial in live], self._ranking)
        return Snapshot(
            trials=rows,
            share_done=self._share_done(forecast, seconds),
            seconds=seconds,
            seconds_left=self._seconds_left(forecast, seconds),
            busy=min(1.0, self.busy_seconds / capacity) if capacity > 0 else 0.0,
            workers=workers,
            best=min(filter(None, leaders), default=(0.0, None))[1],  # the lowest number in a tie
            metric=self._ranking.metric,
            mode=self._ranking.mode,
            path=str(self._folder),
            paused=self.paused,
            waits_for=self.waits_for,
            more=ended.count_without(rows) + Counter(waiting=unshown),
        )

    def _share_done(self, left: Forecast, now: float) -> float | None:
        """Return the finished share of the work or of the time limit; the share never decreases."""
        shares = []
        if left.epochs is not None and math.isfinite(left.epochs):
            done = self.forecaster.done
            shares.append(1.0 if left.epochs == 0 else done / (done + left.epochs))
        if self._time_limit is not None:
            shares.append(min(1.0, (now - self._begun) / self._time_limit))
        if not shares:
            return None
        self._share = max(self._share, *shares)
        return self._share

    def _seconds_left(self, left: Forecast, now: float) -> float | None:
        limits = [] if left.seconds is None or math.isinf(left.seconds) else [left.seconds]
        if self._time_limit is not None:
            limits.append(max(0.0, self._begun + self._time_limit - now))
        return min(limits, default=None)


def _select_shown(live: Sequence[LiveTrial]) -> tuple[list[LiveTrial], int]:
    """Return the open trials that displays may show, and how many new ones they leave out."""
    shown, waiting = [], 0
    for trial in live:
        is_new = all(
            fold.record.status == "waiting" and not fold.record.epochs for fold in trial.in_training
        )
        waiting += is_new
        if not is_new or waiting <= KEPT_ROWS:
            shown.append(trial)
    return shown, max(0, waiting - KEPT_ROWS)


KEPT_ROWS = 12  # the number of best trials kept for displays; no display shows more


class EndedTrials:
    """Keeps what displays need about a run's ended trials; see the module's docstring."""

    def __init__(self, ranking: Ranking) -> None:
        self.counts: Counter[str] = Counter()  # the number of ended trials by status
        self.leader: tuple[float, int] | None = None
        """The best ended trial: its metric, negated if larger is better, and its number."""
        self._ranking = ranking
        self._status = bytearray()  # by number: 1 + the index in ENDED; 0: not ended
        self._leader_row: TrialRow | None = None
        self._best: list[tuple[float, int, TrialRow]] = []  # a heap, the worst first
        self._unshown: list[TrialRow] = []
        self._last_failure: TrialRow | None = None

    def add(self, record: TrialRecord, row: TrialRow) -> None:
        number = record.number
        self._status.extend(bytes(max(0, number + 1 - len(self._status))))
        self._status[number] = 1 + ENDED.index(record.status)
        self.counts[record.status] += 1
        if record.status in ("failed", "diverged"):
            self._last_failure = row
        rank = best_score([record], self._ranking)
        if rank is not None and (self.leader is None or rank < self.leader):
            self.leader, self._leader_row = rank, row
        self._unshown.append(row)
        # Among tied trials, the lowest number is the best, so it leaves the heap last.
        heapq.heappush(self._best, (-self._shown_rank(row), -number, row))
        if len(self._best) > KEPT_ROWS:
            heapq.heappop(self._best)

    def status_of(self, number: int) -> Status | None:
        code = self._status[number] if 0 <= number < len(self._status) else 0
        return ENDED[code - 1] if code else None

    def __contains__(self, number: int) -> bool:
        return self.status_of(number) is not None

    def list_rows(self) -> list[TrialRow]:
        """Return the best trials, the last failure and those that ended since `mark_shown`."""
        rows = [*(row for _, _, row in self._best), *self._unshown]
        rows += [row for row in (self._leader_row, self._last_failure) if row is not None]
        by_number = {row.number: row for row in rows}
        return [by_number[number] for number in sorted(by_number)]

    def count_without(self, rows: Iterable[TrialRow]) -> Counter[str]:
        return self.counts - Counter(row.status for row in rows if row.number in self)

    def mark_shown(self) -> None:
        self._unshown.clear()

    def _shown_rank(self, row: TrialRow) -> float:
        value = fmt.metric_value(row.metrics, self._ranking.metric)
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if self._ranking.mode == "max" else value
