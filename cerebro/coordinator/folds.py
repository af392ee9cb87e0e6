"""The configurations of a search with folds, as the searcher and the user deal with them.

Between the search loop, which speaks of configurations, and `LiveTrials`, whose trials are
folds. The folds of a configuration go from epoch to epoch together: none begins an epoch before
all have finished the one before, and the searcher, or the rule that stops early, has heard their
means. So what is decided does not depend on timing, and no fold trains what a decision would have
spared. A fold that fails ends its configuration: the others finish the epoch that it failed in,
which may fail as well, and of the folds that failed the first one is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from cerebro.coordinator.callbacks import Hooks
from cerebro.coordinator.failures import ALIKE_FAILURES
from cerebro.coordinator.overview import Overview
from cerebro.coordinator.trial import LiveTrial
from cerebro.coordinator.trials import LiveTrials
from cerebro.errors import InputError
from cerebro.report.snapshot import TrialRow
from cerebro.run.records import (
    ENDED,
    Ranking,
    Status,
    TrialRecord,
    configuration,
    failed_fold,
    update,
)
from cerebro.run.settings import Settings
from cerebro.run.store import Answers
from cerebro.searchers.base import Suggestion


@dataclass
class FoldedTrial(LiveTrial):
    """A configuration: its record is made of those of its folds."""

    folds: list[LiveTrial] = field(default_factory=list)

    def row(self, by: Ranking) -> TrialRow:
        update(self.record)
        running = [fold for fold in self.folds if fold.worker is not None]
        self.worker = running[0].worker if running else None
        speeds = [fold.rows_per_second for fold in self.folds if fold.rows_per_second is not None]
        self.rows_per_second = sum(speeds) / len(speeds) if speeds else None
        return super().row(by)


class FoldedTrials:
    """All configurations of a run by number; see the module's text.

    Parameters
    ----------
    trials
        The folds.
    """

    def __init__(
        self, settings: Settings, trials: LiveTrials, overview: Overview, hooks: Hooks
    ) -> None:
        self.by_number: dict[int, FoldedTrial] = {}
        """All that are not forgotten; always the first `ALIKE_FAILURES`."""
        self.forgotten: Counter[str] = Counter()
        """How many are, by status."""
        self._settings = settings
        self._trials = trials
        self._overview = overview
        self._hooks = hooks
        self._each = settings.trials_each
        self._over: set[int] = set()  # ended, and perhaps of no more use
        trials.states.best_epoch = self._best_epoch
        hooks.choose = self._whom

    # --- what the search loop does -----------------------------------------

    def add(self, suggestion: Suggestion) -> LiveTrial:
        """Add a new configuration or a clone of one; each fold is a clone of the same fold."""
        folds = [self._trials.add(self._of_fold(suggestion, fold)) for fold in range(self._each)]
        trial = self._take(folds)
        if trial.record.status in ENDED:  # it cannot be trained
            self._hooks.tell_of(trial.record, "on_trial_start")
            self._note_end(trial)
        return trial

    def go_on(self, trial: LiveTrial) -> None:
        """Let all folds train the next epoch."""
        for fold in self._passed_on(trial):
            self._trials.go_on(fold)

    def pause(self, trial: LiveTrial) -> None:
        """The searcher lets the configuration wait."""
        for fold in self._passed_on(trial):
            self._trials.pause(fold)
        update(trial.record)

    def shelve(self, trial: LiveTrial) -> None:
        """Free what a paused configuration holds."""
        for fold in self._passed_on(trial):
            self._trials.shelve(fold)

    def resume(self, trial: LiveTrial, epochs: int) -> None:
        """The searcher lets a configuration go on that it had paused."""
        for fold in self._passed_on(trial):
            self._trials.resume(fold, epochs)
        update(trial.record)

    def wake(self, trial: LiveTrial) -> None:
        """The searcher has paused the configuration and does so no longer."""
        trial.asleep = False
        self._over.add(trial.record.number)
        for fold in self._folds(trial):
            if fold.record.number in self._trials.by_number:
                self._trials.wake(fold)

    def end(self, trial: LiveTrial, status: Status) -> None:
        """End a configuration for good."""
        for fold in self._passed_on(trial):
            self._trials.end(fold, status)
        update(trial.record)
        self._note_end(trial)

    def end_paused(self) -> None:
        """Nobody will resume the configurations that the searcher has paused: they are over."""
        for trial in self.by_number.values():
            if trial.asleep and trial.record.status not in ENDED:
                self.end(trial, "stopped")

    def status_of(self, number: Any) -> Status | None:
        """What a configuration is, forgotten or not; None where there is none."""
        trial = self.by_number.get(number)
        if trial is not None:
            return trial.record.status
        # A searcher may ask for anything.
        return self._overview.ended.status_of(int(number)) if isinstance(number, Integral) else None

    def recall(self, number: int) -> LiveTrial | None:
        """Return a configuration, from the store if it was forgotten; None if there is none."""
        if number in self.by_number or self.status_of(number) is None:
            return self.by_number.get(number)
        folds = [self._trials.recall(number * self._each + fold) for fold in range(self._each)]
        trial = self._take([fold for fold in folds if fold is not None])
        trial.reported = trial.record.done - 1
        self.forgotten[trial.record.status] -= 1
        self._over.add(number)
        return trial

    def __len__(self) -> int:
        return len(self.by_number) + self.forgotten.total()

    # --- what the coordinator says ------------------------------------------

    def hear(self, fold: LiveTrial) -> LiveTrial | None:
        """A fold has finished an epoch, or ended.

        Returns
        -------
        LiveTrial or None
            The configuration, if with it all folds have finished the epoch, or all have ended.
        """
        trial = self.by_number.get(fold.record.number // self._each)
        if trial is None or trial.record.status in ENDED:
            return None
        culprit = failed_fold(trial.record.folds)
        if culprit is not None:
            for other in trial.folds:
                if other.record.status not in ENDED and other.record.done > culprit.done:
                    self._trials.end(other, "stopped")
        new = update(trial.record)
        for epoch in new:
            trial.history.append(epoch.to_history())
            self._hooks.tell_of(trial.record, "on_epoch_end", dict(epoch.metrics))
        if trial.record.status in ENDED:
            self._note_end(trial)
            return trial
        return trial if new else None

    def named(self, number: int, what: str) -> tuple[LiveTrial, list[LiveTrial]]:
        """Return a configuration that has not ended, and its folds that have not.

        Raises
        ------
        InputError
            If there is no such configuration, or it has ended; `what` says what cannot be done.
        """
        trial, status = self.by_number.get(number), self.status_of(number)
        if status is None:
            raise InputError(f"there is no trial {number}: it cannot be {what}")
        if trial is None or status in ENDED:
            raise InputError(f"trial {number} is {status}: it cannot be {what}")
        return trial, [fold for fold in trial.folds if fold.record.status not in ENDED]

    def siblings(self, fold: LiveTrial) -> list[LiveTrial]:
        """The other folds of a fold's configuration that have not ended."""
        trial = self.by_number.get(fold.record.number // self._each)
        return [] if trial is None else [f for f in trial.folds if f.record.status not in ENDED]

    def restore(self, folds: Sequence[LiveTrial], answers: Mapping[int, Answers]) -> None:
        """Take in the trials of an earlier process; `answers` are about configurations."""
        each = self._each
        spread = {
            number * each + fold: answer
            for number, answer in answers.items()
            for fold in range(each)
        }
        self._trials.restore(folds, spread)
        for first in range(0, len(folds), each):
            trial = self._take(folds[first : first + each])
            trial.reported, trial.asleep = folds[first].reported, folds[first].asleep
            if trial.record.status in ENDED:
                self._overview.ended.add(trial.record, trial.row(self._settings.ranking))
            elif any(fold.history for fold in trial.folds):  # else a rule begins anew
                trial.history = [epoch.to_history() for epoch in trial.record.epochs]

    def take_up(self) -> None:
        """Of a resumed run: epochs may have been found, and folds may have failed."""
        for trial in self.by_number.values():
            self.hear(trial.folds[0])

    def forget_ended(self, is_expected: Callable[[int], bool]) -> list[int]:
        """Forget what has ended and nobody will ask for; return the folds that are forgotten.

        Parameters
        ----------
        is_expected
            Whether a report of a configuration is still to be delivered.
        """
        gone = self._trials.forget_ended(lambda number: is_expected(number // self._each))
        self._trials.ended.shown()
        self._over.update(number // self._each for number in gone)
        for number in list(self._over):
            trial = self.by_number.get(number)
            if trial is not None and (trial.asleep or is_expected(number)):
                continue
            self._over.discard(number)
            if trial is not None and number >= ALIKE_FAILURES and trial.record.status in ENDED:
                del self.by_number[number]
                self.forgotten[trial.record.status] += 1
        return gone

    # --- inside --------------------------------------------------------------

    def _take(self, folds: list[LiveTrial] | Sequence[LiveTrial]) -> FoldedTrial:
        record = configuration([fold.record for fold in folds])
        trial = FoldedTrial(record, reported=record.first_epoch - 1, folds=list(folds))
        self.by_number[record.number] = trial
        return trial

    def _of_fold(self, suggestion: Suggestion, fold: int) -> Suggestion:
        if suggestion.parent is None:
            return suggestion
        parent = self.recall(suggestion.parent)
        number = suggestion.parent * self._each + fold
        of_fold = self._trials.recall(number)
        assert parent is not None and parent.told is not None and of_fold is not None
        of_fold.reported = parent.told  # where one fold of them has failed others may be further
        return replace(suggestion, parent=number)

    def _folds(self, trial: LiveTrial) -> list[LiveTrial]:
        return self.by_number[trial.record.number].folds

    def _passed_on(self, trial: LiveTrial) -> list[LiveTrial]:
        """The folds that have not ended; they know what the searcher has said."""
        for fold in self._folds(trial):
            fold.reported, fold.asleep = trial.reported, trial.asleep
        return [fold for fold in self._folds(trial) if fold.record.status not in ENDED]

    def _note_end(self, trial: LiveTrial) -> None:
        self._overview.ended.add(trial.record, trial.row(self._settings.ranking))
        self._hooks.tell_of(trial.record, "on_trial_end")

    def _best_epoch(self, record: TrialRecord) -> int | None:
        """The epoch whose state a fold keeps as the best: that of its configuration."""
        settings = self._settings
        trial = self.by_number.get(record.number // self._each)
        return None if trial is None else trial.record.best_epoch(settings.metric, settings.mode)

    def _whom(self, record: TrialRecord, hook: str) -> TrialRecord | None:
        """Whom callbacks are told of, instead of a trial: None for nobody."""
        if record.folds or hook == "on_unit_end":
            return record
        trial = self.by_number.get(record.number // self._each)
        if hook != "on_trial_start" or trial is None or trial.started:
            return None  # the configuration's turn comes by itself
        trial.started = True
        update(trial.record)
        return trial.record
