"""One trial after another in a plain loop, on one core: the reference of all others."""

from __future__ import annotations

from benchmarks.comparison.training import Work, train_trial


def run(work: Work) -> None:
    """Train every configuration."""
    for number in range(work.trials):
        train_trial(work, number)
