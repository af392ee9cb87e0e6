"""Implement grid search: every combination of the space's values."""

from __future__ import annotations

from typing import Any

from cerebro.searchers.base import SequenceSearcher


class GridSearch(SequenceSearcher):
    """Try every configuration of the space, in the order of :meth:`Space.grid`.

    Points come first, and the grid does not repeat them. ``n_trials`` limits the number of
    configurations.
    """

    def _prepare(self) -> None:
        self._grid = [config for config in self._space.grid() if config not in self._completed]
        super()._prepare()

    def _count(self) -> float:
        return min(len(self._points) + len(self._grid), self._limit)

    def _config(self, trial: int) -> dict[str, Any]:
        return self._grid[trial - len(self._points)]
