"""A snapshot of a run: the input of every progress display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial, as displays show it.

    Parameters
    ----------
    number
        The trial's number, from 0.
    config
        Its configuration.
    status
        ``waiting running paused stopped finished diverged failed``.
    epoch
        The number of epochs that it has finished.
    epochs
        The number of epochs to train, as far as known.
    metrics
        Metrics of the epoch that represents the trial: ``train_*`` and ``val_*``.
    rows_per_second
        Training rows per second of its last unit, or None before the first.
    worker
        The worker that runs it now, or None.
    error
        Its one-line error, for failed trials.
    best_at
        The number of epochs after which the trial was best, with these metrics; None before the
        first, or if the last epoch represents a trial.
    last
        Metrics of the last finished epoch.
    """

    number: int
    config: Mapping[str, Any]
    status: str
    epoch: int
    epochs: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    rows_per_second: float | None = None
    worker: int | None = None
    error: str | None = None
    best_at: int | None = None
    last: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Parameters
    ----------
    trials
        The trials begun so far, by number. If many have ended, only the best of these, and those
        that ended since the last drawing.
    share_done
        The finished share of the work, 0 to 1.
    seconds
        Seconds since the run's start.
    seconds_left
        Expected time to the end; None while it is unknown.
    busy
        Share of the workers' time spent training or validating, 0 to 1.
    workers
        The number of workers.
    best
        Number of the best trial so far, or None.
    metric, mode
        The metric that ranks trials, and ``"min"`` or ``"max"``.
    path
        The run's folder.
    paused
        Whether the run is paused: no unit begins until it is continued.
    more
        The number of other trials by status.
    """

    trials: Sequence[TrialRow]
    share_done: float
    seconds: float
    seconds_left: float | None
    busy: float
    workers: int
    best: int | None
    metric: str
    mode: str
    path: str = ""
    paused: bool = False
    more: Mapping[str, int] = field(default_factory=dict)

    @property
    def resting(self) -> bool:
        """Whether the run is paused and its last units in flight are done."""
        return self.paused and all(row.worker is None for row in self.trials)
