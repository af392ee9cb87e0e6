"""Threads of simulated processes, of which one runs at a time: for code that waits in a thread.

A fiber has a real thread, so that `threading.get_ident` and locks are as in a real process. It runs
from one of its waits to the next, and the thread that runs the events waits meanwhile. Between two
calls of the machine, it sometimes lets others run.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from faults import ProcessDied

if TYPE_CHECKING:
    from world import Process

SWITCH_SECONDS = 1e-4  # a thread continues up to this time after it could

_idle: list[Carrier] = []
"""Threads for the next fibers: to start one takes longer than a fiber."""

os.register_at_fork(after_in_child=_idle.clear)


def _do_nothing() -> None:
    pass


class Carrier:
    """A thread that runs one fiber after the other."""

    def __init__(self) -> None:
        self._begin = threading.Lock()
        self._pause = threading.Lock()
        self._begin.acquire()
        self._pause.acquire()
        self._run: Callable[[], object] = _do_nothing
        threading.Thread(target=self._serve, name="simulated", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._begin.acquire()
            self._run()
            self._run = _do_nothing  # else what has ended would stay in memory
            _idle.append(self)
            self._pause.release()

    def start(self, run: Callable[[], object]) -> None:
        """Run until the first pause, or the end."""
        self._run = run
        self.resume()

    def resume(self) -> None:
        self._begin.release()
        self._pause.acquire()

    def pause(self) -> None:
        """Return from `start` or `resume`; in the fiber itself."""
        self._pause.release()
        self._begin.acquire()


class Fiber:
    """A thread of a process that calls `run`; ends with the process."""

    def __init__(self, process: Process, run: Callable[[], object]) -> None:
        self.process = process
        self.has_ended = False
        self.is_awake = True  # whether its next step is an event to come
        self.is_ready: Callable[[], bool] = lambda: True
        self._run = run
        self._carrier: Carrier | None = None
        self._error: BaseException | None = None
        self._timer = 0
        process.fibers.append(self)
        process.on_death.append(self._end)
        process.world.at(self._delay(), self._step, process)

    def _delay(self) -> float:
        return SWITCH_SECONDS * self.process.random.random()

    def wake_if_ready(self) -> None:
        if not self.is_awake and self.is_ready():
            self.is_awake = True
            self.process.world.at(self._delay(), self._step, self.process)

    def _step(self) -> None:
        """Run to the next wait, or to the end; in the thread that runs the events."""
        world = self.process.world
        before, world.fiber = world.fiber, self
        if self._carrier is None:
            self._carrier = _idle.pop() if _idle else Carrier()
            self._carrier.start(self._live)
        else:
            self._carrier.resume()
        world.fiber = before
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _live(self) -> None:
        try:
            self._run()
        except ProcessDied:
            pass
        except BaseException as error:
            self._error = error
        self.has_ended = True
        if self in self.process.fibers:
            self.process.fibers.remove(self)

    def wait(self, seconds: float | None, is_ready: Callable[[], bool]) -> bool:
        """Let others run until `is_ready` or the time is over; return whether it is ready."""
        process, world = self.process, self.process.world
        end = math.inf if seconds is None else world.now + seconds
        while True:
            if process.is_dead:
                raise ProcessDied(process.name)
            if is_ready():
                return True
            if world.now >= end:
                return False
            self._timer += 1
            if end < math.inf:
                world.at_time(end, partial(self._time_out, self._timer), process)
            self._pause(is_ready)

    def yield_to_others(self) -> None:
        """Let others run that are due."""
        self._timer += 1
        self.process.world.at(0.0, partial(self._time_out, self._timer), self.process)
        self._pause(lambda: False)
        if self.process.is_dead:
            raise ProcessDied(self.process.name)

    def stand_still(self, seconds: float) -> None:
        """Wait with the whole process, which may be under a lock: this thread continues first."""
        world = self.process.world
        self._timer += 1
        world.at(seconds, partial(self._time_out, self._timer))  # not put off as its process's are
        self._pause(lambda: False)
        if self.process.is_dead:
            raise ProcessDied(self.process.name)

    def _pause(self, is_ready: Callable[[], bool]) -> None:
        assert self._carrier is not None
        self.is_ready, self.is_awake = is_ready, False
        self._carrier.pause()
        self.is_awake = True

    def _time_out(self, timer: int) -> None:
        if timer == self._timer and not self.is_awake:
            self.is_awake = True
            self._step()

    def _end(self) -> None:
        """Have the thread notice that its process has died, unless this is what it does now."""
        if self._carrier is None:
            self.has_ended = True
        elif not self.has_ended and self.process.world.fiber is not self:
            self.is_awake = True
            self.process.world.at(0.0, self.unwind)

    def unwind(self) -> None:
        """Let the thread of a dead process end."""
        if self._carrier is not None and not self.has_ended:
            self._step()


class SimulatedPool(Executor):
    """What `ThreadPoolExecutor` is, in a process of the world."""

    def __init__(self, process: Process, threads: int) -> None:
        self._process = process
        self._threads = threads
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._fibers: list[Fiber] = []
        self._idle = 0
        self._is_closing = False

    def submit(self, call: Callable[..., Any], /, *values: Any, **options: Any) -> Future[Any]:
        if self._is_closing:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._calls.append((future, partial(call, *values, **options)))
        if self._idle < len(self._calls) and len(self._fibers) < self._threads:
            self._fibers.append(Fiber(self._process, self._serve))
        return future

    def _serve(self) -> None:
        while True:
            self._idle += 1
            self._process.wait(None, lambda: bool(self._calls) or self._is_closing)
            self._idle -= 1
            if not self._calls:
                return
            future, call = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except ProcessDied:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_closing = True
        while cancel_futures and self._calls:
            self._calls.popleft()[0].cancel()
        if wait:
            self._process.wait(None, lambda: all(fiber.has_ended for fiber in self._fibers))


_pipes = itertools.count(5000)


class SimulatedPipe:
    """What `WakePipe` is; `process.pipes` finds it by its descriptor."""

    def __init__(self, process: Process) -> None:
        self.is_set = False
        self._number = next(_pipes)
        process.pipes[self._number] = self

    def fileno(self) -> int:
        return self._number

    def wake(self) -> None:
        self.is_set = True

    def clear(self) -> None:
        self.is_set = False

    def close(self) -> None:
        """Keep the descriptor: its number is never used again."""


def wait_for_calls(process: Process, calls: Collection[Future[Any]], seconds: float) -> None:
    process.wait(seconds, lambda: all(call.done() for call in calls))
