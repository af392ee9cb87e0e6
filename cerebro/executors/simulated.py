"""Run a schedule on a simulated clock, to estimate how long a search would take.

The scheduler is the real one, `cerebro._core.Schedule`; only the clock and the work are simulated.
`cerebro.plan` and the scheduler's tests use this module.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import cerebro._core as _core


@dataclass(frozen=True, slots=True)
class SimulatedUnit:
    """One unit; `start` and `end` are in seconds, and `shard` is -1 for validation."""

    trial: int
    epoch: int
    step: int
    shard: int
    worker: int
    attempt: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The result of a simulated run; times are in seconds.

    `units` are in the order in which they ended. `makespan` is the end of the last unit,
    `first_result` the time at which the first trial finished (NaN without trials), and `max_live`
    the largest number of trials that were live at the same time. `capacity` is the time for which
    workers were available until the makespan, summed over the workers.
    """

    units: tuple[SimulatedUnit, ...]
    makespan: float
    first_result: float
    max_live: int
    capacity: float

    @cached_property
    def idle_share(self) -> float:
        """The share of the workers' available time in which they had no unit."""
        if self.capacity <= 0:
            return 0.0
        return max(0.0, 1.0 - sum(unit.end - unit.start for unit in self.units) / self.capacity)


@dataclass(eq=False)
class SimulatedRun:
    """A run on a simulated clock.

    `schedule` has no workers and trials yet. `weights` are those of the shards, such as their rows.
    `eval_cost` is the weight of the validation unit that ends an epoch, or 0. `cost` is the seconds
    per unit of weight.
    """

    schedule: _core.Schedule
    weights: Sequence[float]
    eval_cost: float = 0.0
    cost: float = 1.0
    now: float = 0.0
    workers: int = 0
    running: list[tuple[float, int, SimulatedUnit]] = field(default_factory=list)
    """A heap: by end, then by start."""
    count: int = 0  # the number of units that were started
    units: list[SimulatedUnit] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)  # by trial: the number of epochs to train
    unfinished: set[int] = field(default_factory=set)
    live: set[int] = field(default_factory=set)
    max_live: int = 0
    first_result: float = math.nan

    def join(self) -> None:
        self.schedule.add_worker(self.now)
        self.workers += 1

    def run_to_end(self) -> Simulation:
        self.start_units()
        while self.unfinished:
            self.next_event()
            self.start_units()
        makespan = max((unit.end for unit in self.units), default=0.0)
        return Simulation(
            units=tuple(self.units),
            makespan=makespan,
            first_result=self.first_result,
            max_live=self.max_live,
            capacity=self.workers * makespan,
        )

    def start_units(self) -> None:
        """Carry out the scheduler's commands; loading a shard takes no time."""
        while (command := self.schedule.next(self.now)) is not None:
            if command[0] == "run":
                self.start_unit(*command[1:])

    def start_unit(
        self, worker: int, trial: int, epoch: int, step: int, shard: int, attempt: int
    ) -> None:
        end = self.now + self.cost * (self.eval_cost if shard < 0 else self.weights[shard])
        self.run(SimulatedUnit(trial, epoch, step, shard, worker, attempt, self.now, end))

    def run(self, unit: SimulatedUnit) -> None:
        self.count += 1
        heapq.heappush(self.running, (unit.end, self.count, unit))
        self.live.add(unit.trial)
        self.max_live = max(self.max_live, len(self.live))

    def next_event(self) -> None:
        """Advance the clock to the end of the next unit."""
        self.now, _, unit = heapq.heappop(self.running)
        self.end_unit(unit)

    def end_unit(self, unit: SimulatedUnit) -> None:
        self.units.append(unit)
        self.schedule.unit_done(unit.worker, self.now)
        steps = len(self.weights) + (self.eval_cost > 0)
        if unit.epoch + 1 == self.epochs[unit.trial] and unit.step + 1 == steps:
            self.unfinished.remove(unit.trial)
            self.end_trial(unit.trial)

    def end_trial(self, trial: int) -> None:
        """Finish a trial that has trained all its epochs."""
        self.live.remove(trial)
        if math.isnan(self.first_result):
            self.first_result = self.now
