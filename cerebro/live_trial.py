"""A trial while it trains: its record, and what only matters until it ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cerebro.report.snapshot import TrialRow
from cerebro.trial import TrialRecord


@dataclass
class LiveTrial:
    """A trial's record and what only matters while it trains."""

    record: TrialRecord
    position: int = 0
    """Units that are committed."""
    dispatches: int = 0
    epoch_seconds: float = 0.0
    rows_per_second: float | None = None
    worker: int | None = None
    """Whoever runs its unit now."""
    held: bool = False
    """Paused by the user: it gets no unit until it is continued."""
    stopping: bool = False
    """Stopped by the user: it ends with the unit that runs."""
    last_worker: int | None = None
    """Whoever wrote the state that is committed."""
    workers: set[int] = field(default_factory=set)
    """Whoever may still have the model or the slots open."""
    deaths: Counter[tuple[int, int]] = field(default_factory=Counter)
    history: list[dict[str, Any]] = field(default_factory=list)
    """What `EarlyStopping` reads."""
    not_finite: bool = False
    """Whether validation has given a number that is not finite."""

    def row(self) -> TrialRow:
        """The trial as displays see it."""
        record = self.record
        return TrialRow(
            number=record.number,
            config=record.config,
            status=record.status,
            epoch=len(record.epochs),
            epochs=record.target_epochs,
            metrics=record.epochs[-1].metrics if record.epochs else {},
            rows_per_second=self.rows_per_second,
            worker=self.worker,
            error=record.error,
        )
