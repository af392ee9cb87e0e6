"""Runs a schedule on a simulated clock: how long would this search take?

The scheduler is the real one, :class:`cerebro._core.Schedule`; only the clock
and the work are imagined. A unit takes the trial's cost times the weight of
the shard, times a random factor that is a pure function of the seed and of the
unit: two simulations with one seed differ only in what the scheduler does.

    >>> simulation = simulate([1.0] * 9, workers=8, shards=8, epochs=10)
    >>> simulation.makespan, simulation.lower_bound
    (90.0, 90.0)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import cerebro._core as _core
from cerebro.errors import InputError

_LEAST_FACTOR = 0.1  # noise makes no unit shorter than this share of its cost


class Scheduler(Protocol):
    """What the simulator needs of a scheduler: a part of ``_core.Schedule``."""

    def add_worker(self, now: float, /) -> int: ...
    def remove_worker(self, worker: int, now: float, /) -> None: ...
    def add_trial(self, trial: int, *, epochs: int) -> None: ...
    def next(
        self, now: float, /
    ) -> (
        tuple[Literal["run"], int, int, int, int, int, int]
        | tuple[Literal["load"], int, int]
        | None
    ): ...
    def unit_done(self, worker: int, now: float, /) -> tuple[int, int, int]: ...
    def unit_failed(self, worker: int, now: float, /) -> tuple[int, int, int]: ...


@dataclass(frozen=True, slots=True)
class SimulatedUnit:
    """One unit as it was run; times in seconds from the start.

    ``outcome`` is "done", "failed", or "lost" with the worker that ran it;
    ``shard`` is -1 for validation; ``hopped`` tells whether another worker ran
    the trial before.
    """

    trial: int
    epoch: int
    step: int
    shard: int
    worker: int
    attempt: int
    start: float
    end: float
    hopped: bool
    outcome: Literal["done", "failed", "lost"]


@dataclass(frozen=True)
class Simulation:
    """What came out of :func:`simulate`; times in seconds.

    Attributes
    ----------
    units
        Every unit in the order of their ends, also failed and lost ones.
    makespan
        When the last unit ended.
    lower_bound
        What no schedule can beat, given the same times: the longest trial, the
        work over the workers, and the work of the fullest holder of exclusive
        shards.
    first_result
        When the first trial had done all its epochs; NaN without trials.
    max_live
        The most trials that were begun and not ended at one time.
    capacity
        Seconds that the workers were there, up to the makespan.
    """

    units: tuple[SimulatedUnit, ...]
    makespan: float
    lower_bound: float
    first_result: float
    max_live: int
    capacity: float

    @property
    def ratio(self) -> float:
        """Makespan over its lower bound; 1.0 is perfect."""
        return self.makespan / self.lower_bound if self.lower_bound > 0 else 1.0

    @cached_property
    def idle_share(self) -> float:
        """Share of the workers' time without a unit."""
        if self.capacity <= 0:
            return 0.0
        return max(0.0, 1.0 - sum(unit.end - unit.start for unit in self.units) / self.capacity)


def spread_costs(trials: int, spread: float = 1.0, seed: int = 0) -> list[float]:
    """Return a cost per trial between 1 and ``spread``, evenly in the logarithm."""
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
    schedule: Scheduler | None = None,
) -> Simulation:
    """Run trials on a simulated clock.

    Parameters
    ----------
    costs
        For each trial the seconds per weight of a shard.
    workers
        How many there are from the start.
    shards
        Their number, or a weight for each, e.g. its rows.
    epochs
        Of all trials, or of each.
    eval_cost
        Weight of the validation unit that ends an epoch; 0: none.
    noise
        Standard deviation of a unit's time, as a share of it.
    hop_cost
        Seconds more for a unit whose trial another worker ran before.
    failures
        Share of the units that fail at their end and run again.
    joins
        Times at which a worker joins; they are numbered on in order of time.
    leaves
        Times at which a worker leaves, and its number.
    exclusive, stagger, live_models
        As of :class:`cerebro._core.Schedule`.
    seed
        Of noise and failures.
    schedule
        Another scheduler than ``_core.Schedule`` made from these arguments; it
        must be new, without workers and trials.

    Raises
    ------
    InputError
        If an argument is out of range, or if trials are left when every
        worker has left.
    """
    _check(costs, workers, noise, failures)
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
    times = UnitTimes(costs, weights, eval_cost, noise, failures, seed)
    run = SimulatedRun(schedule, times, hop_cost)
    for _ in range(workers):
        run.join()
    for time in sorted(joins):
        run.expect(time, "join")
    for time, worker in leaves:
        run.expect(time, "leave", worker)
    for trial in range(len(costs)):
        count = epochs if isinstance(epochs, int) else epochs[trial]
        run.add_trial(trial, count)
    return run.to_end()


def _check(costs: Sequence[float], workers: int, noise: float, failures: float) -> None:
    if workers < 0:
        raise InputError(f"workers must not be negative, but is {workers}")
    if noise < 0:
        raise InputError(f"noise must not be negative, but is {noise}")
    if not 0 <= failures < 1:
        raise InputError(f"failures must be at least 0 and below 1, but is {failures}")
    for trial, cost in enumerate(costs):
        if not cost > 0:
            raise InputError(f"the cost of trial {trial} must be above 0, but is {cost}")


class UnitTimes:
    """How long each unit takes, and whether it fails: functions of the unit alone."""

    def __init__(
        self,
        costs: Sequence[float] | Mapping[int, float],
        weights: Sequence[float],
        eval_cost: float = 0.0,
        noise: float = 0.0,
        failures: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.costs = costs
        self.weights = weights
        self.eval_cost = eval_cost
        self.noise = noise
        self.failures = failures
        self.seed = seed

    def seconds(self, trial: int, epoch: int, step: int, shard: int) -> float:
        weight = self.eval_cost if shard < 0 else self.weights[shard]
        seconds = self.costs[trial] * weight
        if self.noise == 0:
            return seconds
        # Box and Muller: a normal number from two uniform ones.
        radius, angle = _core.random_doubles(
            2, self.seed, "space", trial + 1, self._key(epoch, step)
        )
        normal = math.sqrt(-2.0 * math.log1p(-radius)) * math.cos(2.0 * math.pi * angle)
        return seconds * max(_LEAST_FACTOR, 1.0 + self.noise * normal)

    def fails(self, trial: int, epoch: int, step: int, attempt: int) -> bool:
        if self.failures == 0:
            return False
        key = self._key(epoch, step) * 1024 + attempt
        return _core.random_doubles(1, self.seed, "eval", trial, key)[0] < self.failures

    def _key(self, epoch: int, step: int) -> int:
        return epoch * (len(self.weights) + 1) + step


class SimulatedRun:
    """The state of one simulation: the clock, what runs, and what has been."""

    def __init__(self, schedule: Scheduler, times: UnitTimes, hop_cost: float = 0.0) -> None:
        self.schedule = schedule
        self.times = times
        self.hop_cost = hop_cost
        self.now = 0.0
        # (time, order, number, kind, worker): of one time, first the ends of units,
        # then what was expected first.
        self.expected: list[tuple[float, int, int, str, int]] = []
        self.count = 0
        self.present: dict[int, float] = {}  # worker -> when it joined
        self.spans: list[tuple[float, float]] = []  # of the workers that left
        self.running: dict[int, tuple[int, SimulatedUnit]] = {}  # worker -> number of its end
        self.units: list[SimulatedUnit] = []
        self.epochs: dict[int, int] = {}
        self.unfinished: set[int] = set()
        self.live: set[int] = set()
        self.max_live = 0
        self.first_result = math.nan
        self.last_worker: dict[int, int] = {}
        self.holders: dict[int, set[int]] = {}  # shard -> workers told to load it

    def expect(self, time: float, kind: str, worker: int = -1) -> int:
        self.count += 1
        heapq.heappush(self.expected, (time, kind != "end", self.count, kind, worker))
        return self.count

    def join(self) -> None:
        self.present[self.schedule.add_worker(self.now)] = self.now

    def add_trial(self, trial: int, epochs: int) -> None:
        self.epochs[trial] = epochs
        if epochs > 0:
            self.unfinished.add(trial)
        self.schedule.add_trial(trial, epochs=epochs)

    def to_end(self) -> Simulation:
        self._start_units()
        while self.unfinished:
            if not self.expected:
                raise InputError(f"{len(self.unfinished)} trials are left and no worker is")
            self.now, _, number, kind, worker = heapq.heappop(self.expected)
            if kind == "join":
                self.join()
            elif kind == "leave":
                self._leave(worker)
            elif self.running.get(worker, (0,))[0] == number:
                self._end_unit(worker)
            self._start_units()
        return self._result()

    def _start_units(self) -> None:
        while (command := self.schedule.next(self.now)) is not None:
            if command[0] == "load":
                self.holders.setdefault(command[2], set()).add(command[1])
            else:
                self._start_unit(*command[1:])

    def _start_unit(
        self, worker: int, trial: int, epoch: int, step: int, shard: int, attempt: int
    ) -> None:
        hopped = self.last_worker.get(trial, worker) != worker
        seconds = self.times.seconds(trial, epoch, step, shard) + self.hop_cost * hopped
        end = self.now + seconds
        fails = self.times.fails(trial, epoch, step, attempt)
        unit = SimulatedUnit(
            *(trial, epoch, step, shard, worker, attempt),
            start=self.now,
            end=end,
            hopped=hopped,
            outcome="failed" if fails else "done",
        )
        self.running[worker] = self.expect(end, "end", worker), unit
        self.last_worker[trial] = worker
        self.live.add(trial)
        self.max_live = max(self.max_live, len(self.live))

    def _end_unit(self, worker: int) -> None:
        _, unit = self.running.pop(worker)
        self.units.append(unit)
        if unit.outcome == "failed":
            self.schedule.unit_failed(worker, self.now)
            return
        self.schedule.unit_done(worker, self.now)
        steps = len(self.times.weights) + (self.times.eval_cost > 0)
        if unit.epoch + 1 == self.epochs[unit.trial] and unit.step + 1 == steps:
            self.unfinished.remove(unit.trial)
            self.end_trial(unit.trial)

    def end_trial(self, trial: int) -> None:
        """A trial has trained all the epochs that it was given."""
        self.live.remove(trial)
        if math.isnan(self.first_result):
            self.first_result = self.now

    def _leave(self, worker: int) -> None:
        if worker not in self.present:
            raise InputError(f"worker {worker} cannot leave at {self.now}: it is not there")
        if worker in self.running:
            _, unit = self.running.pop(worker)
            self.units.append(replace(unit, end=self.now, outcome="lost"))
        self.spans.append((self.present.pop(worker), self.now))
        self.schedule.remove_worker(worker, self.now)

    def _result(self) -> Simulation:
        makespan = max((unit.end for unit in self.units), default=0.0)
        spans = [*self.spans, *((start, math.inf) for start in self.present.values())]
        return Simulation(
            units=tuple(self.units),
            makespan=makespan,
            lower_bound=self._lower_bound(spans),
            first_result=self.first_result,
            max_live=self.max_live,
            capacity=_capacity(spans, makespan),
        )

    def _lower_bound(self, spans: Sequence[tuple[float, float]]) -> float:
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
            _time_for(total, spans),
            max(by_trial.values(), default=0.0),
            max(by_worker.values(), default=0.0),
        )


def _capacity(spans: Sequence[tuple[float, float]], until: float) -> float:
    """Return the seconds of work that workers there in ``spans`` can do up to a time."""
    return sum(max(0.0, min(end, until) - start) for start, end in spans)


def _time_for(work: float, spans: Sequence[tuple[float, float]]) -> float:
    """Return the time at which workers that never idle have done ``work`` seconds of it."""
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
