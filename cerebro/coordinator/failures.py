"""Failed trials and lost workers: who is to blame, and when a trial or the run is given up."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cerebro.errors import RunError
from cerebro.run.records import Raised, TrialRecord
from cerebro.worker.messages import Task, WorkerLost

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


def comparable(metrics: Mapping[str, float], metric: str, mode: str) -> dict[str, float]:
    """Return metrics as searchers receive them: NaN becomes the worst in the one that ranks trials.

    NaN compares with nothing: a searcher that sorts by it would sort by chance.
    """
    reported = dict(metrics)
    if math.isnan(reported.get(metric, 0.0)):
        reported[metric] = worst(mode)
    return reported


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


MAX_START_LOSSES = 3
"""Workers in a row that may be lost before they begin anything."""


@dataclass(frozen=True)
class Loss:
    """What one loss means."""

    text: str
    """For the run's record: what happened, and to which unit."""
    error: str | None = None
    """Why the trial is given up, if it is."""


class Losses:
    """Counts the workers that were lost.

    A worker that had begun a unit counts against that unit: it may be the one
    that kills, so it is tried again only so often. One that had not is nobody's
    fault but the machine's: its unit is simply given away again, and a place
    where workers die as they start is not filled for ever.

    Parameters
    ----------
    max_retries
        Times that a unit is tried again.
    """

    def __init__(self, max_retries: int) -> None:
        self._max_retries = max_retries
        self._deaths: Counter[tuple[int, int, int]] = Counter()
        self._lost_at_start = 0
        self._last_lost = -1

    def add(self, event: WorkerLost, task: Task | None) -> Loss:
        """Note a loss; `task` is what the worker had been given."""
        if event.with_machine:
            where = "" if task is None else f", which was training trial {task.trial}"
            return Loss(f"{event.reason}{where}")
        self._last_lost = max(self._last_lost, event.worker)
        if task is None or not event.began:
            self._lost_at_start += 1
        else:
            self._lost_at_start = 0
        if task is None:
            return Loss(f"{event.reason}, without a unit")
        shard = "validation" if task.shard < 0 else f"shard {task.shard}"
        where = f"epoch {task.epoch}, {shard}"
        if not event.began:
            return Loss(f"{event.reason}, before it began trial {task.trial}, {where}")
        unit = (task.trial, task.epoch, task.step)
        self._deaths[unit] += 1
        text = f"{event.reason} in trial {task.trial}, {where}, attempt {task.attempt}"
        if self._deaths[unit] <= self._max_retries:
            return Loss(text)
        deaths = self._deaths.pop(unit)
        times = "once" if deaths == 1 else f"{deaths} times"
        trace = f" (where it was: trials/{task.trial}.log)" if event.traced else ""
        return Loss(text, f"{event.reason} in {where}, {times}{trace}")

    def unit_done(self, worker: int, task: Task) -> None:
        """Note that a unit went well, on this worker."""
        self._deaths.pop((task.trial, task.epoch, task.step), None)
        if worker > self._last_lost:  # it was started since
            self._lost_at_start = 0

    @property
    def may_replace(self) -> bool:
        """Whether it makes sense to start another worker in place of the last one lost."""
        return self._lost_at_start < MAX_START_LOSSES
