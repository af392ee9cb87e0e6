"""A trial in training: its record, and the state that the coordinator needs until it ends.

A trial that has not ended gets no unit while it is held, is paused by the searcher or awaits a
state, or while it is a clone that waits for its parent (`LiveTrials`). Its status is "waiting"
until its first unit and whenever it has been resumed or continued, "running" from its next unit on,
and "paused" while the searcher or the user pauses it and no unit of it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro.report.progress import TrialRow
from cerebro.run.records import Ranking, TrialRecord, strip_study
from cerebro.run.states import CloneOf, KeptState
from cerebro.worker.messages import UnitDone


@dataclass(frozen=True)
class OfUser:
    """What a trial that the user adds has beside its suggestion."""

    cold: bool = False  # whether a clone begins anew, with its parent's configuration only
    info_epochs: int | None = None  # its ``info.epochs``; None: that of the run


@dataclass
class LiveTrial:
    """A trial's record and its state in training."""

    record: TrialRecord
    position: int = 0
    """The number of units committed to its state, including those of a clone's parent."""
    dispatches: int = 0
    epoch_seconds: float = 0.0
    last_unit: UnitDone | None = None  # the unit that wrote the committed state
    rows_per_second: float | None = None
    worker: int | None = None  # the worker that runs its current unit
    held: bool = False  # whether the user paused or stopped it, and has not continued it
    stopping: bool = False
    """Whether the user stopped it: it is `held`, and ends as soon as no unit of it runs."""
    paused_by_searcher: bool = False
    """Whether the searcher paused it, and has neither resumed nor dropped it."""
    awaits_state: bool = False
    """Whether its last epoch's state is being copied, until `StateKept` or `StateLost`."""
    lost_states: int = 0  # how often it went back in this epoch because a state was lost
    reported: int = -1
    """The last epoch reported to the searcher, even if the trial did not train it."""
    clone_of: CloneOf | None = None
    """The state from which it starts, until its first unit is committed."""
    origin: KeptState | None = None
    """Where its state is if not in its slots, until its next unit is committed."""
    expected: dict[int, str] = field(default_factory=dict)
    """The original hashes of epochs that are trained again because their states were lost."""
    scheduled: bool = False  # whether the scheduler knows it
    started: bool = False  # whether `on_trial_start` has been called
    history: list[dict[str, Any]] = field(default_factory=list)  # which `EarlyStopping` reads
    noted: set[Any] = field(default_factory=set)
    """What the run's events already record about it, such as its warnings."""

    @property
    def in_training(self) -> Sequence[LiveTrial]:
        """The trials that workers train for it: its folds in a search with folds, else itself."""
        return (self,)

    def is_new(self, what: Any) -> bool:
        """Return whether something is noted of the trial for the first time."""
        is_new = what not in self.noted
        self.noted.add(what)
        return is_new

    @property
    def reported_epoch(self) -> int | None:
        """The last epoch that the trial has both trained and reported to the searcher."""
        epoch = min(self.reported, self.record.done - 1)
        return epoch if epoch >= self.record.first_epoch else None

    def row(self, by: Ranking) -> TrialRow:
        """Return the trial as displays show it."""
        record = self.record
        selected = record.selected(by)
        return TrialRow(
            number=record.number,
            config=strip_study(record.config),
            status=record.status,
            epoch=record.done,
            epochs=record.target_epochs,
            metrics={} if selected is None else selected.metrics,
            rows_per_second=self.rows_per_second,
            worker=self.worker,
            error=record.error,
            best_at=None if selected is None or by.select == "last" else selected.epoch + 1,
            last=record.epochs[-1].metrics if record.epochs else {},
            history=record.epochs,
        )
