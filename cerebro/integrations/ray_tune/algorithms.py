"""The configurations of Ray Tune's search algorithms."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cerebro.errors import InputError


def make_source(param_space: Mapping[str, Any], algorithm: Any, num_samples: int) -> Source:
    """Return the configurations of a `Searcher` or a `BasicVariantGenerator`."""
    from ray.tune.search import BasicVariantGenerator

    kind = Variants if type(algorithm) is BasicVariantGenerator else Source
    return kind(dict(param_space), algorithm, math.inf if num_samples == -1 else num_samples)


class Source:
    """The configurations that a `Searcher` suggests, at most `samples`; it learns from results."""

    adaptive = True

    def __init__(self, mapping: dict[str, Any], algorithm: Any, samples: float) -> None:
        self.samples = samples
        self.exhausted = False
        self.name = type(algorithm).__name__
        self._mapping = mapping
        self._algorithm = algorithm
        self._made = 0
        self._limit = math.inf

    def set_up(self, metric: str, mode: str, points: Sequence[Any], limit: float) -> None:
        """Begin anew; make at most `limit` configurations, whatever the number of samples."""
        self.exhausted, self._made, self._limit = False, 0, limit
        self._begin(metric, mode, points)

    @property
    def total(self) -> int | None:
        """The number of configurations, if it is known."""
        return None if self.samples == math.inf else int(min(self.samples, self._limit))

    def make_config(self) -> tuple[str, dict[str, Any]] | None:
        """Return the next trial's name and configuration; None if no trial is due now."""
        if self.exhausted or self._made >= self._limit:
            self.exhausted = True
            return None
        trial_id = f"{self._made:05d}"
        config = self._next(trial_id)
        if config is None:
            return None
        self._made += 1
        return trial_id, config

    def report(self, trial_id: str, result: dict[str, Any]) -> None:
        self._algorithm.on_trial_result(trial_id, result)

    def report_end(self, trial_id: str, **outcome: Any) -> None:
        self._algorithm.on_trial_complete(trial_id, **outcome)

    def _begin(self, metric: str, mode: str, points: Sequence[Any]) -> None:
        from ray.tune.search.variant_generator import _has_unresolved_values

        if points:
            raise InputError(
                "points are not for a search algorithm of Ray Tune: give it points_to_evaluate "
                "instead"
            )
        unset = find_unset("searcher", self._algorithm, "", metric, mode)
        is_set = self._algorithm.set_search_properties(*unset, self._mapping)
        if not is_set and _has_unresolved_values(self._mapping):
            raise InputError(
                f"param_space: {self.name} was made with its own space: leave only constants in "
                "param_space"
            )

    def _next(self, trial_id: str) -> dict[str, Any] | None:
        from ray.tune.search import Searcher
        from ray.tune.utils.util import merge_dicts

        suggested = Searcher.FINISHED
        if self._made < self.samples:
            suggested = self._algorithm.suggest(trial_id)
        if suggested == Searcher.FINISHED:
            self.exhausted = True
            return None
        if suggested is None:
            return None
        merged: dict[str, Any] = merge_dicts(self._mapping, copy.deepcopy(suggested))
        return merged


class Variants(Source):
    """The samples of a `BasicVariantGenerator`, each with all combinations of grids."""

    adaptive = False

    @property
    def total(self) -> None:
        return None

    def report(self, trial_id: str, result: dict[str, Any]) -> None:
        pass

    def report_end(self, trial_id: str, **outcome: Any) -> None:
        pass

    def _begin(self, metric: str, mode: str, points: Sequence[Any]) -> None:
        self._configs = self._generate([dict(point) for point in points])

    def _next(self, trial_id: str) -> dict[str, Any] | None:
        config = next(self._configs, None)
        self.exhausted = config is None
        return config

    def _generate(self, points: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield what Tune's `BasicVariantGenerator` would: points first, then samples by grids."""
        from ray.tune.search import variant_generator as tune

        generator = self._algorithm
        constant = generator._constant_grid_search
        state = generator._random_state
        spec = {"config": self._mapping}
        presets = [*generator._points_to_evaluate, *points]
        sample = 0
        while sample < self.samples:
            variants = (
                tune._get_preset_variants(spec, presets[sample], constant, state)
                if sample < len(presets)
                else tune.generate_variants(spec, constant, state)
            )
            for _, variant in variants:
                yield variant["config"]
            sample += 1


def find_unset(what: str, it: Any, prefix: str, metric: str, mode: str) -> list[str | None]:
    """Return the search's metric and mode, or None for what an object of Tune's was made with.

    Raises InputError if it was made with others.
    """
    unset: list[str | None] = []
    for name, value in (("metric", metric), ("mode", mode)):
        had = getattr(it, prefix + name, None)
        if had is not None and had != value:
            raise InputError(
                f"{name}={value!r}, but the {what} was made with {name}={had!r}: give the same, "
                "or omit it there"
            )
        unset.append(None if had else value)
    return unset
