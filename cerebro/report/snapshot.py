"""Hold a snapshot of a run: the input of every progress display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class FinishedEpoch(Protocol):
    """A finished epoch of a trial."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The epoch's metrics: ``train_*`` and ``val_*``."""


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial, as displays show it.

    Parameters
    ----------
    number
        The trial's number, from 0.
    config
        The trial's configuration.
    status
        One of ``waiting running paused stopped finished diverged failed``.
    epoch
        The number of epochs that the trial has finished.
    epochs
        The number of epochs to train, if known.
    metrics
        The metrics of the epoch that represents the trial: ``train_*`` and ``val_*``.
    rows_per_second
        The training rows per second in the trial's last unit, or None before the first unit.
    worker
        The worker that is running the trial, or None.
    error
        The one-line error of a failed trial.
    best_at
        The number of epochs after which the trial was best, with these metrics; None before the
        first epoch, or if the last epoch represents a trial.
    last
        The metrics of the last finished epoch.
    history
        The trial's finished epochs. During training, the list grows after the snapshot.
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
    history: Sequence[FinishedEpoch] = ()


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Parameters
    ----------
    trials
        The trials begun so far, by number. Of many ended trials, only the best ones, the last
        failed one, and those that ended since the last drawing are included. Of many trials that
        wait for their first unit, only the first ones are included.
    share_done
        The finished share of the work or of the time limit, 0 to 1; None while neither is known.
    seconds
        The seconds since the run's start.
    seconds_left
        The expected time to the end, in seconds; None while it is unknown.
    busy
        The share of the workers' time spent training or validating, 0 to 1.
    workers
        The number of workers.
    best
        The number of the best trial so far, or None.
    metric, mode
        The metric that ranks trials, and ``"min"`` or ``"max"``.
    path
        The run's folder.
    paused
        Whether the run is paused: no unit begins until the run is continued.
    more
        The number of trials without a row, by status.
    """

    trials: Sequence[TrialRow]
    share_done: float | None
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
        """Whether the run is paused and the last units in flight are done."""
        return self.paused and all(row.worker is None for row in self.trials)
