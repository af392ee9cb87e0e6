"""Run a worker process: ``python -m cerebro._worker SOCKET PAGE``.

The arguments are inherited file descriptors. On request, further workers are started as threads of
the process: *lanes*, which share a GPU and whose units overlap (`cerebro.machine.turns`).
``python -m cerebro._worker serve ...`` is the fork server, whose forks are workers
(`cerebro.executors.fork_server`). A worker answers each task with one event. It ends with its
coordinator, even in the middle of a unit: the C thread of the heartbeat ends the process, whatever
Python is doing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn

import cloudpickle

import cerebro._core as _core
from cerebro.errors import CorruptDataError
from cerebro.executors import fork_server
from cerebro.executors.wire import pickle_event, receive_files, unpickle
from cerebro.machine import guard
from cerebro.machine.imports import Sources, import_early, note_imported
from cerebro.machine.libraries import JAX
from cerebro.machine.local import LOCAL
from cerebro.machine.turns import Turns
from cerebro.worker import gpu
from cerebro.worker.clock import STANDARD_ERROR, BeatClock, LateTasks
from cerebro.worker.jobs import execute
from cerebro.worker.log import NOWHERE, flush_output, log_path, make_streams_last
from cerebro.worker.messages import (
    CheckDone,
    Event,
    Job,
    RunContext,
    ShardFailed,
    ShardTask,
    Task,
    UnitDone,
    UnitFailed,
)
from cerebro.worker.runner import UnitRunner
from cerebro.worker.user_errors import bases_of, describe

BEAT_MILLISECONDS = 100


def main(arguments: list[str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard.enter_worker()  # an imported script must not start a search
    make_streams_last()
    faulthandler.enable(STANDARD_ERROR)  # a crash in C code writes its traceback to the log
    socket, page = map(int, arguments)
    run_worker(Worker(socket, page, Process()))


def run_worker(worker: Worker) -> NoReturn:
    try:
        while True:
            worker.handle_next()
    except (EOFError, ConnectionResetError, BrokenPipeError):
        leave()
    except BaseException as error:
        # The coordinator notices that the process has ended, so it does not need a traceback.
        print(f"cerebro: a worker process ends: {describe(error)}", file=sys.stderr)
        flush_output()
        os._exit(1)  # skips the threads and exit handlers of the user's code


class Process:
    """What the workers of one process share; `turns` is None until there are several workers."""

    def __init__(self) -> None:
        self.turns: Turns | None = None
        self.context: tuple[bytes, RunContext] | None = None  # the run's, after its pickle
        self.late: LateTasks | None = None
        self.runners: list[UnitRunner] = []

    def begin_sharing(self) -> None:
        if self.turns is None:
            self.turns, self.late = Turns(gpu.KEPT), LateTasks(LOCAL)

    def open_context(self, context: bytes) -> RunContext:
        """Return an unpickled context: the same object for all workers, which share its shards."""
        if self.context is None or self.context[0] != context:
            self.context = context, unpickle(context)
        return self.context[1]


class Worker:
    """A worker of a process; `socket` and `page` are descriptors, which it owns."""

    def __init__(self, socket: int, page: int, process: Process) -> None:
        self._connection = Connection(socket)
        self._beat = _core.BeatPage(page)
        self._beat.start_beating(BEAT_MILLISECONDS, socket)
        self._process = process
        self._clock = BeatClock(self._beat, LOCAL.clock, process.late)
        self._stream: gpu.CudaStream | None = None  # if the process has several workers
        self._runner: UnitRunner | None = None
        self._number = -1
        self._trouble: BaseException | None = None  # why the run could not be loaded
        self._done: tuple[int, int] | None = None  # the last task, if it was a unit that is done
        self._sources: Sources = dict(fork_server.imported)

    def handle_next(self) -> None:
        message = self._connection.recv_bytes()
        shared = self._process.turns
        with nullcontext() if shared is None else shared.take_turn(self._clock.wait_for_turn):
            self._handle(cloudpickle.loads(message))

    def _handle(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "preload":
            self._preload(*rest)
        elif kind == "begin":
            self._begin(*rest)
        elif kind == "run":
            self._run(rest[0])
        elif kind == "end":
            self._end()
            self._connection.send_bytes(cloudpickle.dumps(self._sources))
        elif kind == "add lanes":
            self._add_lanes(rest[0])

    def _add_lanes(self, count: int) -> None:
        """Start a thread for each of further workers, whose descriptors follow the message."""
        files = receive_files(self._connection.fileno(), 2 * count)
        self._process.begin_sharing()
        self._clock.late = self._process.late
        for socket, page in zip(files[::2], files[1::2], strict=True):
            lane = Worker(socket, page, self._process)
            threading.Thread(target=run_worker, args=(lane,), daemon=True).start()

    def _preload(self, path: list[str], modules: list[str]) -> None:
        sys.path[:] = path
        import_early(modules)

    def _begin(
        self,
        number: int,
        path: list[str],
        argv: list[str],
        directory: str,
        program: bytes,
        jax: dict[str, Any],
        context: bytes,
    ) -> None:
        self._number = number
        self._trouble = None
        # The modules that the parent imports must be found here before its code is unpickled.
        sys.path[:] = path
        sys.argv[:] = argv  # a script may read its arguments anywhere
        try:
            os.chdir(directory)
            guard.use_program(cloudpickle.loads(program))
            JAX.begin_process(jax)  # before the context is unpickled, which may hold arrays of JAX
            run = self._process.open_context(context)
            note_imported(self._sources, fork_server.last_imported)
            self._clock.limit = run.limits.unit_timeout
            self._runner = UnitRunner(
                run,
                worker=number,
                machine=LOCAL,
                own_process=True,
                clock=self._clock,
                together=self._process.runners,
            )
            self._process.runners.append(self._runner)
            if self._process.turns is not None and self._stream is None:
                self._stream = gpu.open_stream(run.device)
        except BaseException as error:  # the module that defines build may raise anything
            self._trouble = error

    def _run(self, task: Job) -> None:
        """Run a task and answer it, unless the unit that it continues has not succeeded."""
        if isinstance(task, Task) and not task.may_follow(self._done):
            return
        log = NOWHERE
        if self._runner is not None and isinstance(task, Task):
            log = log_path(self._runner.context.folders.logs, task.trial)
        self._clock.begin(log)
        try:
            event = self._make_event(task)
        finally:
            self._clock.end()
        self._done = event.task.identity if isinstance(event, UnitDone) else None
        self._connection.send_bytes(pickle_event(event))

    def _make_event(self, task: Job) -> Event:
        if self._runner is not None:
            with nullcontext() if self._stream is None else self._stream.make_current():
                return execute(self._runner, task)
        assert self._trouble is not None
        cause = f"a worker cannot load the run: {describe(self._trouble)}"
        has_bad_data = isinstance(self._trouble, CorruptDataError)
        kind: Literal["data", "error"] = "data" if has_bad_data else "error"
        if isinstance(task, ShardTask):
            return ShardFailed(self._number, task, kind, cause)
        if not isinstance(task, Task):
            return CheckDone(self._number, (), error=cause)
        return UnitFailed(self._number, task, kind, cause, bases=bases_of(self._trouble))

    def _end(self) -> None:
        note_imported(self._sources, fork_server.last_imported)  # modules imported during the run
        if self._runner is not None:
            self._runner.close()
            self._process.runners.remove(self._runner)
            self._runner = None
        self._trouble = None
        self._process.context = None


def leave() -> NoReturn:
    """End this process and the processes that its trials started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        main(fork_server.serve(sys.argv[2:]))
    main(sys.argv[1:])
