"""The table in docs/design/schedule.md, row by row.

5 % noise, 10 epochs, 8 shards or as many as there are workers if these are
more. A row is the mean over some seeds; costs are not known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest
from comparison_policies import LongestFirst, OneTrialPerWorker, Policy, RandomUnits
from simulation import Search, simulate, spread_costs

TOLERANCE = 0.003  # of a mean ratio; a unit is 0.006 of the shortest makespan


def rows(
    trials: int,
    workers: int,
    *,
    seeds: int = 6,
    spread: float = 1.0,
    exclusive: bool = False,
    policy: Callable[[list[float], int, int], Policy] | None = None,
) -> list[Search]:
    shards = max(8, workers)
    simulations = []
    for seed in range(seeds):
        costs = spread_costs(trials, spread, seed)
        simulations.append(
            simulate(
                costs,
                workers=workers,
                shards=shards,
                noise=0.05,
                exclusive=exclusive,
                seed=seed,
                schedule=policy and policy(costs, shards, seed),
            )
        )
    return simulations


def ratio(simulations: list[Search]) -> float:
    return fmean(simulation.ratio for simulation in simulations)


def first_result(simulations: list[Search]) -> float:
    return fmean(s.first_result / s.makespan for s in simulations)


@pytest.mark.parametrize(
    ("trials", "workers", "makespan", "first"),
    [(16, 8, 1.003, 0.64), (9, 8, 1.005, 0.99), (100, 8, 1.000, 0.08), (17, 16, 1.003, 1.0),
     (3, 2, 1.002, 1.0)],
)  # fmt: skip
def test_shared_shards_match_the_table(
    trials: int, workers: int, makespan: float, first: float
) -> None:
    simulations = rows(trials, workers, seeds=3 if trials == 100 else 12)
    assert ratio(simulations) <= makespan + TOLERANCE
    assert first_result(simulations) <= first + 0.005


@pytest.mark.parametrize(("trials", "workers"), [(16, 8), (100, 8)])
def test_shared_shards_with_spread_costs_match_the_table(trials: int, workers: int) -> None:
    assert ratio(rows(trials, workers, spread=10.0)) <= 1.000 + TOLERANCE


def test_a_hundred_trials_have_few_live_models_and_hops() -> None:
    simulations = rows(100, 8, seeds=3)
    # 8 are live until the last 12, which share the 8 workers and end together.
    assert max(s.max_live for s in simulations) <= 12
    assert max(s.hop_share for s in simulations) <= 0.03


def test_longest_first_has_all_live_and_hops_all_the_time() -> None:
    simulations = rows(100, 8, seeds=2, policy=lambda costs, shards, _: LongestFirst(shards, costs))
    assert ratio(simulations) <= 1.000 + TOLERANCE
    assert first_result(simulations) == pytest.approx(0.99, abs=0.005)
    assert min(s.max_live for s in simulations) >= 99
    assert fmean(s.hop_share for s in simulations) == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(
    ("trials", "workers", "makespan"), [(9, 8, 1.78), (17, 16, 1.88), (3, 2, 1.33)]
)
def test_one_trial_per_worker_matches_the_table(trials: int, workers: int, makespan: float) -> None:
    simulations = rows(trials, workers, policy=lambda _, shards, __: OneTrialPerWorker(shards))
    assert ratio(simulations) == pytest.approx(makespan, abs=0.015)


@pytest.mark.parametrize(
    ("trials", "workers", "spread", "makespan", "published"),
    [(16, 8, 1.0, 1.000, 1.053), (16, 8, 10.0, 1.08, 1.139), (100, 32, 10.0, 1.034, 1.102)],
)
def test_exclusive_shards_match_the_table(
    trials: int, workers: int, spread: float, makespan: float, published: float
) -> None:
    seeds = 12 if workers == 8 else 1
    ours = rows(trials, workers, seeds=seeds, spread=spread, exclusive=True)
    assert ratio(ours) <= makespan + TOLERANCE
    other = rows(
        trials, workers, seeds=seeds, spread=spread,
        policy=lambda _, shards, seed: RandomUnits(shards, seed),
    )  # fmt: skip
    assert ratio(other) == pytest.approx(published, abs=0.03)
    assert ratio(other) > ratio(ours) + 0.02


def test_many_equal_trials_reach_the_bound_with_exclusive_shards() -> None:
    assert ratio(rows(100, 32, seeds=1, exclusive=True)) <= 1.000 + TOLERANCE
