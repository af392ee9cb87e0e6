"""Implement random search: every trial draws its configuration independently."""

from __future__ import annotations

import json
from typing import Any

from cerebro.errors import InputError
from cerebro.searchers.base import SequenceSearcher

REDRAWS = 32
"""How often to draw for a trial before taking an unused configuration from the grid."""


class RandomSearch(SequenceSearcher):
    """Draw configurations from the space; trial ``t`` is ``space.sample(seed, t)``.

    If every dimension has finitely many values, a draw that repeats an earlier configuration is
    discarded until all configurations are used. Then they may repeat, each with a different trial
    seed. Points count as used. Grids of Ray Tune stay those of the trial's number as long as there
    is an unused configuration with them.

    A search with more trials begins with the same ones: configurations depend only on the seed, the
    points and the trial's number.
    """

    _endless = "random search"

    def _prepare(self) -> None:
        super()._prepare()
        self._is_finite = self._space.is_finite
        self._used: set[str] = set()
        # For a finite space: configurations after the points.
        self._drawn: list[dict[str, Any]] = []
        self._all: dict[str, dict[str, Any]] | None = None  # every configuration, once it is needed

    def _config(self, trial: int) -> dict[str, Any]:
        if not self._is_finite:
            return self._space.sample(self._seed, trial)
        if not self._drawn:
            self._used.update(map(_key, self._completed))
        # Which configurations are unused depends on earlier trials: draw these first.
        while len(self._points) + len(self._drawn) <= trial:
            self._drawn.append(self._find_unused(len(self._points) + len(self._drawn)))
            self._used.add(_key(self._drawn[-1]))
        return self._drawn[trial - len(self._points)]

    def _find_unused(self, trial: int) -> dict[str, Any]:
        first = self._space.sample(self._seed, trial)
        again = (self._seed + (trial + 1) * 0x9E3779B97F4A7C15) % 2**63
        # Prefer the values that the trial takes from grids in its turn.
        for turn in (trial, None) if self._space.has_grids else (trial,):
            config = first
            for attempt in range(REDRAWS):
                if _key(config) not in self._used:
                    return config
                config = self._space.complete({}, again, attempt, turn=turn)
            unused = self._list_unused(turn)
            if unused:
                return unused[again % len(unused)]
        self._used.clear()
        return first

    def _list_unused(self, turn: int | None) -> list[dict[str, Any]]:
        """Return unused configurations, with trial `turn`'s values of grids; empty if too many."""
        if self._all is None:
            try:
                self._all = {_key(config): config for config in self._space.grid()}
            except InputError:
                self._all = {}
        unused = [config for key, config in self._all.items() if key not in self._used]
        if turn is None or not self._space.has_grids:
            return unused
        return [config for config in unused if self._space.is_turn(config, turn)]


def _key(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)
