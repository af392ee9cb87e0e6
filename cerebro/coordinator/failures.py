"""Find out why trials failed and workers were lost; decide when to give up a trial or the run."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cerebro.errors import RunError
from cerebro.model import Words
from cerebro.run.records import Raised, Ranking, TrialRecord
from cerebro.searchers.metrics import find_nearest
from cerebro.worker.messages import Task, WorkerLost

ALIKE_FAILURES = 3
"""The run ends if this many trials at its start fail in the same way."""

_WORDS = dict(enumerate(["three", "four", "five", "six", "seven", "eight", "nine", "ten"], 3))
_PRUNED = "optuna.exceptions.TrialPruned"
_NO_METRIC = "the model reports no metric"


def raise_if_alike(first: Sequence[TrialRecord], folder: Path | None = None) -> None:
    """Raise RunError if the first trials, by number, all failed alike, without an epoch.

    Later trials do not count, so the result does not depend on the number of workers. `folder` is
    the run's, None if it will be removed.
    """
    failed = all(record.status == "failed" and not record.epochs for record in first)
    if len(first) >= ALIKE_FAILURES and failed and len(set(map(failure_kind, first))) == 1:
        text = f"the first {len(first)} trials failed in the same way: {first[0].error}"
        raise RunError(text + _locate_traceback(first[0], folder))


def raise_if_all_failed(
    records: Sequence[TrialRecord],
    others: Mapping[str, int] | None = None,
    folder: Path | None = None,
) -> None:
    """Raise RunError if there were no trials or all failed; `others` counts further statuses."""
    counts = Counter(record.status for record in records) + Counter(others)
    total = counts.total()
    if not records:
        raise RunError("the searcher suggested no trial")
    if counts["failed"] + counts["diverged"] == total:
        which = "both" if total == 2 else f"all {_WORDS.get(total, total)}"
        what = "the only trial failed" if total == 1 else f"{which} trials failed; the first"
        raise RunError(f"{what}: {records[0].error}{_locate_traceback(records[0], folder)}")


def _locate_traceback(first: TrialRecord, folder: Path | None) -> str:
    """Return where to read a trial's traceback, in words that also fit a search that raised."""
    if folder is None or not first.traceback:
        return ""
    number = first.number if first.fold is None else 0
    run = shlex.quote(str(folder))
    return f"; its traceback: python -m cerebro logs {run} --trial {number}"


def failure_kind(record: TrialRecord) -> tuple[str, ...]:
    """Return what like failures share: type and user's line, or the message without numbers."""
    raised = record.raised
    if raised.place:
        return raised.bases[0], raised.place
    return (re.sub(r"\d+", "#", record.error or ""),)


def asks_to_stop(raised: Raised) -> bool:
    """Return whether an exception in the user's code stops its trial and is not a failure."""
    return _PRUNED in raised.bases


def worst_value_of(mode: str) -> float:
    return math.inf if mode == "min" else -math.inf


def make_comparable(metrics: Mapping[str, float], by: Ranking) -> dict[str, float]:
    """Return a trial's metrics, with the worst value for a ranking metric that is NaN."""
    reported = dict(metrics)
    if math.isnan(reported.get(by.metric, 0.0)):
        reported[by.metric] = worst_value_of(by.mode)
    return reported


def explain_missing_metric(
    name: str, metrics: Iterable[str], *, validated: bool, words: Words
) -> str | None:
    """Return why a model with these metrics cannot be ranked by the metric `name`; None if it can.

    If `validated`, the ranking metric must come from validation.
    """
    names = set(metrics)
    if _can_rank(name, names, validated=validated):
        return None
    ranking = [metric for metric in sorted(names) if _can_rank(metric, names, validated=validated)]
    validating = next((metric for metric in ranking if not metric.startswith("train_")), None)
    if name in names:
        return (
            f"{_NO_METRIC} {name!r} in validation: {words.report_in_validation}, or rank by "
            f"metric={validating or f'train_{name}'!r}"
        )
    problem = f"{_NO_METRIC} {name!r}; it reports {', '.join(sorted(names)) or 'none'}"
    how = words.report_in_validation if validated and words.by_step else words.report
    near = find_nearest(name, ranking)
    if near is not None and name != "loss":
        return f"{problem}: did you mean metric={near!r}?"
    other = near or validating
    instead = "choose another metric=" if other is None else f"give metric={other!r}"
    return f"{problem}: {how}, or {instead}"


def _can_rank(name: str, names: Collection[str], *, validated: bool) -> bool:
    """Return whether a model that reports `names` can be ranked by one of them."""
    only_training = f"train_{name}" in names and f"val_{name}" not in names
    return name in names and not (only_training and validated)


MAX_START_LOSSES = 3  # how many workers in a row may be lost before they begin a unit


@dataclass(frozen=True)
class Verdict:
    """What follows from losing a worker."""

    text: str  # what happened, and in which unit; recorded as an event of the run
    error: str | None = None  # why the trial must be given up; None if it continues


class LostWorkers:
    """Decides whether to retry units and to replace workers.

    A unit that a lost worker had begun may have killed it, and is retried at most `max_retries`
    times. Otherwise the machine is to blame; after several such losses in a row, lost workers are
    not replaced.
    """

    def __init__(self, max_retries: int) -> None:
        self._max_retries = max_retries
        self._deaths: Counter[tuple[int, int, int]] = Counter()
        self._lost_at_start = 0
        self._last_lost = -1

    def add(self, event: WorkerLost, task: Task | None) -> Verdict:
        """Record a lost worker and the `task` that was sent to it, and return the verdict."""
        if event.with_machine or event.has_left:
            where = "" if task is None else f"; it was training trial {task.trial}"
            return Verdict(f"{event.reason}{where}")
        self._last_lost = max(self._last_lost, event.worker)
        self._lost_at_start = self._lost_at_start + 1 if task is None or not event.began else 0
        if task is None:
            return Verdict(f"{event.reason}, without a unit")
        unit = "validation" if task.part < 0 else f"unit {task.step}"
        where = f"epoch {task.epoch}, {unit}"
        if not event.began:
            return Verdict(f"{event.reason}, before it began trial {task.trial}, {where}")
        key = (task.trial, task.epoch, task.step)
        self._deaths[key] += 1
        text = f"{event.reason} in trial {task.trial}, {where}, attempt {task.attempt}"
        if self._deaths[key] <= self._max_retries:
            return Verdict(text)
        deaths = self._deaths.pop(key)
        times = "once" if deaths == 1 else f"{deaths} times"
        trace = f" (where it was: trials/{task.trial}.log)" if event.traced else ""
        return Verdict(text, f"{event.reason} in {where}, {times}{trace}")

    def unit_done(self, worker: int, task: Task) -> None:
        self._deaths.pop((task.trial, task.epoch, task.step), None)
        if worker > self._last_lost:  # this worker was started after the last loss
            self._lost_at_start = 0

    @property
    def may_replace(self) -> bool:
        """Whether to replace the worker that was lost last."""
        return self._lost_at_start < MAX_START_LOSSES
