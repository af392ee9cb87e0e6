"""Forecast how much work a run has left, and how long it takes.

Work is counted in epochs of one trial; a unit is a fraction of an epoch. Open trials train until
their target epochs, and the searcher announces how much is still to come
(`Searcher.epochs_to_come`), or how many trials. Where only trials are known, those that are pruned
train less: the rest is multiplied by the mean share of their epochs that ended and paused trials
have trained.

The time left is the work multiplied by the mean seconds per epoch of the units so far, and divided
by the number of workers, which stay as busy as they have been; but at least the time of the longest
trial alone.

Pure logic: no clocks or files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cerebro.coordinator.trial import LiveTrial
from cerebro.run.records import ENDED

MIN_UNITS = 2
"""The number of units per worker that must be timed before a forecast is made."""


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
        """Return the number of epochs trained after `position` units."""
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
    """Observes a run's units and trials and forecasts the rest; see the module's docstring."""

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
        self.done = 0.0
        """The number of epochs trained so far, including those of earlier processes."""

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
        """Note a trial that an earlier process has trained."""
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

    def busy_seconds(self, now: float) -> float:
        return self._busy + sum(now - began for _, began in self._began.values())

    def forecast(
        self,
        trials: Iterable[LiveTrial],
        to_come: ToCome,
        workers: int,
        now: float,
        capacity: float,
    ) -> Forecast:
        """Return the remaining work and time.

        `now` is on the clock of `unit_begins`. `capacity` is how many seconds workers could have
        worked since the first unit, summed over the workers.
        """
        unended = [trial for trial in trials if trial.record.is_open]
        paused = [trial for trial in unended if trial.paused_by_searcher]
        active = [trial for trial in unended if not trial.paused_by_searcher]
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
        for trial in active:
            rest = trial.record.target_epochs - self.parts.count_epochs(trial.position)
            left[trial.record.number] = share * max(0.0, rest)
        work = coming + sum(left.values())
        if not self._timed_epochs or self._timed_units < MIN_UNITS * workers:
            return Forecast(work)
        pace = self._timed_seconds / self._timed_epochs
        seconds = {number: epochs * pace for number, epochs in left.items()}
        positions = {trial.record.number: trial.position for trial in active}
        for number, began in self._began.values():
            if number in seconds:
                step = positions[number] % self.parts.units
                passed = min(pace * self.parts.share_of_unit(step), now - began)
                seconds[number] = max(0.0, seconds[number] - passed)
        busy = self.busy_seconds(now) / capacity if capacity > 0 else 1.0
        rate = max(1, workers) * min(1.0, max(0.05, busy))
        together = (sum(seconds.values()) + coming * pace) / rate
        return Forecast(work, max(together, *seconds.values(), 0.0))
