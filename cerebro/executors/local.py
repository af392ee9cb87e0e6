"""Run units in processes on this machine.

Each worker is ``python -m cerebro._worker``, or a fork of this program after it has imported only
PyTorch (`cerebro.executors.forked`). It is connected by an inherited socket, so no port and no
``__main__`` guard is needed, and it imports from the parent only what its tasks need. Messages are
pickles, sent only between a process and its children. If the coordinator is gone, its workers end
themselves and all processes that their trials started. Ctrl-C reaches only the coordinator, because
each worker leads a new session.

The executor notices the end of a worker at once. `TaskWatch` finds workers that are stopped or
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
from typing import Any, Literal

import cloudpickle

import cerebro._core as _core
from cerebro.arguments import read_switch
from cerebro.errors import InputError, WorkerError, text_of
from cerebro.executors.base import Wake
from cerebro.executors.channel import BrokenMessage
from cerebro.executors.process import (
    BEAT_SECONDS,
    EXIT_SECONDS,
    TaskWatch,
    WorkerProcess,
    describe_exit,
    signal_of,
    warm_workers,
)
from cerebro.executors.seats import SeatedShards, place_pools, set_memory_shares
from cerebro.machine import resources as memory
from cerebro.machine.devices import CPU, Device
from cerebro.machine.imports import list_unfindable_modules, sent_whole
from cerebro.machine.program import NONE
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
DUMP_SECONDS = 0.25
"""The time that a worker has to write the traceback of a late unit before it is killed."""
CHECK_SECONDS = 5.0
"""The check of the first configuration may take three times `unit_timeout` plus this time."""

VARIABLE = "CEREBRO_GPU_STREAMS"
"""If this variable is 1, the workers of a GPU share one process, each with its own stream."""

ANSWERS = (UnitDone, UnitFailed, CheckDone, ShardMade, ShardFailed)
"""What a worker answers to a task."""

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
"""Signals for which `faulthandler` writes a traceback."""

RUNNING = -1e5
"""The clock of a task shows less while the task waits for its turn; see `cerebro._worker`."""

Awaited = tuple[Literal["message", "exit", "wake"], int]
"""The meaning of a ready descriptor, and the number of its worker."""


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
        # A build that the user has not written says what the user has given instead.
        unsent = getattr(getattr(context, "build", None), "unsent", None)
        if unsent is not None:
            raise InputError(
                f"{unsent} cannot be sent to worker processes ({error}): give objects that pickle "
                "can copy, or train in this process with workers=0"
            ) from error
        raise InputError(
            f"build cannot be sent to worker processes ({error}): create the objects that it needs "
            "inside build, or train in this process with workers=0"
        ) from error
    return out.getvalue()


def are_together(seats: Sequence[Device | None]) -> bool:
    """Return whether ``CEREBRO_GPU_STREAMS`` makes the workers of a GPU share one process.

    Raise InputError if its value is invalid.
    """
    gpus = [device for device in seats if device is not None]
    return read_switch(VARIABLE, default=False) and len(set(gpus)) < len(gpus)


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
        self._together = are_together(self._seats)
        self._spare: dict[str, list[WorkerProcess]] = {}  # started with others of their GPU
        self._attempts: dict[int, int] = {}  # of each worker's task
        self._queued: dict[int, Task] = {}  # by busy worker: the task after its task
        self._places = SeatedShards(0, [])
        self._threads = threads
        self._fresh = fresh
        self._fork = fork
        self._silence = silence
        self._workers: dict[int, WorkerProcess] = {}
        self._busy: dict[int, TaskWatch] = {}
        self._events: list[Event] = []  # events that are not returned yet
        self._selector: selectors.BaseSelector | None = None
        self._wake: Wake | None = None  # what the selector also waits for
        self._clock: _core.BeatPage | None = None  # beats at the same rate as the workers
        self._next_look = 0.0
        self._context = b""
        self._program = NONE
        self._packed_program = b""
        self._jax: dict[str, Any] = {}  # arrays in the context get other types without them
        self._hash_seed: str | None = None
        self._unit_timeout: float | None = None
        self._next = 0
        self._kills = 0
        self._held: dict[int, int] = {}
        self._owner = os.getpid()

    # --- the protocol ----------------------------------------------------

    def start(self, context: RunContext) -> list[int]:
        self._program = context.program
        self._packed_program = pickle.dumps(context.program)
        alone = replace(context, program=NONE)
        self._context = pickle_context(
            set_memory_shares(alone, self._seats, together=self._together)
        )
        self._jax = dict(context.libraries.get("jax", {}))
        self._hash_seed = context.hash_seed
        self._unit_timeout = context.limits.unit_timeout
        self._selector = selectors.DefaultSelector()
        self._clock = _core.BeatPage()
        self._clock.start_beating(round(1000 * BEAT_SECONDS))
        self._kills = memory.count_kills()
        self._places = place_pools(
            context.train,
            context.validation,
            self._seats,
            order=context.order(),
            together=self._together,
        )
        return [self._start_worker(seat, wait=True) for seat in range(len(self._seats))]

    def submit(self, worker: int, task: Job) -> None:
        self._begin_watching(worker, task)
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

    def _begin_watching(self, worker: int, task: Job) -> None:
        watch = self._busy[worker] = TaskWatch(self._silence, self._time_limit_of(task))
        self._attempts[worker] = getattr(task, "attempt", 0)
        self._next_look = min(self._next_look, time.monotonic() + watch.seconds_to_next_look(None))

    def _send(self, worker: int, task: Job) -> None:
        try:
            self._workers[worker].send(("run", task), is_plain=isinstance(task, Task))
        except OSError:
            self._lose_worker(worker)
        else:
            self._watch(worker)

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> list[Event]:
        end = None if timeout is None else time.monotonic() + timeout
        woken = False
        self._listen_to(wake)
        while not self._events and not woken and (self._busy or wake is not None):
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
        self._listen_to(None)
        ready = set() if kill else self._end_runs([w for w in self._workers if w not in self._busy])
        for worker in self._busy:
            if worker in self._workers:
                self._workers[worker].beat.cancel()
        for number, process in self._workers.items():
            if number in ready and not process.others:
                warm_workers.give(process)
            else:
                process.stop(kill=True)
        for spare in self._spare.values():
            for process in spare:
                process.stop(kill=True)
        self._spare.clear()
        self._workers.clear()
        self._busy.clear()
        self._queued.clear()
        self._events.clear()
        if self._selector is not None:
            self._selector.close()
            self._selector = self._wake = None
        if self._clock is not None:
            self._clock.stop()
            self._clock = None

    @property
    def devices(self) -> tuple[str, ...]:
        """The GPUs of the workers, or the CPU."""
        names = [device.name for device in self._seats if device is not None]
        return tuple(dict.fromkeys(names)) or (CPU,)

    def processes(self) -> dict[int, int]:
        return {number: w.process.pid for number, w in self._workers.items()}

    # --- starting --------------------------------------------------------

    @property
    def _the_selector(self) -> selectors.BaseSelector:
        assert self._selector is not None, "the executor has not been started"
        return self._selector

    def _start_worker(self, seat: int, *, wait: bool) -> int:
        """Start a worker; if `wait`, wait for a fork server that is not ready."""
        number = self._next
        self._next += 1
        self._seat[number] = seat
        device = self._seats[seat]
        lists = list(sys.path), list(sys.argv)
        here = os.getcwd()  # noqa: PTH109
        message = ("begin", number, *lists, here, self._packed_program, self._jax, self._context)
        several = self._together and self._seats.count(device) > 1
        warm = None
        if not self._fresh and not several:
            warm = warm_workers.take(self._threads, device, self._program, self._hash_seed)
        for process in [warm, None]:
            # A warm worker may have died since its last run; a new process then replaces it.
            if several and device is not None:
                the_process = self._start_shared_worker(device)
            else:
                the_process = process or WorkerProcess.spawn(
                    self._threads, device, self._hash_seed, fork=self._fork, wait=wait
                )
            try:
                the_process.send(message)
            except OSError as error:
                the_process.stop(kill=True)
                cause = error
                continue
            self._workers[number] = the_process
            self._the_selector.register(
                the_process.channel, selectors.EVENT_READ, ("message", number)
            )
            if the_process.exit_fd is not None:
                self._the_selector.register(
                    the_process.exit_fd, selectors.EVENT_READ, ("exit", number)
                )
            self._watch(number)
            return number
        raise WorkerError(f"a worker process died while it was started: {cause}") from cause

    def _start_shared_worker(self, device: Device) -> WorkerProcess:
        """Return a worker of the process that serves a GPU; start that process if needed."""
        spare = self._spare.setdefault(device.name, [])
        while spare and spare[0].process.poll() is not None:
            spare.pop(0).stop(kill=True)  # it died before it was needed
        if not spare:
            while (
                warm := warm_workers.take(self._threads, device, self._program, self._hash_seed)
            ) is not None:
                warm.stop(kill=True)  # it holds memory of the GPU, and cannot be used
            count = self._seats.count(device)
            spare += WorkerProcess.spawn_together(count, self._threads, device, self._hash_seed)
        return spare.pop(0)

    def _watch(self, worker: int) -> None:
        """Watch a worker's socket for writing as long as it has unsent bytes."""
        channel = self._workers[worker].channel
        events = selectors.EVENT_READ
        if channel.has_unsent:
            events |= selectors.EVENT_WRITE
        if self._the_selector.get_key(channel).events != events:
            self._the_selector.modify(channel, events, ("message", worker))

    def _time_limit_of(self, task: Job) -> float | None:
        """Return the seconds that a task may take; None: no limit."""
        if self._unit_timeout is None or isinstance(task, WarmTask):
            return None
        # A check builds several models and trains each on a few batches.
        scale, more = (3, CHECK_SECONDS) if isinstance(task, CheckTask) else (1, DUMP_SECONDS)
        return scale * self._unit_timeout + more

    # --- the event loop --------------------------------------------------

    def _listen_to(self, wake: Wake | None) -> None:
        """Also wait for this descriptor of the caller, instead of an earlier one."""
        if wake is self._wake:
            return
        if self._wake is not None:
            self._the_selector.unregister(self._wake)
        if wake is not None:
            self._the_selector.register(wake, selectors.EVENT_READ, ("wake", -1))
        self._wake = wake

    def _wait_once(self, end: float | None) -> bool:
        """Wait for a descriptor or a deadline and handle it; return whether it was `wake`."""
        woken = False
        for key, mask in self._the_selector.select(self._seconds_to_deadline(end)):
            awaited: Awaited = key.data
            kind, worker = awaited
            if kind == "wake":
                woken = True
            elif worker in self._workers:  # it was not lost in the meantime
                self._handle_socket(kind, worker, mask)
        if self._busy and time.monotonic() >= self._next_look:
            self._check_busy_workers()
        return woken

    def _seconds_to_deadline(self, end: float | None) -> float | None:
        """Return the seconds until the next deadline; None if there is no deadline."""
        due = [time for time in (end, self._next_look if self._busy else None) if time is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _handle_socket(self, kind: str, worker: int, mask: int) -> None:
        process = self._workers[worker]
        try:
            if mask & selectors.EVENT_WRITE:
                process.channel.flush()
                self._watch(worker)
            # Messages that were sent before the worker's end come first.
            for message in process.channel.receive():
                self._handle_message(worker, message)
            if kind == "exit":
                self._lose_worker(worker)
        except (EOFError, OSError):
            self._lose_worker(worker)
        except BrokenMessage as error:
            self._lose_worker(worker, f"the worker process sent {error}")

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
        if not answers or worker not in self._busy:
            self._lose_worker(
                worker, f"the worker process sent an unexpected {type(event).__name__}"
            )
        elif isinstance(event, (UnitFailed, ShardFailed)) and event.kind == "worker":
            self._lose_worker(worker, event.message)
        else:
            del self._busy[worker]
            queued = self._queued.pop(worker, None)
            if isinstance(event, UnitDone):
                self._held[worker] = event.resident
                if queued is not None:
                    self._begin_watching(worker, queued)
                    self._workers[worker].beat.hear(queued.number_before)
            self._events.append(event)

    def _check_busy_workers(self) -> None:
        """Kill workers that do not respond or take too long; set the time of the next check."""
        assert self._clock is not None
        patience = self._silence
        for worker, watch in list(self._busy.items()):
            process = self._workers.get(worker)
            if process is None:
                continue
            task_seconds = process.beat.task_seconds
            if watch.is_late(task_seconds):
                reason = f"the unit took longer than unit_timeout={self._unit_timeout:g} seconds"
                self._lose_worker(worker, reason, traced=True)
            elif watch.is_silent(process.beat.beats, self._clock.beats):
                how = "was stopped" if process.is_stopped() else "hangs"
                self._lose_worker(
                    worker,
                    f"the worker process {how}: it sent no heartbeat for {self._silence:g} seconds",
                )
            else:
                patience = min(patience, watch.seconds_to_next_look(task_seconds))
        self._next_look = time.monotonic() + patience

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
        running = {n for n, s in begun.items() if n in self._busy and s is not None and s > RUNNING}
        again = {number for number in running if self._attempts.get(number, 0) > 0}
        to_blame = again or running or {worker}
        for number, its in lost.items():
            self._busy.pop(number, None)
            self._queued.pop(number, None)
            self._the_selector.unregister(its.channel)
            if its.exit_fd is not None:
                self._the_selector.unregister(its.exit_fd)
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
                self._watch(worker)
            except OSError:
                self._lose_worker(worker)
        end = time.monotonic() + EXIT_SECONDS
        waiting = {worker for worker in idle if worker in self._workers}
        while waiting and (seconds := end - time.monotonic()) > 0:
            for key, mask in self._the_selector.select(seconds):
                kind, worker = key.data
                if worker in waiting and self._has_ended(kind, worker, mask):
                    waiting.remove(worker)
                    ended.add(worker)
                elif worker not in self._workers:
                    waiting.discard(worker)
        return ended

    def _has_ended(self, kind: str, worker: int, mask: int) -> bool:
        """Return whether an idle worker has answered that it has ended the run."""
        process = self._workers.get(worker)
        if process is None:
            return False
        try:
            if mask & selectors.EVENT_WRITE:
                process.channel.flush()
                self._watch(worker)
            messages = process.channel.receive()
            if messages:
                process.sources = cloudpickle.loads(messages[0])
                return isinstance(process.sources, dict)
            if kind == "exit":
                self._lose_worker(worker)
        except Exception:  # the worker is stopped in any case
            self._lose_worker(worker)
        return False
