"""Stop trials that no longer improve, or that are worse than half of the others."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cerebro.arguments import check_real_number, check_whole_number
from cerebro.errors import InputError
from cerebro.searchers.base import (
    DONE,
    AdaptiveSearcher,
    Decision,
    Suggested,
    decode_values,
    encode_values,
)
from cerebro.searchers.metrics import find_nearest, metric_mode


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a trial whose metric has not improved for some epochs.

    Whether a trial stops depends only on its own history, never on timing (Prechelt, "Early
    stopping - but when?", 1998).

    Parameters
    ----------
    monitor
        The metric's name, as in ``history``: ``"loss"``, ``"val_accuracy"``.
    patience
        The number of epochs without improvement after which a trial stops; 0 means 1, as in Keras
        and Lightning.
    min_delta
        The smallest change that counts as an improvement, at least 0.
    mode
        ``"min"`` or ``"max"``; not needed for well-known metrics.

    Raises
    ------
    InputError
        If a value is out of range, or the metric's mode is unknown.
    """

    monitor: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        patience = check_whole_number("EarlyStopping: patience", self.patience, 0, math.inf)
        min_delta = check_real_number("EarlyStopping: min_delta", self.min_delta, least=0)
        object.__setattr__(self, "patience", patience)
        object.__setattr__(self, "min_delta", min_delta)
        metric_mode(self.monitor, self.mode, argument="EarlyStopping: monitor")

    def check_metrics(self, metrics: Iterable[str]) -> None:
        """Raise InputError unless `monitor` is among the metrics that a model reports."""
        names = sorted(metrics)
        if self.monitor not in names:
            near = find_nearest(self.monitor, names)
            raise InputError(
                f"EarlyStopping: the model reports no metric {self.monitor!r}; it reports "
                f"{', '.join(names)}{(near and f': did you mean monitor={near!r}?') or ''}"
            )

    def should_stop(self, history: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a trial with this history should stop."""
        sign = 1.0 if metric_mode(self.monitor, self.mode) == "min" else -1.0
        best, waited = float("inf"), 0
        for epoch in history:
            self.check_metrics(epoch["metrics"])
            value = sign * epoch["metrics"][self.monitor]
            if value < best - self.min_delta:
                best, waited = value, 0
            else:
                waited += 1
        return waited >= max(self.patience, 1)


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

    _endless = "median stopping"
    _shown = ("grace_epochs", "min_trials")

    def __init__(self, grace_epochs: int = 1, min_trials: int = 3) -> None:
        self._grace_epochs = check_whole_number("grace_epochs", grace_epochs, 1, math.inf)
        self._min_trials = check_whole_number("min_trials", min_trials, 1, math.inf)

    def _prepare(self) -> None:
        self._best: dict[int, float] = {}
        self._sums: dict[int, float] = {}
        self._averages: list[list[float]] = []
        """By epoch: the averages of all trials so far, sorted."""

    def suggest(self) -> Suggested:
        """Return a new trial, which trains to the end unless it is stopped."""
        return self._suggest_new(self._epochs) if self._next < self._limit else DONE

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
        averages = [list(epoch) for epoch in self._averages]
        sums = [[trial, value] for trial, value in self._sums.items()]
        return {"best": encode_values(self._best), "sums": sums, "averages": averages}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._best, self._sums = decode_values(state["best"]), decode_values(state["sums"])
        self._averages = [[float(v) for v in epoch] for epoch in state["averages"]]


def median_of(values: Sequence[float]) -> float:
    """Return the median of sorted values."""
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
