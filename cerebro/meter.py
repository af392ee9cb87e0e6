"""How far a run is and how busy its workers are: what progress displays draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cerebro.ended_trials import EndedTrials
from cerebro.live_trial import LiveTrial
from cerebro.report.progress import Silent
from cerebro.report.snapshot import Snapshot
from cerebro.settings import Settings
from cerebro.trial import TrialRecord, best_score

PROGRESS_SECONDS = 0.25
PROGRESS_SPACING = 50
"""Progress takes at most about one part in so many of the coordinator's time."""


class Meter:
    """Counts work and shows it, at most a few times a second.

    Parameters
    ----------
    settings
        The search's.
    progress
        The display.
    now
        Seconds since the run's start.
    """

    def __init__(self, settings: Settings, progress: Any, now: Callable[[], float]) -> None:
        self._settings = settings
        self._progress = progress
        self._now = now
        self._next_show = 0.0
        self.ended = EndedTrials.of(settings)
        self.first_unit: float | None = None
        """When the first unit was dispatched."""
        self.busy_seconds = 0.0
        self.units_done = 0
        self.units_planned = 0
        self.units_to_come = 0
        """Of trials that the searcher has not been asked for yet."""
        self.paused = False
        """Whether the run was told to pause."""
        self.rested = 0.0
        """Seconds in which the run waited to be told to go on."""
        self.units_done_before = 0
        """By earlier processes: work that counts as done, but not in this one's time."""

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
        """Show the run as it is, unless that was done just now."""
        if isinstance(self._progress, Silent):
            self.ended.shown()
            return
        before = self._now()
        if before >= self._next_show:
            self._progress.update(self.snapshot(trials, workers))
            self.ended.shown()
            # With thousands of trials a picture takes a while: it is drawn less often then.
            after = self._now()
            self._next_show = after + max(PROGRESS_SECONDS, PROGRESS_SPACING * (after - before))

    def rest(self, trials: Iterable[LiveTrial], workers: int) -> None:
        """Show a run in which nothing happens until it is told to go on."""
        self._progress.update(self.snapshot(trials, workers))

    def snapshot(self, trials: Iterable[LiveTrial], workers: int) -> Snapshot:
        """What progress displays draw."""
        ended = self.ended
        live = [trial for trial in trials if trial.record.number not in ended]
        rows = sorted(
            [*ended.rows(), *(t.row(self._settings) for t in live)], key=lambda row: row.number
        )
        seconds = self._now()
        before = self.units_done_before
        planned = self.units_planned + self.units_to_come
        share = min(1.0, (before + self.units_done) / max(1, planned))
        own = min(1.0, self.units_done / max(1, planned - before))
        # Workers' start-up and rests count neither as work nor as idleness.
        training = 0.0
        if self.first_unit is not None:
            training = max(0.0, seconds - self.first_unit - self.rested)
        capacity = training * max(1, workers)
        settings = self._settings
        return Snapshot(
            trials=rows,
            share_done=share,
            seconds=seconds,
            seconds_left=training * (1 - own) / own if own > 0.02 else None,
            busy=min(1.0, self.busy_seconds / capacity) if capacity > 0 else 0.0,
            workers=workers,
            best=self._best([trial.record for trial in live]),
            metric=settings.metric,
            mode=settings.mode,
            path=str(settings.folder),
            paused=self.paused,
            more=ended.counts_without(rows),
        )

    def _best(self, live: list[TrialRecord]) -> int | None:
        """Number of the best trial, ended or not; of equals the lowest."""
        settings = self._settings
        found = (
            self.ended.leader,
            best_score(live, settings.metric, settings.mode, settings.select),
        )
        return min((entry for entry in found if entry is not None), default=(0.0, None))[1]
