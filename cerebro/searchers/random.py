"""Random search: every trial draws its configuration independently."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cerebro.errors import InputError
from cerebro.searchers.base import SequenceSearcher, check_n_trials
from cerebro.space import Space


class RandomSearch(SequenceSearcher):
    """Draws configurations from the space; trial ``t`` is ``space.sample(seed, t)``.

    More trials of the same search repeat the first ones: the configuration
    depends on the seed and the trial's number alone.
    """

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
            If `n_trials` is None, below 1 or below the number of points, or if a
            point does not fit the space.
        """
        if n_trials is None:
            raise InputError(
                "random search never ends by itself: give n_trials (how many configurations to "
                "try) or time_limit"
            )
        check_n_trials(n_trials, points)
        self._space, self._seed = space, seed
        self._n_trials = n_trials if n_trials == math.inf else int(n_trials)
        self._start(space, seed, epochs, points)

    def _count(self) -> int | float:
        return self._n_trials

    def _config(self, trial: int) -> dict[str, Any]:
        return self._space.sample(self._seed, trial)

    def __repr__(self) -> str:
        return "RandomSearch()"
