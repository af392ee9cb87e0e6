"""Hold a snapshot of a run: the input of every progress display."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cerebro.report import format as fmt


class FinishedEpoch(Protocol):
    @property
    def metrics(self) -> Mapping[str, float]:
        """The epoch's metrics: ``train_*`` and ``val_*``."""


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial, as displays show it."""

    number: int
    config: Mapping[str, Any]
    status: str
    epoch: int  # finished epochs
    epochs: int  # to train
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the epoch that represents the trial: ``train_*`` and ``val_*``."""
    rows_per_second: float | None = None  # in the last training unit
    worker: int | None = None
    error: str | None = None
    best_at: int | None = None
    """The number of epochs after which the trial was best, with these metrics.

    None before the first epoch, or if the last epoch represents the trial.
    """
    last: Mapping[str, float] = field(default_factory=dict)  # metrics of the last epoch
    history: Sequence[FinishedEpoch] = ()  # during training, it grows after the snapshot


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment."""

    trials: Sequence[TrialRow]
    """The trials begun so far, by number.

    Of many ended trials, it has only the best, the last failed one, and those that ended since the
    last drawing; of many that wait for their first unit, only the first.
    """
    share_done: float | None
    """The finished share of the work or of the time limit, 0 to 1; None while neither is known."""
    seconds: float  # since the run's start
    seconds_left: float | None  # expected
    busy: float  # the share of the workers' time spent in units, 0 to 1
    workers: int
    best: int | None  # the number of the best trial so far
    metric: str
    mode: str
    path: str = ""
    paused: bool = False  # no unit begins until the run is continued
    more: Mapping[str, int] = field(default_factory=dict)  # trials without a row, by status

    @property
    def resting(self) -> bool:
        """Whether the run is paused and the last units in flight are done."""
        return self.paused and all(row.worker is None for row in self.trials)

    @property
    def pause(self) -> str:
        """Return ``"pausing"``, ``"paused"``, or an empty string if the run is not paused."""
        return "" if not self.paused else "paused" if self.resting else "pausing"

    @property
    def time_left(self) -> str:
        """Write the time left, such as ``"1:05 left"``; empty if unknown."""
        return f"{fmt.rough_duration(self.seconds_left)} left" if self.seconds_left else ""

    def count_trials(self, shown: Iterable[TrialRow] = ()) -> Counter[str]:
        """Count all trials by status, except those `shown`."""
        counts = Counter(row.status for row in self.trials)
        counts.update(self.more)
        counts.subtract(Counter(row.status for row in shown))
        return counts
