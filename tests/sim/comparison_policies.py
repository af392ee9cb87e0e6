"""Other scheduling policies, for comparison: each has the methods that the simulator needs."""

from __future__ import annotations

import random
from typing import Literal

Command = tuple[Literal["run"], int, int, int, int, int, int]


class Policy:
    """Bookkeeping shared by all policies; a trial's units cycle through the shards."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.workers = 0
        self.idle: set[int] = set()
        self.left: dict[int, int] = {}  # trial -> units left
        self.done: dict[int, int] = {}
        self.ready: set[int] = set()
        self.running: dict[int, tuple[int, int]] = {}  # worker -> (trial, shard)

    def add_worker(self, now: float, /) -> int:
        self.idle.add(self.workers)
        self.workers += 1
        return self.workers - 1

    def remove_worker(self, worker: int, now: float, /) -> None:
        raise NotImplementedError

    def add_trial(self, trial: int, *, epochs: int) -> None:
        self.left[trial] = epochs * self.shards
        self.done[trial] = 0
        self.ready.add(trial)

    def next(self, now: float, /) -> Command | None:
        chosen = self.choose()
        if chosen is None:
            return None
        worker, trial, shard = chosen
        self.idle.remove(worker)
        self.ready.remove(trial)
        self.running[worker] = trial, shard
        epoch, step = divmod(self.done[trial], self.shards)
        return "run", worker, trial, epoch, step, shard, 0

    def unit_done(self, worker: int, now: float, /) -> tuple[int, int, int]:
        trial, _ = self.running.pop(worker)
        epoch, step = divmod(self.done[trial], self.shards)
        self.idle.add(worker)
        self.left[trial] -= 1
        self.done[trial] += 1
        if self.left[trial] > 0:
            self.ready.add(trial)
        return trial, epoch, step

    def unit_failed(self, worker: int, now: float, /) -> tuple[int, int, int]:
        raise NotImplementedError

    def choose(self) -> tuple[int, int, int] | None:
        """Return (worker, trial, shard), or None."""
        raise NotImplementedError


class LongestFirst(Policy):
    """Shared shards: the trial with the most work left, on the lowest idle worker."""

    def __init__(self, shards: int, costs: list[float]) -> None:
        super().__init__(shards)
        self.costs = costs

    def choose(self) -> tuple[int, int, int] | None:
        if not self.idle or not self.ready:
            return None
        trial = max(self.ready, key=lambda t: (self.left[t] * self.costs[t], -t))
        return min(self.idle), trial, self.done[trial] % self.shards


class OneTrialPerWorker(Policy):
    """As in task-parallel tuners: a trial keeps its worker from the first unit to the last."""

    def __init__(self, shards: int) -> None:
        super().__init__(shards)
        self.home: dict[int, int] = {}  # worker -> trial

    def choose(self) -> tuple[int, int, int] | None:
        for worker in sorted(self.idle):
            trial = self.home.get(worker)
            if trial is None or self.left[trial] == 0:
                trial = min(self.ready - set(self.home.values()), default=None)
                if trial is None:
                    continue
                self.home[worker] = trial
            return worker, trial, self.done[trial] % self.shards
        return None


class RandomUnits(Policy):
    """The published rule: an idle worker takes a random remaining unit of its shards.

    Worker w holds the shards s with s mod workers = w, and a trial visits the
    shards of an epoch in any order.
    """

    def __init__(self, shards: int, seed: int) -> None:
        super().__init__(shards)
        self.random = random.Random(seed)
        self.visited: dict[int, set[int]] = {}  # trial -> shards of this epoch

    def choose(self) -> tuple[int, int, int] | None:
        for worker in sorted(self.idle):
            units = [
                (worker, trial, shard)
                for trial in sorted(self.ready)
                for shard in range(worker, self.shards, self.workers)
                if shard not in self.visited.setdefault(trial, set())
            ]
            if units:
                return self.random.choice(units)
        return None

    def unit_done(self, worker: int, now: float, /) -> tuple[int, int, int]:
        trial, shard = self.running[worker]
        self.visited[trial].add(shard)
        if len(self.visited[trial]) == self.shards:
            self.visited[trial].clear()
        return super().unit_done(worker, now)
