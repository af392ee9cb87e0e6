"""Run units in processes on this machine.

Each worker is ``python -m cerebro._worker``, or a fork of this program after it has imported only
PyTorch (`cerebro.executors.fork_server`). It is connected by an inherited socket, so no port and no
``__main__`` guard is needed, and it imports from the parent only what its tasks need. If the
coordinator is gone, its workers end themselves and all processes that their trials started. Ctrl-C
reaches only the coordinator, because each worker leads a new session.

The executor notices the end of a worker at once. `Watchdog` finds workers that are stopped or
hang, and units that take too long. A worker is killed and reaped before its loss is reported, so
that no two workers have the same unit. The workers of a GPU are threads of one process, whose units
overlap there, so they are lost and replaced together.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from cerebro.errors import InputError, text_of
from cerebro.executors.base import Wake
from cerebro.executors.process import (
    EXIT_SECONDS,
    Listener,
    Ready,
    Starter,
    WorkerProcess,
    describe_exit,
    signal_of,
)
from cerebro.executors.seats import SeatedShards, place_pools
from cerebro.executors.wire import BrokenMessage
from cerebro.machine.devices import CPU, Device
from cerebro.machine.local import LOCAL, Clock
from cerebro.worker.messages import (
    CheckDone,
    CheckTask,
    Event,
    Job,
    RunContext,
    ShardFailed,
    ShardMade,
    Task,
    UnitDone,
    UnitFailed,
    WarmTask,
    WorkerLost,
)

SILENCE_SECONDS = 10.0
BEAT_SECONDS = 0.1
LOOKS = 5  # how often a worker is checked within the silence that it is allowed
START_SILENCE = 120.0  # seconds until a worker's first beat: Python may start from a slow disk
DUMP_SECONDS = 0.25  # for a worker to write the traceback of a late unit before it is killed
CHECK_SECONDS = 5.0  # the first check may take three times `unit_timeout` plus this time

ANSWERS = (UnitDone, UnitFailed, CheckDone, ShardMade, ShardFailed)  # to tasks
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
"""Signals for which `faulthandler` writes a traceback."""

RUNNING = -1e5  # the clock of a task that waits for its turn shows less; see `WAITING_FOR_TURN`


class TaskWatch:
    """Watches one task of one worker.

    After `silence` seconds without a beat, the worker counts as lost. The task may take `limit`
    seconds; None means no limit.
    """

    def __init__(self, silence: float, limit: float | None, task: Job | None = None) -> None:
        self.attempt = getattr(task, "attempt", 0)
        self.identity = getattr(task, "identity", None)
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
    """Notices busy workers that do not respond, and tasks that take too long.

    Silence is measured in the coordinator's own heartbeats, which a thread makes at the same rate
    as in the workers. If the machine is suspended, frozen or too busy for these threads, both stop,
    and no worker is killed for it. A unit's time is measured by a clock that stops while the
    machine is suspended. `silence` is as in `TaskWatch`.
    """

    def __init__(self, silence: float, clock: Clock, processes: Starter) -> None:
        self.busy: dict[int, TaskWatch] = {}  # by worker: its task that has no answer yet
        self._silence = silence
        self._clock = clock
        self._processes = processes
        self._unit_timeout: float | None = None
        self._own_page: Any = None  # a page with beats at the same rate as the workers
        self._next_look = 0.0

    def start(self, unit_timeout: float | None) -> None:
        self._unit_timeout = unit_timeout
        self._own_page = self._processes.make_page()
        self._own_page.start_beating(round(1000 * BEAT_SECONDS))

    def stop(self) -> None:
        self.busy.clear()
        if self._own_page is not None:
            self._own_page.stop()
            self._own_page = None

    @property
    def next_look(self) -> float | None:
        """When to look at the busy workers, on the monotonic clock; None if no worker is busy."""
        return self._next_look if self.busy else None

    def begin(self, worker: int, task: Job) -> None:
        watch = TaskWatch(self._silence, self._time_limit_of(task), task)
        self.busy[worker] = watch
        look = self._clock.monotonic() + watch.seconds_to_next_look(None)
        self._next_look = min(self._next_look, look)

    def end(self, worker: int) -> None:
        self.busy.pop(worker, None)

    def _time_limit_of(self, task: Job) -> float | None:
        """Return the seconds that a task may take; None: no limit."""
        if self._unit_timeout is None or isinstance(task, WarmTask):
            return None
        # A check builds several models and trains each on a few batches.
        scale, more = (3, CHECK_SECONDS) if isinstance(task, CheckTask) else (1, DUMP_SECONDS)
        return scale * self._unit_timeout + more

    def find_faults(self, workers: Mapping[int, WorkerProcess]) -> list[tuple[int, str, bool]]:
        """Return the busy workers to kill, each with the reason and if it has left a traceback."""
        if not self.busy or self._clock.monotonic() < self._next_look:
            return []
        assert self._own_page is not None
        faults, patience = [], self._silence
        for worker, watch in self.busy.items():
            if (process := workers.get(worker)) is None:
                continue
            task_seconds = process.beat.task_seconds
            if watch.is_late(task_seconds):
                reason = f"the unit took longer than unit_timeout={self._unit_timeout:g} seconds"
                faults.append((worker, reason, True))
            elif watch.is_silent(process.beat.beats, self._own_page.beats):
                is_stopped = self._processes.is_stopped(process.process.pid)
                how = "was stopped" if is_stopped else "hangs"
                reason = (
                    f"the worker process {how}: it sent no heartbeat for {self._silence:g} seconds"
                )
                faults.append((worker, reason, False))
            else:
                patience = min(patience, watch.seconds_to_next_look(task_seconds))
        self._next_look = self._clock.monotonic() + patience
        return faults


class LocalExecutor:
    """Runs units in worker processes on this machine.

    `threads` are those of each worker. `fresh` starts only new processes, without warm workers of
    an earlier run. A busy worker counts as lost after `silence` seconds without a heartbeat, which
    shows only that the process can run; `unit_timeout` limits the time of a unit. `seats` has the
    GPU of each worker, or None for the CPU; a replacement takes the seat of the lost worker. `fork`
    allows forking workers without a GPU; see `cerebro.executors.fork_server`. `processes` makes a
    `Starter` of these arguments; only it, `clock` and `messages` lead out of this process.
    """

    def __init__(
        self,
        workers: int,
        threads: int,
        *,
        fresh: bool = False,
        silence: float = SILENCE_SECONDS,
        seats: Sequence[Device | None] = (),
        fork: bool = True,
        clock: Clock = LOCAL.clock,
        processes: Callable[..., Starter] = Starter,
        messages: Callable[[], Listener] = Listener,
    ) -> None:
        if not silence >= 5 * BEAT_SECONDS:
            raise InputError(f"silence must be at least {5 * BEAT_SECONDS} s, not {silence!r}")
        self._seats = list(seats) or [None] * workers
        self._seat: dict[int, int] = {}  # of each worker, including lost workers
        self._clock = clock
        self._starter = processes(threads, self._seats, fresh=fresh, fork=fork)
        self._make_listener = messages
        self._listener = messages()
        self._watchdog = Watchdog(silence, clock, self._starter)
        self._places = SeatedShards()
        self._workers: dict[int, WorkerProcess] = {}
        self._queued: dict[int, Task] = {}  # by busy worker: the task after its task
        self._events: list[Event] = []  # events that are not returned yet
        self._kills = 0  # by the kernel's out-of-memory killer
        self._held: dict[int, int] = {}  # by worker: the memory after its last unit
        self._owner = self._starter.own_pid()

    # --- the protocol ----------------------------------------------------

    def start(self, context: RunContext) -> list[int]:
        self._starter.begin(context)
        self._listener = self._make_listener()
        self._watchdog.start(context.limits.unit_timeout)
        self._kills = self._starter.count_kills()
        self._places = place_pools(
            context.train,
            context.validation,
            self._seats,
            order=context.order(),
        )
        started = [self._start_worker(seat, wait=True) for seat in range(len(self._seats))]
        # The first one tries the first configuration: one that runs already, if any.
        return sorted(started, key=lambda worker: self._workers[worker].beat.beats == 0)

    def submit(self, worker: int, task: Job) -> None:
        self._watchdog.begin(worker, task)
        process = self._workers.get(worker)
        if process is None:  # lost: the event will be returned
            return
        process.beat.clear()
        process.beat.end_task()  # the task's time starts when the worker begins it
        self._send(worker, ("run", task), is_plain=isinstance(task, Task))

    def queue(self, worker: int, task: Task) -> None:
        if worker not in self._workers:  # lost: the event will be returned
            return
        self._queued[worker] = task
        self._send(worker, ("run", task), is_plain=True)

    def _send(self, worker: int, message: tuple[Any, ...], *, is_plain: bool = False) -> None:
        try:
            self._workers[worker].send(message, is_plain=is_plain)
        except OSError:
            self._lose_worker(worker)
        else:
            self._listener.update(self._workers[worker])

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> list[Event]:
        end = None if timeout is None else self._clock.monotonic() + timeout
        woken = False
        self._listener.set_wake(wake)
        while not self._events and not woken and (self._watchdog.busy or wake is not None):
            woken = self._wait_once(end)
            if end is not None and self._clock.monotonic() >= end:
                break
        events, self._events = self._events, []
        return events

    def cancel(self, worker: int) -> None:
        self._workers[worker].beat.cancel()

    def replace(self, worker: int) -> int:
        # The other workers are waiting: a fork server that must start first is used next time.
        return self._start_worker(self._seat[worker], wait=False)

    def holders(self) -> dict[int, list[int]] | None:
        """Return the worker that holds each pool on its GPU; None if every worker reads all."""
        seated = {self._seat[worker]: worker for worker in self._workers}
        return self._places.holders(seated)

    def load(self, worker: int, pool: int) -> None:
        """Assign a pool to a worker; its shards are loaded by the units on them."""
        self._places.give(self._seat[worker], pool)

    def close(self, *, kill: bool = False) -> None:
        if self._owner != self._starter.own_pid():  # a fork: the parent has the workers
            return
        self._listener.set_wake(None)
        busy = self._watchdog.busy
        ready = set() if kill else self._end_runs([w for w in self._workers if w not in busy])
        for worker in busy.keys() & self._workers.keys():
            self._workers[worker].beat.cancel()
        for number, process in self._workers.items():
            if number not in ready:
                process.stop(kill=True)
        self._starter.end([its for number, its in self._workers.items() if number in ready])
        self._workers.clear()
        self._queued.clear()
        self._events.clear()
        self._listener.close()
        self._watchdog.stop()

    @property
    def devices(self) -> tuple[str, ...]:
        """The GPUs of the workers, or the CPU."""
        names = [device.name for device in self._seats if device is not None]
        return tuple(dict.fromkeys(names)) or (CPU,)

    def processes(self) -> dict[int, int]:
        return {number: w.process.pid for number, w in self._workers.items()}

    def _start_worker(self, seat: int, *, wait: bool) -> int:
        number = len(self._seat)
        self._seat[number] = seat
        process = self._workers[number] = self._starter.start(number, seat, wait=wait)
        self._listener.add(number, process)
        return number

    # --- the event loop --------------------------------------------------

    def _wait_once(self, end: float | None) -> bool:
        """Wait for a descriptor or a deadline and handle it; return whether it was `wake`."""
        woken = False
        due = [when for when in (end, self._watchdog.next_look) if when is not None]
        seconds = max(0.0, min(due) - self._clock.monotonic()) if due else None
        for ready, is_writable in self._listener.wait(seconds):
            if ready.is_wake:
                woken = True
            elif ready.worker in self._workers:  # it was not lost in the meantime
                self._handle_socket(ready, is_writable)
        for worker, reason, traced in self._watchdog.find_faults(self._workers):
            self._lose_worker(worker, reason, traced=traced)
        return woken

    def _handle_socket(self, ready: Ready, is_writable: bool) -> None:
        worker = ready.worker
        try:
            # Messages that were sent before the worker's end come first.
            for message in self._receive(worker, is_writable):
                self._handle_message(worker, message)
            if ready.has_ended:
                self._lose_worker(worker)
        except (EOFError, OSError):
            self._lose_worker(worker)
        except BrokenMessage as error:
            self._lose_worker(worker, f"the worker process sent {error}")

    def _receive(self, worker: int, is_writable: bool) -> list[bytes]:
        """Return the messages of a worker, after sending it what its socket accepts."""
        process = self._workers[worker]
        if is_writable:
            process.channel.flush()
            self._listener.update(process)
        return process.channel.receive()

    def _handle_message(self, worker: int, message: bytes) -> None:
        if worker not in self._workers:  # an earlier message made the worker count as lost
            return
        try:
            event = cloudpickle.loads(message)
        except Exception as error:
            self._lose_worker(
                worker, f"the worker process sent an unreadable message ({text_of(error)})"
            )
            return
        answers = isinstance(event, ANSWERS) and event.worker == worker
        watch, task = self._watchdog.busy.get(worker), getattr(event, "task", None)
        if not answers or watch is None or watch.identity != getattr(task, "identity", None):
            self._lose_worker(
                worker, f"the worker process sent an unexpected {type(event).__name__}"
            )
        elif isinstance(event, (UnitFailed, ShardFailed)) and event.kind == "worker":
            self._lose_worker(worker, event.message)
        else:
            self._watchdog.end(worker)
            queued = self._queued.pop(worker, None)
            if isinstance(event, UnitDone):
                self._held[worker] = event.process.resident
                if queued is not None:
                    self._watchdog.begin(worker, queued)
                    self._workers[worker].beat.hear(queued.number_before)
            self._events.append(event)

    # --- losing and ending -----------------------------------------------

    def _lose_worker(self, worker: int, reason: str | None = None, *, traced: bool = False) -> None:
        """Kill and reap a worker, then report its loss; `reason` is None if it ended by itself.

        The other workers of its process are lost, too. Only the unit that must have cost the
        process is to blame: it did not wait for its turn, or was lost before and so did not give
        its turn away.
        """
        process = self._workers.get(worker)
        if process is None:
            return
        others = [n for n, its in self._workers.items() if its in process.lanes and n != worker]
        lost = {number: self._workers.pop(number) for number in (worker, *others)}
        begun = {number: its.beat.task_seconds for number, its in lost.items()}
        # The clock of an idle worker still shows its last task.
        busy = self._watchdog.busy
        running = {n for n, s in begun.items() if n in busy and s is not None and s > RUNNING}
        again = {number for number in running if busy[number].attempt > 0}
        to_blame = again or running or {worker}
        for number, its in lost.items():
            self._watchdog.end(number)
            self._queued.pop(number, None)
            self._listener.remove(its)
        for its in lost.values():
            its.stop(kill=True)
        ended_by_itself = reason is None
        killed = signal_of(process.process.returncode) if ended_by_itself else None
        if reason is None:
            reason = describe_exit(process.process.returncode)
            if killed == signal.SIGKILL:
                reason += self._hint_at_memory(worker)
        traced = traced or killed in CRASHES
        for number in lost:
            cause = reason
            if number != worker and not ended_by_itself:
                cause = f"the worker process was lost with worker {worker}: {reason}"
            self._events.append(
                WorkerLost(
                    number,
                    cause,
                    signal=killed,
                    began=begun[number] is not None,
                    traced=traced,
                    with_machine=len(lost) > 1 and to_blame != {number},
                )
            )

    def _hint_at_memory(self, worker: int) -> str:
        """Return a hint after SIGKILL if the kernel's out-of-memory killer has killed again."""
        kills = self._starter.count_kills()
        if kills <= self._kills:
            return ""
        self._kills += 1
        held = self._held.get(worker)
        after = "" if not held else f"; it held {held / 1e6:.0f} MB after its last unit"
        return (
            f", probably out of memory (the kernel's out-of-memory killer struck{after}; fewer "
            "workers, a smaller batch_size or a smaller model need less)"
        )

    def _end_runs(self, idle: list[int]) -> set[int]:
        """Make idle workers release the run's files; return the workers that did."""
        ended: set[int] = set()
        for worker in idle:
            if worker in self._workers:  # it was not lost with another worker of its process
                self._send(worker, ("end",))
        end = self._clock.monotonic() + EXIT_SECONDS
        waiting = {worker for worker in idle if worker in self._workers}
        while waiting and (seconds := end - self._clock.monotonic()) > 0:
            for ready, is_writable in self._listener.wait(seconds):
                worker = ready.worker
                if worker in waiting and self._has_ended(ready, is_writable):
                    waiting.remove(worker)
                    ended.add(worker)
                elif worker not in self._workers:
                    waiting.discard(worker)
        return ended

    def _has_ended(self, ready: Ready, is_writable: bool) -> bool:
        """Return whether an idle worker has answered that it has ended the run."""
        process = self._workers.get(ready.worker)
        if process is None:
            return False
        try:
            if messages := self._receive(ready.worker, is_writable):
                process.sources = cloudpickle.loads(messages[0])
                return isinstance(process.sources, dict)
            if ready.has_ended:
                self._lose_worker(ready.worker)
        except Exception:  # the worker is stopped in any case
            self._lose_worker(ready.worker)
        return False
