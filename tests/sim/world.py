"""A simulated machine's time and processes, which one seed and a list of faults decide.

One thread runs everything: the time goes from event to event. The coordinator's code runs as it is,
and other processes run while it waits, and sometimes between two of its calls of the machine.
Workers are generators, which run from one of their steps to the next. So a worker's steps come
between any two steps of the others.

Each process has its own random numbers: a fault that is left out changes no choice elsewhere.
"""

from __future__ import annotations

import heapq
import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from typing import Any

from faults import Fault, ProcessDied
from fibers import Fiber, SimulatedPipe, SimulatedPool, wait_for_calls

from cerebro.machine.local import Clock, Tasks

CALL_SECONDS = 2e-5  # a call of the machine takes up to this time
OTHERS_RUN = 0.05  # the probability that other processes run between two calls of one
TASK_SECONDS = 2e-3  # a task begins its work up to this time after there is some
BEAT_SECONDS = 0.1
MOMENT = 1e-6
BEGAN = 1_700_000_000.0  # the wall clock's time at the beginning
MOST_EVENTS = 1_000_000
MOST_SECONDS = 1e5  # of simulated time
NO_ERROR = {
    *("step", "send", "start", "kill", "wait", "listen", "dial"),  # not calls of the disk
    *(f"slots {name}" for name in ("attempt", "commit", "committed", "fence", "hash", "revert")),
    *("slots sealed", "slots view"),  # these only read and write memory
}
OF_MESSAGES = {"delay", "cut", "double"}  # faults

Program = Generator[float | None, None, None]
"""A process's steps: yields the seconds until the next one, or None until `Process.wake`."""


class Stuck(Exception):
    """Raised if the simulation can never go on, or does not end."""


class World:
    """The time, the events to come, and the processes of a machine."""

    def __init__(self, seed: int, faults: Sequence[Fault] = ()) -> None:
        self.seed = seed
        self.now = 0.0
        self.wall_offset = 0.0
        self.processes: list[Process] = []
        self.has_lost_power = False
        self.on_power_loss: list[Callable[[], object]] = []
        self.struck: list[Fault] = []  # the faults that did strike, in their order
        self.workers = 0  # how many were started
        self.fiber: Fiber | None = None  # the one that runs now; None: who runs the events does
        self._faults: defaultdict[str, list[Fault]] = defaultdict(list)
        for fault in sorted(faults, key=lambda fault: fault.at):
            self._faults[fault.process].append(fault)
        self._events: list[tuple[float, int, Process | None, Callable[[], object]]] = []
        self._number = 0
        self._done = 0

    def start_process(self, name: str) -> Process:
        """Return a new process; the first one after a power loss finds what that has left."""
        if self.has_lost_power:
            self.has_lost_power = False
            for action in self.on_power_loss:
                action()
        process = Process(self, name, 1000 + len(self.processes), self._faults[name])
        self.processes.append(process)
        return process

    def at(
        self, seconds: float, action: Callable[[], object], process: Process | None = None
    ) -> None:
        """Call `action` in so many seconds, unless its `process` has died by then."""
        self.at_time(self.now + seconds, action, process)

    def at_time(
        self, when: float, action: Callable[[], object], process: Process | None = None
    ) -> None:
        """Do as `at` does, at a time; of the same time, in the order of these calls.

        A difference of times is rounded, so that ``at(when - now)`` would not keep their order.
        """
        self._number += 1
        heapq.heappush(self._events, (when, self._number, process, action))

    def wait(
        self, seconds: float | None, is_ready: Callable[[], bool], process: Process | None = None
    ) -> bool:
        """Run events until `is_ready` or the time is over; return whether it is ready.

        Raise Stuck if nothing is left to happen and there is no limit, and ProcessDied if the
        `process` that waits dies.
        """
        end = math.inf if seconds is None else self.now + seconds
        while True:
            if process is not None and process.is_dead:
                raise ProcessDied(process.name)
            # A call that blocks the process ends first: its thread may be under a lock.
            free = 0.0 if process is None else process.blocked_until
            if is_ready() and free <= self.now and self._has_run(free):
                return True
            if process is not None:
                process.begin_tasks()
            if not self._events and end == math.inf:
                self._stop(process, "nothing is left to happen")
            if self._has_run(max(end, free)):
                self.now = max(self.now, end, free)
                self._count(process)
                return is_ready()
            self._run_first(process)

    def _has_run(self, when: float) -> bool:
        """Return whether the next event is later than a time."""
        return not self._events or self._events[0][0] > when

    def run_due(self, besides: Process) -> None:
        """Run the events that are due, besides those of one process, which is in a call."""
        own = []
        while self._events and self._events[0][0] <= self.now:
            if self._events[0][2] is besides:
                own.append(heapq.heappop(self._events))
            else:
                self._run_first(besides)
        for event in own:
            heapq.heappush(self._events, event)

    def _run_first(self, waits: Process | None) -> None:
        when, number, process, action = heapq.heappop(self._events)
        if process is not None:
            if process.is_dead:
                return
            free = process.blocked_until + MOMENT  # first, the call ends that has blocked it
            if free > when:  # even if the time is later: calls of others move it, too
                heapq.heappush(self._events, (free, number, process, action))
                return
        self.now = max(self.now, when)
        self._count(waits)
        action()
        if process is not None and process.fibers:
            process.wake_fibers()

    def _count(self, waits: Process | None) -> None:
        self._done += 1
        if self._done > MOST_EVENTS or self.now > MOST_SECONDS:
            self._stop(waits, "it does not end")

    def _stop(self, process: Process | None, why: str) -> None:
        alive = ", ".join(other.name for other in self.processes if not other.is_dead)
        who = "the world" if process is None else process.name
        when = f"{self.now:.6f} s"
        raise Stuck(f"{who} waits at {when}, but {why}; still running: {alive or 'none'}")

    def lose_power(self, machine: object = None) -> None:
        """End all processes of a machine at once; None is that of the coordinator, the first one.

        `on_power_loss`, such as of its disk, is called before the next process starts: only then
        the calls that were under way have ended.
        """
        self.has_lost_power |= machine is None
        for process in self.processes:
            if process.machine is machine:
                process.loses_power = True
                process.die(-9)

    def end(self) -> None:
        """End all processes, and the threads of those that have any."""
        for process in self.processes:
            process.die(-9)
            for fiber in list(process.fibers):
                fiber.unwind()


class Process:
    """A simulated process: the coordinator, whose code calls `wait`, or a worker (`drive`)."""

    def __init__(self, world: World, name: str, pid: int, faults: Sequence[Fault]) -> None:
        self.world = world
        self.name = name
        self.pid = pid
        self.random = random.Random(f"{world.seed} {name}")
        self.calls = 0
        self.is_dead = False
        self.returncode: int | None = None
        self.stopped_until = 0.0
        self.blocked_until = 0.0  # by a stop or a slow call
        self.on_death: list[Callable[[], object]] = []
        self.on_silence: list[Callable[[float], object]] = []  # of its heartbeats, for some seconds
        self.on_leave: Callable[[], object] = lambda: None  # when it is told to end
        self.machine: object = None  # another one than the coordinator's
        self.loses_power = False
        self.tasks: list[SimulatedTask] = []
        self.fibers: list[Fiber] = []
        self.pipes: dict[int, SimulatedPipe] = {}
        self._faults = list(faults)[::-1]
        self._message_faults: list[Fault] = []
        self._error: Fault | None = None
        self._errors_left = 0
        self._pauses: list[tuple[float, float]] = []  # of the heartbeats
        self._program: Program | None = None
        self._waits = False  # whether the program waits for `wake`

    # --- calls ------------------------------------------------------------------------------

    def call(self, kind: str, path: object = "") -> None:
        """Count a call of the machine, and let its fault strike.

        Raise ProcessDied if the process is dead or dies here, and OSError if the disk is to fail.
        """
        if self.is_dead:
            raise ProcessDied(self.name)
        world = self.world
        self.calls += 1
        world.now += CALL_SECONDS * self.random.random()
        while self._faults and self._faults[-1].at <= self.calls:
            self._strike(self._faults.pop())
        if self._errors_left and kind not in NO_ERROR:
            self._errors_left -= 1
            assert self._error is not None
            raise OSError(self._error.errno, os.strerror(self._error.errno), str(path))
        if self._program is None and self.random.random() < OTHERS_RUN:
            if world.fiber is None:
                world.run_due(self)
                self._check()
            elif world.fiber.process is self and kind != "send":  # which may be under a lock
                world.fiber.yield_to_others()

    def _strike(self, fault: Fault) -> None:
        world = self.world
        world.struck.append(fault)
        if fault.kind == "kill":
            self.die(-9)
        elif fault.kind == "power":
            world.lose_power(self.machine)
        elif fault.kind in ("stop", "slow"):
            if fault.kind == "stop":
                self.stopped_until = world.now + fault.seconds
                self._pause_beats(fault.seconds)
            self.blocked_until = world.now + fault.seconds
            if world.fiber is not None:
                world.fiber.stand_still(fault.seconds)
            elif self._program is None:  # a worker's step ends first, and its next one waits
                world.wait(fault.seconds, lambda: False)
        elif fault.kind == "late beats":
            self._pause_beats(fault.seconds)
        elif fault.kind == "leave":
            self.on_leave()
        elif fault.kind in ("jump", "suspend"):  # the wall clock alone goes on in a suspension
            world.wall_offset += fault.seconds
        elif fault.kind == "error":
            self._error, self._errors_left = fault, fault.times
        else:
            self._message_faults.append(fault)
        self._check()

    def _check(self) -> None:
        if self.is_dead:
            raise ProcessDied(self.name)

    def forget_faults(self) -> None:
        self._faults.clear()
        self._errors_left = 0

    def take_message_fault(self) -> Fault | None:
        """Return the fault of a message that is being sent, if it has one."""
        return self._message_faults.pop(0) if self._message_faults else None

    # --- waiting ------------------------------------------------------------------------------

    def wait(self, seconds: float | None, is_ready: Callable[[], bool]) -> bool:
        """Let others run until `is_ready` or the time is over; return whether it is ready."""
        fiber = self.world.fiber
        if fiber is not None:
            return fiber.wait(seconds, is_ready)
        return self.world.wait(seconds, is_ready, self)

    def sleep(self, seconds: float) -> None:
        self.wait(seconds, lambda: False)

    def begin_tasks(self) -> None:
        """Let the tasks of this process run that have work; they do so only while it waits."""
        for task in self.tasks:
            task.begin_if_due()
        if self.fibers:
            self.wake_fibers()

    def wake_fibers(self) -> None:
        for fiber in self.fibers:
            fiber.wake_if_ready()

    # --- a worker's program -------------------------------------------------------------------

    def drive(self, program: Program) -> None:
        """Run a program from now on; the process exits with 0 at its end."""
        self._program = program
        self._resume()

    def wake(self) -> None:
        """Let the program continue that waits, if it does."""
        if self._waits:
            self._waits = False
            self.world.at(CALL_SECONDS * self.random.random(), self._resume, self)

    def _resume(self) -> None:
        try:
            self.call("step")
        except ProcessDied:
            return
        if self.blocked_until > self.world.now:
            self.world.at(0.0, self._take_step, self)
        else:
            self._take_step()

    def _take_step(self) -> None:
        assert self._program is not None
        try:
            delay = next(self._program)
        except StopIteration:
            self.die(0)
        except ProcessDied:
            assert self.is_dead
        else:
            self._waits = delay is None
            if delay is not None:
                self.world.at(delay, self._resume, self)

    # --- the end, and heartbeats ----------------------------------------------------------------

    def die(self, code: int) -> None:
        """End at once; the code is negative for a signal."""
        if self.is_dead:
            return
        self.is_dead = True
        self.returncode = code
        self._pause_beats(math.inf)
        actions, self.on_death = self.on_death, []
        for action in actions:
            action()

    def end_with_coordinator(self) -> None:
        """End within a heartbeat, as workers do; until then the program goes on.

        The kernel continues a stopped worker whose parent ends, and a worker's own thread waits for
        the end of the connection, so neither a stop nor late heartbeats keep it alive.
        """
        if self.stopped_until > self.world.now:
            self.stopped_until = self.blocked_until = self.world.now
        self.world.at(BEAT_SECONDS * self.random.random(), lambda: self.die(-9))

    def _pause_beats(self, seconds: float) -> None:
        begin, end = self.world.now, self.world.now + seconds
        if self._pauses and self._pauses[-1][1] >= begin:
            begin, last = self._pauses.pop()
            end = max(end, last)
        self._pauses.append((begin, end))
        for hear in self.on_silence:
            hear(seconds)

    def count_beats(self, since: float) -> int:
        """Return the number of heartbeats since a time, at which there was one."""
        now = self.world.now
        silent = sum(max(0.0, min(now, end) - max(since, begin)) for begin, end in self._pauses)
        return int((now - since - silent) / BEAT_SECONDS) + 1


class SimulatedClock(Clock):
    """The clocks of a machine, for a process that may sleep."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._world = process.world

    def monotonic(self) -> float:
        self._world.now += MOMENT  # else a loop that waits for a time would not end
        return self._world.now

    perf_counter = monotonic

    def time(self) -> float:
        return BEGAN + self.monotonic() + self._world.wall_offset

    def sleep(self, seconds: float) -> None:
        self.process.sleep(seconds)


class SimulatedEvent:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._process.wait(timeout, self.is_set)


class SimulatedTask:
    """A task of a process, whose steps run while the process waits."""

    def __init__(
        self, process: Process, step: Callable[[], bool], has_work: Callable[[], bool], name: str
    ) -> None:
        self.name = name
        self._process = process
        self._step = step
        self._has_work = has_work
        self._is_due = False  # until its step has ended
        self._has_ended = False

    def begin_if_due(self) -> None:
        if not self._is_due and self._has_work():
            self._is_due = True
            process = self._process
            process.world.at(TASK_SECONDS * process.random.random(), self._take_step, process)

    def _take_step(self) -> None:
        goes_on = self._step()
        self._is_due = False
        if not goes_on:
            self._has_ended = True
            self._process.tasks.remove(self)

    def join(self) -> None:
        self._process.wait(None, lambda: self._has_ended)


class SimulatedTasks(Tasks):
    def __init__(self, process: Process) -> None:
        self._process = process

    def repeat(self, step: Callable[[], bool], has_work: Callable[[], bool], name: str) -> Any:
        task = SimulatedTask(self._process, step, has_work, name)
        self._process.tasks.append(task)
        return task

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self._process)

    def pool(self, threads: int, name: str) -> SimulatedPool:
        return SimulatedPool(self._process, threads)

    def wait_for(self, calls: Collection[Future[Any]], seconds: float) -> None:
        wait_for_calls(self._process, calls, seconds)

    def wake_pipe(self) -> Any:
        return SimulatedPipe(self._process)
