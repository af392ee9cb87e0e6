"""What the searchers have in common that draw a configuration for each trial's number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cerebro.searchers.base import SequenceSearcher, check_n_trials, needs_end
from cerebro.space import Space


class DrawnSearch(SequenceSearcher):
    """Draws one configuration after the other, without an end of its own."""

    _title = ""

    def __init__(self) -> None:
        super().__init__()
        self._space = Space({})
        self._seed = 0
        self._n_trials: int | float = 0

    def setup(
        self,
        space: Space,
        *,
        seed: int,
        epochs: int,
        n_trials: int | float | None,
        metric: str,
        mode: str,
        points: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Prepare for a search.

        Raises
        ------
        InputError
            If `n_trials` is None, below 1 or below the number of points, if a point does not
            fit the space, or if a package is missing.
        """
        count = needs_end(self._title, n_trials)
        check_n_trials(count, points)
        self._space, self._seed = space, seed
        self._n_trials = count if count == math.inf else int(count)
        self._prepare()
        self._start(space, seed, epochs, points)

    def _prepare(self) -> None:
        """Begin anew, for this space and seed."""

    def _count(self) -> int | float:
        return self._n_trials

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
