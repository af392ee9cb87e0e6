"""Define plain records of trials and of their folds; without files or models.

In a run with ``n`` folds, trial ``t`` is fold ``t % n`` of configuration ``t // n``. The searcher
and the user see configurations; workers train trials. A configuration has finished an epoch when
all its folds have finished it. Its metrics are the means over the folds, with their standard
deviations. None of this is stored: it is computed from the trials.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cerebro.machine.imports import module_of

Status = Literal["waiting", "running", "paused", "stopped", "finished", "diverged", "failed"]

OPEN: tuple[Status, ...] = ("waiting", "running", "paused")
ENDED: tuple[Status, ...] = ("stopped", "finished", "diverged", "failed")
NOT_EXACT = "not exact"
"""The kind of an event that names an operation without a deterministic version."""

OUTSIDE = 2**30
"""The stream of the first trial that the user added; those of the searcher's are below it."""

STUDY = "cerebro:study"
"""The key of a stored configuration for an Optuna trial's other data; users do not see it."""


def strip_study(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as shown to users."""
    return {name: value for name, value in config.items() if name != STUDY}


def class_name(kind: type) -> str:
    """Return a class's full name, which is the same in every process."""
    return f"{module_of(kind)}.{kind.__qualname__}"


@dataclass(frozen=True)
class Ranking:
    """The metric, mode and epoch by which trials are ranked."""

    metric: str
    mode: str
    """``"min"`` or ``"max"``."""
    select: str
    """The epoch that represents a trial: ``"best"`` or ``"last"``."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of the user's code."""

    bases: tuple[str, ...] = ()
    """The names of the exception's class and its bases, in method resolution order; or empty."""
    place: str = ""
    """The line of the user's code that raised it; empty if no such line is known."""


NOTHING_RAISED = Raised()


@dataclass(slots=True)
class EpochRecord:
    """One finished epoch of a trial."""

    epoch: int
    metrics: dict[str, float]
    seconds: float
    state_hash: str
    state_file: str | None

    def to_history(self) -> dict[str, Any]:
        history = {"epoch": self.epoch, "metrics": dict(self.metrics), "seconds": self.seconds}
        return history | {"state_hash": self.state_hash}


@dataclass(slots=True)
class TrialRecord:
    """A trial as the store keeps it."""

    number: int
    config: dict[str, Any]
    status: Status = "waiting"
    target_epochs: int = 0
    parent: int | None = None
    """For a clone: the trial from whose state it started."""
    parent_epoch: int | None = None
    """For a clone: the epoch of the parent's state; the clone's own epochs continue its numbers."""
    resumable: bool = False
    """Whether the run left the trial unfinished."""
    error: str | None = None
    traceback: str | None = None
    raised: Raised = NOTHING_RAISED
    """The exception of the user's code that ended the trial."""
    epochs: list[EpochRecord] = field(default_factory=list)
    """The trial's own epochs, by number; none is removed while the trial trains."""
    extensions: tuple[tuple[int, int], ...] = ()
    """If ``info.epochs`` has changed: pairs of a position and the value from there on."""
    stream: int | None = None
    """The number in its seed and its order of shards, if it is not the trial's number. A trial that
    the user added has one from `OUTSIDE` on, and those of the searcher's later trials go on as if
    it was not there."""
    began: float | None = None
    """When its first unit was dispatched, in seconds since the run's start."""
    ended: float | None = None
    fold: int | None = None
    """The index of this fold in its configuration; None without folds."""
    folds: tuple[TrialRecord, ...] = ()
    """In a configuration with folds: the trials of its folds."""
    _best: tuple[str, str, int, EpochRecord | None, float] = field(
        default=("", "", 0, None, math.inf), init=False, repr=False, compare=False
    )
    """For a metric and mode: how many epochs were compared, the best one, and its score."""

    @property
    def is_open(self) -> bool:
        """Whether the trial has epochs left to train, now or when its run is resumed."""
        return self.status not in ENDED or (self.status == "stopped" and self.resumable)

    @property
    def origin(self) -> Literal["searcher", "user"]:
        """Who added the trial."""
        return "searcher" if self.stream is None or self.stream < OUTSIDE else "user"

    @property
    def key(self) -> int:
        """The number in the trial's seed and its order of shards: its stream."""
        return self.number if self.stream is None else self.stream

    def info_epochs(self, position: int, default: int) -> int:
        """Return the value of ``info.epochs`` for the unit at a position."""
        values = [epochs for begin, epochs in self.extensions if begin <= position]
        return values[-1] if values else default

    @property
    def first_epoch(self) -> int:
        """The number of the first epoch that the trial itself trains."""
        return 0 if self.parent_epoch is None else self.parent_epoch + 1

    @property
    def done(self) -> int:
        """The epochs trained into the trial's state, including those of a clone's parent."""
        return self.first_epoch + len(self.epochs)

    def best_epoch(self, metric: str, mode: str) -> int | None:
        """Return the number of the epoch with the best metric; the earliest if several tie."""
        best = self._best_record(metric, mode)
        return None if best is None else best.epoch

    def selected(self, by: Ranking) -> EpochRecord | None:
        """Return the epoch that represents the trial: its best or its last one."""
        if not self.epochs:
            return None
        if by.select == "last":
            return self.epochs[-1]
        return self._best_record(by.metric, by.mode) or self.epochs[-1]

    def _best_record(self, metric: str, mode: str) -> EpochRecord | None:
        """Return the best epoch; compare each epoch only once, because displays ask often."""
        its_metric, its_mode, seen, best, least = self._best
        if (its_metric, its_mode) != (metric, mode):
            seen, best, least = 0, None, math.inf
        for record in self.epochs[seen:]:
            value = score(record.metrics, metric, mode)
            if value is not None and value < least:
                best, least = record, value
        self._best = metric, mode, len(self.epochs), best, least
        return best


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """A request of the user's to a running search, and its outcome; see the table ``actions``."""

    request: str
    time: float
    verb: str
    trial: int | None = None
    child: int | None = None
    epoch: int | None = None
    changes: Mapping[str, Any] | None = None
    epochs: int | None = None
    sender: str = ""
    outcome: str = "done"

    @property
    def is_done(self) -> bool:
        return self.outcome.partition(":")[0] == "done"


def copy_record(record: TrialRecord) -> TrialRecord:
    """Return a copy of a record that does not change while the trial trains."""
    return replace(
        record,
        epochs=[replace(epoch) for epoch in record.epochs],
        folds=tuple(map(copy_record, record.folds)),
    )


def score(metrics: dict[str, float], metric: str, mode: str) -> float | None:
    """Return the metric as a number to minimize; None if it is missing or not finite."""
    value = metrics.get(metric)
    if value is None or not math.isfinite(value):
        return None
    return value if mode == "min" else -value


def best_trials(records: Iterable[TrialRecord], by: Ranking, n: int) -> list[int]:
    """Return the numbers of the `n` best trials, best first; ties are ordered by number."""
    return [number for _, number in sorted(_scores(records, by))[:n]]


def best_score(records: Iterable[TrialRecord], by: Ranking) -> tuple[float, int] | None:
    """Return the best trial's metric, as a number to minimize, and its number."""
    return min(_scores(records, by), default=None)


def _scores(records: Iterable[TrialRecord], by: Ranking) -> Iterator[tuple[float, int]]:
    for record in records:
        epoch = record.selected(by)
        value = None if epoch is None else score(epoch.metrics, by.metric, by.mode)
        if value is not None:
            yield value, record.number


STD = "_std"
"""The suffix that a metric's name gets for its standard deviation."""


def gather_configurations(records: Sequence[TrialRecord], folds: int) -> list[TrialRecord]:
    """Return the configurations of trials sorted by number, except those that lack trials."""
    return [
        make_configuration(records[first : first + folds])
        for first in range(0, len(records) - folds + 1, folds)
    ]


def make_configuration(folds: Sequence[TrialRecord]) -> TrialRecord:
    first = folds[0]
    for fold, record in enumerate(folds):
        record.fold = fold
    whole = TrialRecord(
        number=first.number // len(folds),
        config=first.config,
        target_epochs=first.target_epochs,
        parent=None if first.parent is None else first.parent // len(folds),
        parent_epoch=first.parent_epoch,
        stream=_stream_of_configuration(first, len(folds)),
        folds=tuple(folds),
    )
    update_configuration(whole)
    return whole


def _stream_of_configuration(first: TrialRecord, folds: int) -> int | None:
    """Return the searcher's own number of a configuration if it is not the run's."""
    if first.stream is None or first.origin == "user":
        return first.stream
    return first.stream // folds


def update_configuration(whole: TrialRecord) -> list[EpochRecord]:
    """Update a configuration's record from its folds; return the new epochs."""
    new = []
    while whole.done < min(fold.done for fold in whole.folds):
        at = len(whole.epochs)
        new.append(mean_epoch([fold.epochs[at] for fold in whole.folds]))
        whole.epochs.append(new[-1])
    whole.target_epochs = whole.folds[0].target_epochs
    culprit = failed_fold(whole.folds)
    present = {fold.status for fold in whole.folds}
    order: tuple[Status, ...] = ("running", "paused", "waiting", "stopped")
    whole.status = next((status for status in order if status in present), "finished")
    if culprit is not None and present <= set(ENDED):
        whole.status = culprit.status
    whole.resumable = any(fold.resumable for fold in whole.folds)
    whole.began = min((f.began for f in whole.folds if f.began is not None), default=None)
    ends = [fold.ended for fold in whole.folds if fold.ended is not None]
    whole.ended = max(ends) if len(ends) == len(whole.folds) else None
    whole.error = whole.traceback = None
    whole.raised = NOTHING_RAISED
    if culprit is None:  # an exception may have stopped one fold
        culprit = next((fold for fold in whole.folds if fold.raised.bases), None)
    if culprit is not None and whole.status == culprit.status:
        whole.error = f"{culprit.error}; in fold {culprit.fold}"
        whole.traceback, whole.raised = culprit.traceback, culprit.raised
    return new


def failed_fold(folds: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the fold that made a configuration fail: the first one in the earliest epoch."""
    failed = [fold for fold in folds if fold.status in ("failed", "diverged")]
    return min(failed, key=lambda fold: fold.done, default=None)


def mean_epoch(folds: Sequence[EpochRecord]) -> EpochRecord:
    """Return a configuration's epoch: the means over the folds, summed in their order."""
    metrics: dict[str, float] = {}
    for name in folds[0].metrics:
        values = [fold.metrics[name] for fold in folds if name in fold.metrics]
        if len(values) == len(folds):
            metrics[name], metrics[name + STD] = mean_and_std(values)
    return EpochRecord(
        epoch=folds[0].epoch,
        metrics=metrics,
        seconds=sum(fold.seconds for fold in folds),
        state_hash=joint_hash(fold.state_hash for fold in folds),
        state_file=None,
    )


def joint_hash(hashes: Iterable[str]) -> str:
    """Combine the folds' state hashes into 32 hexadecimal digits."""
    return hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the population standard deviation, as in scikit-learn."""
    count = len(values)
    if not all(map(math.isfinite, values)):
        return sum(values) / count, math.nan
    try:
        mean = math.fsum(values) / count
        return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / count)
    except OverflowError:
        return math.fsum(value / count for value in values), math.inf


def find_clash(metrics: Iterable[str]) -> str | None:
    """Return why a standard deviation's name would clash with a metric; None if none would."""
    names = set(metrics)
    for name in sorted(names):
        plain = name.removesuffix(STD)
        if plain != name and plain in names:
            return (
                f"the model reports {plain!r} and {name!r}, which over folds is the name of the "
                f"first one's standard deviation: give the metric {name!r} a different name"
            )
    return None
