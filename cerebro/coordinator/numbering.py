"""Number the searcher's trials as if there were no others.

Searchers count: their k-th trial is trial k. A trial that the user adds takes the next number of
the run, so later trials of the searcher have another number there than in its own count.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import replace

from cerebro.coordinator.trial import LiveTrial
from cerebro.run.records import TrialRecord
from cerebro.searchers.base import Suggestion


class Numbering:
    """Converts between the run's numbers of trials and those that the searcher knows."""

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self._outside = sorted(record.number for record in records if record.origin == "user")
        self.due: list[LiveTrial] = []
        """The user's trials that have finished an epoch, which the search loop has yet to see."""

    def note_outside(self, number: int) -> None:
        """Note a trial that is not the searcher's."""
        insort(self._outside, number)

    def own(self, number: int) -> int:
        """Return the searcher's number of one of its trials."""
        return number - bisect_left(self._outside, number)

    def of_run(self, own: int) -> int:
        """Return the run's number of the searcher's trial; anything else is returned as it is."""
        number = own
        if type(own) is int:
            for outside in self._outside:
                if outside > number:
                    break
                number += 1
        return number

    def translate(self, suggestion: Suggestion) -> Suggestion:
        """Return a searcher's suggestion with the run's numbers."""
        if not self._outside:
            return suggestion
        trial, parent = suggestion.trial, suggestion.parent
        return replace(
            suggestion,
            trial=None if trial is None else self.of_run(trial),
            parent=None if parent is None else self.of_run(parent),
        )
