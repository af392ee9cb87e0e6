"""Implement quasi-random search, which covers the space more evenly than random draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from cerebro.errors import InputError
from cerebro.machine.imports import import_extra
from cerebro.searchers.base import SequenceSearcher
from cerebro.space import Node

MAX_DIMENSIONS = 21_201
"""The largest number of dimensions for which SciPy has direction numbers."""


class QuasiRandomSearch(SequenceSearcher):
    """Draw configurations from a scrambled Sobol sequence.

    I. M. Sobol, "On the distribution of points in a cube and the approximate evaluation of
    integrals", 1967, with Owen's scrambling. Needs SciPy (the extra ``search``). Trial ``t``
    depends only on the seed, the space and ``t``. A dimension whose condition is false leaves its
    coordinate unused, and so does a grid of Ray Tune, whose options trials take in turn. The first
    ``2**m`` trials are the most even.
    """

    _endless = "quasi-random search"

    def _prepare(self) -> None:
        super()._prepare()
        varying = [node for node in self._space.nodes if node.varies]
        self._columns = {id(node): column for column, node in enumerate(varying)}
        self._engine = self._sobol(max(1, len(varying)))
        self._at = 0  # the point that the engine returns next

    def _sobol(self, dimensions: int) -> Any:
        qmc = import_extra("scipy.stats.qmc", "search", "searcher='quasirandom' needs SciPy")
        if dimensions > MAX_DIMENSIONS:
            raise InputError(f"quasi-random search takes at most {MAX_DIMENSIONS} dimensions")
        generator = np.random.default_rng([self._seed % 2**32, self._seed >> 32])
        return qmc.Sobol(dimensions, scramble=True, bits=None, rng=generator)

    def _config(self, trial: int) -> dict[str, Any]:
        shares = self._shares(trial)
        options = self._space.grid_options(trial)

        def choose(node: Node) -> Any:
            if id(node) in options:
                return options[id(node)]
            return node.dimension.draw(float(shares[self._columns[id(node)]]))

        return self._space.fill({}, choose)

    def _shares(self, trial: int) -> Any:
        """Return a trial's point in the sequence, with each coordinate in [0, 1)."""
        if trial < self._at:
            self._engine.reset()
            self._at = 0
        if trial > self._at:
            self._engine.fast_forward(trial - self._at)
        self._at = trial + 1
        return np.minimum(self._engine.random(1)[0], 1 - 2.0**-53)
