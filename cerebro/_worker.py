"""The program of a worker process: ``python -m cerebro._worker SOCKET PAGE``.

Both arguments are inherited file descriptors. The worker answers each task with one event. It ends
with its coordinator, even in the middle of a unit: the C thread of the heartbeat ends the process,
regardless of Python.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn

import cloudpickle

import cerebro._core as _core
from cerebro.errors import CorruptDataError
from cerebro.executors.received import opened
from cerebro.machine import guard
from cerebro.machine.imports import Sources, note_imported
from cerebro.worker.blame import bases_of, describe
from cerebro.worker.jobs import execute
from cerebro.worker.log import flush_output
from cerebro.worker.messages import CheckDone, Event, Job, RunContext, Task, UnitFailed
from cerebro.worker.runner import UnitRunner

BEAT_MILLISECONDS = 100
IMPORT_SECONDS = 30.0
"""Extra time for importing libraries in a process's first `build`, beyond `unit_timeout`."""
STANDARD_ERROR = 2


def main(arguments: list[str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard.enter_worker()  # an imported script must not start a search
    faulthandler.enable(STANDARD_ERROR)  # a crash in C code leaves its traceback in the log
    connection = Connection(int(arguments[0]))
    beat = _core.BeatPage(int(arguments[1]))
    beat.start_beating(BEAT_MILLISECONDS, connection.fileno())
    worker = Worker(connection, beat)
    try:
        while True:
            worker.handle(cloudpickle.loads(connection.recv_bytes()))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        leave()
    except BaseException as error:
        # The coordinator notices the end of the process; it has no use for a traceback.
        print(f"cerebro: a worker process ends: {describe(error)}", file=sys.stderr)
        flush_output()
        os._exit(1)  # without the threads and exit handlers of the user's code


class BeatClock:
    """Reports a task's start to the coordinator, and dumps a late task's traceback to the log.

    Importing libraries does not count as a unit's time: the first `build` of a process gets extra
    time.
    """

    def __init__(self, beat: _core.BeatPage) -> None:
        self._beat = beat
        self._has_built = False
        self.limit: float | None = None

    def begin(self) -> None:
        self._start(0.0 if self._has_built else IMPORT_SECONDS)

    def built(self) -> None:
        if not self._has_built:
            self._has_built = True
            self._start(0.0)

    @contextlib.contextmanager
    def aside(self, seconds: float) -> Iterator[None]:
        self._start(seconds)
        try:
            yield
        finally:
            self._start(0.0)

    def end(self) -> None:
        if self.limit is not None:
            faulthandler.cancel_dump_traceback_later()

    def _start(self, grace: float) -> None:
        self._beat.begin_task(grace)
        if self.limit is not None:
            faulthandler.dump_traceback_later(self.limit + grace, file=STANDARD_ERROR)


class Worker:
    """Handle the messages that arrive on the socket."""

    def __init__(self, connection: Connection, beat: _core.BeatPage) -> None:
        self._connection = connection
        self._beat = beat
        self._clock = BeatClock(beat)
        self._runner: UnitRunner | None = None
        self._number = -1
        self._trouble = ""  # why the run could not be loaded
        self._data_trouble = False
        self._bases: tuple[str, ...] = ()  # of the exception that is the trouble
        self._sources: Sources = {}

    def handle(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "preload":
            self._preload(*rest)
        elif kind == "begin":
            self._begin(*rest)
        elif kind == "run":
            self._connection.send_bytes(cloudpickle.dumps(self._execute(rest[0])))
        elif kind == "end":
            self._end()
            self._connection.send_bytes(cloudpickle.dumps(self._sources))

    def _preload(self, path: list[str], modules: list[str]) -> None:
        """Import modules before there is a run; `begin` reports what cannot be imported."""
        sys.path[:] = path
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)

    def _begin(
        self, number: int, path: list[str], argv: list[str], directory: str, context: bytes
    ) -> None:
        self._number = number
        self._trouble = ""
        self._data_trouble = False
        # The parent's imports must be found here, before its code is unpacked.
        sys.path[:] = path
        sys.argv[:] = argv  # a script may read its arguments anywhere
        try:
            os.chdir(directory)
            run: RunContext = opened(context)
            note_imported(self._sources)
            self._clock.limit = run.unit_timeout
            self._runner = UnitRunner(
                run, worker=number, beat=self._beat, own_process=True, clock=self._clock
            )
        except BaseException as error:  # the module of build may raise anything
            self._trouble = f"a worker cannot load the run: {describe(error)}"
            self._data_trouble = isinstance(error, CorruptDataError)
            self._bases = bases_of(error)

    def _execute(self, task: Job) -> Event:
        self._clock.begin()
        try:
            return self._answer(task)
        finally:
            self._clock.end()

    def _answer(self, task: Job) -> Event:
        if self._runner is not None:
            return execute(self._runner, task)
        if not isinstance(task, Task):
            return CheckDone(self._number, (), error=self._trouble)
        kind: Literal["data", "error"] = "data" if self._data_trouble else "error"
        return UnitFailed(self._number, task, kind, self._trouble, bases=self._bases)

    def _end(self) -> None:
        note_imported(self._sources)  # imported during the run
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def leave() -> NoReturn:
    """End this process and the processes that its trials started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
