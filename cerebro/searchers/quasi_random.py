"""Quasi-random search: configurations that cover the space more evenly than chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cerebro.errors import InputError
from cerebro.searchers.base import SequenceSearcher, check_n_trials
from cerebro.space import Node, Space

MAX_DIMENSIONS = 21_201
"""For which SciPy has direction numbers."""


class QuasiRandomSearch(SequenceSearcher):
    """Draws configurations from a scrambled Sobol sequence.

    I. M. Sobol, "On the distribution of points in a cube and the approximate evaluation of
    integrals", 1967, with Owen's scrambling. Needs SciPy (``pip install 'cerebro[search]'``).
    Trial ``t`` depends on the seed, the space and ``t`` alone; dimensions whose condition
    does not hold leave their share unused. The first ``2**m`` trials are the most even.
    """

    def __init__(self) -> None:
        super().__init__()
        self._space = Space({})
        self._seed = 0
        self._n_trials: int | float = 0
        self._columns: dict[int, int] = {}
        self._engine: Any = None
        self._at = 0

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
            fit the space, or if SciPy is missing.
        """
        if n_trials is None:
            raise InputError(
                "quasi-random search never ends by itself: give n_trials (how many "
                "configurations to try) or time_limit"
            )
        check_n_trials(n_trials, points)
        self._space, self._seed = space, seed
        self._n_trials = n_trials if n_trials == math.inf else int(n_trials)
        varying = [node for node in space.nodes if node.varies]
        self._columns = {id(node): column for column, node in enumerate(varying)}
        self._engine = self._sobol(max(1, len(varying)))
        self._at = 0
        self._start(space, seed, epochs, points)

    def _sobol(self, dimensions: int) -> Any:
        try:
            from scipy.stats import qmc
        except ImportError:
            raise InputError(
                "searcher='quasirandom' needs SciPy: pip install 'cerebro[search]'"
            ) from None
        if dimensions > MAX_DIMENSIONS:
            raise InputError(f"quasi-random search takes at most {MAX_DIMENSIONS} dimensions")
        generator = np.random.default_rng([self._seed % 2**32, self._seed >> 32])
        return qmc.Sobol(dimensions, scramble=True, bits=None, rng=generator)

    def _count(self) -> int | float:
        return self._n_trials

    def _config(self, trial: int) -> dict[str, Any]:
        shares = self._shares(trial)

        def choose(node: Node) -> Any:
            return node.dimension.draw(float(shares[self._columns[id(node)]]))

        return self._space.fill({}, choose)

    def _shares(self, trial: int) -> Any:
        """Return the sequence's point of a trial, each coordinate in [0, 1)."""
        if trial < self._at:
            self._engine.reset()
            self._at = 0
        if trial > self._at:
            self._engine.fast_forward(trial - self._at)
        self._at = trial + 1
        return np.minimum(self._engine.random(1)[0], 1 - 2.0**-53)

    def __repr__(self) -> str:
        return "QuasiRandomSearch()"
