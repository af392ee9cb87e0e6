"""Forecast how much work a run has left, and how long it takes.

Work is counted in epochs of one trial; a unit is a fraction of an epoch. The remaining work depends
on three parts:

- *Open trials* train until their target epochs, unless they are stopped earlier.
- *Trials to come* are announced by the searcher (`Searcher.epochs_to_come`; exact for successive
  halving, Hyperband and PBT) or follow from the number of trials.
- *Pruning* by a searcher, a rule, a failure or the user reduces both. Its effect is estimated from
  the trials so far: for each number of epochs, the share of trials that ended there among those
  that reached it (Kaplan and Meier's estimator). Later trials have a larger weight, because
  searchers become stricter as they learn. Each share is smoothed towards the mean of all shares,
  with the weight of one trial, so that a single stop does not dominate.

Each trial has the pace of its latest epoch. Trials without one get the mean of all trials. A
worker's first unit is not timed, because it imports libraries. The time left is that of the best
schedule (McNaughton's): the work divided by the number of workers, assuming that they stay as busy
as they have been, but at least the time of the longest trial alone.

Pure logic: no clocks or files.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from cerebro.coordinator.trial import LiveTrial
from cerebro.run.records import ENDED

FORGET = 0.9
"""The factor of a decision's weight for each later decision at the same number of epochs."""

MIN_UNITS = 2
"""The number of units per worker that must be timed before a forecast is made."""


@dataclass(frozen=True)
class EpochParts:
    """Describes an epoch: training units of equal size, then one validation unit, if any.

    `evaluation` is the validation's share of an epoch's work, from 0 to 1.
    """

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
    """The work of trials that the searcher has not suggested yet.

    `epochs` count beyond the targets of the trials so far; `trials` is used if `epochs` is None.
    """

    epochs: float | None = None
    trials: float | None = None


@dataclass(frozen=True)
class Forecast:
    """The remaining work of a run, in epochs of one trial and in seconds; None if unknown."""

    epochs: float | None = None
    seconds: float | None = None


class Pruning:
    """Estimates the share of trials that end after each number of epochs, from recent trials."""

    def __init__(self) -> None:
        self._ended: defaultdict[int, float] = defaultdict(float)
        self._decided: defaultdict[int, float] = defaultdict(float)

    def note_passed(self, epochs: int) -> None:
        """Note that a trial with `epochs` epochs has trained another epoch."""
        self._note_decision(epochs, 0.0)

    def note_ended(self, epochs: int) -> None:
        """Note that a trial ended or paused after `epochs` epochs, before its last epoch."""
        self._note_decision(epochs, 1.0)

    def note_resumed(self, epochs: int) -> None:
        """Note that a trial that paused after `epochs` epochs has been resumed."""
        self._ended[epochs] = max(0.0, self._ended[epochs] - 1.0)
        self._decided[epochs] = max(0.0, self._decided[epochs] - 1.0)

    def _note_decision(self, epochs: int, ended: float) -> None:
        self._ended[epochs] = FORGET * self._ended[epochs] + ended
        self._decided[epochs] = FORGET * self._decided[epochs] + 1.0

    def expect_further(self, epochs: int) -> FurtherEpochs:
        """Return how many further epochs to expect of a trial whose target is `epochs`."""
        usual = sum(self._ended.values()) / max(1.0, sum(self._decided.values()))
        shares = {
            done: (self._ended.get(done, 0.0) + usual) / (decided + 1.0)
            for done, decided in self._decided.items()
            if done < epochs
        }
        return FurtherEpochs(epochs, usual, shares)


class FurtherEpochs:
    """Gives how many further epochs to expect of a trial, by the number of those already trained.

    The number is that before the decision whether the trial continues. The cost depends on the
    number of decisions so far, not on the target, which may be a million epochs. `shares` has the
    share of trials that end, by number of epochs, and `usual` the share where there were no
    decisions.
    """

    def __init__(self, target: int, usual: float, shares: Mapping[int, float]) -> None:
        self._usual = usual
        self._known = [*sorted(shares), target]
        self._further = {target: 0.0}
        for done, after in reversed(list(pairwise(self._known))):
            self._further[done] = (1.0 - shares[done]) * (1.0 + self._value_before(after, done + 1))

    def __getitem__(self, done: int) -> float:
        return self._value_before(self._known[bisect_left(self._known, done)], done)

    def _value_before(self, known: int, done: int) -> float:
        """Return the value for `done`; there were no decisions from there to `known`."""
        count, further = known - done, self._further[known]
        if count == 0 or self._usual == 0.0:
            return count + further
        if self._usual == 1.0:
            return 0.0
        # Each of them is (1 - usual) * (1 + the next one): a geometric series.
        ended = -math.expm1(count * math.log1p(-self._usual))
        return (1.0 - ended) * further + (1.0 - self._usual) * ended / self._usual


class Paces:
    """Keeps the pace of each trial: the seconds per epoch, from its latest epoch."""

    def __init__(self, parts: EpochParts) -> None:
        self._parts = parts
        self._latest: dict[int, deque[tuple[float, float]]] = {}  # by trial: seconds, share
        self._pace: dict[int, float] = {}
        self._gone = 0  # trials that have ended
        self._sum_of_gone = 0.0
        self.units = 0
        """The number of units that were timed."""

    def add(self, trial: int, step: int, seconds: float) -> None:
        latest = self._latest.setdefault(trial, deque(maxlen=self._parts.units))
        latest.append((seconds, self._parts.share_of_unit(step)))
        self._pace[trial] = sum(s for s, _ in latest) / sum(share for _, share in latest)
        self.units += 1

    def take_over(self, trial: int, seconds: float) -> None:
        """Start a trial with the seconds of an epoch that an earlier process trained."""
        if seconds > 0:
            for step in range(self._parts.units):
                self.add(trial, step, seconds * self._parts.share_of_unit(step))

    def forget(self, trial: int) -> None:
        """Forget an ended trial, but keep its pace in the mean."""
        pace = self._pace.pop(trial, None)
        self._latest.pop(trial, None)
        if pace is not None:
            self._gone += 1
            self._sum_of_gone += pace

    def pace_of(self, trial: int) -> float | None:
        """Return the pace of a trial; None before its first unit."""
        return self._pace.get(trial)

    @property
    def mean(self) -> float | None:
        count = self._gone + len(self._pace)
        return (self._sum_of_gone + sum(self._pace.values())) / count if count else None


class Forecaster:
    """Observes a run's units and trials and forecasts the rest; see the module's docstring.

    `epochs` is the number of epochs of a trial that is not stopped.
    """

    def __init__(self, parts: EpochParts, epochs: int) -> None:
        self.parts = parts
        self.pruning = Pruning()
        self._epochs = epochs
        self._paces = Paces(parts)
        self._began: dict[int, tuple[int, float]] = {}  # by worker: trial, start of its unit
        self._of_trial: dict[int, float] = {}  # by trial: the start time of its running unit
        self._warm: set[int] = set()  # workers that have done a unit
        self._busy = 0.0  # seconds of ended units, summed over the workers
        self._paused: set[int] = set()
        self._resumes = False
        self.done = 0.0
        """The number of epochs trained so far, including those of earlier processes."""

    # --- events ----------------------------------------------------------

    def unit_begins(self, trial: int, worker: int, now: float) -> None:
        self._began[worker] = trial, now
        self._of_trial[trial] = now

    def unit_ends(self, worker: int, now: float, step: int | None = None) -> None:
        """Note that a worker's unit has ended; without `step`, the unit failed or was lost."""
        trial, began = self._began.pop(worker, (None, now))
        if trial is None:
            return
        del self._of_trial[trial]
        self._busy += now - began
        if step is not None:
            if worker in self._warm:
                self._paces.add(trial, step, now - began)
            self._warm.add(worker)
            self.done += self.parts.share_of_unit(step)

    def trial_went_back(self, before: int, position: int) -> None:
        """Note that a trial lost units; positions are counted as in `LiveTrial`."""
        self.done -= self.parts.count_epochs(before) - self.parts.count_epochs(position)

    def epoch_done(self, trial: LiveTrial) -> None:
        self.pruning.note_passed(trial.record.done - 1)

    def trial_restored(self, trial: LiveTrial) -> None:
        """Note a trial that an earlier process has trained."""
        record = trial.record
        for done in range(record.first_epoch, record.done):
            self.pruning.note_passed(done)
        if record.epochs:
            self._paces.take_over(record.number, record.epochs[-1].seconds)
        if record.status in ("stopped", "failed", "diverged"):
            self.pruning.note_ended(record.done)
        elif trial.paused_by_searcher:
            self.trial_paused(trial)
        if record.status in ENDED:
            self._paces.forget(record.number)
        # Ended trials have no position.
        trained = self.parts.count_epochs(trial.position) - self.parts.count_epochs(
            trial.first_position
        )
        self.done += max(trained, record.done - record.first_epoch)

    def trial_ended(self, trial: LiveTrial) -> None:
        record = trial.record
        if record.done < self._epochs and record.number not in self._paused:
            self.pruning.note_ended(record.done)
        self._paused.discard(record.number)
        self._paces.forget(record.number)

    def trial_paused(self, trial: LiveTrial) -> None:
        self._paused.add(trial.record.number)
        self.pruning.note_ended(trial.record.done)

    def trial_resumed(self, trial: LiveTrial) -> None:
        self._resumes = True
        if trial.record.number in self._paused:
            self._paused.remove(trial.record.number)
            self.pruning.note_resumed(trial.record.done)

    # --- the forecast ----------------------------------------------------

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
        exact = to_come.epochs is not None
        further: dict[int, FurtherEpochs] = {}
        mean = self._paces.mean
        work = seconds = longest = 0.0
        for trial in trials:
            record = trial.record
            if not record.is_open or trial.paused_by_searcher:
                continue
            target = record.target_epochs
            if not exact and self._resumes:
                target = max(target, self._epochs)
            if target not in further and not exact:
                further[target] = self.pruning.expect_further(target)
            epochs = self._count_epochs_left(trial, target, further.get(target))
            work += epochs
            pace = self._paces.pace_of(record.number) or mean or 0.0
            trial_seconds = epochs * pace
            if record.number in self._of_trial:
                unit = pace * self.parts.share_of_unit(trial.position % self.parts.units)
                trial_seconds -= min(unit, now - self._of_trial[record.number])
            seconds += trial_seconds
            longest = max(longest, trial_seconds)
        coming = to_come.epochs
        if coming is None and to_come.trials is not None:
            epochs_per_trial = self.pruning.expect_further(self._epochs)[0]
            coming = to_come.trials * epochs_per_trial
        if coming is None:
            return Forecast()
        work += coming
        if mean is None or self._paces.units < MIN_UNITS * workers:
            return Forecast(work)
        seconds += coming * mean
        busy = self.busy_seconds(now) / capacity if capacity > 0 else 1.0
        rate = max(1, workers) * min(1.0, max(0.05, busy))
        return Forecast(work, max(seconds / rate, longest))

    def _count_epochs_left(
        self, trial: LiveTrial, target: int, further: FurtherEpochs | None
    ) -> float:
        at = self.parts.count_epochs(trial.position)
        if further is None:
            return max(0.0, target - at)
        done, step = divmod(trial.position, self.parts.units)
        if done >= target:
            return 0.0
        if step == 0 and trial.reported < done - 1:  # the searcher has not decided on it yet
            return further[done]
        return done + 1 - at + further[done + 1]
