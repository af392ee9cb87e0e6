"""A configuration with folds: what its folds, which are trials, come to together.

In a run with ``n`` folds the trial with the number ``t`` is fold ``t % n`` of configuration
``t // n``. The searcher and the user see configurations; what is trained are trials. A
configuration has finished an epoch when all its folds have, and its metrics are the means of
theirs, with the standard deviations beside them. Nothing of it is stored: it follows from the
trials.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from cerebro.trial import ENDED, NOTHING_RAISED, EpochRecord, Status, TrialRecord

STD = "_std"
"""What follows a metric's name in that of its standard deviation."""


def gather(records: Sequence[TrialRecord], folds: int) -> list[TrialRecord]:
    """Return the configurations of trials that are sorted by number.

    One of which trials are missing, as only a damaged store has it, is left out.
    """
    return [
        configuration(records[first : first + folds])
        for first in range(0, len(records) - folds + 1, folds)
    ]


def configuration(folds: Sequence[TrialRecord]) -> TrialRecord:
    """Return the record of the configuration that these trials are the folds of."""
    first = folds[0]
    for fold, record in enumerate(folds):
        record.fold = fold
    whole = TrialRecord(
        number=first.number // len(folds),
        config=first.config,
        target_epochs=first.target_epochs,
        parent=None if first.parent is None else first.parent // len(folds),
        parent_epoch=first.parent_epoch,
        folds=tuple(folds),
    )
    update(whole)
    return whole


def update(whole: TrialRecord) -> list[EpochRecord]:
    """Bring a configuration's record to where its folds are; return the epochs that are new."""
    new = []
    while whole.done < min(fold.done for fold in whole.folds):
        at = len(whole.epochs)
        new.append(mean_epoch([fold.epochs[at] for fold in whole.folds]))
        whole.epochs.append(new[-1])
    whole.target_epochs = whole.folds[0].target_epochs
    culprit = failed_fold(whole.folds)
    whole.status = _status(whole.folds)
    whole.resumable = any(fold.resumable for fold in whole.folds)
    whole.error = whole.traceback = None
    whole.raised = NOTHING_RAISED
    if culprit is None:  # one that asked to be stopped, by an exception
        culprit = next((fold for fold in whole.folds if fold.raised.bases), None)
    if culprit is not None and whole.status == culprit.status:
        whole.error = f"{culprit.error}; in fold {culprit.fold}"
        whole.traceback, whole.raised = culprit.traceback, culprit.raised
    return new


def failed_fold(folds: Sequence[TrialRecord]) -> TrialRecord | None:
    """The fold that a configuration fails by: of those in the earliest epoch, the first."""
    failed = [fold for fold in folds if fold.status in ("failed", "diverged")]
    return min(failed, key=lambda fold: fold.done, default=None)


def _status(folds: Sequence[TrialRecord]) -> Status:
    present = {fold.status for fold in folds}
    culprit = failed_fold(folds)
    if culprit is not None and present <= set(ENDED):
        return culprit.status
    order: tuple[Status, ...] = ("running", "paused", "waiting", "stopped")
    return next((status for status in order if status in present), "finished")


def mean_epoch(folds: Sequence[EpochRecord]) -> EpochRecord:
    """Return what a configuration's epoch is: means over the folds, in the folds' order."""
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
    """Return 32 hexadecimal digits that stand for the folds' state hashes."""
    return hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation (of the values as a whole, as scikit-learn's)."""
    count = len(values)
    if not all(map(math.isfinite, values)):
        return sum(values) / count, math.nan
    try:
        mean = math.fsum(values) / count
        return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / count)
    except OverflowError:
        return math.fsum(value / count for value in values), math.inf


def clash(metrics: Iterable[str]) -> str | None:
    """Why these metrics cannot have standard deviations beside them; None if they can."""
    names = set(metrics)
    for name in sorted(names):
        plain = name.removesuffix(STD)
        if plain != name and plain in names:
            return (
                f"the model reports {plain!r} and {name!r}, which over folds is the name of the "
                f"first one's standard deviation: give the metric {name!r} another name"
            )
    return None
