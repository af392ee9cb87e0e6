"""Legal and illegal events for `Schedule`, compared with a model of what is due."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cerebro._core import Schedule
from cerebro.errors import StateError

NUMBERS = range(13)
"""Numbers of trials; so few that most are used twice."""


@dataclass
class Trial:
    epochs: int
    epoch: int
    step: int
    worker: int | None = None
    dropped: bool = False
    held: bool = False
    done: set[tuple[int, int]] = field(default_factory=set)
    """The pairs (epoch, shard) trained since the last rewind."""


@dataclass
class Unit:
    trial: int
    epoch: int
    step: int
    shard: int


class Model:
    """A schedule, and what the events so far must have made of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.shards = rng.choice([1, 2, 3, 4, 7, 65])
        self.exclusive = rng.random() < 0.35
        cost = rng.choice([0.0, 0.0, 1.0, 0.3])
        self.steps = self.shards + (cost > 0)
        weights = [rng.choice([0.0, 1.0, 5.5, 1e300, 1e-300]) for _ in range(self.shards)]
        self.schedule = Schedule(
            shards=rng.choice([self.shards, weights]),
            exclusive=self.exclusive,
            stagger=self.exclusive or rng.random() < 0.6,
            eval_cost=cost,
            live_models=rng.choice([1, 2, 8]),
            capacity=rng.choice([1, 2, 64]),
        )
        self.now = 0.0
        self.workers: set[int] = set()
        self.running: dict[int, Unit] = {}
        self.trials: dict[int, Trial] = {}
        self.holders: dict[int, set[int]] = {}

    def step(self) -> None:
        odd = [0.0, 1e9, -1.0, float("nan"), float("inf")]
        self.now += self.rng.choice(odd) if self.rng.random() < 0.02 else self.rng.random()
        (event,) = self.rng.choices(list(EVENTS), list(EVENTS.values()))
        with suppress(ValueError, StateError):  # an illegal event: it must not change anything
            event(self)
        left = self.schedule.remaining()
        assert left is None or not left < 0
        assert sorted(self.schedule.idle_workers) == sorted(self.workers - set(self.running))
        assert isinstance(self.schedule.finished, bool)

    # Each calls the schedule first: if it refuses, the model stays as it is.

    def add_worker(self) -> None:
        self.workers.add(self.schedule.add_worker(self.now))

    def remove_worker(self) -> None:
        worker = self.rng.choice([*self.workers, 99])
        self.schedule.remove_worker(worker, self.now)
        self.workers.remove(worker)
        if worker in self.running:
            self.trials[self.running.pop(worker).trial].worker = None
        for holders in self.holders.values():
            holders.discard(worker)

    def add_trial(self) -> None:
        number, epochs = self.rng.choice(NUMBERS), self.rng.randint(0, 3)
        epoch, step = self.rng.choice([0, 0, 1]), self.rng.choice([0, 0, self.any_step()])
        self.schedule.add_trial(number, epochs=epochs, epoch=epoch, step=step)
        assert number not in self.trials
        self.trials[number] = Trial(epochs, epoch, step)

    def extend_trial(self) -> None:
        number, epochs = self.any_trial(), self.rng.randint(0, 4)
        self.schedule.extend_trial(number, epochs)
        self.trials[number].epochs = epochs

    def drop_trial(self) -> None:
        number = self.any_trial()
        self.schedule.drop_trial(number)
        self.trials[number].dropped = True

    def forget_trial(self) -> None:
        number = self.any_trial()
        self.schedule.forget_trial(number)
        trial = self.trials.pop(number)
        assert trial.dropped and trial.worker is None

    def hold_trial(self) -> None:
        number = self.any_trial()
        self.schedule.hold_trial(number)
        self.trials[number].held = True

    def release_trial(self) -> None:
        number = self.any_trial()
        self.schedule.release_trial(number)
        self.trials[number].held = False

    def rewind_trial(self) -> None:
        number = self.any_trial()
        at = self.trials[number].epoch if number in self.trials else 0
        epoch, step = self.rng.randint(0, at), self.any_step()
        self.schedule.rewind_trial(number, epoch=epoch, step=step)
        trial = self.trials[number]
        assert trial.worker is None
        trial.epoch, trial.step = epoch, step
        trial.done = {pair for pair in trial.done if pair[0] < epoch}

    def set_holders(self) -> None:
        shard = self.rng.randint(-1, self.shards)
        chosen = self.rng.sample([*self.workers, 77], self.rng.randint(0, len(self.workers)))
        self.schedule.set_holders(shard, chosen)
        self.holders[shard] = set(chosen)

    def look_at_live(self) -> None:
        live = self.schedule.live(self.any_worker())
        assert len(live) == len(set(live))
        self.schedule.forget_live(self.any_worker(), self.rng.choice(NUMBERS))

    def next(self) -> None:
        command = self.schedule.next(self.now)
        if command is None:
            return
        if command[0] == "load":
            _, worker, shard = command
            assert self.exclusive and worker in self.workers
            self.holders[shard] = {worker}
            return
        _, worker, number, epoch, step, shard, _ = command
        trial = self.trials[number]
        assert worker in self.workers and worker not in self.running
        assert not (trial.dropped or trial.held) and trial.worker is None
        if self.exclusive and shard in self.holders:
            assert worker in self.holders[shard]
        trial.worker = worker
        self.begin(worker, Unit(number, epoch, step, shard))

    def begin(self, worker: int, unit: Unit) -> None:
        """Note a unit that a worker begins: the trial's next, of a shard that it has not had."""
        trial = self.trials[unit.trial]
        assert (unit.epoch, unit.step) == (trial.epoch, trial.step) and unit.epoch < trial.epochs
        assert (unit.epoch, unit.shard) not in trial.done
        self.running[worker] = unit

    def advance(self, unit: Unit) -> None:
        trial = self.trials[unit.trial]
        trial.done.add((unit.epoch, unit.shard))
        trial.step += 1
        if trial.step == self.steps:
            trial.step, trial.epoch = 0, trial.epoch + 1

    def unit_done(self) -> None:
        worker = self.any_worker()
        told = self.schedule.unit_done(worker, self.now)
        unit = self.running.pop(worker)
        assert told == (unit.trial, unit.epoch, unit.step)
        self.trials[unit.trial].worker = None
        self.advance(unit)

    def unit_repeated(self) -> None:
        """A unit that has failed, or whose result is lost, is due again."""
        worker = self.any_worker()
        self.schedule.unit_failed(worker, self.now)
        self.trials[self.running.pop(worker).trial].worker = None

    def unit_continued(self) -> None:
        """A worker goes on with the trial's next unit by itself."""
        worker = self.any_worker()
        following = self.schedule.next_here(worker)
        if following is None and worker in self.running:
            return  # it may not
        told = self.schedule.unit_continued(worker, self.now)
        unit = self.running[worker]
        assert following is not None and told == (unit.trial, unit.epoch, unit.step)
        self.advance(unit)
        assert self.schedule.trial_position(unit.trial)[:2] == following[:2]
        self.begin(worker, Unit(unit.trial, *following))

    def any_step(self) -> int:
        return self.rng.randint(0, self.steps + 1)

    def any_trial(self) -> int:
        return self.rng.choice([*self.trials, 99])

    def any_worker(self) -> int:
        return self.rng.choice([*self.workers, 99])


EVENTS: dict[Callable[[Model], None], float] = {
    Model.add_worker: 6,
    Model.remove_worker: 3,
    Model.add_trial: 7,
    Model.extend_trial: 3,
    Model.drop_trial: 3,
    Model.forget_trial: 3,
    Model.hold_trial: 3,
    Model.release_trial: 4,
    Model.rewind_trial: 2,
    Model.set_holders: 4,
    Model.look_at_live: 4,
    Model.next: 28,
    Model.unit_done: 20,
    Model.unit_repeated: 6,
    Model.unit_continued: 4,
}
"""The events, and how often each is tried."""


def run(rng: random.Random, folder: Path) -> int:
    """Make up to 400 events; needs no files."""
    model = Model(rng)
    events = rng.randint(20, 400)
    for _ in range(events):
        model.step()
    return events
