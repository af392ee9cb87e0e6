"""Units that are queued at busy workers: schedules stay as good, and the order of units exact."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
from simulation import Search, simulate, spread_costs

from cerebro import _core


class Queueing:
    """A scheduler whose driver queues, at every busy worker, the unit that it names in advance."""

    def __init__(self, **options: Any) -> None:
        self.schedule = _core.Schedule(**options)
        self.queued: dict[int, tuple[int, int, int]] = {}
        self.begun: list[tuple[Any, ...]] = []  # commands of units that have begun by themselves
        self.fresh: list[int] = []  # workers that have begun a unit
        self.continued = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.schedule, name)

    def next(self, now: float) -> tuple[Any, ...] | None:
        command = self.begun.pop(0) if self.begun else self.schedule.next(now)
        if command is not None:
            if command[0] == "run":
                self.fresh.append(command[1])
            return command
        while self.fresh:
            worker = self.fresh.pop()
            following = self.schedule.next_here(worker)
            if following is not None:
                self.queued[worker] = following
        return None

    def unit_done(self, worker: int, now: float) -> tuple[int, int, int]:
        following = self.queued.pop(worker, None)
        if following is None:
            return self.schedule.unit_done(worker, now)
        done = self.schedule.unit_continued(worker, now)
        self.begun.append(("run", worker, done[0], *following, 0))
        self.continued += 1
        return done

    def unit_failed(self, worker: int, now: float) -> tuple[int, int, int]:
        self.queued.pop(worker, None)
        return self.schedule.unit_failed(worker, now)

    def remove_worker(self, worker: int, now: float) -> None:
        self.queued.pop(worker, None)
        self.fresh = [other for other in self.fresh if other != worker]
        self.schedule.remove_worker(worker, now)


def both(
    costs: list[float], workers: int, shards: int, **options: Any
) -> tuple[Search, Search, float]:
    """Simulate a search without and with queues; return both, and the share of queued units."""
    known = {name: options[name] for name in ("exclusive", "eval_cost") if name in options}
    queueing = Queueing(shards=[1.0] * shards, **known)
    plain = simulate(costs, workers=workers, shards=shards, **options)
    queued = simulate(costs, workers=workers, shards=shards, **options, schedule=queueing)
    return plain, queued, queueing.continued / len(queued.units)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_order_of_every_trial_stays_exact(seed: int, exclusive: bool) -> None:
    """With failed units, a worker that leaves in the middle, and one that joins."""
    trials, shards, epochs = 9, 6, 3
    _, search, _ = both(
        spread_costs(trials, 3.0, seed),
        3,
        shards,
        epochs=epochs,
        eval_cost=0.5,
        noise=0.05,
        failures=0.05,
        leaves=[(60.0, 1)],
        joins=[80.0],
        exclusive=exclusive,
        seed=seed,
    )
    for trial in range(trials):
        done = [u for u in search.units if u.trial == trial and u.outcome == "done"]
        expected = []
        for epoch in range(epochs):
            order = [*_core.visit_order(trial, epoch, shards), -1]
            expected += [(epoch, step, shard) for step, shard in enumerate(order)]
        assert [(u.epoch, u.step, u.shard) for u in done] == expected
        spans = sorted((u.start, u.end) for u in search.units if u.trial == trial)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize(
    ("trials", "workers", "spread", "share"),
    [(16, 2, 1.0, 0.75), (16, 8, 1.0, 0.5), (9, 8, 1.0, 0.4), (3, 2, 1.0, 0.4),
     (16, 8, 10.0, 0.5), (40, 4, 10.0, 0.8)],
)  # fmt: skip
def test_queues_do_not_lengthen_a_search(
    trials: int, workers: int, spread: float, share: float
) -> None:
    """At most 7 of 8 units can be queued: those that do not begin an epoch."""
    found = [
        both(*(spread_costs(trials, spread, seed), workers, 8), noise=0.05, seed=seed)
        for seed in range(6)
    ]
    plain, queued = (fmean(pair[i].ratio for pair in found) for i in range(2))
    assert queued <= plain + 0.01, (plain, queued)
    assert min(pair[2] for pair in found) >= share
