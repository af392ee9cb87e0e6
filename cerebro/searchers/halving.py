"""Implement successive halving, Hyperband (brackets of it) and ASHA, whose rungs never wait.

A bracket has rungs that are filled, compared and reduced. A rung of a bracket waits for all of its
trials, as in the papers; the best are then promoted. ASHA decides when a trial arrives, and may
lose the best trial because of the order of arrival.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from cerebro.arguments import check_whole_number
from cerebro.errors import InputError
from cerebro.searchers.base import (
    DONE,
    AdaptiveSearcher,
    Decision,
    Suggested,
    Suggestion,
    decode_value,
    decode_values,
    encode_value,
    encode_values,
)


def check_rungs(
    min_epochs: int, reduction_factor: int, epochs: int | None = None
) -> tuple[int, int]:
    """Return the first two arguments as ints; raise InputError unless they define valid rungs."""
    min_epochs = check_whole_number("min_epochs", min_epochs, 1, math.inf)
    reduction_factor = check_whole_number("reduction_factor", reduction_factor, 2, math.inf)
    if epochs is not None and min_epochs > epochs:
        raise InputError(
            f"min_epochs={min_epochs} is above epochs={epochs}: give search() more epochs, or "
            "the searcher a smaller min_epochs"
        )
    return min_epochs, reduction_factor


def rung_epochs(min_epochs: int, reduction_factor: int, epochs: int) -> list[int]:
    """Return the epochs at which trials are compared: a geometric series ending with `epochs`."""
    check_rungs(min_epochs, reduction_factor, epochs)
    rungs = []
    at = min_epochs
    while at < epochs:
        rungs.append(at)
        at *= reduction_factor
    return [*rungs, epochs]


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
    Hyperparameter Optimization", AISTATS 2016): the trials of a rung are compared once all of them
    are done; promoted trials continue where they paused.

    Parameters
    ----------
    min_epochs
        The number of epochs before the first comparison.
    reduction_factor
        One in this many trials is promoted, and trains this many times as long.

    Notes
    -----
    The search's ``n_trials`` is the number of configurations. By default, one configuration reaches
    the last rung. With only a time limit, a new bracket begins when one ends.
    If ``n_trials`` is larger when a run is resumed, another bracket compares the additional ones.
    """

    def _prepare(self) -> None:
        super()._prepare()
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


class OpenRung:
    """The trials that reached a rung, sorted, and which of them have not been promoted."""

    def __init__(self, reduction_factor: int) -> None:
        self._factor = reduction_factor
        self._ranked: list[tuple[float, int]] = []  # value and trial
        self._stayed: list[tuple[float, int]] = []  # a heap of those that may still be promoted

    def __len__(self) -> int:
        return len(self._ranked)

    def add(self, trial: int, value: float, *, moved: bool = False) -> None:
        """Add a trial that reached the rung, or that has ended (infinity) and still counts."""
        insort(self._ranked, (value, trial))
        if math.isfinite(value) and not moved:
            heapq.heappush(self._stayed, (value, trial))

    def is_good(self, value: float, trial: int) -> bool:
        """Return whether a trial is among the rung's best ``1/reduction_factor``."""
        rank = bisect_left(self._ranked, (value, trial))
        return rank < len(self._ranked) // self._factor

    @property
    def moved(self) -> int:
        return bisect_left(self._ranked, (math.inf, -1)) - len(self._stayed)

    @property
    def promotable(self) -> int:
        stayed = set(self._stayed)
        return sum(entry in stayed for entry in self._ranked[: len(self) // self._factor])

    def pop_promoted(self) -> int | None:
        """Remove and return the best trial to promote; None if no trial is good enough."""
        if self._stayed and self.is_good(*self._stayed[0]):
            return heapq.heappop(self._stayed)[1]
        return None

    def state_dict(self) -> list[list[Any]]:
        """Return, as JSON, each trial with its value and with 1 if it was promoted, else 0."""
        stayed = {trial for _, trial in self._stayed}
        return [[trial, encode_value(v), int(trial not in stayed)] for v, trial in self._ranked]

    @classmethod
    def from_state(cls, reduction_factor: int, state: Sequence[Sequence[Any]]) -> OpenRung:
        rung = cls(reduction_factor)
        for trial, value, moved in state:
            rung.add(trial, decode_value(value), moved=bool(moved))
        return rung


class ASHA(AdaptiveSearcher):
    """Asynchronous successive halving (Li et al., "A System for Massively Parallel
    Hyperparameter Tuning", MLSys 2020).

    Parameters
    ----------
    min_epochs
        The number of epochs before the first comparison.
    reduction_factor
        One in this many trials is promoted from a rung. 3 and more train fewer epochs for the same
        ``n_trials``; with the same number of epochs, 2 was better on recorded curves.
    variant
        ``"promotion"``, as published: a trial pauses at a rung and continues once it is among the
        best ``1/reduction_factor`` of the trials that reached the rung. ``"stopping"``: a trial is
        stopped permanently unless it is among the best when it reaches the rung; the first
        ``reduction_factor - 1`` trials at a rung continue (in Ray Tune and Syne Tune only the
        first). The stopping variant may lose the best trial if that trial reaches a rung early.

    Notes
    -----
    ``n_trials`` or ``time_limit`` limits the number of trials. As with every adaptive searcher,
    reports are delivered in rounds, and the outcome does not depend on timing, unless the search
    has ``asynchronous=True``.
    """

    _endless = "ASHA"
    _shown = ("min_epochs", "reduction_factor", "variant")

    def __init__(
        self,
        min_epochs: int = 1,
        reduction_factor: int = 2,
        variant: Literal["promotion", "stopping"] = "promotion",
    ) -> None:
        if variant not in ("promotion", "stopping"):
            raise InputError(f"variant must be 'promotion' or 'stopping', not {variant!r}")
        self._min_epochs, self._reduction_factor = check_rungs(min_epochs, reduction_factor)
        self._variant = variant

    def _prepare(self) -> None:
        # The epochs of each rung.
        self._epochs_of = rung_epochs(self._min_epochs, self._reduction_factor, self._epochs)
        self._rungs = [OpenRung(self._reduction_factor) for _ in self._epochs_of]
        self._live: set[int] = set()

    def suggest(self) -> Suggested:
        """Return the trial to promote from the highest rung that has one, else a new trial."""
        promotes = self._variant == "promotion"
        for level in range(len(self._rungs) - 2, -1, -1) if promotes else ():
            trial = self._rungs[level].pop_promoted()
            if trial is not None:
                self._live.add(trial)
                return Suggestion({}, self._epochs_of[level + 1], trial=trial)
        if self._next < self._limit:
            self._live.add(self._next)
            return self._suggest_new(self._epochs_of[0] if promotes else self._epochs)
        return None if self._live else DONE

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        level = sum(epoch + 1 > epochs for epochs in self._epochs_of)
        if not math.isfinite(value):
            self._rungs[min(level, len(self._rungs) - 1)].add(trial, value)
            self._live.discard(trial)
            return Decision.STOP
        if epoch + 1 != self._epochs_of[level]:
            return Decision.CONTINUE
        rung = self._rungs[level]
        rung.add(trial, value)
        if level == len(self._rungs) - 1:
            self._live.discard(trial)
            return Decision.CONTINUE
        if self._variant == "promotion":
            self._live.discard(trial)
            return Decision.PAUSE
        # The first trials to arrive cannot be compared with others, so they continue.
        if len(rung) < self._reduction_factor or rung.is_good(value, trial):
            return Decision.CONTINUE
        self._live.discard(trial)
        return Decision.STOP

    def epochs_to_come(self) -> float | None:
        if self._variant == "stopping":
            return None
        reach = self._limit
        epochs = (reach - self._next) * self._epochs_of[0]
        for rung, (before, after) in zip(self._rungs, pairwise(self._epochs_of), strict=False):
            more = max(0.0, self._expect_promotions(reach) - self._expect_promotions(len(rung)))
            promoted = rung.promotable + more
            epochs += promoted * (after - before)
            reach = rung.moved + promoted
        return epochs

    def _expect_promotions(self, trials: float) -> float:
        """Return how many of the trials that reach a rung are promoted, on average."""
        if trials < self._reduction_factor:
            return 0.0
        # Trials that were among the best when they arrived count, too. This excess grows with the
        # square root; its factors come from a simulation.
        return trials / self._reduction_factor + max(0.0, 0.4 * math.sqrt(trials) - 0.5)

    def _state(self) -> dict[str, Any]:
        return {"rungs": [rung.state_dict() for rung in self._rungs], "live": sorted(self._live)}

    def _load(self, state: Mapping[str, Any]) -> None:
        factor = self._reduction_factor
        self._rungs = [OpenRung.from_state(factor, rung) for rung in state["rungs"]]
        self._live = set(state["live"])
