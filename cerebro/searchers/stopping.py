"""Stop trials that no longer improve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cerebro.arguments import check_real_number, check_whole_number
from cerebro.errors import InputError
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
