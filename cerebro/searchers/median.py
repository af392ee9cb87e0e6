"""Implement the median stopping rule, which ends a trial that is worse than half of the others."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from typing import Any

from cerebro.arguments import check_whole_number
from cerebro.searchers.adaptive import AdaptiveSearcher, decode_value, encode_value
from cerebro.searchers.base import DONE, Decision, Suggested, require_end


class MedianStopping(AdaptiveSearcher):
    """Random search that stops a trial whose best value so far is worse than the median of
    the other trials' average values up to the same epoch.

    The rule of Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017,
    section 3.2.2.

    Parameters
    ----------
    grace_epochs
        The number of epochs before a trial may be stopped.
    min_trials
        The number of other trials that must have reached the same epoch.
    """

    def __init__(self, grace_epochs: int = 1, min_trials: int = 3) -> None:
        super().__init__()
        self._grace_epochs = check_whole_number("grace_epochs", grace_epochs, 1, math.inf)
        self._min_trials = check_whole_number("min_trials", min_trials, 1, math.inf)
        self._best: dict[int, float] = {}
        self._sums: dict[int, float] = {}
        self._averages: list[
            list[float]
        ] = []  # by epoch: the averages of all trials so far, sorted

    def _prepare(self) -> None:
        require_end("median stopping", self._n_trials)
        self._best, self._sums, self._averages = {}, {}, []

    def suggest(self) -> Suggested:
        """Return a new trial, which trains to the end unless it is stopped."""
        assert self._n_trials is not None
        return self._suggest_new(self._epochs) if self._next < self._n_trials else DONE

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        if not math.isfinite(value):
            self._forget(trial)
            return Decision.STOP
        self._best[trial] = min(value, self._best.get(trial, math.inf))
        self._sums[trial] = self._sums.get(trial, 0.0) + value
        while len(self._averages) <= epoch:
            self._averages.append([])
        others = self._averages[epoch]
        judged = epoch + 1 > self._grace_epochs and len(others) >= self._min_trials
        stops = judged and self._best[trial] > median_of(others)
        insort(others, self._sums[trial] / (epoch + 1))
        if stops or epoch + 1 == self._epochs:
            self._forget(trial)
        return Decision.STOP if stops else Decision.CONTINUE

    def _forget(self, trial: int) -> None:
        """Drop values that are needed only while the trial trains."""
        self._best.pop(trial, None)
        self._sums.pop(trial, None)

    def _state(self) -> dict[str, Any]:
        return {
            "best": [[t, encode_value(v)] for t, v in self._best.items()],
            "sums": [[t, v] for t, v in self._sums.items()],
            "averages": [list(epoch) for epoch in self._averages],
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        self._best = {t: decode_value(v) for t, v in state["best"]}
        self._sums = {t: float(v) for t, v in state["sums"]}
        self._averages = [[float(v) for v in epoch] for epoch in state["averages"]]

    def __repr__(self) -> str:
        return f"MedianStopping(grace_epochs={self._grace_epochs}, min_trials={self._min_trials})"


def median_of(values: Sequence[float]) -> float:
    """Return the median of sorted values."""
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
