"""Run a simulated search: the searcher and search loop of a run, without training.

`cerebro.testing` uses it to drive searchers, and `cerebro.plan` to estimate searches.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from cerebro.coordinator.search_loop import Report, SearchLoop
from cerebro.coordinator.searcher_record import StoredDecision, find_reported, replay_decisions
from cerebro.coordinator.trial import LiveTrial, OfUser
from cerebro.coordinator.user import Hooks
from cerebro.run.records import ENDED, EpochRecord, Status, TrialRecord
from cerebro.run.settings import SearchSettings
from cerebro.run.store import encode
from cerebro.searchers.base import Decision, Searcher, Suggestion
from cerebro.space import Space


@dataclass
class SimulatedTrial:
    """The outcome of one trial."""

    number: int
    config: dict[str, Any]
    target: int
    epoch: int = 0
    """The number of epochs trained; for a clone, it includes its parent's epochs."""
    status: str = "running"
    """One of ``running paused stopped finished failed``."""
    parent: int | None = None
    values: list[float] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)


class ContractError(AssertionError):
    """Raised if a searcher violates the contract of `cerebro.searchers.Searcher`."""


class SimulatedTrials:
    """The trials of a simulated search; see `cerebro.coordinator.search_loop.Trials`."""

    def __init__(self, epochs: int) -> None:
        self.by_number: dict[int, LiveTrial] = {}
        self.ready: list[int] = []  # trials that are now training an epoch
        self.pinned: Collection[tuple[int, int]] = ()  # trials and epochs whose states are kept
        self._epochs = epochs

    def add(self, suggestion: Suggestion, of_user: OfUser | None = None) -> LiveTrial:
        json.dumps(suggestion.config, allow_nan=False)
        number = len(self.by_number)
        epochs = suggestion.epochs or self._epochs
        record = TrialRecord(number, dict(suggestion.config), "running", target_epochs=epochs)
        if suggestion.parent is not None:
            parent, epoch = self.by_number[suggestion.parent], suggestion.parent_epoch
            record.parent = suggestion.parent
            record.parent_epoch = parent.reported_epoch if epoch is None else epoch
        trial = self.by_number[number] = LiveTrial(record, reported=record.first_epoch - 1)
        self.ready.append(number)
        return trial

    def extend(self, trial: LiveTrial) -> None:
        """Train the next epoch; keep the state of the last epoch if the searcher wants it."""
        last = trial.record.epochs[-1]
        if (trial.record.number, last.epoch) not in self.pinned:
            last.state_file = None
        self.ready.append(trial.record.number)

    def pause(self, trial: LiveTrial) -> None:
        trial.record.status = "paused"

    def shelve(self, trial: LiveTrial) -> None:
        """Do nothing: there are no slots."""

    def resume(self, trial: LiveTrial, epochs: int) -> None:
        trial.record.status, trial.record.target_epochs = "running", epochs
        self.extend(trial)

    def aim(self, trial: LiveTrial, epochs: int) -> None:
        trial.record.target_epochs = epochs

    def clear_pause(self, trial: LiveTrial) -> None:
        trial.paused_by_searcher = False

    def end(self, trial: LiveTrial, status: Status) -> None:
        trial.record.status = status

    def status_of(self, number: Any) -> Status | None:
        trial = self.by_number.get(number)
        return None if trial is None else trial.record.status

    def recall(self, number: int) -> LiveTrial | None:
        return self.by_number.get(number)


class SimulatedSearch(SearchLoop):
    """Sets up a searcher, runs its loop over simulated trials, and is the loop's `Record`."""

    def __init__(self, searcher: Searcher, space: Space, settings: SearchSettings) -> None:
        self._space = space
        self._settings = settings
        settings.set_up(searcher, space)
        self._decisions: list[StoredDecision] = []  # since the searcher's state was last saved
        self._simulated = SimulatedTrials(settings.limits.epochs)
        self._simulated.pinned = searcher.pinned
        hooks = Hooks((), lambda record: record)
        super().__init__(settings, searcher, self, hooks, self._simulated)
        self._values: dict[int, list[float]] = defaultdict(list)
        self._decided: dict[int, list[str]] = defaultdict(list)
        self._state = self._searcher_state()

    def group(self) -> AbstractContextManager[None]:
        return nullcontext()

    def set_meta(self, key: str, value: Any) -> int:
        """Return the size that a value would have in a store."""
        return len(encode(value))

    def add_decision(
        self, round: int, trial: int, epoch: int, decision: str, epochs: int | None, /
    ) -> None:
        self._decisions.append(StoredDecision(trial, epoch, decision, epochs))

    def record_of(self, number: int) -> TrialRecord:
        return self._simulated.by_number[number].record

    def take_ready(self) -> list[int]:
        """Advance the loop as far as possible; return the trials that train an epoch now."""
        self.advance(max_steps=sys.maxsize)
        ready, self._simulated.ready = self._simulated.ready, []
        return ready

    def add_value(self, number: int, value: float) -> None:
        """Record the metric of an epoch that a trial has trained; NaN means that it failed."""
        trial = self._simulated.by_number[number]
        self._values[number].append(value)
        if math.isnan(value):
            self._simulated.end(trial, "failed")
            self.trial_ended(trial)
        else:
            metrics = {self._ranking.metric: value}
            trial.record.epochs.append(EpochRecord(trial.record.done, metrics, 0.0, "", "kept"))
            self.epoch_done(trial, trial.record.done - 1, metrics)

    def replace_searcher(self, fresh: Searcher, *, retell: int = 0) -> None:
        """Replace the searcher by one that loads its state, which may lack `retell` decisions."""
        if not self.searcher.adaptive or len(self._decisions) >= retell:
            self._state = self._searcher_state()
            self._decisions.clear()
        self._settings.set_up(fresh, self._space)
        fresh.load_state_dict(json.loads(self._state))
        replay_decisions(
            fresh,
            self._decisions,
            reported=lambda n, epoch: find_reported(self.record_of(n), epoch, self._ranking),
            config_of=lambda trial: self.record_of(trial).config,
            epochs=self._limits.epochs,
        )
        self.searcher = fresh
        self._simulated.pinned = fresh.pinned

    def end(self) -> list[SimulatedTrial]:
        """Return all trials; stop those that are still paused, as at the end of a run."""
        for trial in self._simulated.by_number.values():
            if trial.paused_by_searcher and trial.record.status not in ENDED:
                self._simulated.end(trial, "stopped")
            if trial.record.status not in ENDED:
                number = trial.record.number
                raise ContractError(f"trial {number} was lost: it is still running at the end")
        return [
            SimulatedTrial(
                record.number,
                record.config,
                record.target_epochs,
                epoch=record.done,
                status=record.status,
                parent=record.parent,
                values=self._values[record.number],
                decisions=self._decided[record.number],
            )
            for record in (trial.record for trial in self._simulated.by_number.values())
        ]

    def _report(self, report: Report) -> Decision:
        decision = super()._report(report)
        self._decided[report.trial].append(decision.value)
        return decision

    def _searcher_state(self) -> str:
        return json.dumps(self.searcher.state_dict(), allow_nan=False)
