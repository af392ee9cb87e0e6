"""Tiny searches, beside the best schedule that there is, found by trying all."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from simulation import simulate

from cerebro._core import visit_order

Chains = tuple[tuple[tuple[float, int], ...], ...]  # per trial: (seconds, shard) of each unit


def chains_of(costs: tuple[float, ...], shards: int) -> Chains:
    return tuple(
        tuple((cost, shard) for shard in visit_order(trial, 0, shards))
        for trial, cost in enumerate(costs)
    )


def optimum(chains: Chains, workers: int, exclusive: bool) -> float:
    """Return the least makespan.

    Whatever the best schedule is, starting its units in the order of their
    starts, each as early as it can, is no worse: so trying all orders finds it.
    """

    @cache
    def best(done: tuple[int, ...], trials: tuple[float, ...], free: tuple[float, ...]) -> float:
        least = float("inf")
        for trial, chain in enumerate(chains):
            if done[trial] == len(chain):
                continue
            seconds, shard = chain[done[trial]]
            worker = shard % workers if exclusive else free.index(min(free))
            end = max(trials[trial], free[worker]) + seconds
            then = best(
                (*done[:trial], done[trial] + 1, *done[trial + 1 :]),
                (*trials[:trial], end, *trials[trial + 1 :]),
                (*free[:worker], end, *free[worker + 1 :]),
            )
            least = min(least, then)
        return max(trials) if least == float("inf") else least

    return best((0,) * len(chains), (0.0,) * len(chains), (0.0,) * workers)


CASES = [
    (costs, shards, workers)
    for trials in (1, 2, 3)
    for costs in itertools.combinations_with_replacement((1.0, 2.0, 4.0), trials)
    for shards in (1, 2, 3)
    for workers in (1, 2)
]


@pytest.mark.parametrize("exclusive", [False, True], ids=["shared", "exclusive"])
def test_the_makespan_exceeds_the_optimum_by_at_most_one_unit(exclusive: bool) -> None:
    """Never more than a unit above the optimum, and nearly always the optimum
    itself, although the costs are not known beforehand and one epoch has few units."""
    best_found = 0
    for costs, shards, workers in CASES:
        found = simulate(costs, workers=workers, shards=shards, epochs=1, exclusive=exclusive)
        least = optimum(chains_of(costs, shards), workers, exclusive)
        assert found.lower_bound <= least + 1e-9
        assert least - 1e-9 <= found.makespan <= least + max(costs) + 1e-9, (costs, shards, workers)
        best_found += found.makespan <= least + 1e-9
    assert best_found >= 0.75 * len(CASES), (best_found, len(CASES))


@pytest.mark.parametrize(
    ("trials", "workers", "shards"), [(3, 2, 2), (4, 2, 2), (4, 3, 3), (2, 2, 3)]
)
def test_equal_costs_reach_the_optimum(trials: int, workers: int, shards: int) -> None:
    costs = (1.0,) * trials
    found = simulate(costs, workers=workers, shards=shards, epochs=1)
    assert found.makespan == optimum(chains_of(costs, shards), workers, exclusive=False)
