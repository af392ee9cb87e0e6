"""The simulator itself: its times, its bounds and what it refuses."""

from __future__ import annotations

import math

import pytest
from simulation import simulate, spread_costs

from cerebro.errors import InputError


def test_equal_trials_without_noise_reach_the_lower_bound() -> None:
    simulation = simulate([1.0] * 9, workers=8, shards=8, epochs=10)
    assert (simulation.makespan, simulation.lower_bound) == (90.0, 90.0)
    assert simulation.ratio == 1.0
    assert simulation.idle_share == 0.0
    assert len(simulation.units) == 9 * 8 * 10


def test_one_trial_takes_the_sum_of_its_units() -> None:
    simulation = simulate([2.0], workers=3, shards=[1.0, 4.0], epochs=2, eval_cost=0.5)
    assert simulation.makespan == simulation.lower_bound == simulation.first_result == 2 * 2 * 5.5
    assert [unit.shard for unit in simulation.units] == [0, 1, -1, 1, 0, -1]
    assert simulation.idle_share == pytest.approx(2 / 3)
    assert simulation.max_live == 1
    assert simulation.hop_share == 0.0


def test_times_of_units_depend_on_seed_and_unit_alone() -> None:
    def times(workers: int, seed: int) -> dict[tuple[int, int, int], float]:
        units = simulate([1.0, 2.0, 3.0], workers=workers, noise=0.1, seed=seed).units
        return {(u.trial, u.epoch, u.step): u.end - u.start for u in units}

    assert times(1, seed=5) == pytest.approx(times(3, seed=5))
    assert times(1, seed=5) != pytest.approx(times(1, seed=6))
    assert len(set(times(1, seed=5).values())) > 200


def test_failed_units_run_again() -> None:
    simulation = simulate([1.0, 1.0], workers=2, failures=0.3)
    failed = [unit for unit in simulation.units if unit.outcome == "failed"]
    assert len(failed) > 20
    assert len(simulation.units) == 160 + len(failed)


def test_the_lower_bound_counts_only_workers_that_are_present() -> None:
    """Two workers for 10 seconds, then one: 40 seconds of work end at 30."""
    simulation = simulate([1.0] * 5, workers=2, shards=4, epochs=2, leaves=[(10.0, 1)])
    assert simulation.lower_bound == 30.0
    assert simulation.makespan == 30.0
    assert simulation.capacity == 40.0
    simulation = simulate([1.0] * 5, workers=1, shards=4, epochs=2, joins=[10.0])
    assert simulation.lower_bound == simulation.makespan == 25.0


def test_a_worker_that_leaves_loses_its_unit() -> None:
    simulation = simulate([1.0], workers=2, shards=2, epochs=1, leaves=[(0.5, 0)])
    assert [(u.worker, u.attempt, u.outcome, u.end) for u in simulation.units] == [
        (0, 0, "lost", 0.5),
        (1, 1, "done", 1.5),
        (1, 0, "done", 2.5),
    ]
    assert simulation.units[1].hopped


def test_a_hop_takes_its_configured_cost() -> None:
    simulation = simulate([1.0] * 3, workers=2, shards=2, epochs=4, hop_cost=0.25)
    for unit in simulation.units:
        assert unit.end - unit.start == (1.25 if unit.hopped else 1.0)
    assert any(unit.hopped for unit in simulation.units)


def test_a_simulation_without_units_takes_no_time() -> None:
    simulation = simulate([], workers=2)
    assert simulation.makespan == simulation.lower_bound == 0.0
    assert simulation.ratio == 1.0
    assert math.isnan(simulation.first_result)
    assert simulate([1.0], workers=1, epochs=0).units == ()


def test_costs_are_spread_between_one_and_the_spread() -> None:
    costs = spread_costs(1000, 10.0, seed=1)
    assert 1.0 <= min(costs) < 1.05 and 9.5 < max(costs) <= 10.0
    assert sum(cost < math.sqrt(10) for cost in costs) == pytest.approx(500, abs=50)
    assert spread_costs(3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": [1.0, 0.0], "workers": 1}, "cost of trial 1"),
        ({"costs": [1.0], "workers": -1}, "workers"),
        ({"costs": [1.0], "workers": 1, "noise": -0.1}, "noise"),
        ({"costs": [1.0], "workers": 1, "failures": 1.0}, "failures"),
        ({"costs": [1.0], "workers": 0}, "1 trials are left and no worker is"),
        ({"costs": [1.0], "workers": 1, "leaves": [(1.0, 0), (2.0, 0)]}, "not there"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(**arguments)  # type: ignore[arg-type]
