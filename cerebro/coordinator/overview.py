"""Track a run's progress, how busy its workers are, and the ended trials worth showing.

The details of ended trials are in the store. A run of 100,000 trials must not keep 100,000
configurations and histories in memory only to count them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cerebro.coordinator.forecast import Forecast, Forecaster, ToCome
from cerebro.coordinator.trial import LiveTrial
from cerebro.report import format as fmt
from cerebro.report.progress import Silent, Snapshot, TrialRow
from cerebro.run.records import ENDED, Ranking, Status, TrialRecord, best_score
from cerebro.run.settings import Settings

PROGRESS_SECONDS = 0.25
PROGRESS_SPACING = 50
"""Displays take at most about 1 / `PROGRESS_SPACING` of the coordinator's time."""


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
        self._now = now
        self.forecaster = forecaster
        self._to_come = to_come
        self._begun = now()
        self._time_limit = settings.limits.time_limit
        self._share = 0.0  # the largest share shown so far
        self._next_show = 0.0
        self.ended = EndedTrials(settings.ranking)
        self.first_unit: float | None = None
        """The time at which the first unit was dispatched."""
        self.busy_seconds = 0.0
        self.paused = False
        """Whether a command has paused the run."""
        self.waited = 0.0
        """The seconds that the run spent waiting to be resumed."""

    def unit_begins(self, trial: int, worker: int) -> None:
        now = self._now()
        if self.first_unit is None:
            self.first_unit = now
        self.forecaster.unit_begins(trial, worker, now)

    def unit_done(self, worker: int, step: int, seconds: float) -> None:
        """Note that a unit has been trained, in `seconds` on the worker's clock."""
        self.busy_seconds += seconds
        self.forecaster.unit_ends(worker, self._now(), step)

    def unit_lost(self, worker: int) -> None:
        """Note that a worker's unit, if it had one, failed or was lost."""
        self.forecaster.unit_ends(worker, self._now())

    def show_start(self, trials: Iterable[LiveTrial], workers: int) -> None:
        self._progress.run_started(self.snapshot(trials, workers))
        self.ended.mark_shown()

    def show(self, trials: Iterable[LiveTrial], workers: int) -> None:
        if isinstance(self._progress, Silent):
            self.ended.mark_shown()
            return
        before = self._now()
        if before >= self._next_show:
            self._progress.update(self.snapshot(trials, workers))
            self.ended.mark_shown()
            # Drawing thousands of trials is slow, so it is done less often.
            after = self._now()
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
        seconds = self._now()
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


KEPT_ROWS = 12
"""The number of best trials kept for displays; no display shows more."""


class EndedTrials:
    """Keeps what displays need about a run's ended trials; see the module's docstring."""

    def __init__(self, ranking: Ranking) -> None:
        self.counts: Counter[str] = Counter()
        """The number of ended trials by status."""
        self.first_failure: str | None = None
        """The error of the first trial that failed or diverged."""
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
            if self.first_failure is None:
                self.first_failure = record.error or ""
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

    def __len__(self) -> int:
        return self.counts.total()

    def list_rows(self) -> list[TrialRow]:
        """Return the best trials, the last failure and those that ended since `mark_shown`."""
        rows = [*(row for _, _, row in self._best), *self._unshown]
        rows += [row for row in (self._leader_row, self._last_failure) if row is not None]
        by_number = {row.number: row for row in rows}
        return [by_number[number] for number in sorted(by_number)]

    def count_without(self, rows: Iterable[TrialRow]) -> Counter[str]:
        return self.counts - Counter(row.status for row in rows if row.number in self)

    def mark_shown(self) -> None:
        """Note that displays have shown all trials that ended so far."""
        self._unshown.clear()

    def _shown_rank(self, row: TrialRow) -> float:
        value = fmt.metric_value(row.metrics, self._ranking.metric)
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if self._ranking.mode == "max" else value
