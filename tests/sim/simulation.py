"""Simulated searches with noise, failures, hops that cost time, and workers that come and go.

>>> simulation = simulate([1.0] * 9, workers=8, shards=8, epochs=10)
>>> simulation.makespan, simulation.lower_bound
(90.0, 90.0)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import cerebro._core as _core
from cerebro.errors import InputError
from cerebro.executors.simulated import SimulatedRun, SimulatedUnit, Simulation

LEAST_FACTOR = 0.1  # noise makes no unit shorter than this share of its cost


@dataclass(frozen=True, slots=True)
class Unit(SimulatedUnit):
    """A unit that may move to another worker, fail or lose its worker."""

    hopped: bool
    outcome: Literal["done", "failed", "lost"]


@dataclass(frozen=True)
class Search(Simulation):
    """The result of `simulate`; `lower_bound` is the lower bound of every schedule with the same
    times: the longest trial, the work over the workers, and the work of the busiest holder of
    exclusive shards."""

    lower_bound: float

    @property
    def ratio(self) -> float:
        """Makespan over its lower bound; 1.0 is perfect."""
        return self.makespan / self.lower_bound if self.lower_bound > 0 else 1.0

    @property
    def hop_share(self) -> float:
        """Share of the units that ran on a different worker than their trial's previous unit."""
        return sum(unit.hopped for unit in self.units) / max(1, len(self.units))


def spread_costs(trials: int, spread: float = 1.0, seed: int = 0) -> list[float]:
    """Return a cost per trial between 1 and ``spread``, log-uniform."""
    return [spread**u for u in _core.random_doubles(trials, seed, "space")]


def simulate(
    costs: Sequence[float],
    *,
    workers: int,
    shards: int | Sequence[float] = 8,
    epochs: int | Sequence[int] = 10,
    eval_cost: float = 0.0,
    noise: float = 0.0,
    hop_cost: float = 0.0,
    failures: float = 0.0,
    joins: Iterable[float] = (),
    leaves: Iterable[tuple[float, int]] = (),
    exclusive: bool = False,
    stagger: bool = True,
    live_models: int = 8,
    seed: int = 0,
    schedule: Any = None,
) -> Search:
    """Run trials on a simulated clock.

    Parameters ---------- costs For each trial the seconds per weight of a shard. workers Their
    number at the start. shards Their number, or a weight for each, e.g. its rows. epochs Of all
    trials, or per trial. eval_cost Weight of the validation unit that ends an epoch; 0: none. noise
    Standard deviation of a unit's time, as a share of it. The random factor is a function of the
    seed and the unit: searches with the same seed differ only by the scheduler. hop_cost Extra
    seconds for a unit whose trial last ran on a different worker. failures Share of the units that
    fail at their end and run again. joins Times at which a worker joins; joined workers get the
    next numbers in order of time. leaves Times at which a worker leaves, and its number. exclusive,
    stagger, live_models As of :class:`cerebro._core.Schedule`. seed Of noise and failures. schedule
    A scheduler to replace the ``_core.Schedule`` made from these arguments; it must be new, without
    workers and trials.

    Raises ------ InputError If an argument is out of range, or if trials remain when every worker
    has left.
    """
    check(costs, workers, noise, failures)
    weights = [1.0] * shards if isinstance(shards, int) else [float(w) for w in shards]
    if schedule is None:
        schedule = _core.Schedule(
            shards=weights,
            exclusive=exclusive,
            stagger=stagger,
            eval_cost=eval_cost,
            live_models=live_models,
            capacity=max(1, len(costs)),
        )
    run = SearchRun(schedule, weights, eval_cost, costs, noise, failures, hop_cost, seed)
    run.changes = [*((time, "join", -1) for time in sorted(joins))]
    run.changes += [(time, "leave", worker) for time, worker in leaves]
    run.changes.sort(key=lambda change: change[0])
    for _ in range(workers):
        run.join()
    for trial in range(len(costs)):
        run.add_trial(trial, epochs if isinstance(epochs, int) else epochs[trial])
    return run.run_to_end()


def check(costs: Sequence[float], workers: int, noise: float, failures: float) -> None:
    if workers < 0:
        raise InputError(f"workers must not be negative, but is {workers}")
    if noise < 0:
        raise InputError(f"noise must not be negative, but is {noise}")
    if not 0 <= failures < 1:
        raise InputError(f"failures must be at least 0 and below 1, but is {failures}")
    for trial, cost in enumerate(costs):
        if not cost > 0:
            raise InputError(f"the cost of trial {trial} must be above 0, but is {cost}")


class SearchRun(SimulatedRun):
    """The state of one simulated search."""

    def __init__(
        self,
        schedule: Any,
        weights: Sequence[float],
        eval_cost: float,
        costs: Sequence[float],
        noise: float,
        failures: float,
        hop_cost: float,
        seed: int,
    ) -> None:
        super().__init__(schedule, weights, eval_cost)
        self.costs = costs
        self.noise = noise
        self.failures = failures
        self.hop_cost = hop_cost
        self.seed = seed
        self.changes: list[tuple[float, str, int]] = []  # time, "join" or "leave", worker
        self.present: dict[int, float] = {}  # worker -> when it joined
        self.spans: list[tuple[float, float]] = []  # of the workers that left
        self.last_worker: dict[int, int] = {}
        self.holders: dict[int, set[int]] = {}  # shard -> workers told to load it

    def join(self) -> None:
        self.present[self.schedule.add_worker(self.now)] = self.now

    def add_trial(self, trial: int, epochs: int) -> None:
        self.epochs[trial] = epochs
        if epochs > 0:
            self.unfinished.add(trial)
        self.schedule.add_trial(trial, epochs=epochs)

    def run_to_end(self) -> Search:
        found = super().run_to_end()
        spans = [*self.spans, *((start, math.inf) for start in self.present.values())]
        return Search(
            units=found.units,
            makespan=found.makespan,
            first_result=found.first_result,
            max_live=found.max_live,
            capacity=capacity(spans, found.makespan),
            lower_bound=self.lower_bound(spans),
        )

    def start_units(self) -> None:
        while (command := self.schedule.next(self.now)) is not None:
            if command[0] == "load":
                self.holders.setdefault(command[2], set()).add(command[1])
            else:
                self.start_unit(*command[1:])

    def start_unit(
        self, worker: int, trial: int, epoch: int, step: int, shard: int, attempt: int
    ) -> None:
        hopped = self.last_worker.get(trial, worker) != worker
        seconds = self.seconds(trial, epoch, step, shard) + self.hop_cost * hopped
        fails = self.fails(trial, epoch, step, attempt)
        self.last_worker[trial] = worker
        self.run(
            Unit(
                *(trial, epoch, step, shard, worker, attempt),
                start=self.now,
                end=self.now + seconds,
                hopped=hopped,
                outcome="failed" if fails else "done",
            )
        )

    def next_event(self) -> None:
        """At the same time, ends of units come first, then the changes in the given order."""
        if not self.running and not self.changes:
            raise InputError(f"{len(self.unfinished)} trials are left and no worker is")
        if self.running and (not self.changes or self.running[0][0] <= self.changes[0][0]):
            super().next_event()
            return
        self.now, kind, worker = self.changes.pop(0)
        if kind == "join":
            self.join()
        else:
            self.leave(worker)

    def end_unit(self, unit: Unit) -> None:
        if unit.outcome == "failed":
            self.units.append(unit)
            self.schedule.unit_failed(unit.worker, self.now)
        else:
            super().end_unit(unit)

    def leave(self, worker: int) -> None:
        if worker not in self.present:
            raise InputError(f"worker {worker} cannot leave at {self.now}: it is not there")
        for entry in [entry for entry in self.running if entry[2].worker == worker]:
            self.running.remove(entry)
            heapq.heapify(self.running)
            self.units.append(replace(entry[2], end=self.now, outcome="lost"))
        self.spans.append((self.present.pop(worker), self.now))
        self.schedule.remove_worker(worker, self.now)

    def seconds(self, trial: int, epoch: int, step: int, shard: int) -> float:
        weight = self.eval_cost if shard < 0 else self.weights[shard]
        seconds = self.costs[trial] * weight
        if self.noise == 0:
            return seconds
        # Box-Muller: a normal number from two uniform ones.
        radius, angle = _core.random_doubles(
            2, self.seed, "space", trial + 1, self.key(epoch, step)
        )
        normal = math.sqrt(-2.0 * math.log1p(-radius)) * math.cos(2.0 * math.pi * angle)
        return seconds * max(LEAST_FACTOR, 1.0 + self.noise * normal)

    def fails(self, trial: int, epoch: int, step: int, attempt: int) -> bool:
        if self.failures == 0:
            return False
        key = self.key(epoch, step) * 1024 + attempt
        return _core.random_doubles(1, self.seed, "eval", trial, key)[0] < self.failures

    def key(self, epoch: int, step: int) -> int:
        return epoch * (len(self.weights) + 1) + step

    def lower_bound(self, spans: Sequence[tuple[float, float]]) -> float:
        by_trial: dict[int, float] = {}
        by_worker: dict[int, float] = {}
        total = 0.0
        for unit in self.units:
            seconds = unit.end - unit.start
            total += seconds
            by_trial[unit.trial] = by_trial.get(unit.trial, 0.0) + seconds
            if len(self.holders.get(unit.shard, ())) == 1:
                by_worker[unit.worker] = by_worker.get(unit.worker, 0.0) + seconds
        return max(
            time_for(total, spans),
            max(by_trial.values(), default=0.0),
            max(by_worker.values(), default=0.0),
        )


def capacity(spans: Sequence[tuple[float, float]], until: float) -> float:
    """Return the seconds of work that workers present in ``spans`` can do up to a time."""
    return sum(max(0.0, min(end, until) - start) for start, end in spans)


def time_for(work: float, spans: Sequence[tuple[float, float]]) -> float:
    """Return the time at which workers that are never idle have done ``work`` seconds."""
    times = sorted({time for span in spans for time in span if math.isfinite(time)})
    done, before = 0.0, 0.0
    for time in times:
        rate = sum(start <= before and before < end for start, end in spans)
        if done + rate * (time - before) >= work:
            break
        done += rate * (time - before)
        before = time
    rate = sum(start <= before and before < end for start, end in spans)
    return before + (work - done) / rate if rate else before
