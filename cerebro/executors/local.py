"""Runs units in processes on this machine.

Each worker is ``python -m cerebro._worker`` at the other end of an inherited
socket: no port, no ``__main__`` guard, nothing imported from the parent but
what its tasks need. Messages are pickles, between a process and its own
children only. A worker whose socket closes exits by itself, so that no worker
outlives its coordinator; Ctrl-C reaches only the coordinator, because workers
are sessions of their own.

Workers that ended a run in good order stay warm for the next one in the same
process: importing PyTorch again would take longer than many a search. One that has
imported a file which was edited since is ended instead.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from cerebro import _core
from cerebro.errors import InputError, WorkerError
from cerebro.executors.base import Wake
from cerebro.sources import are_unchanged, sent_whole
from cerebro.unit import CheckTask, Event, RunContext, Task, WorkerLost

EXIT_SECONDS = 5.0


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends all modules by name, also those of a type of their own, such as ``torch.classes``."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def packed(context: RunContext) -> bytes:
    """Pickle what workers are told about the run, ``build`` included.

    Raises
    ------
    InputError
        If ``build`` holds something that cannot leave this process.
    """
    out = io.BytesIO()
    for name in sent_whole & sys.modules.keys():
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        _Pickler(out).dump(context)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise InputError(
            f"build cannot be sent to worker processes ({error}): make what it needs inside of "
            "it, or train in this process with workers=0"
        ) from error
    return out.getvalue()


open_workers: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _close_sockets_in_fork() -> None:
    """Give up a fork's copies of the sockets: workers leave when the last copy closes."""
    for worker in list(open_workers):
        with contextlib.suppress(OSError):
            worker.connection.close()


os.register_at_fork(after_in_child=_close_sockets_in_fork)


@dataclass(eq=False)
class WorkerProcess:
    """One worker process, its socket and the page it beats in."""

    process: subprocess.Popen[bytes]
    connection: Connection
    beat: _core.BeatPage
    threads: int
    owner: int = field(default_factory=os.getpid)
    sources: dict[str, int] = field(default_factory=dict)
    """Files that it had imported when its last run ended; see `cerebro.sources`."""

    def __post_init__(self) -> None:
        open_workers.add(self)

    @classmethod
    def spawn(cls, threads: int) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        beat = _core.BeatPage()
        environment = dict(os.environ)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            environment[name] = str(threads)
        package_parent = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120
        path = [package_parent, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "cerebro._worker", str(theirs.fileno()), str(beat.fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), beat.fd),
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise WorkerError(f"cannot start a worker process: {error}") from error
        finally:
            theirs.close()
        return cls(process, Connection(ours.detach()), beat, threads)

    def send(self, message: tuple[Any, ...]) -> None:
        self.connection.send_bytes(cloudpickle.dumps(message))

    def stop(self, *, kill: bool) -> None:
        """End the process and wait for it; it is given time to finish unless killed."""
        if self.owner != os.getpid():  # in a fork of its parent
            return
        if kill:
            self._kill()
        self.connection.close()
        try:
            self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()

    def _kill(self) -> None:
        """Kill the worker and what its trials started: it leads a session of its own."""
        if self.process.returncode is None:  # not reaped, so that the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class WarmWorkers:
    """Idle workers kept for the next run of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._pid = os.getpid()

    def take(self, threads: int) -> WorkerProcess | None:
        with self._lock:
            if self._pid != os.getpid():  # after a fork they are the parent's
                self._idle, self._pid = [], os.getpid()
            # The one used last has its libraries imported and its caches warm.
            for worker in reversed(list(self._idle)):
                if worker.process.poll() is not None:
                    self._idle.remove(worker)
                elif not are_unchanged(worker.sources):  # it would train with the old code
                    self._idle.remove(worker)
                    worker.stop(kill=True)
                elif worker.threads == threads:
                    self._idle.remove(worker)
                    return worker
        return None

    def give(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._idle.append(worker)

    def close(self) -> None:
        """Stop them all; called at the interpreter's exit."""
        with self._lock:
            idle, self._idle = self._idle, []
        if self._pid != os.getpid():
            return
        for worker in idle:
            worker.connection.close()
        for worker in idle:
            worker.stop(kill=False)


warm_workers = WarmWorkers()
atexit.register(warm_workers.close)


class LocalExecutor:
    """Worker processes on this machine.

    Parameters
    ----------
    workers
        How many.
    threads
        Compute threads of each.
    fresh
        Take no warm workers of an earlier run.
    """

    def __init__(self, workers: int, threads: int, *, fresh: bool = False) -> None:
        self._count = workers
        self._threads = threads
        self._fresh = fresh
        self._workers: dict[int, WorkerProcess] = {}
        self._busy: set[int] = set()
        self._lost: list[WorkerLost] = []
        self._context = b""
        self._next = 0

    def start(self, context: RunContext) -> list[int]:
        self._context = packed(context)
        return [self._start_worker() for _ in range(self._count)]

    def submit(self, worker: int, task: Task | CheckTask) -> None:
        process = self._workers[worker]
        process.beat.clear()
        self._busy.add(worker)
        try:
            process.send(("run", task))
        except OSError:
            self._lose(worker)

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> list[Event]:
        events: list[Event] = list(self._lost)
        self._lost.clear()
        if events or not self._busy:
            return events
        by_connection = {self._workers[w].connection: w for w in self._busy}
        sources: list[Any] = [*by_connection, *([] if wake is None else [wake])]
        for connection in wait(sources, timeout):
            if not isinstance(connection, Connection):  # it is `wake`: no event
                continue
            worker = by_connection[connection]
            try:
                events.append(cloudpickle.loads(connection.recv_bytes()))
                self._busy.discard(worker)
            except (EOFError, OSError):
                self._lose(worker)
        events += self._lost
        self._lost.clear()
        return events

    def cancel(self, worker: int) -> None:
        """Tell a worker to stop its unit at the next batch."""
        self._workers[worker].beat.cancel()

    def replace(self, worker: int) -> int:
        return self._start_worker()

    def close(self, *, kill: bool = False) -> None:
        for worker in list(self._busy):
            self._workers[worker].beat.cancel()
        for number, worker_process in self._workers.items():
            if kill or number in self._busy or not self._end_run(worker_process):
                worker_process.stop(kill=kill or number in self._busy)
            else:
                warm_workers.give(worker_process)
        self._workers.clear()
        self._busy.clear()

    def processes(self) -> dict[int, int]:
        """Return the process id of each worker."""
        return {number: w.process.pid for number, w in self._workers.items()}

    def _start_worker(self) -> int:
        number = self._next
        self._next += 1
        message = ("begin", number, list(sys.path), os.getcwd(), self._context)  # noqa: PTH109
        warm = None if self._fresh else warm_workers.take(self._threads)
        for process in [warm, None]:
            # A warm worker may have died since its last run; a new one is started then.
            the_process = process or WorkerProcess.spawn(self._threads)
            self._workers[number] = the_process
            try:
                the_process.send(message)
                return number
            except OSError as error:
                del self._workers[number]
                the_process.stop(kill=True)
                cause = error
        raise WorkerError(f"a worker process died while it was started: {cause}") from cause

    def _end_run(self, process: WorkerProcess) -> bool:
        """Have an idle worker release the run's files; False if it cannot."""
        try:
            process.send(("end",))
            if not process.connection.poll(EXIT_SECONDS):
                return False
            process.sources = cloudpickle.loads(process.connection.recv_bytes())
            return True
        except (EOFError, OSError):
            return False

    def _lose(self, worker: int) -> None:
        process = self._workers.pop(worker)
        self._busy.discard(worker)
        process.stop(kill=True)
        self._lost.append(WorkerLost(worker, _reason(process.process.returncode)))


def _reason(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return f"the worker process was ended by {name}"
    return f"the worker process exited with status {returncode}"
