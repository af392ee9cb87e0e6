"""Failed trials: what makes them alike, and when the run is given up for them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from cerebro.errors import RunError
from cerebro.trial import Raised, TrialRecord

ALIKE_FAILURES = 3
"""So many first trials that all fail alike end the run."""
_WORDS = dict(enumerate(["three", "four", "five", "six", "seven", "eight", "nine", "ten"], 3))
_PRUNED = "optuna.exceptions.TrialPruned"
_NO_METRIC = "the model reports no metric"


def raise_if_alike(first: Sequence[TrialRecord]) -> None:
    """Stop a run whose first trials, by number, have all made the same mistake.

    They count once all have failed, whatever others do meanwhile: the answer depends on
    the trials, not on how many workers there are. A trial that has finished an epoch
    shows that the code works.

    Raises
    ------
    RunError
        With the first cause.
    """
    if len(first) < ALIKE_FAILURES:
        return
    if any(record.status != "failed" or record.epochs for record in first):
        return
    if len({failure_kind(record) for record in first}) == 1:
        raise RunError(f"the first {len(first)} trials failed alike: {first[0].error}")


def raise_if_all_failed(
    records: Sequence[TrialRecord], others: Mapping[str, int] | None = None
) -> None:
    """Raise RunError if a run found nothing.

    Parameters
    ----------
    records
        The run's trials, or at least the first of them.
    others
        How many more there are, by status.
    """
    counts = Counter(record.status for record in records) + Counter(others)
    total = counts.total()
    if records and counts["failed"] + counts["diverged"] == total:
        raise RunError(_all_failed(records[0], total))
    if not records:
        raise RunError("the searcher suggested no trial")


def _all_failed(first: TrialRecord, total: int) -> str:
    """Say that all trials failed, why the first did, and where its traceback is."""
    if total == 1:
        said = f"the only trial failed: {first.error}"
    else:
        which = "both" if total == 2 else f"all {_WORDS.get(total, total)}"
        said = f"{which} trials failed; the first: {first.error}"
    number = first.number if first.fold is None else 0
    return f"{said}; its traceback: result.trials[{number}].traceback" if first.traceback else said


def failure_kind(record: TrialRecord) -> tuple[str, ...]:
    """What makes two failures alike: the exception's type and where it was raised.

    Without a place in the user's code it is the message, whatever its numbers.
    """
    raised = record.raised
    if raised.place:
        return raised.bases[0], raised.place
    return (re.sub(r"\d+", "#", record.error or ""),)


def asks_to_stop(raised: Raised) -> bool:
    """Whether an exception of the user's code ends its trial without being a failure."""
    return _PRUNED in raised.bases


def worst(mode: str) -> float:
    """The value of a metric that no other is worse than."""
    return math.inf if mode == "min" else -math.inf


def as_told(metrics: Mapping[str, float], metric: str, mode: str) -> dict[str, float]:
    """Metrics as a searcher is told them: what ranks trials is a number or the worst one.

    NaN compares with nothing: a searcher that sorts by it would sort by chance.
    """
    told = dict(metrics)
    if math.isnan(told.get(metric, 0.0)):
        told[metric] = worst(mode)
    return told


def not_finite(metrics: Mapping[str, float]) -> str:
    """Say which validation metrics are no finite numbers; empty if all are."""
    names = [n for n, v in metrics.items() if n.startswith("val_") and not math.isfinite(v)]
    return ", ".join(f"{name} is {metrics[name]}" for name in names)


def missing_metric(name: str, metrics: Mapping[str, float], *, validated: bool) -> str | None:
    """Why an epoch's metrics do not rank the trial; None if they do.

    With validation, what ranks must come from validation.
    """
    only_training = f"train_{name}" in metrics and f"val_{name}" not in metrics
    if name in metrics and not (only_training and validated):
        return None
    if name in metrics:
        return (
            f"{_NO_METRIC} {name!r} in validation: return it from eval_batch too, or rank by "
            f"metric='train_{name}'"
        )
    names = ", ".join(sorted(metrics)) or "none"
    return (
        f"{_NO_METRIC} {name!r}; it reports {names}: return it from train_batch and eval_batch, "
        "or choose another metric="
    )
