"""Implement random, quasi-random and grid search, whose configurations no report changes."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from cerebro.errors import InputError
from cerebro.machine.imports import import_extra
from cerebro.searchers.base import DONE, Decision, SpaceSearcher, Suggested, Suggestion
from cerebro.space import Node, json_value

REDRAWS = 32  # draws for a trial, before it gets an unused configuration from the grid
MAX_DIMENSIONS = 21_201  # SciPy has direction numbers for so many


class SequenceSearcher(SpaceSearcher):
    """A searcher of known configurations, whose trials all train to the end."""

    adaptive = False

    def _prepare(self) -> None:
        count = self._count()
        self.total = None if count == math.inf else int(count)

    def _count(self) -> float:
        """Return the number of configurations, including the points."""
        return self._limit

    @abstractmethod
    def _config(self, trial: int) -> dict[str, Any]:
        """Return the configuration of a trial that is not one of the user's points."""

    def suggest(self) -> Suggested:
        """Return the next configuration, or `DONE`."""
        trial = self._next
        if trial >= self._count():
            return DONE
        is_point = trial < len(self._completed)
        config = self._completed[trial] if is_point else self._config(trial)
        self._next += 1
        return Suggestion(json_value(config, "space"), self._epochs)

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        return Decision.CONTINUE

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])


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
        self._drawn: list[dict[str, Any]] = []  # after the points, if the space is finite
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
