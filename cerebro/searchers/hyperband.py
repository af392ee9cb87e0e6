"""Implement successive halving, and Hyperband: brackets of it, from many short to few long trials.

A bracket has rungs that are filled, compared and reduced. A rung waits for all of its trials, as in
the papers; the best are then promoted. Variants that decide when a trial arrives may lose the best
trial because of the order of arrival.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from cerebro.searchers.base import (
    DONE,
    AdaptiveSearcher,
    Decision,
    Suggested,
    Suggestion,
    check_rungs,
    decode_values,
    encode_values,
    rung_epochs,
)


class Rung(NamedTuple):
    """A number of trials that are compared after a number of epochs."""

    trials: int
    epochs: int


@dataclass(eq=False)
class Bracket:
    """A bracket of `rungs`, with decreasing sizes and increasing epochs, and its progress."""

    rungs: Sequence[Rung]
    level: int = 0  # of the rung that is being filled
    values: dict[int, float] = field(default_factory=dict)  # to minimize; infinity: ended
    members: list[int] = field(default_factory=list)  # of this rung
    waiting: list[int] = field(default_factory=list)  # promoted, not suggested yet; best first
    dropped: list[int] = field(default_factory=list)  # paused for good, not reported yet

    @property
    def rung(self) -> Rung:
        return self.rungs[self.level]

    @property
    def wants_new(self) -> bool:
        return self.level == 0 and len(self.members) < self.rung.trials

    @property
    def is_over(self) -> bool:
        is_full = not self.wants_new and len(self.values) == len(self.members)
        return is_full and self.level == len(self.rungs) - 1

    @property
    def epochs_to_come(self) -> int:
        alive = len(self.members) - sum(map(math.isinf, self.values.values()))
        if self.level == 0:
            new = self.rung.trials - len(self.members)
            alive += new
            epochs = new * self.rung.epochs
        else:
            epochs = len(self.waiting) * (self.rung.epochs - self.rungs[self.level - 1].epochs)
        for before, rung in pairwise(self.rungs[self.level :]):
            alive = min(alive, rung.trials)
            epochs += alive * (rung.epochs - before.epochs)
        return epochs

    def decide(self, trial: int, epoch: int, value: float) -> Decision:
        """Decide how a member proceeds; called in an order that does not depend on timing."""
        last, lives = self.level == len(self.rungs) - 1, math.isfinite(value)
        if epoch + 1 < self.rung.epochs and lives:
            return Decision.CONTINUE
        self.values[trial] = value
        if last:
            return Decision.CONTINUE if lives else Decision.STOP
        if len(self.values) == len(self.members) and not self.wants_new:
            paused = [t for t, v in self.values.items() if math.isfinite(v)]
            self._promote()
            self.dropped += [t for t in paused if t not in self.members]
        return Decision.PAUSE if lives else Decision.STOP

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
        lists = {name: list(getattr(self, name)) for name in ("members", "waiting", "dropped")}
        rungs, values = [list(rung) for rung in self.rungs], encode_values(self.values)
        return {"rungs": rungs, "level": self.level, "values": values, **lists}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Bracket:
        rungs = [Rung(*rung) for rung in state["rungs"]]
        lists = (list(state[name]) for name in ("members", "waiting", "dropped"))
        return cls(rungs, state["level"], decode_values(state["values"]), *lists)


class BracketSearcher(AdaptiveSearcher):
    """A searcher whose trials belong to brackets, in parallel; the first that needs one gets it."""

    _shown = ("min_epochs", "reduction_factor")

    def __init__(self, min_epochs: int = 1, reduction_factor: int = 3) -> None:
        self._min_epochs, self._reduction_factor = check_rungs(min_epochs, reduction_factor)

    def _prepare(self) -> None:
        self._opened = 0  # the number of brackets opened
        self._brackets: list[Bracket] = []  # unfinished ones
        self._of_trial: dict[int, Bracket] = {}

    @abstractmethod
    def _plan_bracket(self, number: int, begun: int) -> Bracket | None:
        """Return the next bracket, if earlier ones begin `begun` trials; None if not needed."""

    def _make_bracket(self, sizes: Iterable[tuple[int, int]], first: int) -> Bracket:
        """Return a bracket of rungs with at most these trials, of which `first` begin."""
        factor = self._reduction_factor
        rungs = [Rung(max(1, min(n, first // factor**i)), at) for i, (n, at) in enumerate(sizes)]
        return Bracket(rungs)

    @property
    def _is_over(self) -> bool:
        return all(bracket.is_over for bracket in self._brackets)

    def suggest(self) -> Suggested:
        """Return a promoted trial or a new one; None while rungs wait for their last trials."""
        for bracket in self._brackets:
            if bracket.waiting:
                return Suggestion({}, bracket.rung.epochs, trial=bracket.waiting.pop(0))
        needs_trial = next((bracket for bracket in self._brackets if bracket.wants_new), None)
        if needs_trial is None:
            needs_trial = self._plan_bracket(self._opened, self._next)
            if needs_trial is None:
                return DONE if self._is_over else None
            self._brackets.append(needs_trial)
            self._opened += 1
        needs_trial.members.append(self._next)
        self._of_trial[self._next] = needs_trial
        return self._suggest_new(needs_trial.rung.epochs)

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        bracket = self._of_trial[trial]
        decision = bracket.decide(trial, epoch, value)
        if bracket.is_over and not bracket.dropped:
            self._brackets.remove(bracket)
            self._forget(bracket.members)
        return decision

    def dropped(self) -> list[int]:
        trials = []
        for bracket in self._brackets:
            trials += bracket.dropped
            bracket.dropped = []
        self._forget(trials)
        return trials

    def _forget(self, trials: Iterable[int]) -> None:
        for trial in trials:
            self._of_trial.pop(trial, None)

    def epochs_to_come(self) -> float:
        if self._n_trials == math.inf:
            return math.inf
        epochs, begun, number = 0, self._next, self._opened
        for bracket in self._brackets:
            epochs += bracket.epochs_to_come
            begun += bracket.rung.trials - len(bracket.members) if bracket.level == 0 else 0
        while (planned := self._plan_bracket(number, begun)) is not None:
            epochs += planned.epochs_to_come
            begun += planned.rungs[0].trials
            number += 1
        return epochs

    def _state(self) -> dict[str, Any]:
        return {"brackets": [bracket.state_dict() for bracket in self._brackets]}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._brackets = [Bracket.from_state(bracket) for bracket in state["brackets"]]
        self._of_trial = {trial: b for b in self._brackets for trial in b.members}


class SuccessiveHalving(BracketSearcher):
    """Train all configurations briefly, then the best ``1/reduction_factor`` longer, and so on.

    The synchronous algorithm of Jamieson and Talwalkar ("Non-stochastic Best Arm Identification and
    Hyperparameter Optimization", AISTATS 2016): a rung is compared when all of its trials are done;
    the promoted trials continue from where they paused.

    Parameters
    ----------
    min_epochs
        The number of epochs before the first comparison.
    reduction_factor
        One in this many trials is promoted, and trains this many times as long.

    Notes
    -----
    The search's ``n_trials`` is the number of configurations. By default, it is the number that
    leaves one configuration for the last rung. With only a time limit, brackets follow each other.
    If ``n_trials`` is larger when a run is resumed, another bracket compares the additional ones.
    """

    def _prepare(self) -> None:
        super()._prepare()
        check_rungs(self._min_epochs, self._reduction_factor, self._epochs)
        self._rungs = rung_epochs(self._min_epochs, self._reduction_factor, self._epochs)
        # The number of trials that leaves one for the last rung.
        self._whole = self._reduction_factor ** (len(self._rungs) - 1)
        self._most = self._whole if self._n_trials is None else math.inf

    def _plan_bracket(self, number: int, begun: int) -> Bracket | None:
        """Return a bracket of the trials that no bracket has; None if all have one."""
        if self._n_trials == math.inf:
            first = self._whole if self._is_over else 0
        else:
            first = int(self._whole if self._n_trials is None else self._n_trials) - begun
        sizes = ((first, epochs) for epochs in self._rungs)
        return self._make_bracket(sizes, first) if first > 0 else None


def hyperband_brackets(
    max_epochs: int, reduction_factor: int = 3, min_epochs: int = 1
) -> list[list[tuple[int, int]]]:
    """Return Hyperband's brackets: for each rung, the number of trials and of epochs.

    Algorithm 1 of Li, Jamieson, DeSalvo, Rostamizadeh and Talwalkar, "Hyperband: A Novel
    Bandit-Based Approach to Hyperparameter Optimization", JMLR 18 (2018), with ``R = max_epochs /
    min_epochs``; epochs are rounded to whole numbers.

    Parameters
    ----------
    max_epochs
        The number of epochs of the longest trials.
    reduction_factor
        The paper's eta.
    min_epochs
        The number of epochs of the shortest trials.
    """
    check_rungs(min_epochs, reduction_factor, max_epochs)
    s_max = 0
    while min_epochs * reduction_factor ** (s_max + 1) <= max_epochs:
        s_max += 1
    brackets = []
    for s in range(s_max, -1, -1):
        # B / R is s_max + 1; in integers, because 3**4 / 5 * 5 need not be 81.0.
        n = -(-(s_max + 1) * reduction_factor**s // (s + 1))
        rungs = []
        for i in range(s + 1):
            epochs = max(min_epochs, round(max_epochs / reduction_factor ** (s - i)))
            rungs.append((max(1, n // reduction_factor**i), epochs))
        brackets.append(rungs)
    return brackets


class Hyperband(BracketSearcher):
    """Run brackets of successive halving that balance many trials against long ones.

    As published (Li et al., JMLR 2018): trials pause at a rung until it is complete, and continue
    from there. Brackets run in parallel, which keeps workers busy while a rung waits for its last
    trial.

    Parameters
    ----------
    min_epochs
        The number of epochs of the shortest trials; the longest train for the search's ``epochs``.
    reduction_factor
        The paper's eta.

    Notes
    -----
    Without ``n_trials``, each bracket runs once: ``epochs=81`` begins 143 trials. With it, brackets
    run again, or the last one is reduced, until ``n_trials`` trials have begun.
    """

    def _prepare(self) -> None:
        super()._prepare()
        self._sizes = hyperband_brackets(self._epochs, self._reduction_factor, self._min_epochs)
        begun = sum(sizes[0][0] for sizes in self._sizes)
        self._most = begun if self._n_trials is None else math.inf

    def _plan_bracket(self, number: int, begun: int) -> Bracket | None:
        # Without n_trials, there may be more open ones: those of an n_trials that was given before.
        if begun >= self._limit or (self._n_trials is None and number >= len(self._sizes)):
            return None
        sizes = self._sizes[number % len(self._sizes)]
        first = sizes[0][0]
        if self._limit < math.inf:
            first = min(first, int(self._limit) - begun)
        return self._make_bracket(sizes, first)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "opened": self._opened}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._opened = int(state["opened"])
