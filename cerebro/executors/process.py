"""Start, await, kill and reap worker processes, and keep them warm; the coordinator's side."""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import cerebro._core as _core
from cerebro.errors import WorkerError
from cerebro.executors.fork_server import UNREAD, Child, ForkServers, forks_workers, start_program
from cerebro.executors.seats import set_memory_shares
from cerebro.executors.wire import Channel, pickle_context, pickle_message
from cerebro.machine import cuda, devices, environment, guard
from cerebro.machine.devices import Device
from cerebro.machine.imports import PACKAGE, Sources, are_current
from cerebro.machine.program import NONE, Program
from cerebro.machine.resources import count_kills, is_stopped

if TYPE_CHECKING:
    from cerebro.executors.base import Wake
    from cerebro.worker.messages import RunContext

LANES_AT_ONCE = 100  # workers that one message adds: Linux sends at most 253 descriptors
EXIT_SECONDS = 5.0
REAP_SECONDS = 60.0  # for a killed process, which ends at once unless it waits for a disk

open_workers: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _close_sockets_in_fork() -> None:
    """Close a fork's copies of the sockets: workers exit when the last copy is closed."""
    for worker in list(open_workers):
        with contextlib.suppress(OSError):
            worker.close()


os.register_at_fork(after_in_child=_close_sockets_in_fork)


@dataclass(frozen=True)
class WorkerKind:
    """What a worker process keeps from its start; its GPU is None if it sees its parent's GPUs."""

    threads: int
    device: Device | None = None
    hash_seed: str = field(default_factory=environment.hash_seed)


@dataclass(eq=False)
class WorkerProcess:
    """A worker, its process, its socket and its page of heartbeats; a GPU's share a process."""

    process: subprocess.Popen[bytes] | Child
    channel: Channel
    beat: _core.BeatPage
    kind: WorkerKind
    exit_fd: int | None = None
    """Readable once the process has ended, even if other processes hold copies of its socket."""
    owner: int = field(default_factory=os.getpid)
    sources: Sources = field(default_factory=dict)
    """The modules that it had imported when its last run ended; see `cerebro.machine.imports`."""
    variables: dict[str, str] = field(default_factory=lambda: _inherited_variables())
    """The environment variables that it inherited; see `_inherited_variables`."""
    lanes: list[WorkerProcess] = field(default_factory=list)
    """The workers of this process, which share the list; the first one adds the others."""

    def __post_init__(self) -> None:
        open_workers.add(self)
        self.lanes.append(self)

    @classmethod
    def spawn(cls, kind: WorkerKind, *, fork: bool = False, wait: bool = True) -> WorkerProcess:
        """Start a worker process as the leader of a new session; raise WorkerError if that fails.

        `fork` allows a fork server to fork a worker without a GPU; `wait`, to wait for a server
        that is not ready yet.
        """
        process: subprocess.Popen[bytes] | Child | None = None
        variables = _make_environment(kind)
        ours, theirs, beat = _make_channels()
        try:
            files = theirs.fileno(), beat.fd
            if fork and kind.device is None and forks_workers():
                process = fork_servers.fork(variables, files, wait=wait)
            if process is None:
                process = start_program(map(str, files), variables, files)
                if kind.device is not None:
                    cuda.check_early(variables)
        except OSError as error:
            raise WorkerError(f"cannot start a worker process: {error}") from error
        finally:
            theirs.close()
            if process is None:
                ours.close()  # a fork that was requested ends itself
        return cls(process, Channel(ours), beat, kind, _open_exit_descriptor(process.pid))

    def add_lanes(self, count: int) -> None:
        """Start more workers in this process, whose first worker must be idle; see `lanes`.

        Raise OSError if the process has ended, and WorkerError if there is no descriptor left.
        """
        while count > 0:
            some = min(count, LANES_AT_ONCE)
            count -= some
            made: list[tuple[socket.socket, socket.socket, _core.BeatPage]] = []
            try:
                made += (_make_channels() for _ in range(some))
                self.send(("add lanes", some), is_plain=True)
                files = [file for _, theirs, beat in made for file in (theirs.fileno(), beat.fd)]
                self.channel.send_files(files)
            except (OSError, WorkerError):
                for ours, _, _ in made:
                    ours.close()
                raise
            finally:
                for _, theirs, _ in made:
                    theirs.close()
            # They have no `exit_fd`: the first worker's shows when the process ends.
            for ours, _, beat in made:
                WorkerProcess(self.process, Channel(ours), beat, self.kind, lanes=self.lanes)

    def send(self, message: tuple[Any, ...], *, is_plain: bool = False) -> None:
        """Send a message; `is_plain` promises that it contains no object of the user's code."""
        self.channel.send(pickle_message(message, is_plain=is_plain))

    def stop(self, *, kill: bool) -> None:
        """End the process and reap it; give it time to finish unless `kill`.

        Raise WorkerError if it does not end after SIGKILL: its files must not be used again.
        """
        if self.owner != os.getpid():  # in a fork of the worker's parent
            return
        if kill:
            self._kill()
        self.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS)
            return
        self._kill()
        try:
            self.process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            raise WorkerError(
                f"worker process {self.process.pid} was killed but does not end: is a disk that it "
                "uses not responding?"
            ) from None

    def close(self) -> None:
        """Close this process's ends of the worker's channels, so that the worker exits."""
        self.channel.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)
            self.exit_fd = None
        self.lanes = []  # a list that has this worker would keep its page

    def _kill(self) -> None:
        """Kill the worker and the processes in its group, which its trials started."""
        if self.process.returncode is None:  # not reaped, so its pid is not reused
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                # A fork that has no group yet.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.process.pid, signal.SIGKILL)


def _make_channels() -> tuple[socket.socket, socket.socket, _core.BeatPage]:
    """Return the two ends of a worker's socket, and its page; raise WorkerError if that fails."""
    try:
        beat = _core.BeatPage()
        return *socket.socketpair(), beat
    except OSError as error:
        raise WorkerError(f"cannot start a worker process: {error}") from error


def _inherited_variables() -> dict[str, str]:
    """Return this process's environment variables, without those that workers do not read."""
    read = {name: value for name, value in os.environ.items() if not name.startswith(UNREAD)}
    return read | environment.read_variables()


def _make_environment(kind: WorkerKind) -> dict[str, str]:
    """Return the worker's environment: its device, threads, hash seed, and this cerebro's path."""
    variables = dict(os.environ) | environment.read_variables()
    variables[environment.HASH_SEED] = kind.hash_seed
    if kind.device is not None:
        variables |= devices.make_variables(kind.device)
    for name in environment.THREAD_VARIABLES:
        variables[name] = str(kind.threads)
    variables[guard.VARIABLE] = "1"
    path = [str(PACKAGE.parent), *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    variables["PYTHONPATH"] = os.pathsep.join(path)
    return variables


def _open_exit_descriptor(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a child ends; None if the system lacks this.

    Without it, the socket shows that a worker has ended, unless a process that the worker started
    holds a copy: then only the worker's silence shows it.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, an old Linux, or no descriptor is left
        return None


def describe_exit(returncode: int | None) -> str:
    number = signal_of(returncode)
    if number is None:
        return f"the worker process exited with status {returncode}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"the worker process was ended by {name}"


def signal_of(returncode: int | None) -> int | None:
    return -returncode if returncode is not None and returncode < 0 else None


class WarmWorkers:
    """The idle processes that are kept for the next run of this process, by their first workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._pid = os.getpid()

    def take(self, kind: WorkerKind, program: Program) -> WorkerProcess | None:
        variables = _inherited_variables()
        with self._lock:
            if self._pid != os.getpid():  # in a fork, the workers belong to the parent
                self._idle, self._pid = [], os.getpid()
            # The worker that was used last has the warmest caches.
            for worker in reversed(list(self._idle)):
                if (
                    worker.process.poll() is not None
                    or worker.variables != variables
                    or not all(are_current(lane.sources, program.digest) for lane in worker.lanes)
                ):
                    # It is dead, or would train with old code, choose different kernels, or lack a
                    # variable that has been set since, such as the credentials of a storage.
                    self._idle.remove(worker)
                    for lane in worker.lanes:
                        lane.stop(kill=True)
                elif worker.kind == kind:
                    self._idle.remove(worker)
                    return worker
        return None

    def give(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._idle.append(worker)

    def start_early(
        self, threads: int, seats: Sequence[Device | None], modules: Sequence[str] = ()
    ) -> None:
        """Start the workers of a run that is still being prepared, unless they are already running.

        If a fork server forks them, only the server is started. `modules` are imported while
        waiting. Raise WorkerError if the system lacks a process, memory or descriptors.
        """
        program = Program.capture() if self._idle else NONE
        kinds = [WorkerKind(threads, seat) for seat in seats]
        workers = [self.take(kind, program) for kind in kinds]
        try:
            if None in workers and forks_workers() and all(seat is None for seat in seats):
                fork_servers.start(_make_environment(WorkerKind(threads)), modules)
                return
            for number, kind in enumerate(kinds):
                if workers[number] is None:
                    workers[number] = new = WorkerProcess.spawn(kind)
                    with contextlib.suppress(OSError):  # it is dead: the run will replace it
                        new.send(("preload", list(sys.path), list(modules)))
        finally:
            for worker in reversed(workers):  # the first is taken first
                if worker is not None:
                    self.give(worker)

    def close(self) -> None:
        """Stop all idle workers and the fork servers; called when the interpreter exits."""
        fork_servers.close()
        with self._lock:
            idle, self._idle = self._idle, []
        if self._pid != os.getpid():
            return
        for worker in idle:
            for lane in worker.lanes:
                lane.close()
        for worker in idle:
            worker.stop(kill=False)


warm_workers = WarmWorkers()
fork_servers = ForkServers()

atexit.register(warm_workers.close)


class Starter:
    """Starts the workers of a run; the arguments are those of `LocalExecutor`."""

    own_pid = staticmethod(os.getpid)
    count_kills = staticmethod(count_kills)
    is_stopped = staticmethod(is_stopped)
    make_page = staticmethod(_core.BeatPage)

    def __init__(
        self, threads: int, seats: Sequence[Device | None], *, fresh: bool, fork: bool
    ) -> None:
        self._threads = threads
        self._seats = seats
        self._fresh = fresh
        self._fork = fork
        self._spare: dict[WorkerKind, list[WorkerProcess]] = {}  # of processes of this run
        self._program = NONE
        self._hash_seed = ""
        self._run: tuple[bytes, dict[str, Any], bytes] = b"", {}, b""

    def begin(self, context: RunContext) -> None:
        self._program, self._hash_seed = context.program, context.hash_seed
        alone = replace(context, program=NONE)
        shared = set_memory_shares(alone, self._seats)
        program = pickle_message(context.program, is_plain=True)
        # JAX's settings are sent apart: without them, arrays in the context get other types.
        self._run = program, dict(context.libraries.get("jax", {})), pickle_context(shared)

    def start(self, number: int, seat: int, *, wait: bool) -> WorkerProcess:
        """Start a worker; if `wait`, wait for a fork server that is not ready."""
        here = os.getcwd()  # noqa: PTH109
        message = ("begin", number, list(sys.path), list(sys.argv), here, *self._run)
        kind = WorkerKind(self._threads, self._seats[seat], self._hash_seed)
        for fresh in (self._fresh, True):
            # A warm worker may have died since its last run; a new process then replaces it.
            try:
                spare = self._find_spare(kind, fresh=fresh, wait=wait)
                spare[0].send(message)
                return spare.pop(0)
            except OSError as error:
                cause = error
                for lane in self._spare.pop(kind):
                    lane.stop(kill=True)
        raise WorkerError(f"a worker process died while it was started: {cause}") from cause

    def _find_spare(self, kind: WorkerKind, *, fresh: bool, wait: bool) -> list[WorkerProcess]:
        """Return the workers of a process of this run that have no task yet, at least one."""
        spare = self._spare.setdefault(kind, [])
        while spare and spare[0].process.poll() is not None:
            spare.pop(0).stop(kill=True)  # it died before it was needed
        if not spare:
            warm = None if fresh else warm_workers.take(kind, self._program)
            worker = warm or WorkerProcess.spawn(kind, fork=self._fork, wait=wait)
            try:
                if kind.device is not None:
                    worker.add_lanes(self._seats.count(kind.device) - len(worker.lanes))
            finally:
                spare += worker.lanes
        return spare

    def end(self, ended: Collection[WorkerProcess]) -> None:
        """Keep the processes warm whose workers have all `ended` the run, if they had it."""
        spare = [worker for workers in self._spare.values() for worker in workers]
        self._spare.clear()
        free = {*ended, *spare}
        for worker in (*ended, *spare):
            if not free.issuperset(worker.lanes):
                worker.stop(kill=True)
            elif worker is worker.lanes[0]:
                warm_workers.give(worker)


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
