"""Implement a bracket of successive halving: rungs that are filled, compared and reduced.

A rung waits for all of its trials, as in the papers; the best are then promoted. Variants that
decide when a trial arrives may lose the best trial because of the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cerebro.searchers.adaptive import AdaptiveSearcher, decode_value, encode_value
from cerebro.searchers.base import DONE, Decision, Suggested


@dataclass(frozen=True)
class Rung:
    """A number of trials that are compared after a number of epochs."""

    trials: int
    epochs: int


@dataclass(eq=False)
class Bracket:
    """A bracket of `rungs`, with decreasing sizes and increasing epochs, and its progress."""

    rungs: Sequence[Rung]
    level: int = 0  # of the rung that is being filled
    begun: int = 0  # trials of the first rung
    values: dict[int, float] = field(default_factory=dict)  # to minimize; infinity: ended
    members: list[int] = field(default_factory=list)  # of this rung
    waiting: list[int] = field(default_factory=list)  # promoted, not suggested yet; best first
    dropped: list[int] = field(default_factory=list)  # paused for good, not reported yet

    @property
    def rung(self) -> Rung:
        return self.rungs[self.level]

    @property
    def wants_new(self) -> bool:
        """Whether the first rung needs another trial."""
        return self.level == 0 and self.begun < self.rungs[0].trials

    @property
    def is_over(self) -> bool:
        return (
            not self.wants_new
            and self.level == len(self.rungs) - 1
            and len(self.values) == len(self.members)
        )

    @property
    def epochs_to_come(self) -> int:
        """The epochs of trials still to be suggested, new or promoted."""
        alive = len(self.members) - sum(map(math.isinf, self.values.values()))
        if self.level == 0:
            new = self.rungs[0].trials - self.begun
            alive += new
            epochs = new * self.rung.epochs
        else:
            epochs = len(self.waiting) * (self.rung.epochs - self.rungs[self.level - 1].epochs)
        for before, rung in pairwise(self.rungs[self.level :]):
            alive = min(alive, rung.trials)
            epochs += alive * (rung.epochs - before.epochs)
        return epochs

    def begin(self, trial: int) -> None:
        self.members.append(trial)
        self.begun += 1

    def pop_promoted(self) -> int | None:
        """Remove and return the next trial promoted to the current rung, or None."""
        return self.waiting.pop(0) if self.waiting else None

    def decide(self, trial: int, epoch: int, value: float) -> Decision:
        """Decide how a member proceeds; called in an order that does not depend on timing."""
        last = self.level == len(self.rungs) - 1
        if epoch + 1 < self.rung.epochs and math.isfinite(value):
            return Decision.CONTINUE
        self.values[trial] = value
        if last:
            return Decision.CONTINUE if math.isfinite(value) else Decision.STOP
        if len(self.values) == len(self.members) and not self.wants_new:
            paused = [t for t, v in self.values.items() if math.isfinite(v)]
            self._promote()
            self.dropped += [t for t in paused if t not in self.members]
        return Decision.PAUSE if math.isfinite(value) else Decision.STOP

    def _promote(self) -> None:
        """Promote the best trials that have not ended; ties are decided by the lowest number."""
        self.level += 1
        ranked = sorted((value, trial) for trial, value in self.values.items())
        best = [trial for value, trial in ranked if math.isfinite(value)]
        self.members = best[: self.rung.trials]
        self.waiting = list(self.members)
        self.values = {}
        if not self.members:  # there is no trial to promote
            self.level = len(self.rungs) - 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "rungs": [[rung.trials, rung.epochs] for rung in self.rungs],
            "level": self.level,
            "begun": self.begun,
            "values": [[trial, encode_value(value)] for trial, value in self.values.items()],
            "members": list(self.members),
            "waiting": list(self.waiting),
            "dropped": list(self.dropped),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Bracket:
        return cls(
            [Rung(trials, epochs) for trials, epochs in state["rungs"]],
            state["level"],
            state["begun"],
            {trial: decode_value(value) for trial, value in state["values"]},
            list(state["members"]),
            list(state["waiting"]),
            list(state["dropped"]),
        )


class Brackets:
    """Unfinished brackets in parallel; the first one that needs a trial gets it."""

    def __init__(self, brackets: Sequence[Bracket]) -> None:
        self.brackets = list(brackets)
        self._of_trial: dict[int, Bracket] = {
            trial: bracket for bracket in self.brackets for trial in bracket.members
        }

    @property
    def is_over(self) -> bool:
        return all(bracket.is_over for bracket in self.brackets)

    @property
    def epochs_to_come(self) -> int:
        return sum(bracket.epochs_to_come for bracket in self.brackets)

    @property
    def to_begin(self) -> int:
        """The number of new trials that first rungs still need."""
        return sum(b.rungs[0].trials - b.begun for b in self.brackets if b.level == 0)

    def add(self, bracket: Bracket) -> None:
        self.brackets.append(bracket)

    def pop_promoted(self) -> tuple[int, int] | None:
        """Return a promoted trial of the first bracket that has one, and its epochs; or None."""
        for bracket in self.brackets:
            trial = bracket.pop_promoted()
            if trial is not None:
                return trial, bracket.rung.epochs
        return None

    def find_wanting(self) -> Bracket | None:
        """Return the first bracket that needs another trial, or None."""
        return next((bracket for bracket in self.brackets if bracket.wants_new), None)

    def begin(self, bracket: Bracket, trial: int) -> None:
        bracket.begin(trial)
        self._of_trial[trial] = bracket

    def decide(self, trial: int, epoch: int, value: float) -> Decision:
        bracket = self._of_trial[trial]
        decision = bracket.decide(trial, epoch, value)
        if bracket.is_over and not bracket.dropped:
            self.brackets.remove(bracket)
            self._forget(bracket.members)
        return decision

    def dropped(self) -> list[int]:
        """Return the paused trials that will not continue, each only once."""
        trials = []
        for bracket in self.brackets:
            trials += bracket.dropped
            bracket.dropped = []
        self._forget(trials)
        return trials

    def _forget(self, trials: Sequence[int]) -> None:
        for trial in trials:
            self._of_trial.pop(trial, None)

    def state_dict(self) -> list[dict[str, Any]]:
        return [bracket.state_dict() for bracket in self.brackets]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> Brackets:
        return cls([Bracket.from_state(item) for item in state])


class BracketSearcher(AdaptiveSearcher):
    """A searcher whose trials belong to brackets; subclasses define when another one opens."""

    def __init__(self) -> None:
        super().__init__()
        self._brackets = Brackets([])

    def suggest(self) -> Suggested:
        """Return a promoted trial or a new one; None while rungs wait for their last trials."""
        again = self._brackets.pop_promoted()
        if again is not None:
            return self._suggest_resumed(*again)
        bracket = self._brackets.find_wanting() or self._open()
        if bracket is None:
            return DONE if self._brackets.is_over else None
        self._brackets.begin(bracket, self._next)
        return self._suggest_new(bracket.rung.epochs)

    def _open(self) -> Bracket | None:
        """Open the next bracket; return None if no other one is needed."""
        raise NotImplementedError

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        return self._brackets.decide(trial, epoch, value)

    def dropped(self) -> list[int]:
        return self._brackets.dropped()
