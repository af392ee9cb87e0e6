"""How far a trial's epoch has come: the part of its state that is Cerebro's own.

It travels inside the state, so that a state alone says which unit comes next
and what the epoch's metrics are so far, on whichever worker it is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cerebro.unit import Sums


@dataclass
class EpochProgress:
    """Metric sums of the epoch in progress, in visit order."""

    epoch: int = 0
    step: int = 0
    training: dict[str, tuple[float, float]] = field(default_factory=dict)
    validation: dict[str, float] | None = None

    def begin_unit(self, epoch: int, step: int) -> None:
        if step == 0:
            self.training = {}
            self.validation = None
        self.epoch = epoch
        self.step = step

    def add_training(self, sums: Sums) -> None:
        for name, (total, weight) in sums.items():
            before = self.training.get(name, (0.0, 0.0))
            self.training[name] = (before[0] + total, before[1] + weight)

    def add_validation(self, metrics: dict[str, float]) -> None:
        self.validation = dict(metrics)

    def epoch_metrics(self) -> dict[str, float]:
        """``train_*``, ``val_*`` and short names; a short name means validation if there is one."""
        training = {
            name: total / weight if weight else math.nan
            for name, (total, weight) in self.training.items()
        }
        validation = self.validation or {}
        metrics = {f"train_{name}": value for name, value in training.items()}
        metrics.update({f"val_{name}": value for name, value in validation.items()})
        metrics.update(training)
        metrics.update(validation)
        return metrics

    def to_state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "training": {name: list(pair) for name, pair in self.training.items()},
            "validation": self.validation,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> EpochProgress:
        return cls(
            epoch=state["epoch"],
            step=state["step"],
            training={name: (pair[0], pair[1]) for name, pair in state["training"].items()},
            validation=state["validation"],
        )
