"""Order the reports to an adaptive searcher.

Trials finish their epochs in an order that depends on timing, so a searcher that received reports
in this order would decide differently in every run. It receives them in an order that does not
depend on timing: by round, and within a round by trial number. Round ``r`` has one report of every
trial that is live in it. The members of round ``r + 1`` are the trials that continue and the trials
suggested when round ``r`` is over.

There is no barrier: a report is delivered as soon as all reports before it have been delivered. Its
trial continues as soon as the searcher has answered, even if other trials of the round are still
training. So no trial is more than one epoch ahead of its round.

Pure logic: no clock, file or thread. Reports that have arrived but are not yet delivered are not
part of the state, because the store has them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """The report of one epoch of a trial to the searcher."""

    trial: int
    epoch: int
    metrics: Mapping[str, float]
    ended: bool = False
    """Whether the trial failed or was stopped by the user: it ends whatever the answer is."""


class Rounds:
    """Holds reports back until they are due; if not `ordered`, delivers them as they arrive."""

    def __init__(self, *, ordered: bool = True) -> None:
        self.ordered = ordered
        self.number = -1
        self._due: list[int] = []  # a heap: the trials that have not reported in this round
        self._next: set[int] = set()  # members of the next round; if not ordered, all members
        self._arrived: dict[int, Report] = {}

    @property
    def live(self) -> int:
        """The number of trials whose reports are still to come."""
        return len(self._due) + len(self._next)

    @property
    def members(self) -> set[int]:
        """The trials whose reports are still to come."""
        return {*self._due, *self._next}

    @property
    def is_over(self) -> bool:
        """Whether the searcher may now be asked for suggestions."""
        return not self._due

    def expects(self, trial: int) -> bool:
        """Return whether a report of the trial is still to arrive or to be delivered."""
        return trial in self._arrived or trial in self._next or trial in self._due

    def join(self, trial: int) -> None:
        self._next.add(trial)

    def arrive(self, report: Report) -> None:
        self._arrived[report.trial] = report

    def take(self) -> Report | None:
        """Return the next report, whose trial must :meth:`join` again; None: it has not arrived."""
        if self.ordered:
            if not self._due or self._due[0] not in self._arrived:
                return None
            return self._arrived.pop(heapq.heappop(self._due))
        for trial in self._arrived:
            self._next.discard(trial)
            return self._arrived.pop(trial)
        return None

    def begin(self) -> bool:
        """Begin the next round if this one is over; return whether a round was begun."""
        if not self.ordered or self._due or not self._next:
            return False
        self.number += 1
        self._due = sorted(self._next)
        self._next = set()
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "due": sorted(self._due), "next": sorted(self._next)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; reports that were not delivered must arrive again."""
        self.number = int(state["number"])
        self._due = sorted(state["due"])
        self._next = set(state["next"])
        self._arrived = {}
