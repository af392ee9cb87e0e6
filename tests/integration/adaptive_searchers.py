"""Small adaptive searchers for tests: they pause, resume, stop and clone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cerebro
from cerebro import DONE, Decision, Suggestion


class Recorded:
    """Records its calls, reports and decisions."""

    adaptive = True

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def setup(self, space, *, seed, epochs, n_trials, metric, mode, points):
        self.space, self.seed, self.epochs, self.n_trials = space, seed, epochs, n_trials
        self.metric = metric
        self.sign = 1.0 if mode == "min" else -1.0

    def suggest(self):
        answer = self.next_suggestion()
        self.calls.append(("suggest", answer))
        return answer

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        answer = self.decide(trial, epoch, self.sign * metrics[self.metric])
        self.calls.append(("report", trial, epoch, metrics[self.metric], answer))
        return answer

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state) -> None:
        for name in self.kept:
            setattr(self, name, state[name])


class Halving(Recorded):
    """Synchronous successive halving: all trials reach a rung, the better half continues."""

    kept = ("rungs", "rung", "begun", "results", "resumed", "waiting")

    def __init__(self, rungs=(1, 2, 4)) -> None:
        super().__init__()
        self.rungs = list(rungs)
        self.rung = 0
        self.begun = 0
        self.results: list[list[Any]] = []  # of this rung: [loss, trial]
        self.resumed: list[int] = []  # still to be resumed in this rung
        self.waiting = 0

    def next_suggestion(self):
        if self.rung == 0 and self.begun < self.n_trials:
            trial, self.begun = self.begun, self.begun + 1
            self.waiting += 1
            return Suggestion(self.space.sample(self.seed, trial), epochs=self.rungs[0])
        if not self.waiting and self.results:
            if self.rung == len(self.rungs) - 1:
                return DONE
            self.results.sort()
            good = [t for loss, t in self.results if math.isfinite(loss)]
            self.resumed = sorted(good[: max(1, len(self.results) // 2)])
            self.results = []
            self.rung += 1
            self.waiting = len(self.resumed)
        if self.resumed:
            return Suggestion({}, trial=self.resumed.pop(0), epochs=self.rungs[self.rung])
        return None if self.waiting else DONE

    def decide(self, trial, epoch, loss):
        if math.isinf(loss) or epoch + 1 == self.rungs[self.rung]:
            self.results.append([loss, trial])
            self.waiting -= 1
            return Decision.PAUSE
        return Decision.CONTINUE


class Population(Recorded):
    """Population-based training: every second epoch clones of the best replace bad ones."""

    kept = ("begun", "latest", "clones", "cloned", "configs")

    def __init__(self, every=2, clones=4) -> None:
        super().__init__()
        self.every = every
        self.begun = 0
        self.latest: dict[str, list[float]] = {}  # of live trials: [epoch, loss]
        self.clones: list[list[Any]] = []  # to be suggested: [parent, learning rate]
        self.cloned = clones
        self.configs: list[dict[str, Any]] = []

    def next_suggestion(self):
        if self.begun < self.n_trials:
            trial, self.begun = self.begun, self.begun + 1
            self.configs.append(self.space.sample(self.seed, trial))
            self.latest[str(trial)] = [-1, math.inf]
            return Suggestion(self.configs[-1])
        while self.clones:
            parent, factor = self.clones.pop(0)
            if str(parent) not in self.latest:  # it has finished by now
                continue
            config = dict(self.configs[parent])
            config["lr"] *= factor
            self.latest[str(len(self.configs))] = [-1, math.inf]
            self.configs.append(config)
            return Suggestion(config, parent=parent)
        return None if self.latest else DONE

    def decide(self, trial, epoch, loss):
        if math.isinf(loss) or epoch + 1 == self.epochs:
            self.latest.pop(str(trial), None)
            return Decision.STOP
        self.latest[str(trial)] = [epoch, loss]
        ranked = sorted((value, int(t)) for t, (e, value) in self.latest.items() if e >= 0)
        bad = trial in [t for _, t in ranked[(len(ranked) + 1) // 2 :]]
        if (epoch + 1) % self.every or self.cloned == 0 or not bad:
            return Decision.CONTINUE
        self.cloned -= 1
        del self.latest[str(trial)]
        self.clones.append([ranked[0][1], 0.8])
        return Decision.STOP


def decisions_of(result: cerebro.Result) -> list[tuple[Any, ...]]:
    """The stored data of a run's searcher."""
    from cerebro.run.store import reader

    with reader(result.path) as connection:
        rows = connection.execute("SELECT * FROM decisions ORDER BY id").fetchall()
    return [tuple(row)[1:] for row in rows]
