"""In which order reports reach a searcher that listens to them.

Trials finish their epochs whenever a worker gets round to them. A searcher that
decides by what it hears would decide otherwise on another day; so its reports
are put into an order that timing cannot change: by round, and within a round by
the trial's number. Round ``r`` has one report of every trial that is live in it; a
trial that goes on is a member of round ``r + 1``, and so are the trials that are
suggested when round ``r`` is over.

There is no barrier: a report is delivered as soon as all before it are, and its
trial trains on as soon as it was answered, while others of the round still train.
No trial is therefore more than one epoch ahead of its round.

Pure logic: no clock, file or thread. Reports that have arrived and not been
delivered are no part of the state, because whoever restores it has them on record.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """What a searcher is told of a trial's epoch."""

    trial: int
    epoch: int
    metrics: Mapping[str, float]
    ended: bool = False
    """The trial failed or was stopped by the user: it is over, whatever the answer."""


class Rounds:
    """Holds reports back until it is their turn.

    Parameters
    ----------
    ordered
        False: a report is delivered when it arrives, and there is one endless round.
    """

    def __init__(self, *, ordered: bool = True) -> None:
        self.ordered = ordered
        self.number = -1
        self._due: list[int] = []  # a heap: who has yet to report in this round
        self._next: set[int] = set()  # members of the next round; unordered: all
        self._arrived: dict[int, Report] = {}

    @property
    def live(self) -> int:
        """How many trials have a report to come."""
        return len(self._due) + len(self._next)

    @property
    def members(self) -> set[int]:
        """The trials that have a report to come."""
        return {*self._due, *self._next}

    @property
    def is_over(self) -> bool:
        """Whether suggestions may be asked for now."""
        return not self._due

    def expects(self, trial: int) -> bool:
        """Whether a report of the trial is to come, or to be taken."""
        return trial in self._arrived or trial in self._next or trial in self._due

    def join(self, trial: int) -> None:
        """Take in a trial that is to report: a new one, one that goes on or comes back."""
        self._next.add(trial)

    def arrive(self, report: Report) -> None:
        """Take a report; it is kept until its turn comes."""
        self._arrived[report.trial] = report

    def take(self) -> Report | None:
        """Return the report whose turn it is, None if it has not arrived.

        Its trial is no member any more; if it goes on it has to :meth:`join` again.
        """
        if self.ordered:
            if not self._due or self._due[0] not in self._arrived:
                return None
            return self._arrived.pop(heapq.heappop(self._due))
        for trial in self._arrived:
            self._next.discard(trial)
            return self._arrived.pop(trial)
        return None

    def begin(self) -> bool:
        """Begin the next round if this one is over; True if there was one to begin."""
        if not self.ordered or self._due or not self._next:
            return False
        self.number += 1
        self._due = sorted(self._next)
        self._next = set()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON, whose reports are to come."""
        return {"number": self.number, "due": sorted(self._due), "next": sorted(self._next)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; reports not delivered by then have to arrive again."""
        self.number = int(state["number"])
        self._due = sorted(state["due"])
        self._next = set(state["next"])
        self._arrived = {}
