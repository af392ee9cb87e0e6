"""Implement population-based training: the worst trials copy the best and change their settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import cerebro._core as _core
from cerebro.arguments import check_real_number, check_whole_number
from cerebro.errors import InputError
from cerebro.searchers.base import (
    DONE,
    AdaptiveSearcher,
    Decision,
    Suggested,
    Suggestion,
    decode_values,
    encode_values,
)
from cerebro.space import (
    Choice,
    Dimension,
    Integer,
    LogUniform,
    Node,
    Normal,
    Quantized,
    Uniform,
    path_name,
    value_at,
)


class PBT(AdaptiveSearcher):
    """Population based training (Jaderberg et al., "Population Based Training of Neural
    Networks", 2017), synchronous: trials are compared when the whole population is done.

    A replaced trial ends, and a clone takes its place. The clone is a new trial that begins with
    the committed state of one of the best (weights, optimizer moments), but has its own
    hyperparameters and generators. `Trial.parent` records its lineage.

    Parameters
    ----------
    interval
        The number of epochs between comparisons.
    quantile
        The share of the population that is replaced by clones of an equal share of the best; above
        0, at most 0.5.
    mutate
        The names of the hyperparameters that a clone changes (dotted if nested). Default: the
        continuous ones (`uniform` without a step, `loguniform`, `normal`), because hyperparameters
        that shape the model would not fit the copied state.
    factors
        A number is mutated by multiplying it by one of these and clipping it to its bounds; a
        choice moves to a neighbor.
    resample
        The probability of drawing a new value instead.
    population
        The size of the population, if the search has no ``n_trials``.

    Notes
    -----
    The search's ``n_trials`` is the size of the population. It cannot change when a run is resumed,
    because the existing trials were compared without the additional ones. Epochs that are added to
    a finished run train its last population further; no trial is replaced in them.
    """

    _shown = ("interval", "quantile", "mutate")

    def __init__(
        self,
        interval: int = 1,
        quantile: float = 0.25,
        mutate: Sequence[str] | None = None,
        factors: tuple[float, float] = (0.8, 1.2),
        resample: float = 0.25,
        population: int = 8,
    ) -> None:
        if isinstance(mutate, str):
            raise InputError(f"mutate must be a list of names, such as [{mutate!r}]")
        self._interval = check_whole_number("interval", interval, 1, math.inf)
        self._population = check_whole_number("population", population, 2, math.inf)
        self._quantile = check_real_number("quantile", quantile, above=0, most=0.5)
        self._resample = check_real_number("resample", resample, least=0, most=1)
        self._mutate = None if mutate is None else list(mutate)
        if not isinstance(factors, (list, tuple)) or len(factors) != 2:
            raise InputError(f"factors must be two numbers, such as (0.8, 1.2), not {factors!r}")
        down, up = (check_real_number("factors", factor) for factor in factors)
        self._factors = down, up

    def _prepare(self) -> None:
        self._size = self._population if self._limit == math.inf else int(self._limit)
        if self._size < 2:
            raise InputError("PBT compares trials: give n_trials=2 or more")
        self._most = self._size
        names = list(self._space.dimensions)
        for name in self._mutate or ():
            if name not in names:
                raise InputError(
                    f"mutate: {name!r} does not vary in the space (there is "
                    f"{', '.join(names) or 'nothing'})"
                )
        self._members: list[int] = []  # by place in the population: the trial
        self._configs: dict[int, dict[str, Any]] = {}
        self._values: dict[int, float] = {}
        self._generation = 0
        self._waiting: list[list[int]] = []  # to be suggested: (place, trial, parent or -1)
        self._dropped: list[int] = []

    @property
    def _target(self) -> int:
        """The epochs at the end of this generation."""
        return min((self._generation + 1) * self._interval, self._epochs)

    def suggest(self) -> Suggested:
        """Return a trial to resume, a clone, or a new trial; None while a generation trains."""
        if len(self._members) < self._size:
            trial = self._next
            suggestion = self._suggest_new(self._target)
            self._members.append(trial)
            self._configs[trial] = suggestion.config
            return suggestion
        if self._waiting:
            place, trial, parent = self._waiting.pop(0)
            if parent < 0:
                return Suggestion({}, self._target, trial=trial)
            clone = self._members[place] = self._next
            self._next += 1
            self._configs[clone] = self._explore(self._configs[parent], clone)
            return Suggestion(self._configs[clone], self._target, parent=parent)
        return DONE if len(self._values) == self._size and self._is_last else None

    @property
    def _is_last(self) -> bool:
        return self._target == self._epochs

    def wants_more(
        self, state: Mapping[str, Any], n_trials_before: int | None, n_trials: int | None
    ) -> bool:
        """Return False; raise InputError if the population would not have its size any more."""
        if n_trials != n_trials_before:
            raise InputError(
                f"n_trials was {n_trials_before}, is {n_trials}: with PBT it is the size of the "
                "population, which cannot change after trials were compared; resume with "
                f"n_trials={n_trials_before}, or start a new run with another run="
            )
        return False

    def epochs_to_come(self) -> float:
        begun = self._generation * self._interval
        new = (self._size - len(self._members)) * self._target
        again = len(self._waiting) * (self._target - begun)
        return new + again + self._size * (self._epochs - self._target)

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        if epoch + 1 < self._target and math.isfinite(value):
            return Decision.CONTINUE
        self._values[trial] = value
        over = not math.isfinite(value)
        if self._is_last:
            return Decision.STOP if over else Decision.CONTINUE
        if len(self._values) == self._size:
            self._dropped += self._exploit()
        return Decision.STOP if over else Decision.PAUSE

    def _exploit(self) -> list[int]:
        """Decide which trials continue; return the paused trials that are replaced."""
        ranked = sorted((value, trial) for trial, value in self._values.items())
        alive = [trial for value, trial in ranked if math.isfinite(value)]
        count = max(1, math.floor(self._size * self._quantile))
        best = alive[:count]
        losers = {trial for _, trial in ranked[len(ranked) - count :]} - set(best)
        losers |= set(self._values) - set(alive)
        self._generation += 1
        self._values = {}
        self._waiting = []
        if not best:  # there is no trial to copy
            self._generation = -(-self._epochs // self._interval) - 1
            self._values = dict.fromkeys(self._members, math.inf)
            return []
        for place, trial in enumerate(self._members):
            (share,) = _core.random_doubles(1, self._seed, "search", self._generation, place)
            parent = best[min(int(share * len(best)), len(best) - 1)] if trial in losers else -1
            self._waiting.append([place, trial, parent])
        # Suggest clones first, before their parents train further.
        self._waiting.sort(key=lambda item: item[2] < 0)
        return [trial for trial in self._members if trial in losers and trial in alive]

    def dropped(self) -> list[int]:
        trials, self._dropped = self._dropped, []
        return trials

    def _explore(self, parent: Mapping[str, Any], trial: int) -> dict[str, Any]:
        """Return the parent's configuration with the mutated values changed."""

        def choose(node: Node) -> Any:
            # A value of the same name under other conditions belongs to another dimension.
            there, value = value_at(parent, node.path) if node.applies(parent) else (False, None)
            draws = _core.random_doubles(3, self._seed, "search", trial, node.stream)
            if not there:
                return node.dimension.draw(draws[2])
            if not self._is_mutated(node):
                return value
            if draws[0] < self._resample:
                return node.dimension.draw(draws[2])
            return perturb(node.dimension, value, self._factors, up=draws[1] >= 0.5)

        return self._space.fill({}, choose)

    def _is_mutated(self, node: Node) -> bool:
        if self._mutate is not None:
            return path_name(node.path) in self._mutate
        kind = node.dimension
        return isinstance(kind, (LogUniform, Normal)) or (
            isinstance(kind, Uniform) and kind.step is None
        )

    def _state(self) -> dict[str, Any]:
        return {
            "members": list(self._members),
            "configs": [[trial, self._configs[trial]] for trial in self._members],
            "values": encode_values(self._values),
            "generation": self._generation,
            "waiting": [list(item) for item in self._waiting],
            "dropped": list(self._dropped),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        self._members = list(state["members"])
        self._configs = {trial: dict(config) for trial, config in state["configs"]}
        self._values = decode_values(state["values"])
        self._generation = int(state["generation"])
        self._waiting = [list(item) for item in state["waiting"]]
        self._dropped = list(state["dropped"])


def perturb(dimension: Dimension, value: Any, factors: tuple[float, float], *, up: bool) -> Any:
    """Return a value near `value`, within the dimension's bounds."""
    if isinstance(dimension, Choice):
        options = list(dimension.options)
        at = options.index(value) if value in options else 0
        return options[min(max(at + (1 if up else -1), 0), len(options) - 1)]
    changed = value * factors[1 if up else 0]
    if isinstance(dimension, Quantized):
        return dimension.nearest(changed)
    if isinstance(dimension, Integer):
        steps = max(1, round(abs(changed - value) / dimension.step))
        return dimension.nearest(value + (steps if up else -steps) * dimension.step)
    if isinstance(dimension, Uniform) and dimension.step is not None:
        return dimension.nearest(dimension.nearest(value) + (1 if up else -1) * dimension.step)
    if isinstance(dimension, (Uniform, LogUniform)):
        return float(min(max(changed, dimension.low), dimension.high))
    return float(changed)
