"""What must hold in every search: looked for in thousands of random simulated ones."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import groupby, pairwise

import pytest
from simulation import Search, Unit, simulate, spread_costs

from cerebro._core import visit_order

Arguments = dict[str, object]


def random_search(seed: int) -> Arguments:
    rng = random.Random(seed)
    trials, workers, shards = rng.randint(1, 40), rng.randint(1, 9), rng.randint(1, 12)
    kind = seed % 3  # 0: shared, 1: exclusive, 2: at most two shards open
    stays = rng.random() < 0.5
    leaves = [] if stays else [(rng.uniform(0, 20), w) for w in range(rng.randrange(workers))]
    return {
        "costs": spread_costs(trials, rng.choice([1, 3, 10]), seed),
        "workers": workers,
        "shards": [rng.uniform(0.5, 1.5) for _ in range(shards)],
        "epochs": [rng.randint(1, 3) for _ in range(trials)],
        "eval_cost": rng.choice([0.0, 0.5]),
        "noise": rng.choice([0.0, 0.05, 0.3]),
        "hop_cost": rng.choice([0.0, 0.01]),
        "failures": rng.choice([0.0, 0.05]),
        "joins": [] if stays else [rng.uniform(0, 20) for _ in range(rng.randrange(4))],
        "leaves": leaves,
        "exclusive": kind == 1,
        "stagger": kind != 2,
        "live_models": rng.randint(1, 8),
        "seed": seed,
    }


def check_overlap(units: list[Unit], what: str) -> None:
    """No two of the units at one time."""
    units = sorted(units, key=lambda unit: (unit.start, unit.end))
    for before, after in pairwise(units):
        assert before.end <= after.start, f"{what}: {before} and {after}"


def by(units: tuple[Unit, ...], key: str) -> dict[int, list[Unit]]:
    groups = defaultdict(list)
    for unit in units:
        groups[getattr(unit, key)].append(unit)
    return groups


def check_trial(units: list[Unit], epochs: int, shards: int, arguments: Arguments) -> None:
    """Each unit once, in the order of its visits, after as many attempts as failed."""
    trial = units[0].trial
    expected = []
    for epoch in range(epochs):
        order = visit_order(trial, epoch, shards, stagger=bool(arguments["stagger"]))
        expected += [(epoch, step, shard) for step, shard in enumerate(order)]
        expected += [(epoch, shards, -1)] if arguments["eval_cost"] else []
    check_overlap(units, f"trial {trial}")
    units = sorted(units, key=lambda unit: (unit.start, unit.end))
    got = []
    for position, attempts in groupby(units, key=lambda unit: (unit.epoch, unit.step, unit.shard)):
        tried = list(attempts)
        got.append(position)
        assert [unit.attempt for unit in tried] == list(range(len(tried)))
        assert [unit.outcome == "done" for unit in tried] == [False] * (len(tried) - 1) + [True]
    assert got == expected


def check_two_open(units: tuple[Unit, ...], shards: int) -> None:
    """When a unit starts, no more than two shards are being read."""
    training = sorted((unit for unit in units if unit.shard >= 0), key=lambda unit: unit.start)
    running: list[Unit] = []
    for unit in training:
        running = [other for other in running if other.end > unit.start] + [unit]
        assert len({other.shard for other in running}) <= 2, running


def check(simulation: Search, arguments: Arguments) -> None:
    shards = len(arguments["shards"])  # type: ignore[arg-type]
    trials = by(simulation.units, "trial")
    assert len(trials) == len(arguments["costs"])  # type: ignore[arg-type]
    for trial, units in trials.items():
        check_trial(units, arguments["epochs"][trial], shards, arguments)  # type: ignore[index]
    for worker, units in by(simulation.units, "worker").items():
        check_overlap(units, f"worker {worker}")
    if arguments["exclusive"]:
        for shard, units in by(simulation.units, "shard").items():
            if shard >= 0:
                check_overlap(units, f"shard {shard}")
    if not arguments["stagger"]:
        check_two_open(simulation.units, shards)


@pytest.mark.parametrize("block", range(10))
def test_invariants_hold_in_random_searches(block: int) -> None:
    for seed in range(block * 200, block * 200 + 200):
        arguments = random_search(seed)
        check(simulate(**arguments), arguments)  # type: ignore[arg-type]


def test_two_simulations_are_the_same() -> None:
    for seed in range(30):
        arguments = random_search(seed)
        first, second = simulate(**arguments), simulate(**arguments)  # type: ignore[arg-type]
        assert first == second


def long_search(seed: int, exclusive: bool) -> Arguments:
    """A search as promise 4 speaks of: nobody leaves, and units are many.

    Exclusive: each worker holds equally many shards, and there are at least
    two trials for each worker.
    """
    rng = random.Random(seed)
    workers = rng.randint(1, 9)
    shards = workers * rng.randint(1, 12 // workers) if exclusive else rng.randint(1, 12)
    trials = rng.randint(2 * workers if exclusive else 1, 40)
    return {
        "costs": spread_costs(trials, rng.choice([1, 3, 10]), seed),
        "workers": workers,
        "shards": [rng.uniform(0.8, 1.2) for _ in range(shards)],
        "epochs": rng.randint(2, 10),
        "eval_cost": rng.choice([0.0, 0.5]),
        "noise": 0.05,
        "exclusive": exclusive,
        "seed": seed,
    }


def longest_unit(simulation: Search) -> float:
    return max(unit.end - unit.start for unit in simulation.units)


def test_the_makespan_is_near_the_lower_bound_with_shared_shards() -> None:
    """Within 1 % of the lower bound but for one unit, which is never split: so
    within 1 % as soon as a worker has 100 units or more to do."""
    counted = 0
    for seed in range(300):
        simulation = simulate(**long_search(seed, exclusive=False))  # type: ignore[arg-type]
        unit = longest_unit(simulation)
        assert simulation.makespan <= 1.01 * simulation.lower_bound + unit, seed
        if simulation.lower_bound >= 110 * unit:
            counted += 1
            assert simulation.ratio <= 1.01, seed
    assert counted >= 100


def test_the_makespan_is_near_the_lower_bound_with_exclusive_shards() -> None:
    """Within 10 % of the lower bound, where a worker has 50 units or more to do."""
    counted = 0
    for seed in range(300):
        simulation = simulate(**long_search(seed, exclusive=True))  # type: ignore[arg-type]
        if simulation.lower_bound >= 50 * longest_unit(simulation):
            counted += 1
            assert simulation.ratio <= 1.10, seed
    assert counted >= 200


def test_models_hop_little_when_trials_are_many() -> None:
    simulation = simulate([1.0] * 100, workers=8, noise=0.05)
    assert simulation.hop_share < 0.06
    # Half of the time eight trials are live: those that the eight workers run.
    live, median = set(), Counter[int]()
    for unit in sorted(simulation.units, key=lambda unit: unit.end):
        live.add(unit.trial)
        if (unit.epoch, unit.step) == (9, 7):
            live.remove(unit.trial)
        median[len(live)] += 1
    assert median[8] > 0.5 * len(simulation.units)
