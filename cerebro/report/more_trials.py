"""Estimate the gain of more random trials from the order statistics of the trials so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 4
"""The fewest trials for an estimate."""


@dataclass(frozen=True)
class MoreTrials:
    """The largest gain that can be expected from half as many further trials."""

    more: int
    """The number of further trials."""
    chance: float
    """The probability that one of them is a new best."""
    gain: float
    """The expected improvement of the best value, in units of the metric; at least 0."""
    half_found: float
    """The expected best value of ``n - more`` trials drawn from those tried."""


def chance_of_a_new_best(tried: int, more: int) -> float:
    """Return the probability that the best of ``tried + more`` trials is among the `more`.

    This is ``more / (tried + more)``: all orders of independent draws are equally likely, for any
    distribution (N. Glick, Breaking records and breaking boards, American Mathematical Monthly 85,
    1978). If draws can tie, it is an upper bound.
    """
    return more / (tried + more) if more else 0.0


def expected_best(values: Sequence[float], draws: int, mode: str) -> float:
    """Return the mean of the best of `draws` values, over all choices without replacement.

    If the values are sorted with the best last, the i-th is the best of ``C(i - 1, draws - 1)`` of
    the ``C(n, draws)`` choices. This is the unbiased estimate of the expected best of `draws`
    independent trials (R. Tang et al., Showing your work doesn't always work, ACL 2020).
    """
    ordered = sorted(values, reverse=mode == "min")  # the best last
    n = len(ordered)
    total, share = 0.0, draws / n  # C(n - 1, draws - 1) / C(n, draws), for the last value
    for i in range(n, 0, -1):
        if i < draws:
            break
        total += share * ordered[i - 1]
        if i > 1:
            share *= (i - draws) / (i - 1)  # C(i - 2, draws - 1) / C(i - 1, draws - 1)
    return total


def more_trials(values: Sequence[float], tried: int, mode: str) -> MoreTrials | None:
    """Estimate the gain of half as many further independent trials; None below `FEWEST` values.

    The expected best of ``k`` draws is concave in ``k``: on average, each draw adds less than the
    one before. So ``m`` further trials gain at most as much as the last ``m`` did, ``E[best of n] -
    E[best of n - m]``, which `expected_best` estimates without bias for any distribution. `tried`
    counts failed trials, too.
    """
    n = len(values)
    if n < FEWEST:
        return None
    more = n // 2
    best = max(values) if mode == "max" else min(values)
    half_found = expected_best(values, n - more, mode)
    chance = chance_of_a_new_best(tried, more)
    return MoreTrials(more, chance, abs(best - half_found), half_found)
