"""Define the base class of Cerebro's adaptive searchers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cerebro.arguments import check_whole_number
from cerebro.errors import InputError
from cerebro.searchers.base import Decision, SpaceSearcher, Suggestion


class AdaptiveSearcher(SpaceSearcher):
    """A searcher whose decisions depend on reports; its new configurations are random."""

    _most: float = math.inf
    """How many trials, without clones, the searcher begins if it chooses the number itself."""

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Decide how a trial proceeds; a metric that is not finite ends it and counts as worst."""
        value = metrics.get(self._metric, math.nan) * self._sign
        return self._decide(trial, epoch, value if math.isfinite(value) else math.inf)

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        """Decide by a value to minimize; infinity means that the trial has ended."""
        raise NotImplementedError

    def _suggest_new(self, epochs: int) -> Suggestion:
        """Suggest the next new trial, as in random search, to be trained until epoch `epochs`."""
        trial = self._next
        # Not in setup: a run that began with n_trials may be resumed without.
        if trial == 0 and len(self._points) > self._most:
            raise InputError(
                f"without n_trials, {type(self).__name__} begins {self._most} trials, but there "
                f"are {len(self._points)} points to try first; points count as trials, so give "
                f"n_trials={len(self._points)} or more, or fewer points"
            )
        point = self._points[trial] if trial < len(self._points) else {}
        self._next += 1
        return Suggestion(self._space.complete(point, self._seed, trial), epochs)

    def _suggest_resumed(self, trial: int, epochs: int) -> Suggestion:
        """Suggest resuming a paused trial until epoch `epochs`."""
        return Suggestion({}, epochs, trial=trial)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._next, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["count"])
        self._load(state)

    def _state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


def check_rungs(
    min_epochs: int, reduction_factor: int, epochs: int | None = None
) -> tuple[int, int]:
    """Return the first two arguments as ints; raise InputError unless they define valid rungs."""
    min_epochs = check_whole_number("min_epochs", min_epochs, 1, math.inf)
    reduction_factor = check_whole_number("reduction_factor", reduction_factor, 2, math.inf)
    if epochs is not None and min_epochs > epochs:
        raise InputError(
            f"min_epochs={min_epochs} is above epochs={epochs}: give search() more epochs, or "
            "the searcher a smaller min_epochs"
        )
    return min_epochs, reduction_factor


def rung_epochs(min_epochs: int, reduction_factor: int, epochs: int) -> list[int]:
    """Return the epochs at which trials are compared: a geometric series ending with `epochs`."""
    rungs = []
    at = min_epochs
    while at < epochs:
        rungs.append(at)
        at *= reduction_factor
    return [*rungs, epochs]


def encode_value(value: float) -> float | None:
    """Return a value as JSON: infinity becomes null."""
    return value if math.isfinite(value) else None


def decode_value(value: float | None) -> float:
    return math.inf if value is None else float(value)
