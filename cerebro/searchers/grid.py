"""Grid search: every combination of the space's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cerebro.searchers.base import SequenceSearcher, check_n_trials
from cerebro.space import Space, json_value


class GridSearch(SequenceSearcher):
    """Try every configuration of the space, in the order of :meth:`Space.grid`.

    Points come first and are not repeated if the grid contains them. ``n_trials`` limits the number
    of configurations.
    """

    def __init__(self) -> None:
        super().__init__()
        self._grid: list[dict[str, Any]] = []
        self._n_trials: int | float | None = None

    def setup(
        self,
        space: Space,
        *,
        seed: int,
        epochs: int,
        n_trials: int | float | None = None,
        metric: str,
        mode: str,
        points: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Prepare for a search.

        Raises
        ------
        InputError
            A dimension cannot be enumerated (the message names it), `n_trials` is below 1 or below
            the number of points, or a point does not fit the space.
        """
        check_n_trials(n_trials, points)
        self._n_trials = n_trials
        self._start(space, seed, epochs, points)
        self._grid = [config for config in space.grid() if config not in self._points]

    def _count(self) -> int | float:
        count = len(self._points) + len(self._grid)
        return count if self._n_trials is None else min(count, self._n_trials)

    def _config(self, trial: int) -> dict[str, Any]:
        config: dict[str, Any] = json_value(self._grid[trial - len(self._points)], "grid")
        return config

    def __repr__(self) -> str:
        return "GridSearch()"
