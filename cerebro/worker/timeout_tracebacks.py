"""Write the tracebacks of a process to the log of its late unit, if several units overlap in it.

`faulthandler` has one timer for a process, which works even if a unit never lets go of the GIL. A
unit's clock stops while the unit waits for its turn (`cerebro.machine.turns`), so a thread looks at
all clocks again and again, and sets the timer for the unit that will be late first. Setting it at
every change of turn would cost more than short units take.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from cerebro.machine.files import open_plain
from cerebro.worker.log import APPEND

LOOK_SECONDS = 0.1
"""How often the clocks are read: less than the time that a late unit has before it is killed."""

GRACE_SECONDS = 1.0
"""How long the timer is left alone once it has run out: its thread may have to wait for a core."""


class LimitedTask(Protocol):
    """A worker's task whose time is limited."""

    @property
    def identity(self) -> Hashable:
        """What differs between two tasks of any workers of the process."""

    @property
    def log(self) -> Path:
        """The file to which the tracebacks are appended."""

    @property
    def seconds_left(self) -> float | None:
        """The time until the task is late; None if its clock does not run, or if it has ended."""


class LateTasks:
    """Dumps all tracebacks of the process to the log of each task that is late, once."""

    def __init__(self) -> None:
        self._tasks: list[LimitedTask] = []
        self._thread: threading.Thread | None = None
        self._armed: tuple[Hashable, float] | None = None  # for which task, and when
        self._file = -1  # the log for which the timer is set
        self._dumped: set[Hashable] = set()

    def watch(self, task: LimitedTask) -> None:
        """Look at a worker's tasks from now on."""
        if task not in self._tasks:
            self._tasks.append(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_setting_timer, daemon=True)
            self._thread.start()

    def set_timer(self) -> None:
        """Set the timer for the task that will be late first."""
        limits = [(task.seconds_left, task) for task in self._tasks]
        running = [(seconds, task) for seconds, task in limits if seconds is not None]
        self._dumped &= {task.identity for task in self._tasks}
        if self._armed is not None and (passed := time.monotonic() - self._armed[1]) >= 0:
            if passed < GRACE_SECONDS:
                return
            self._dumped.add(self._armed[0])
            self._disarm()
        due = [(s, task) for s, task in running if task.identity not in self._dumped]
        if not due:
            self._disarm()
            return
        seconds, first = min(due, key=lambda each: each[0])
        when = time.monotonic() + max(0.001, seconds)
        is_armed = self._armed is not None and self._armed[0] == first.identity
        if self._armed is not None and is_armed and abs(self._armed[1] - when) < LOOK_SECONDS / 10:
            return
        self._disarm()
        with suppress(OSError):
            self._file = open_plain(first.log, APPEND)
            faulthandler.dump_traceback_later(max(0.001, seconds), file=self._file)
            self._armed = first.identity, when

    def _disarm(self) -> None:
        if self._armed is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _keep_setting_timer(self) -> None:
        while True:
            self.set_timer()
            time.sleep(LOOK_SECONDS)
