"""Run units in processes on this machine.

Each worker is ``python -m cerebro._worker``, or a fork of this program after it has imported only
PyTorch (`cerebro.executors.forked`). It is connected by an inherited socket, so no port and no
``__main__`` guard is needed, and it imports from the parent only what its tasks need. Messages are
pickles, sent only between a process and its children. If the coordinator is gone, its workers end
themselves and all processes that their trials started. Ctrl-C reaches only the coordinator, because
each worker leads a new session.

The executor notices the end of a worker at once. `Watchdog` finds workers that are stopped or
hang, and units that take too long. A worker is killed and reaped before its loss is reported, so
that no two workers have the same unit.

If ``CEREBRO_GPU_STREAMS`` is 1, the workers of a GPU are threads of one process, whose units
overlap there (`cerebro.machine.turns`). If it dies, its workers are lost and replaced together.

Workers that end a run normally stay warm for the next run of the same process, because importing
PyTorch again can take longer than a search. A worker is ended instead if a file that it has
imported was edited afterwards.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import selectors
import signal
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cloudpickle

from cerebro.arguments import read_switch
from cerebro.errors import InputError, WorkerError, text_of
from cerebro.executors.base import Wake
from cerebro.executors.channel import BrokenMessage
from cerebro.executors.process import (
    EXIT_SECONDS,
    WorkerKind,
    WorkerProcess,
    describe_exit,
    signal_of,
    warm_workers,
)
from cerebro.executors.seats import SeatedShards, place_pools, set_memory_shares
from cerebro.executors.watch import BEAT_SECONDS, Watchdog
from cerebro.machine import resources as memory
from cerebro.machine.devices import CPU, Device
from cerebro.machine.imports import list_unfindable_modules, sent_whole
from cerebro.machine.program import NONE
from cerebro.worker.messages import (
    CheckDone,
    Event,
    Job,
    RunContext,
    ShardFailed,
    ShardMade,
    Task,
    UnitDone,
    UnitFailed,
    WorkerLost,
)

SILENCE_SECONDS = 10.0
VARIABLE = "CEREBRO_GPU_STREAMS"
"""If this variable is 1, the workers of a GPU share one process, each with its own stream."""

ANSWERS = (UnitDone, UnitFailed, CheckDone, ShardMade, ShardFailed)  # to tasks
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
"""Signals for which `faulthandler` writes a traceback."""

RUNNING = -1e5  # the clock of a task that waits for its turn shows less; see `WAITING_FOR_TURN`


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles every module by name, including instances of subclasses such as ``torch.classes``."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def pickle_context(context: object) -> bytes:
    """Pickle the run's context for workers; raise InputError if ``build`` cannot be sent."""
    out = io.BytesIO()
    # `multiprocessing` gives the program's main module this name in a new process.
    for name in {*sent_whole, *list_unfindable_modules(), "__mp_main__"} & sys.modules.keys():
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        _Pickler(out).dump(context)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        text = (
            f"build cannot be sent to worker processes ({error}): create the objects that it needs "
            "inside build"
        )
        # A build that the user has not written says what the user has given instead.
        unsent = getattr(getattr(context, "build", None), "unsent", None)
        if unsent is not None:
            text = (
                f"{unsent} cannot be sent to worker processes ({error}): give objects that pickle "
                "can copy"
            )
        raise InputError(f"{text}, or train in this process with workers=0") from error
    return out.getvalue()


def are_together(seats: Sequence[Device | None]) -> bool:
    """Return whether the workers of a GPU share a process; raise InputError for a bad variable."""
    gpus = [device for device in seats if device is not None]
    return read_switch(VARIABLE, default=False) and len(set(gpus)) < len(gpus)


class Starter:
    """Starts the workers of a run; the arguments are those of `LocalExecutor`."""

    def __init__(
        self, threads: int, seats: Sequence[Device | None], *, fresh: bool, fork: bool
    ) -> None:
        self.together = are_together(seats)
        self._threads = threads
        self._seats = seats
        self._fresh = fresh
        self._fork = fork
        self._spare: dict[WorkerKind, list[WorkerProcess]] = {}  # started with others of their GPU
        self._program = NONE
        self._hash_seed = ""
        self._run: tuple[bytes, dict[str, Any], bytes] = b"", {}, b""

    def begin(self, context: RunContext) -> None:
        """Prepare a run, whose context is sent to each worker.

        JAX's settings are sent apart: without them, arrays in the context get other types.
        """
        self._program, self._hash_seed = context.program, context.hash_seed
        alone = replace(context, program=NONE)
        shared = set_memory_shares(alone, self._seats, together=self.together)
        jax = dict(context.libraries.get("jax", {}))
        self._run = pickle.dumps(context.program), jax, pickle_context(shared)

    def start(self, number: int, seat: int, *, wait: bool) -> WorkerProcess:
        """Start a worker; if `wait`, wait for a fork server that is not ready."""
        device = self._seats[seat]
        lists = list(sys.path), list(sys.argv)
        here = os.getcwd()  # noqa: PTH109
        message = ("begin", number, *lists, here, *self._run)
        several = self.together and device is not None and self._seats.count(device) > 1
        kind = WorkerKind(self._threads, device, self._hash_seed)
        warm = None
        if not (self._fresh or several):
            warm = warm_workers.take(kind, self._program)
        for process in [warm, None]:
            # A warm worker may have died since its last run; a new process then replaces it.
            if several:
                worker = self._start_shared(kind)
            else:
                worker = process or WorkerProcess.spawn(kind, fork=self._fork, wait=wait)
            try:
                worker.send(message)
            except OSError as error:
                worker.stop(kill=True)
                cause = error
                continue
            return worker
        raise WorkerError(f"a worker process died while it was started: {cause}") from cause

    def _start_shared(self, kind: WorkerKind) -> WorkerProcess:
        """Return a worker of the process that serves a GPU; start that process if needed."""
        spare = self._spare.setdefault(kind, [])
        while spare and spare[0].process.poll() is not None:
            spare.pop(0).stop(kill=True)  # it died before it was needed
        if not spare:
            while (warm := warm_workers.take(kind, self._program)) is not None:
                warm.stop(kill=True)  # it holds memory of the GPU, and cannot be used
            spare += WorkerProcess.spawn_together(self._seats.count(kind.device), kind)
        return spare.pop(0)

    def close(self) -> None:
        for spare in self._spare.values():
            for process in spare:
                process.stop(kill=True)
        self._spare.clear()


class Ready(NamedTuple):
    """A descriptor that is ready: a worker's socket, its end, or the caller's `wake`."""

    worker: int
    has_ended: bool = False
    is_wake: bool = False


class Listener:
    """Waits for the sockets of workers, for their ends, and for a descriptor of the caller."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake: Wake | None = None

    def add(self, number: int, process: WorkerProcess) -> None:
        self._selector.register(process.channel, selectors.EVENT_READ, Ready(number))
        if process.exit_fd is not None:
            ended = Ready(number, has_ended=True)
            self._selector.register(process.exit_fd, selectors.EVENT_READ, ended)
        self.update(process)

    def remove(self, process: WorkerProcess) -> None:
        self._selector.unregister(process.channel)
        if process.exit_fd is not None:
            self._selector.unregister(process.exit_fd)

    def update(self, process: WorkerProcess) -> None:
        """Wait for a worker's socket to accept bytes as long as it has unsent bytes."""
        events = selectors.EVENT_READ
        if process.channel.has_unsent:
            events |= selectors.EVENT_WRITE
        key = self._selector.get_key(process.channel)
        if key.events != events:
            self._selector.modify(process.channel, events, key.data)

    def set_wake(self, wake: Wake | None) -> None:
        """Also wait for this descriptor of the caller, instead of an earlier one."""
        if wake is self._wake:
            return
        if self._wake is not None:
            self._selector.unregister(self._wake)
        if wake is not None:
            self._selector.register(wake, selectors.EVENT_READ, Ready(-1, is_wake=True))
        self._wake = wake

    def wait(self, seconds: float | None) -> list[tuple[Ready, bool]]:
        """Return the ready descriptors, and whether each accepts bytes."""
        ready = self._selector.select(seconds)
        return [(key.data, bool(mask & selectors.EVENT_WRITE)) for key, mask in ready]

    def close(self) -> None:
        self._selector.close()
        self._wake = None


class LocalExecutor:
    """Runs units in worker processes on this machine.

    `threads` are those of each worker. `fresh` starts only new processes, without warm workers of
    an earlier run. A busy worker counts as lost after `silence` seconds without a heartbeat, which
    shows only that the process can run; `unit_timeout` limits the time of a unit. `seats` has the
    GPU of each worker, or None for the CPU; a replacement takes the seat of the lost worker. `fork`
    allows forking workers without a GPU; see `cerebro.executors.forked`.
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
    ) -> None:
        if not silence >= 5 * BEAT_SECONDS:
            raise InputError(f"silence must be at least {5 * BEAT_SECONDS} s, not {silence!r}")
        self._seats = list(seats) or [None] * workers
        self._seat: dict[int, int] = {}  # of each worker, including lost workers
        self._starter = Starter(threads, self._seats, fresh=fresh, fork=fork)
        self._listener = Listener()
        self._watchdog = Watchdog(silence)
        self._places = SeatedShards(0, [])
        self._workers: dict[int, WorkerProcess] = {}
        self._queued: dict[int, Task] = {}  # by busy worker: the task after its task
        self._events: list[Event] = []  # events that are not returned yet
        self._kills = 0  # by the kernel's out-of-memory killer
        self._held: dict[int, int] = {}  # by worker: the memory after its last unit
        self._owner = os.getpid()

    # --- the protocol ----------------------------------------------------

    def start(self, context: RunContext) -> list[int]:
        self._starter.begin(context)
        self._listener = Listener()
        self._watchdog.start(context.limits.unit_timeout)
        self._kills = memory.count_kills()
        self._places = place_pools(
            context.train,
            context.validation,
            self._seats,
            order=context.order(),
            together=self._starter.together,
        )
        return [self._start_worker(seat, wait=True) for seat in range(len(self._seats))]

    def submit(self, worker: int, task: Job) -> None:
        self._watchdog.begin(worker, task)
        process = self._workers.get(worker)
        if process is None:  # lost: the event will be returned
            return
        process.beat.clear()
        process.beat.end_task()  # the task's time starts when the worker begins it
        self._send(worker, task)

    def queue(self, worker: int, task: Task) -> None:
        if worker not in self._workers:  # lost: the event will be returned
            return
        self._queued[worker] = task
        self._send(worker, task)

    def _send(self, worker: int, task: Job) -> None:
        try:
            self._workers[worker].send(("run", task), is_plain=isinstance(task, Task))
        except OSError:
            self._lose_worker(worker)
        else:
            self._listener.update(self._workers[worker])

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> list[Event]:
        end = None if timeout is None else time.monotonic() + timeout
        woken = False
        self._listener.set_wake(wake)
        while not self._events and not woken and (self._watchdog.busy or wake is not None):
            woken = self._wait_once(end)
            if end is not None and time.monotonic() >= end:
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
        if self._owner != os.getpid():  # a fork: workers and selector belong to the parent
            return
        self._listener.set_wake(None)
        busy = self._watchdog.busy
        ready = set() if kill else self._end_runs([w for w in self._workers if w not in busy])
        for worker in busy.keys() & self._workers.keys():
            self._workers[worker].beat.cancel()
        for number, process in self._workers.items():
            if number in ready and not process.others:
                warm_workers.give(process)
            else:
                process.stop(kill=True)
        self._starter.close()
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
        seconds = max(0.0, min(due) - time.monotonic()) if due else None
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
        if not answers or worker not in self._watchdog.busy:
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
        others = [other for other, its in self._workers.items() if its in process.others]
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
            is_cause = number == worker or ended_by_itself
            self._events.append(
                WorkerLost(
                    number,
                    reason
                    if is_cause
                    else f"the worker process was lost with worker {worker}: {reason}",
                    signal=killed,
                    began=begun[number] is not None,
                    traced=traced,
                    with_machine=len(lost) > 1 and to_blame != {number},
                )
            )

    def _hint_at_memory(self, worker: int) -> str:
        """Return a hint after SIGKILL if the kernel's out-of-memory killer has killed again."""
        kills = memory.count_kills()
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
            try:
                self._workers[worker].send(("end",))
                self._listener.update(self._workers[worker])
            except OSError:
                self._lose_worker(worker)
        end = time.monotonic() + EXIT_SECONDS
        waiting = {worker for worker in idle if worker in self._workers}
        while waiting and (seconds := end - time.monotonic()) > 0:
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
