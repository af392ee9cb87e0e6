"""Run a worker process: ``python -m cerebro._worker SOCKET PAGE``.

Both arguments are inherited file descriptors. ``python -m cerebro._worker serve ...`` is the fork
server, whose forks are workers (`cerebro.executors.fork_server`). A worker answers each task with
one event. It ends with its coordinator, even in the middle of a unit: the C thread of the heartbeat
ends the process, whatever Python is doing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn

import cloudpickle

import cerebro._core as _core
from cerebro.errors import CorruptDataError
from cerebro.executors import fork_server
from cerebro.executors.received import opened
from cerebro.machine import guard
from cerebro.machine.imports import Sources, note_imported
from cerebro.worker.blame import bases_of, describe
from cerebro.worker.jobs import execute
from cerebro.worker.log import flush_output
from cerebro.worker.messages import (
    CheckDone,
    Event,
    Job,
    RunContext,
    ShardFailed,
    ShardTask,
    Task,
    UnitFailed,
)
from cerebro.worker.runner import UnitRunner

BEAT_MILLISECONDS = 100
IMPORT_SECONDS = 30.0
"""The seconds for importing libraries in a process's first `build`, in addition to `unit_timeout`.
"""
STANDARD_ERROR = 2


def main(arguments: list[str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard.enter_worker()  # an imported script must not start a search
    faulthandler.enable(STANDARD_ERROR)  # a crash in C code writes its traceback to the log
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
        # The coordinator notices that the process has ended, so it does not need a traceback.
        print(f"cerebro: a worker process ends: {describe(error)}", file=sys.stderr)
        flush_output()
        os._exit(1)  # skips the threads and exit handlers of the user's code


class BeatClock:
    """Reports a task's start to the coordinator, and dumps a late task's traceback to the log.

    The time for importing libraries does not count as a unit's time, so the first `build` of a
    process gets extra time.
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
    """Handles the messages that arrive on the socket."""

    def __init__(self, connection: Connection, beat: _core.BeatPage) -> None:
        self._connection = connection
        self._beat = beat
        self._clock = BeatClock(beat)
        self._runner: UnitRunner | None = None
        self._number = -1
        self._trouble = ""  # why the run could not be loaded
        self._data_trouble = False
        self._bases: tuple[str, ...] = ()  # of the exception that caused the trouble
        self._sources: Sources = dict(fork_server.imported)

    def handle(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "preload":
            self._preload(*rest)
        elif kind == "begin":
            self._begin(*rest)
        elif kind == "run":
            self._connection.send_bytes(_packed(self._execute(rest[0])))
        elif kind == "end":
            self._end()
            self._connection.send_bytes(cloudpickle.dumps(self._sources))

    def _preload(self, path: list[str], modules: list[str]) -> None:
        """Import modules before a run begins; `begin` reports modules that cannot be imported."""
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
        # The modules that the parent imports must be found here before its code is unpickled.
        sys.path[:] = path
        sys.argv[:] = argv  # a script may read its arguments anywhere
        try:
            os.chdir(directory)
            run: RunContext = opened(context)
            note_imported(self._sources, fork_server.last_imported)
            self._clock.limit = run.unit_timeout
            self._runner = UnitRunner(
                run, worker=number, beat=self._beat, own_process=True, clock=self._clock
            )
        except BaseException as error:  # the module that defines build may raise anything
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
        kind: Literal["data", "error"] = "data" if self._data_trouble else "error"
        if isinstance(task, ShardTask):
            return ShardFailed(self._number, task, kind, self._trouble)
        if not isinstance(task, Task):
            return CheckDone(self._number, (), error=self._trouble)
        return UnitFailed(self._number, task, kind, self._trouble, bases=self._bases)

    def _end(self) -> None:
        note_imported(self._sources, fork_server.last_imported)  # modules imported during the run
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def _packed(event: Event) -> bytes:
    """Pickle an event; use cloudpickle, which is slower, only for objects of the user's code."""
    try:
        return pickle.dumps(event, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return cloudpickle.dumps(event)  # type: ignore[no-any-return]


def leave() -> NoReturn:
    """End this process and the processes that its trials started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        main(fork_server.serve(sys.argv[2:]))
    main(sys.argv[1:])
