"""Implement successive halving: train many trials briefly, and the best of them longer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cerebro.searchers.adaptive import check_rungs, rung_epochs
from cerebro.searchers.bracket import Bracket, Brackets, BracketSearcher, Rung


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

    def __init__(self, min_epochs: int = 1, reduction_factor: int = 3) -> None:
        super().__init__()
        self._min_epochs, self._reduction_factor = check_rungs(min_epochs, reduction_factor)
        self._rungs: list[int] = []
        self._whole = 1  # the number of trials that leaves one for the last rung

    def _prepare(self) -> None:
        check_rungs(self._min_epochs, self._reduction_factor, self._epochs)
        self._brackets = Brackets([])
        self._rungs = rung_epochs(self._min_epochs, self._reduction_factor, self._epochs)
        self._whole = self._reduction_factor ** (len(self._rungs) - 1)
        self._most = self._whole if self._n_trials is None else math.inf

    def _bracket(self) -> Bracket | None:
        """Return a bracket of the trials that no bracket has; None if all have one."""
        total = self._whole if self._n_trials is None else self._n_trials
        first = total - self._next - self._brackets.to_begin
        if total == math.inf:
            first = self._whole if self._brackets.is_over else 0
        if first <= 0:
            return None
        return Bracket(
            [
                Rung(max(1, int(first) // self._reduction_factor**i), epochs)
                for i, epochs in enumerate(self._rungs)
            ]
        )

    def _open(self) -> Bracket | None:
        """Open a bracket of the trials that no bracket has, if any."""
        bracket = self._bracket()
        if bracket is not None:
            self._brackets.add(bracket)
        return bracket

    def epochs_to_come(self) -> float:
        """Return how many more epochs the searcher will request."""
        if self._n_trials == math.inf:
            return math.inf
        bracket = self._bracket()
        further = 0 if bracket is None else bracket.epochs_to_come
        return self._brackets.epochs_to_come + further

    def _state(self) -> dict[str, Any]:
        return {"brackets": self._brackets.state_dict()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._brackets = Brackets.from_state(state["brackets"])

    def __repr__(self) -> str:
        arguments = f"min_epochs={self._min_epochs}, reduction_factor={self._reduction_factor}"
        return f"SuccessiveHalving({arguments})"
