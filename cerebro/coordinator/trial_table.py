"""Keep the trials of a run in memory, by number.

A run of 100,000 trials must not keep all of them in memory. Ended trials that are no longer needed
are forgotten: the store has them, and `EndedTrials` has the status of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from numbers import Integral
from typing import Any, Generic, TypeVar

from cerebro.coordinator.failures import ALIKE_FAILURES
from cerebro.coordinator.overview import EndedTrials
from cerebro.coordinator.trial import LiveTrial
from cerebro.errors import InputError
from cerebro.run.records import ENDED, Status

TrialKind = TypeVar("TrialKind", bound=LiveTrial)


class TrialTable(ABC, Generic[TrialKind]):
    """Trials by number, and the number of forgotten trials by status; subclasses add to `ended`."""

    def __init__(self, ended: EndedTrials) -> None:
        self.by_number: dict[int, TrialKind] = {}
        """All trials that are not forgotten; always includes the first `ALIKE_FAILURES` trials."""
        self.forgotten: Counter[str] = Counter()
        """The number of forgotten trials, by status."""
        self.ended = ended
        self._over: dict[int, None] = {}  # an ordered set: ended, perhaps not needed

    @abstractmethod
    def end(self, trial: LiveTrial, status: Status) -> None:
        """End a trial permanently."""

    @abstractmethod
    def _read(self, number: int) -> TrialKind:
        """Read a forgotten trial from the store."""

    def _open_trials_of(self, trial: TrialKind) -> list[LiveTrial]:
        """Return the open trials of an entry: itself, or the folds of a configuration."""
        return [trial]

    def __len__(self) -> int:
        return len(self.by_number) + self.forgotten.total()

    def status_of(self, number: Any) -> Status | None:
        """Return the status of a trial, forgotten or not; None if there is no such trial.

        `number` comes from a searcher and may be any object.
        """
        trial = self.by_number.get(number)
        if trial is not None:
            return trial.record.status
        return self.ended.status_of(int(number)) if isinstance(number, Integral) else None

    def find_open(self, number: int, what: str) -> tuple[TrialKind, list[LiveTrial]]:
        """Return an open trial and the open trials that are trained for it.

        Raise InputError if there is no such trial or it has ended, and so cannot be `what`
        ("paused").
        """
        trial, status = self.by_number.get(number), self.status_of(number)
        if status is None:
            raise InputError(f"there is no trial {number}: it cannot be {what}")
        if trial is None or status in ENDED:
            raise InputError(f"trial {number} is {status}: it cannot be {what}")
        return trial, self._open_trials_of(trial)

    def recall(self, number: int) -> TrialKind | None:
        """Return a trial, from the store if it was forgotten; None if there is no such trial."""
        if number not in self.by_number and self.status_of(number) is not None:
            trial = self.by_number[number] = self._read(number)
            # The trial was forgotten after the searcher had received all its reports.
            trial.reported = trial.record.done - 1
            self.forgotten[trial.record.status] -= 1
            self._over[number] = None
        return self.by_number.get(number)

    def end_paused(self) -> None:
        """End the trials that the searcher has paused and will not resume."""
        for trial in self.by_number.values():
            if trial.paused_by_searcher and trial.record.status not in ENDED:
                self.end(trial, "stopped")

    def _forget_unused(
        self, is_awaited: Callable[[int], bool], is_needed: Callable[[int], bool]
    ) -> list[TrialKind]:
        """Forget ended trials that are no longer needed; return them.

        If `is_awaited`, the next call checks a trial again; if `is_needed`, only once it is in
        `_over` again.
        """
        unused = []
        for number in [n for n in self._over if not is_awaited(n)]:
            del self._over[number]
            trial = self.by_number[number]
            if trial.record.status not in ENDED or number < ALIKE_FAILURES:
                continue
            if not trial.paused_by_searcher and not is_needed(number):
                unused.append(self.by_number.pop(number))
                self.forgotten[trial.record.status] += 1
        return unused
