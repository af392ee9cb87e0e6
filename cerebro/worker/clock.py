"""Measure the time of a worker's tasks, and write a late task's tracebacks to its log.

`LateTasks` writes tracebacks if several units overlap in a process. `faulthandler` has one timer
for a process, which works even if a unit never lets go of the GIL. A unit's clock stops while the
unit waits for its turn (`cerebro.machine.turns`), so a thread looks at all clocks again and again,
and sets the timer for the unit that will be late first. Setting it at every change of turn would
cost more than short units take.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path

import cerebro._core as _core
from cerebro.errors import UnitCancelled
from cerebro.machine.files import open_plain
from cerebro.machine.local import Clock, Machine
from cerebro.worker.log import APPEND, NOWHERE

IMPORT_SECONDS = 30.0  # for the imports of a process's first `build`, besides `unit_timeout`
STANDARD_ERROR = 2
WAITING_FOR_TURN = 1e6  # seconds by which a task's clock is set back while it waits for its turn
HEARING_SECONDS = 1e-4  # how often a queued unit looks whether the answer before it was heard
LOOK_SECONDS = 0.1  # between looks at the clocks: less than a late unit has before it is killed
GRACE_SECONDS = 1.0  # the timer that has run out is left alone: its thread may wait for a core


class TaskClock:
    """Measures the time of a unit alone, as `BeatClock` does; this one measures nothing."""

    beat: _core.BeatPage | None = None
    """The worker's heartbeats, if it has any."""

    def note_built(self) -> None:
        """Note that a model has been built and its libraries have been imported."""

    def stop_clock(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Return a context whose time, at most `seconds`, does not count towards the unit."""
        return contextlib.nullcontext()

    def await_hearing(self, answer: int) -> None:
        """Wait, uncounted, until the coordinator has heard an answer, or raise UnitCancelled."""


class BeatClock(TaskClock):
    """Reports a task's start to the coordinator, and dumps a late task's traceback to the log.

    Neither importing libraries, for which a process's first `build` gets extra time, nor waiting
    for a turn counts as a task's time. `late` is given if the process has several workers.
    """

    def __init__(self, beat: _core.BeatPage, clock: Clock, late: LateTasks | None = None) -> None:
        self.beat: _core.BeatPage = beat
        self._clock = clock
        self.late = late
        self._has_built = False
        self._waiting_since = 0.0
        self._began = 0  # the number of tasks
        self._is_running = False
        self.limit: float | None = None
        self.log = NOWHERE

    def begin(self, log: Path = NOWHERE) -> None:
        """Begin a task; `log` is where to dump its traceback if other units overlap it."""
        self.log = log
        self._began += 1
        self._is_running = True
        self._start(0.0 if self._has_built else IMPORT_SECONDS)

    def note_built(self) -> None:
        if not self._has_built:
            self._has_built = True
            self._start(0.0)

    @contextlib.contextmanager
    def stop_clock(self, seconds: float) -> Iterator[None]:
        self._start(seconds)
        try:
            yield
        finally:
            self._start(0.0)

    def end(self) -> None:
        self._is_running = False
        self._dump_later(None)

    @property
    def identity(self) -> tuple[int, int]:
        """A key unique to the current task among all workers of this process."""
        return id(self), self._began

    @property
    def seconds_left(self) -> float | None:
        """The time until the task is late; None if its clock does not run, or if it has ended."""
        if self.limit is None or not self._is_running:
            return None
        seconds = self.beat.task_seconds
        if seconds is None or seconds < -WAITING_FOR_TURN / 2:
            return None
        return self.limit - seconds

    def wait_for_turn(self, begins: bool) -> None:
        """Stop the clock while the task waits for its turn; other threads have it meanwhile."""
        if begins:
            self._waiting_since = self._clock.monotonic()
            self.beat.postpone_task(WAITING_FOR_TURN)
        else:
            waited = self._clock.monotonic() - self._waiting_since
            self.beat.postpone_task(waited - WAITING_FOR_TURN)

    def await_hearing(self, answer: int) -> None:
        if self.beat.heard == answer:  # usually: a unit takes longer than an answer
            return
        self.wait_for_turn(True)
        self._dump_later(None)
        try:
            is_heard = False
            while not is_heard:
                is_heard = self.beat.heard == answer
                if self.beat.cancelled:  # even if the answer was heard right after
                    raise UnitCancelled("the unit was cancelled before it was committed")
                if not is_heard:
                    self._clock.sleep(HEARING_SECONDS)
        finally:
            self.wait_for_turn(False)
            self._dump_later(self.seconds_left)

    def _start(self, grace: float) -> None:
        self.beat.begin_task(grace)
        self._dump_later(self.seconds_left)

    def _dump_later(self, seconds: float | None) -> None:
        """Dump the traceback in `seconds`, to standard error, which is the log; None: never."""
        if self.limit is None:
            return
        if self.late is not None:  # standard error is the log of the unit in turn
            self.late.watch(self)
        elif seconds is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(max(0.001, seconds), file=STANDARD_ERROR)


class LateTasks:
    """Dumps all tracebacks of the process to the log of each task that is late, once."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._tasks: list[BeatClock] = []
        self._is_looking = False
        self._armed: tuple[tuple[int, int], float] | None = None  # for which task, and when
        self._file = -1  # the log for which the timer is set
        self._dumped: set[tuple[int, int]] = set()

    def watch(self, task: BeatClock) -> None:
        """Look at a worker's tasks from now on."""
        if task not in self._tasks:
            self._tasks.append(task)
        if not self._is_looking:
            self._is_looking = True
            self._machine.tasks.repeat(self._look, lambda: True, "late tasks")

    def set_timer(self) -> None:
        """Set the timer for the task that will be late first."""
        now = self._machine.clock.monotonic()
        self._dumped &= {task.identity for task in self._tasks}
        if self._armed is not None and (passed := now - self._armed[1]) >= 0:
            if passed < GRACE_SECONDS:
                return
            self._dumped.add(self._armed[0])
            self._disarm()
        due = [
            (seconds, task)
            for task in self._tasks
            if (seconds := task.seconds_left) is not None and task.identity not in self._dumped
        ]
        if not due:
            self._disarm()
            return
        seconds, first = min(due, key=lambda each: each[0])
        seconds = max(0.001, seconds)
        when = now + seconds
        armed, at = self._armed or (None, 0.0)
        if armed == first.identity and abs(at - when) < LOOK_SECONDS / 10:
            return
        self._disarm()
        with contextlib.suppress(OSError):
            self._file = open_plain(first.log, APPEND)
            faulthandler.dump_traceback_later(seconds, file=self._file)
            self._armed = first.identity, when

    def _disarm(self) -> None:
        if self._armed is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _look(self) -> bool:
        self.set_timer()
        self._machine.clock.sleep(LOOK_SECONDS)
        return True
