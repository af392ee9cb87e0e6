"""Present the folds of each configuration to the searcher and the user as one trial.

The folds of a configuration advance together: none begins an epoch until all have finished the
previous one, and the searcher or `EarlyStopping` has received the mean metrics. So decisions do not
depend on timing, and no fold trains an unnecessary epoch. A fold that fails ends its configuration,
once the other folds have finished the epoch in which it failed; of several that fail in it, the
error names the one with the lowest number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cerebro._core as _core
from cerebro.coordinator.overview import EndedTrials, Overview
from cerebro.coordinator.trial import LiveTrial, OfUser
from cerebro.coordinator.trials import LiveTrials, TrialTable
from cerebro.coordinator.user import Hooks
from cerebro.report.progress import TrialRow
from cerebro.run.records import (
    ENDED,
    Ranking,
    Status,
    TrialRecord,
    failed_fold,
    make_configuration,
    update_configuration,
)
from cerebro.run.settings import Settings
from cerebro.run.store import LastDecision, Store
from cerebro.searchers.base import Suggestion
from cerebro.worker.messages import RunContext


@dataclass
class FoldedTrial(LiveTrial):
    """A configuration with its folds; its record combines the records of the folds."""

    folds: list[LiveTrial] = field(default_factory=list)

    @property
    def in_training(self) -> Sequence[LiveTrial]:
        return self.folds

    def row(self, by: Ranking) -> TrialRow:
        update_configuration(self.record)
        running = [fold for fold in self.folds if fold.worker is not None]
        self.worker = running[0].worker if running else None
        speeds = [fold.rows_per_second for fold in self.folds if fold.rows_per_second is not None]
        self.rows_per_second = sum(speeds) / len(speeds) if speeds else None
        return super().row(by)


class FoldedTrials(TrialTable[FoldedTrial]):
    """The configurations for the search loop; `folds` are the trials that workers train."""

    def __init__(
        self,
        settings: Settings,
        context: RunContext,
        store: Store,
        schedule: _core.Schedule,
        overview: Overview,
        hooks: Hooks,
        pinned: Collection[tuple[int, int]],
    ) -> None:
        super().__init__(overview.ended)
        self._ranking = settings.ranking
        self._hooks = hooks
        self._each = settings.trials_per_config
        self.folds = LiveTrials(
            settings,
            context,
            store,
            schedule,
            overview,
            EndedTrials(settings.ranking),
            self._notify_of_fold,
            stepwise=True,
            best_epoch=self._find_best_epoch,
            pinned=pinned,
        )

    def add(self, suggestion: Suggestion, of_user: OfUser | None = None) -> LiveTrial:
        """Add a configuration, or a clone, whose folds are clones of its parent's folds."""
        folds = [
            self.folds.add(self._suggest_fold(suggestion, fold, of_user), of_user)
            for fold in range(self._each)
        ]
        trial = self._add_folds(folds)
        if trial.record.status in ENDED:  # its configuration is invalid
            self._hooks.notify_of(trial.record, "on_trial_start")
            self._note_end(trial)
        return trial

    def extend(self, trial: LiveTrial) -> None:
        self._decide(trial, self.folds.extend)

    def pause(self, trial: LiveTrial) -> None:
        self._decide(trial, self.folds.pause)
        update_configuration(trial.record)

    def shelve(self, trial: LiveTrial) -> None:
        self._decide(trial, self.folds.shelve)

    def resume(self, trial: LiveTrial, epochs: int) -> None:
        self._decide(trial, self.folds.resume, epochs)
        update_configuration(trial.record)

    def end(self, trial: LiveTrial, status: Status) -> None:
        self._decide(trial, self.folds.end, status)
        update_configuration(trial.record)
        self._note_end(trial)

    def _decide(self, trial: LiveTrial, act: Callable[..., None], *how: Any) -> None:
        """Copy the searcher's decision to the folds, and carry it out for those not ended."""
        folds = self._folds_of(trial)
        for fold in folds:
            fold.reported, fold.paused_by_searcher = trial.reported, trial.paused_by_searcher
        for fold in [fold for fold in folds if fold.record.status not in ENDED]:
            act(fold, *how)

    def aim(self, trial: LiveTrial, epochs: int) -> None:
        for fold in self._folds_of(trial):
            self.folds.aim(fold, epochs)
        trial.record.target_epochs = epochs

    def clear_pause(self, trial: LiveTrial) -> None:
        trial.paused_by_searcher = False
        self._over[trial.record.number] = None
        for fold in self._folds_of(trial):
            if fold.record.number in self.folds.by_number:
                self.folds.clear_pause(fold)

    def update_from(self, fold: LiveTrial) -> LiveTrial | None:
        """Update a fold's configuration; return it once all folds have done the epoch or ended."""
        trial = self.by_number.get(fold.record.number // self._each)
        if trial is None or trial.record.status in ENDED:
            return None
        culprit = failed_fold(trial.record.folds)
        if culprit is not None:
            for other in trial.folds:
                if other.record.status not in ENDED and other.record.done > culprit.done:
                    self.folds.end(other, "stopped")
        new = update_configuration(trial.record)
        for epoch in new:
            trial.history.append(epoch.to_history())
            self._hooks.notify_of(trial.record, "on_epoch_end", dict(epoch.metrics))
        if trial.record.status in ENDED:
            self._note_end(trial)
            return trial
        return trial if new else None

    def folds_beside(self, fold: LiveTrial) -> list[LiveTrial]:
        trial = self.by_number.get(fold.record.number // self._each)
        return [] if trial is None else self._open_trials_of(trial)

    def restore(self, folds: Sequence[LiveTrial], answers: Mapping[int, LastDecision]) -> None:
        """Take over the trials of an earlier process; `answers` are given per configuration."""
        each = self._each
        spread = {n * each + fold: a for n, a in answers.items() for fold in range(each)}
        self.folds.restore(folds, spread)
        for first in range(0, len(folds), each):
            trial = self._add_folds(folds[first : first + each])
            trial.reported = folds[first].reported
            trial.paused_by_searcher = folds[first].paused_by_searcher
            if trial.record.status in ENDED:
                self.ended.add(trial.record, trial.row(self._ranking))
            elif any(fold.history for fold in trial.folds):  # else early stopping starts again
                trial.history = [epoch.to_history() for epoch in trial.record.epochs]

    def update_all(self) -> None:
        """Update the configurations of a resumed run: folds may have recovered epochs or failed."""
        for trial in self.by_number.values():
            self.update_from(trial.folds[0])

    def forget_ended(self, is_expected: Callable[[int], bool]) -> list[int]:
        """Forget ended configurations and folds that are not needed; return the folds' numbers."""

        def has_folds(number: int) -> bool:
            folds = self.by_number[number].folds
            return any(fold.record.number in self.folds.by_number for fold in folds)

        gone = self.folds.forget_ended(lambda number: is_expected(number // self._each))
        self.folds.ended.mark_shown()
        # Folds ask their configuration for its best epoch, so it is forgotten after its last fold.
        self._over.update(dict.fromkeys(number // self._each for number in gone))
        self._forget_unused(is_expected, has_folds)
        return gone

    def _read(self, number: int) -> FoldedTrial:
        folds = [self.folds.recall(number * self._each + fold) for fold in range(self._each)]
        return self._add_folds([fold for fold in folds if fold is not None])

    def _open_trials_of(self, trial: FoldedTrial) -> list[LiveTrial]:
        return [fold for fold in trial.folds if fold.record.status not in ENDED]

    def _add_folds(self, folds: Sequence[LiveTrial]) -> FoldedTrial:
        record = make_configuration([fold.record for fold in folds])
        trial = FoldedTrial(record, reported=record.first_epoch - 1, folds=list(folds))
        self.by_number[record.number] = trial
        return trial

    def _suggest_fold(
        self, suggestion: Suggestion, fold: int, of_user: OfUser | None
    ) -> Suggestion:
        if suggestion.parent is None:
            return suggestion
        parent = self.recall(suggestion.parent)
        number = suggestion.parent * self._each + fold
        of_fold = self.folds.recall(number)
        assert parent is not None and of_fold is not None
        if suggestion.parent_epoch is None and not (of_user and of_user.cold):
            assert parent.reported_epoch is not None
            of_fold.reported = parent.reported_epoch  # other folds may have more epochs
        return replace(suggestion, parent=number)

    def _folds_of(self, trial: LiveTrial) -> list[LiveTrial]:
        return self.by_number[trial.record.number].folds

    def _note_end(self, trial: LiveTrial) -> None:
        self.ended.add(trial.record, trial.row(self._ranking))
        self._hooks.notify_of(trial.record, "on_trial_end")

    def _find_best_epoch(self, record: TrialRecord) -> int | None:
        """Return the best epoch of a fold's configuration, whose state the fold keeps."""
        trial, by = self.by_number.get(record.number // self._each), self._ranking
        return None if trial is None else trial.record.best_epoch(by.metric, by.mode)

    def _notify_of_fold(self, fold: TrialRecord, hook: str, *_: Any) -> None:
        """Call `on_trial_start` for the first fold of a configuration, and no other hook."""
        trial = self.by_number.get(fold.number // self._each)
        if hook == "on_trial_start" and trial is not None and not trial.started:
            trial.started = True
            update_configuration(trial.record)
            self._hooks.notify_of(trial.record, hook)
