"""Lost workers: who is to blame, when a trial is given up for them, and when a place is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cerebro.unit import Task, WorkerLost

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
