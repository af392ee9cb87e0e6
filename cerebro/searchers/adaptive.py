"""What the searchers that listen to reports have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cerebro.arguments import whole_number
from cerebro.errors import InputError
from cerebro.searchers.base import Decision, Suggestion, _Done, check_n_trials
from cerebro.space import Space, json_value


class AdaptiveSearcher:
    """A searcher that decides by what it hears; its new configurations are random ones.

    Trial ``t`` is ``space.sample(seed, t)``, points first, as in random search. Subclasses
    say what comes next (:meth:`suggest`) and what becomes of a trial (:meth:`_decide`).
    """

    adaptive = True

    def __init__(self) -> None:
        self._space = Space({})
        self._seed = 0
        self._epochs = 1
        self._n_trials: int | float | None = None
        self._metric = ""
        self._sign = 1.0
        self._points: list[Mapping[str, Any]] = []
        self._count = 0
        """Trials suggested so far, which is the number of the next one."""

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
            If arguments do not fit each other, such as fewer epochs than the searcher's
            first rung, or if a point does not fit the space.
        """
        check_n_trials(n_trials, points)
        self._space, self._seed, self._epochs = space, seed, epochs
        self._n_trials = n_trials
        self._metric, self._sign = metric, 1.0 if mode == "min" else -1.0
        self._points = [json_value(point, "points") for point in points]
        for trial, point in enumerate(self._points):
            space.complete(point, seed, trial)
        self._count = 0
        self._prepare()

    def _prepare(self) -> None:
        """Begin anew; called at the end of :meth:`setup`."""
        raise NotImplementedError

    def suggest(self) -> Suggestion | Literal[_Done.DONE] | None:
        """Return the next suggestion; None if there is none now, `DONE` if never again."""
        raise NotImplementedError

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Hear the metrics of a trial's epoch (from 0) and decide how it goes on.

        A metric that is no finite number, such as that of a trial that failed, ends the
        trial: it is the worst of all.
        """
        value = metrics.get(self._metric, math.nan) * self._sign
        return self._decide(trial, epoch, value if math.isfinite(value) else math.inf)

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        """Decide by a value to minimise; infinity means that the trial is over."""
        raise NotImplementedError

    def _new(self, epochs: int) -> Suggestion:
        """Return the suggestion of the next new trial, until `epochs` epochs are done."""
        trial = self._count
        point = self._points[trial] if trial < len(self._points) else {}
        self._count += 1
        return Suggestion(self._space.complete(point, self._seed, trial), epochs)

    def _again(self, trial: int, epochs: int) -> Suggestion:
        """Return the suggestion that a paused trial goes on until `epochs` epochs are done."""
        return Suggestion({}, epochs, trial=trial)

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON, what a fresh searcher after :meth:`setup` needs to go on."""
        return {"count": self._count, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; called after :meth:`setup`."""
        self._count = int(state["count"])
        self._load(state)

    def _state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


def check_rungs(
    min_epochs: int, reduction_factor: int, epochs: int | None = None
) -> tuple[int, int]:
    """Return the first two as ints; InputError unless rungs can be made of these."""
    min_epochs = whole_number("min_epochs", min_epochs, 1, math.inf)
    reduction_factor = whole_number("reduction_factor", reduction_factor, 2, math.inf)
    if epochs is not None and min_epochs > epochs:
        raise InputError(
            f"min_epochs={min_epochs} is above epochs={epochs}: give search() more epochs, or "
            "the searcher a smaller min_epochs"
        )
    return min_epochs, reduction_factor


def rung_epochs(min_epochs: int, reduction_factor: int, epochs: int) -> list[int]:
    """Return the epochs at which trials are compared: geometric, the last one is `epochs`."""
    rungs = []
    at = min_epochs
    while at < epochs:
        rungs.append(at)
        at *= reduction_factor
    return [*rungs, epochs]


def encode_value(value: float) -> float | None:
    """Return a value as JSON has it: infinity as null."""
    return value if math.isfinite(value) else None


def decode_value(value: float | None) -> float:
    return math.inf if value is None else float(value)
