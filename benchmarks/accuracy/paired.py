"""Paired differences over seeds, and what they say about a bar."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH = 0.25  # points to which the interval of a mean is narrowed, on each side
FEWEST = 24  # seeds; a narrow interval of fewer may be chance


@dataclass
class Paired:
    """The accuracies of one order and those of the reference, seed by seed.

    An accuracy is the mean over the last two epochs: after one epoch alone it jumps more.
    """

    bar: float
    """How far the mean difference may be from 0, in points."""
    order: list[list[float]] = field(default_factory=list)
    """For each seed, the accuracy after each epoch."""
    reference: list[list[float]] = field(default_factory=list)

    def add(self, order: list[float], reference: list[float]) -> None:
        """Add a seed."""
        self.order.append(order)
        self.reference.append(reference)

    @property
    def differences(self) -> list[float]:
        """For each seed, the order's accuracy minus the reference's."""
        both = zip(self.order, self.reference, strict=True)
        return [last(ours) - last(theirs) for ours, theirs in both]

    @property
    def mean(self) -> float:
        """The mean difference, in points."""
        return statistics.fmean(self.differences)

    @property
    def interval(self) -> float:
        """Half the width of the 95% interval of the mean difference."""
        return half_width(self.differences)

    @property
    def by_epoch(self) -> list[tuple[float, float]]:
        """For each epoch, the mean difference and its interval."""
        found = []
        for epoch in range(len(self.order[0])):
            both = zip(self.order, self.reference, strict=True)
            differences = [ours[epoch] - theirs[epoch] for ours, theirs in both]
            found.append((statistics.fmean(differences), half_width(differences)))
        return found

    @property
    def accuracy(self) -> float:
        """The reference's mean accuracy, in points."""
        return statistics.fmean(map(last, self.reference))

    def is_decided(self) -> bool:
        """Return whether there are enough seeds."""
        return len(self.order) >= FEWEST and self.interval < WIDTH

    def verdict(self) -> str:
        """Say whether the mean is within the bar.

        "no": it is beyond, by more than its interval; "unclear": by less, or the interval is wide.
        """
        beyond = abs(self.mean) - self.bar
        if beyond > self.interval:
            return "no"
        return "yes" if beyond <= 0 and self.interval < WIDTH else "unclear"


def last(scores: Sequence[float]) -> float:
    """Return the mean over the last two epochs."""
    return statistics.fmean(scores[-2:])


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95% interval of a mean by Student's t."""
    from scipy.stats import t

    if len(values) < 2:
        return math.inf
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return float(t.ppf(0.975, len(values) - 1)) * spread
