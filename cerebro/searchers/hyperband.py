"""Implement Hyperband: brackets of successive halving, from many short to few long trials."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cerebro.searchers.adaptive import check_rungs
from cerebro.searchers.bracket import Bracket, Brackets, BracketSearcher, Rung


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

    def __init__(self, min_epochs: int = 1, reduction_factor: int = 3) -> None:
        super().__init__()
        self._min_epochs, self._reduction_factor = check_rungs(min_epochs, reduction_factor)
        self._sizes: list[list[tuple[int, int]]] = []
        self._opened = 0  # the number of brackets opened, including earlier rounds

    def _prepare(self) -> None:
        self._sizes = hyperband_brackets(self._epochs, self._reduction_factor, self._min_epochs)
        self._brackets = Brackets([])
        self._opened = 0
        begun = sum(sizes[0][0] for sizes in self._sizes)
        self._most = begun if self._n_trials is None else math.inf

    def _open(self) -> Bracket | None:
        """Open the next bracket, unless all requested brackets are open."""
        bracket = self._bracket(self._opened, self._next)
        if bracket is not None:
            self._brackets.add(bracket)
            self._opened += 1
        return bracket

    def _bracket(self, number: int, begun: int) -> Bracket | None:
        """Return a bracket, given that earlier ones began `begun` trials; None if not needed."""
        n = self._n_trials
        if n is None and number >= len(self._sizes):  # more, if there was an n_trials before
            return None
        if n is not None and begun >= n:
            return None
        sizes = self._sizes[number % len(self._sizes)]
        first = sizes[0][0]
        if n is not None and n != math.inf:
            first = min(first, int(n) - begun)
        return Bracket(
            [
                Rung(max(1, min(trials, first // self._reduction_factor**i)), epochs)
                for i, (trials, epochs) in enumerate(sizes)
            ]
        )

    def epochs_to_come(self) -> float:
        """Return how many more epochs the searcher will request."""
        if self._n_trials == math.inf:
            return math.inf
        epochs = self._brackets.epochs_to_come
        begun = self._next + self._brackets.to_begin
        number = self._opened
        while (bracket := self._bracket(number, begun)) is not None:
            epochs += bracket.epochs_to_come
            begun += bracket.rungs[0].trials
            number += 1
        return epochs

    def _state(self) -> dict[str, Any]:
        return {"brackets": self._brackets.state_dict(), "opened": self._opened}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._brackets = Brackets.from_state(state["brackets"])
        self._opened = int(state["opened"])

    def __repr__(self) -> str:
        return (
            f"Hyperband(min_epochs={self._min_epochs}, reduction_factor={self._reduction_factor})"
        )
