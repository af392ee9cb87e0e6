"""The median stopping rule: a trial that is worse than half of the others ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

from cerebro.errors import InputError
from cerebro.searchers.adaptive import AdaptiveSearcher, decode_value, encode_value
from cerebro.searchers.base import DONE, Decision, Suggestion, _Done


class MedianStopping(AdaptiveSearcher):
    """Random search that stops a trial whose best value so far is worse than the median of
    what the other trials had on average by the same epoch.

    The rule of Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017,
    section 3.2.2.

    Parameters
    ----------
    grace_epochs
        Epochs before a trial may be stopped.
    min_trials
        Other trials that must have come as far.
    """

    def __init__(self, grace_epochs: int = 1, min_trials: int = 3) -> None:
        super().__init__()
        for name, value in (("grace_epochs", grace_epochs), ("min_trials", min_trials)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")
        self._grace_epochs = grace_epochs
        self._min_trials = min_trials
        self._best: dict[int, float] = {}
        self._sums: dict[int, float] = {}
        self._averages: list[dict[int, float]] = []  # by epoch: trial to its average until then

    def _prepare(self) -> None:
        if self._n_trials is None:
            raise InputError(
                "median stopping never ends by itself: give n_trials (how many configurations to "
                "try) or time_limit"
            )
        self._best, self._sums, self._averages = {}, {}, []

    def suggest(self) -> Suggestion | Literal[_Done.DONE] | None:
        """Return a new trial, which trains to the end unless it is stopped."""
        assert self._n_trials is not None
        return self._new(self._epochs) if self._count < self._n_trials else DONE

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        if not math.isfinite(value):
            return Decision.STOP
        self._best[trial] = min(value, self._best.get(trial, math.inf))
        self._sums[trial] = self._sums.get(trial, 0.0) + value
        while len(self._averages) <= epoch:
            self._averages.append({})
        self._averages[epoch][trial] = self._sums[trial] / (epoch + 1)
        others = [v for t, v in self._averages[epoch].items() if t != trial]
        if epoch + 1 <= self._grace_epochs or len(others) < self._min_trials:
            return Decision.CONTINUE
        return Decision.STOP if self._best[trial] > median(others) else Decision.CONTINUE

    def _state(self) -> dict[str, Any]:
        return {
            "best": [[t, encode_value(v)] for t, v in self._best.items()],
            "sums": [[t, v] for t, v in self._sums.items()],
            "averages": [[[t, v] for t, v in epoch.items()] for epoch in self._averages],
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        self._best = {t: decode_value(v) for t, v in state["best"]}
        self._sums = {t: float(v) for t, v in state["sums"]}
        self._averages = [{t: float(v) for t, v in epoch} for epoch in state["averages"]]

    def __repr__(self) -> str:
        return f"MedianStopping(grace_epochs={self._grace_epochs}, min_trials={self._min_trials})"
