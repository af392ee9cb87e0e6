"""What the parts of a run get of the machine at their start: its clock, disk and threads.

With the processes and messages of `cerebro.executors`, these are all ways from the coordinator, the
store, the executors and the workers to what is outside of them. A simulation gives them others
(``tests/sim``); everything else uses `LOCAL`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor as Threads
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from cerebro.machine.disk import Disk
from cerebro.machine.signals import WakePipe


class Clock:
    """The time in seconds; the methods are those of the module `time`."""

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)
    time = staticmethod(time.time)  # from here on, the name is no longer the module


class Event(Protocol):
    """The part of `threading.Event` that is used to wait for a task."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Task(Protocol):
    """The part of `threading.Thread` that is used to wait for the end of a task."""

    def join(self) -> None: ...


class Tasks:
    """What runs beside the caller: threads here, steps of one loop in a simulation."""

    def repeat(self, step: Callable[[], bool], has_work: Callable[[], bool], name: str) -> Task:
        """Call `step`, which waits for work, until it returns False.

        `has_work` says whether it would not have to wait; only a simulation asks.
        """

        def run() -> None:
            while step():
                pass

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def event(self) -> Event:
        return threading.Event()

    def pool(self, threads: int, name: str) -> Threads:
        """Return what makes up to so many calls at a time."""
        return ThreadPoolExecutor(threads, name)

    def wait_for(self, calls: Collection[Future[Any]], seconds: float) -> None:
        """Wait up to `seconds` until all calls are done."""
        wait(calls, timeout=seconds)

    def wake_pipe(self) -> WakePipe:
        return WakePipe()


@dataclass(frozen=True)
class Machine:
    clock: Clock = field(default_factory=Clock)
    disk: Disk = field(default_factory=Disk)
    tasks: Tasks = field(default_factory=Tasks)


LOCAL = Machine()
