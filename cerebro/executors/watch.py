"""Notice busy workers that do not respond, and tasks that take too long.

Silence is measured in the coordinator's own heartbeats, which a thread makes at the same rate as in
the workers. If the machine is suspended, frozen or too busy for these threads, both stop, and no
worker is killed for it. A unit's time is measured by a clock that stops while the machine is
suspended. `TaskWatch` is pure logic: its caller passes the numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import cerebro._core as _core
from cerebro.executors.process import WorkerProcess
from cerebro.worker.messages import CheckTask, Job, WarmTask

BEAT_SECONDS = 0.1
LOOKS = 5  # how often a worker is checked within the silence that it is allowed
START_SILENCE = 120.0  # seconds until a worker's first beat: Python may start from a slow disk
DUMP_SECONDS = 0.25  # for a worker to write the traceback of a late unit before it is killed
CHECK_SECONDS = 5.0  # the first check may take three times `unit_timeout` plus this time


class TaskWatch:
    """Watches one task of one worker.

    After `silence` seconds without a beat, the worker counts as lost. The task may take `limit`
    seconds; None means no limit. `attempt` is that of a unit.
    """

    def __init__(self, silence: float, limit: float | None, attempt: int = 0) -> None:
        self.attempt = attempt
        self._look = silence / LOOKS
        self._silent_beats = math.ceil((silence - self._look) / BEAT_SECONDS)
        self._start_beats = math.ceil(max(silence, START_SILENCE) / BEAT_SECONDS)
        self._limit = limit
        self._beats = -1
        self._since = 0

    def is_silent(self, beats: int, own: int) -> bool:
        """Return whether the worker is silent too long; `own` counts this process's beats."""
        if beats != self._beats:
            self._beats, self._since = beats, own
        allowed = self._silent_beats if beats > 0 else self._start_beats
        return own - self._since >= allowed

    def is_late(self, task_seconds: float | None) -> bool:
        """Return whether the task takes too long; `task_seconds` is None before it begins."""
        return self._limit is not None and task_seconds is not None and task_seconds >= self._limit

    def seconds_to_next_look(self, task_seconds: float | None) -> float:
        if self._limit is None:
            return self._look
        # A task that has not begun cannot exceed its limit before the whole limit has passed.
        seconds = self._limit - (0.0 if task_seconds is None else task_seconds)
        return min(self._look, max(0.0, seconds))


class Watchdog:
    """Watches the busy workers of a run; `silence` is as in `TaskWatch`."""

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._unit_timeout: float | None = None
        self._watches: dict[int, TaskWatch] = {}
        self._clock: _core.BeatPage | None = None  # beats at the same rate as the workers
        self._next_look = 0.0

    def start(self, unit_timeout: float | None) -> None:
        self._unit_timeout = unit_timeout
        self._clock = _core.BeatPage()
        self._clock.start_beating(round(1000 * BEAT_SECONDS))

    def stop(self) -> None:
        self._watches.clear()
        if self._clock is not None:
            self._clock.stop()
            self._clock = None

    @property
    def busy(self) -> Mapping[int, TaskWatch]:
        """The watches of the tasks that have no answer yet, by worker."""
        return self._watches

    @property
    def next_look(self) -> float | None:
        """When to look at the busy workers, on the monotonic clock; None if no worker is busy."""
        return self._next_look if self._watches else None

    def begin(self, worker: int, task: Job) -> None:
        watch = TaskWatch(self._silence, self._time_limit_of(task), getattr(task, "attempt", 0))
        self._watches[worker] = watch
        self._next_look = min(self._next_look, time.monotonic() + watch.seconds_to_next_look(None))

    def end(self, worker: int) -> None:
        self._watches.pop(worker, None)

    def _time_limit_of(self, task: Job) -> float | None:
        """Return the seconds that a task may take; None: no limit."""
        if self._unit_timeout is None or isinstance(task, WarmTask):
            return None
        # A check builds several models and trains each on a few batches.
        scale, more = (3, CHECK_SECONDS) if isinstance(task, CheckTask) else (1, DUMP_SECONDS)
        return scale * self._unit_timeout + more

    def find_faults(self, workers: Mapping[int, WorkerProcess]) -> list[tuple[int, str, bool]]:
        """Look at the busy workers if it is time to; return those to kill.

        Each comes with the reason, and with whether it has written a traceback.
        """
        if not self._watches or time.monotonic() < self._next_look:
            return []
        assert self._clock is not None
        faults, patience = [], self._silence
        for worker, watch in self._watches.items():
            if (process := workers.get(worker)) is None:
                continue
            task_seconds = process.beat.task_seconds
            if watch.is_late(task_seconds):
                reason = f"the unit took longer than unit_timeout={self._unit_timeout:g} seconds"
                faults.append((worker, reason, True))
            elif watch.is_silent(process.beat.beats, self._clock.beats):
                how = "was stopped" if process.is_stopped() else "hangs"
                reason = (
                    f"the worker process {how}: it sent no heartbeat for {self._silence:g} seconds"
                )
                faults.append((worker, reason, False))
            else:
                patience = min(patience, watch.seconds_to_next_look(task_seconds))
        self._next_look = time.monotonic() + patience
        return faults
