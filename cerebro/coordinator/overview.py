"""Track a run's progress, how busy its workers are, and the ended trials worth showing.

The store has the details of ended trials. A run of 100,000 trials must not keep 100,000
configurations and histories in memory only to count them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cerebro.coordinator.trial import LiveTrial
from cerebro.report import format as fmt
from cerebro.report.progress import Silent
from cerebro.report.snapshot import Snapshot, TrialRow
from cerebro.run.records import ENDED, Ranking, Status, TrialRecord, best_score

PROGRESS_SECONDS = 0.25

PROGRESS_SPACING = 50
"""Displays take at most about 1 / this number of the coordinator's time."""


class Overview:
    """Counts work and shows it, at most a few times a second.

    Parameters
    ----------
    ranking
        What ranks trials.
    folder
        The run's folder, which displays show.
    progress
        The display.
    now
        Seconds since the run's start.
    """

    def __init__(
        self, ranking: Ranking, folder: Path, progress: Any, now: Callable[[], float]
    ) -> None:
        self._ranking = ranking
        self._folder = folder
        self._progress = progress
        self._now = now
        self._next_show = 0.0
        self.ended = EndedTrials(ranking)
        self.first_unit: float | None = None
        """The time at which the first unit was dispatched."""
        self.busy_seconds = 0.0
        self.units_done = 0
        self.units_planned = 0
        self.units_to_come = 0
        """Units of trials that are still to be suggested."""
        self.paused = False
        """Whether a command has paused the run."""
        self.waited = 0.0
        """Seconds in which the run waited to be resumed."""
        self.units_done_before = 0
        """Units that earlier processes have done, which do not count as this one's work."""

    def unit_begins(self) -> None:
        if self.first_unit is None:
            self.first_unit = self._now()

    def unit_done(self, seconds: float) -> None:
        self.busy_seconds += seconds
        self.units_done += 1

    def started(self, trials: Iterable[LiveTrial], workers: int) -> None:
        """Show the run for the first time."""
        self._progress.run_started(self.snapshot(trials, workers))
        self.ended.shown()

    def show(self, trials: Iterable[LiveTrial], workers: int) -> None:
        """Show the run, unless it was shown a moment ago."""
        if isinstance(self._progress, Silent):
            self.ended.shown()
            return
        before = self._now()
        if before >= self._next_show:
            self._progress.update(self.snapshot(trials, workers))
            self.ended.shown()
            # Drawing thousands of trials takes a while, so it is done less often.
            after = self._now()
            self._next_show = after + max(PROGRESS_SECONDS, PROGRESS_SPACING * (after - before))

    def show_waiting(self, trials: Iterable[LiveTrial], workers: int) -> None:
        """Show a run in which nothing happens until a command or the searcher resumes it."""
        self._progress.update(self.snapshot(trials, workers))

    def snapshot(self, trials: Iterable[LiveTrial], workers: int) -> Snapshot:
        """Return the data that progress displays draw."""
        ended = self.ended
        live = [trial for trial in trials if trial.record.number not in ended]
        rows = sorted(
            [*ended.rows(), *(t.row(self._ranking) for t in live)], key=lambda row: row.number
        )
        seconds = self._now()
        before = self.units_done_before
        planned = self.units_planned + self.units_to_come
        share = min(1.0, (before + self.units_done) / max(1, planned))
        own = min(1.0, self.units_done / max(1, planned - before))
        # Neither the workers' start-up nor waiting counts as idle time.
        training = 0.0
        if self.first_unit is not None:
            training = max(0.0, seconds - self.first_unit - self.waited)
        capacity = training * max(1, workers)
        return Snapshot(
            trials=rows,
            share_done=share,
            seconds=seconds,
            seconds_left=training * (1 - own) / own if own > 0.02 else None,
            busy=min(1.0, self.busy_seconds / capacity) if capacity > 0 else 0.0,
            workers=workers,
            best=self._best([trial.record for trial in live]),
            metric=self._ranking.metric,
            mode=self._ranking.mode,
            path=str(self._folder),
            paused=self.paused,
            more=ended.counts_without(rows),
        )

    def _best(self, live: list[TrialRecord]) -> int | None:
        """Return the number of the best trial, ended or not; the lowest if several tie."""
        found = self.ended.leader, best_score(live, self._ranking)
        return min((entry for entry in found if entry is not None), default=(0.0, None))[1]


KEPT_ROWS = 12
"""The number of best trials kept for display; no display shows more."""


class EndedTrials:
    """The ended trials of a run; see the module's text.

    Parameters
    ----------
    ranking
        What ranks trials.
    """

    def __init__(self, ranking: Ranking) -> None:
        self.counts: Counter[str] = Counter()
        """The number of ended trials by status."""
        self.first_failure: str | None = None
        """Why the first unsuccessful trial ended."""
        self.leader: tuple[float, int] | None = None
        """The best of them: its metric as a number to minimize, and its number."""
        self._ranking = ranking
        self._status = bytearray()  # by number: 1 + the index in ENDED; 0: has not ended
        self._leader_row: TrialRow | None = None
        self._best: list[tuple[float, int, TrialRow]] = []  # a heap, the worst first
        self._unshown: list[TrialRow] = []

    def add(self, record: TrialRecord, row: TrialRow) -> None:
        """Add a trial that has ended."""
        number = record.number
        self._status.extend(bytes(max(0, number + 1 - len(self._status))))
        self._status[number] = 1 + ENDED.index(record.status)
        self.counts[record.status] += 1
        if record.status in ("failed", "diverged") and self.first_failure is None:
            self.first_failure = record.error or ""
        rank = best_score([record], self._ranking)
        if rank is not None and (self.leader is None or rank < self.leader):
            self.leader, self._leader_row = rank, row
        self._unshown.append(row)
        # If trials tie, the lowest number is the better one: it leaves the heap last.
        entry = (-self._shown_rank(row), -number, row)
        if len(self._best) < KEPT_ROWS:
            heapq.heappush(self._best, entry)
        else:
            heapq.heappushpop(self._best, entry)

    def status_of(self, number: int) -> Status | None:
        """Return the status that a trial ended with; None if it has not ended."""
        code = self._status[number] if 0 <= number < len(self._status) else 0
        return ENDED[code - 1] if code else None

    def __contains__(self, number: int) -> bool:
        return self.status_of(number) is not None

    def __len__(self) -> int:
        return self.counts.total()

    def rows(self) -> list[TrialRow]:
        """Return the rows of the best, and of those that ended since :meth:`shown`, by number."""
        chosen = {row.number: row for _, _, row in self._best}
        chosen.update((row.number, row) for row in self._unshown)
        if self._leader_row is not None:
            chosen[self._leader_row.number] = self._leader_row
        return [chosen[number] for number in sorted(chosen)]

    def counts_without(self, rows: Iterable[TrialRow]) -> Counter[str]:
        """Count the ended trials that have no row, by status."""
        return self.counts - Counter(row.status for row in rows if row.number in self)

    def shown(self) -> None:
        """Note that displays have shown all trials that ended so far."""
        self._unshown.clear()

    def _shown_rank(self, row: TrialRow) -> float:
        """Return the number that displays sort by."""
        value = fmt.metric_value(row.metrics, self._ranking.metric)
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if self._ranking.mode == "max" else value
