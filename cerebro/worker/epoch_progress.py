"""Keep the progress of a trial's epoch: the part of its state that belongs to Cerebro.

It is stored in the state, so that the state alone determines the next unit and the epoch's metrics
so far, on any worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cerebro._core as _core
from cerebro.errors import CorruptDataError
from cerebro.worker.messages import Sums


@dataclass
class EpochProgress:
    """The position in an epoch, and the epoch's metric sums in visit order."""

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

    def set_training(self, metrics: Mapping[str, float]) -> None:
        """Set the training metrics of the whole epoch, which are not means over batches."""
        self.training.update({name: (value, 1.0) for name, value in metrics.items()})

    def add_validation(self, metrics: dict[str, float]) -> None:
        self.validation = dict(metrics)

    def epoch_metrics(self) -> dict[str, float]:
        """Return ``train_*``, ``val_*`` and short names; these mean validation if there is any."""
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

    @classmethod
    def from_packed(cls, packed: Any) -> EpochProgress:
        """Read the progress from a packed state; raise CorruptDataError if it is not a trial's."""
        try:
            progress = cls.from_state(_core.unpack_state(packed, only="progress"))
            progress._check()
        except (CorruptDataError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CorruptDataError(f"this is not the state of a trial: {error}") from error
        return progress

    def _check(self) -> None:
        """Raise TypeError if a value has the wrong type or range."""
        numbers = [number for pair in self.training.values() for number in pair]
        numbers += (self.validation or {}).values()
        counts = (self.epoch, self.step)
        if not all(type(count) is int and count >= 0 for count in counts) or not all(
            isinstance(number, (int, float)) for number in numbers
        ):
            raise TypeError("its progress is invalid")
