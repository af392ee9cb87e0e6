"""A searcher that uses all features: it pauses, resumes, stops and clones trials."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cerebro import DONE, Decision, Suggestion

STATE = ("begun", "live", "paused", "clones", "cloned", "configs")


class Tournament:
    """After the first epoch every third trial pauses; after the second one becomes a clone.

    Paused trials continue when no other trial is left.
    """

    adaptive = True

    def setup(
        self,
        space: Any,
        *,
        seed: int,
        epochs: int,
        n_trials: int | float | None,
        metric: str,
        mode: str,
        points: Any,
    ) -> None:
        self.space, self.seed, self.epochs = space, seed, epochs
        self.n_trials, self.metric = n_trials or 1, metric
        self.begun = 0
        self.live: dict[str, float] = {}
        self.paused: list[int] = []
        self.clones: list[int] = []
        self.cloned = False
        self.configs: list[dict[str, Any]] = []

    def suggest(self) -> Any:
        if self.begun < self.n_trials:
            self.begun += 1
            return self._begin(self.space.sample(self.seed, self.begun - 1), None)
        while self.clones:
            parent = self.clones.pop(0)
            if str(parent) in self.live:
                config = self.configs[parent] | {"lr": 0.8 * self.configs[parent]["lr"]}
                return self._begin(config, parent)
        if self.paused and not self.live:
            trial = self.paused.pop(0)
            self.live[str(trial)] = math.inf
            return Suggestion({}, trial=trial, epochs=self.epochs)
        return None if self.live else DONE

    def _begin(self, config: dict[str, Any], parent: int | None) -> Suggestion:
        self.live[str(len(self.configs))] = math.inf
        self.configs.append(config)
        return Suggestion(config, parent=parent)

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        loss = metrics[self.metric]
        self.live.pop(str(trial), None)
        if math.isinf(loss) or epoch + 1 == self.epochs:
            return Decision.STOP
        if epoch == 0 and trial % 3 == 2:
            self.paused.append(trial)
            return Decision.PAUSE
        if epoch == 1 and self.live and not self.cloned:
            self.cloned = True
            self.clones.append(int(min(self.live, key=lambda other: (self.live[other], other))))
            return Decision.STOP
        self.live[str(trial)] = loss
        return Decision.CONTINUE

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state[name])
