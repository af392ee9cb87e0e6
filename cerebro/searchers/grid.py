"""Implement grid search: every combination of the space's values."""

from __future__ import annotations

from typing import Any

from cerebro.searchers.base import SequenceSearcher
from cerebro.space import json_value


class GridSearch(SequenceSearcher):
    """Try every configuration of the space, in the order of :meth:`Space.grid`.

    Points come first, and the grid does not repeat them. ``n_trials`` limits the number of
    configurations.
    """

    def __init__(self) -> None:
        super().__init__()
        self._grid: list[dict[str, Any]] = []

    def _prepare(self) -> None:
        self._grid = [config for config in self._space.grid() if config not in self._completed]
        super()._prepare()

    def _count(self) -> int | float:
        count = len(self._points) + len(self._grid)
        return count if self._n_trials is None else min(count, self._n_trials)

    def _config(self, trial: int) -> dict[str, Any]:
        config: dict[str, Any] = json_value(self._grid[trial - len(self._points)], "grid")
        return config

    def __repr__(self) -> str:
        return "GridSearch()"
