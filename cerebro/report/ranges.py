"""Describe the range of a setting, as far as plots and advice need it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """The values from which a search draws a setting."""

    low: float | None = None  # the ends, for a number between them
    high: float | None = None
    is_log: bool = False  # the logarithm is drawn
    options: Sequence[Any] = ()  # the values, if they are listed

    def place(self, value: float) -> float | None:
        """Return a value's position between the ends: 0 at the low end, 1 at the high end."""
        low, high = self.low, self.high
        if low is None or high is None or not low < high:
            return None
        if self.is_log:
            if value <= 0 or low <= 0:
                return None
            return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        return (value - low) / (high - low)

    @property
    def steps(self) -> list[float]:
        """The listed values in ascending order, if all are numbers; else empty."""
        numbers = [o for o in self.options if is_number(o)]
        return sorted(set(numbers)) if len(numbers) == len(self.options) else []


def is_number(value: Any) -> bool:
    """Return whether a setting's value is a number and not a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
