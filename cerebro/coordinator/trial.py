"""A trial while it trains: its record, and what only matters until it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cerebro.report.snapshot import TrialRow
from cerebro.run.records import Ranking, TrialRecord, plain
from cerebro.run.states import CloneOf, KeptState
from cerebro.worker.messages import Warned


@dataclass
class LiveTrial:
    """A trial's record and what only matters while it trains."""

    record: TrialRecord
    position: int = 0
    """Units that are behind its state, those of a clone's parent included."""
    first_position: int = 0
    """Where a clone began."""
    dispatches: int = 0
    epoch_seconds: float = 0.0
    rows_per_second: float | None = None
    worker: int | None = None
    """Whoever runs its unit now."""
    held: bool = False
    """Paused by the user: it gets no unit until it is continued."""
    stopping: bool = False
    """Stopped by the user: it ends with the unit that runs."""
    asleep: bool = False
    """Paused by the searcher, which may suggest it again."""
    unkept: bool = False
    """The state of its last epoch is on its way to where it is kept; see `UnitDone.is_kept`."""
    lost_states: int = 0
    """Times that it had to go back in this epoch."""
    reported: int = -1
    """The last epoch that the searcher has heard of, also one that the trial did not train."""
    clone_of: CloneOf | None = None
    """Until its first unit is committed: the state that it begins with."""
    planned: int = 0
    """Units that it adds to the run's plan."""
    last_worker: int | None = None
    """Whoever wrote the state that is committed."""
    workers: set[int] = field(default_factory=set)
    """Whoever may still have the model or the slots open."""
    origin: KeptState | None = None
    """Of a resumed run, until its next unit is committed: where the trial's state is."""
    info_epochs: int | None = None
    """What ``info.epochs`` is, where it is not the run's number."""
    expected: dict[int, str] = field(default_factory=dict)
    """Hashes of epochs that are trained again, because their states are gone."""
    scheduled: bool = False
    """Whether the scheduler knows it."""
    unwritten: int = -1
    """How often the store had been flushed when it was last told what is wanted of the trial, which
    must be on record before the next unit."""
    started: bool = False
    """Whether callbacks have been told that it starts."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """What `EarlyStopping` reads."""
    not_finite: bool = False
    """Whether validation has given a number that is not finite."""
    not_exact: set[str] = field(default_factory=set)
    """Operations without a deterministic version that it is known to use."""
    warned: set[Warned] = field(default_factory=set)
    """What it has warned of."""

    @property
    def told(self) -> int | None:
        """The last epoch that the trial has trained and the searcher has heard of."""
        epoch = min(self.reported, self.record.done - 1)
        return epoch if epoch >= self.record.first_epoch else None

    def row(self, by: Ranking) -> TrialRow:
        """The trial as displays see it."""
        record = self.record
        selected = record.selected(by)
        return TrialRow(
            number=record.number,
            config=plain(record.config),
            status=record.status,
            epoch=record.done,
            epochs=record.target_epochs,
            metrics={} if selected is None else selected.metrics,
            rows_per_second=self.rows_per_second,
            worker=self.worker,
            error=record.error,
            best_at=None if selected is None or by.select == "last" else selected.epoch + 1,
            last=record.epochs[-1].metrics if record.epochs else {},
        )
