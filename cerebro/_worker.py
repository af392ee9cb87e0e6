"""The program of a worker process: ``python -m cerebro._worker SOCKET PAGE``.

Both arguments are inherited file descriptors. The worker answers each task with
one event and exits when its socket closes, also in the middle of a unit.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn

import cloudpickle

from cerebro import _core
from cerebro.errors import CorruptDataError
from cerebro.sources import note_imported
from cerebro.unit import CheckDone, CheckTask, Event, RunContext, Task, UnitFailed
from cerebro.worker import UnitRunner, describe

BEAT_MILLISECONDS = 100


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(arguments[0]))
    beat = _core.BeatPage(int(arguments[1]))
    threading.Thread(target=exit_with_parent, args=(connection.fileno(),), daemon=True).start()
    beat.start_beating(BEAT_MILLISECONDS)
    worker = Worker(connection, beat)
    try:
        while worker.handle(cloudpickle.loads(connection.recv_bytes())):
            pass
    except (EOFError, ConnectionResetError, BrokenPipeError):
        leave()
    except BaseException as error:
        # The coordinator hears that the socket closed; a traceback would be for nobody.
        print(f"cerebro: a worker process ends: {describe(error)}", file=sys.stderr)
        return 1
    finally:
        beat.stop()
    return 0


class Worker:
    """One end of the socket: what arrives, and what it does."""

    def __init__(self, connection: Connection, beat: _core.BeatPage) -> None:
        self._connection = connection
        self._beat = beat
        self._runner: UnitRunner | None = None
        self._number = -1
        self._trouble = ""  # why this run could not begin here
        self._data_trouble = False
        self._sources: dict[str, int] = {}  # imported files, with their times of change

    def handle(self, message: tuple[Any, ...]) -> bool:
        kind, *rest = message
        if kind == "begin":
            self._begin(*rest)
        elif kind == "run":
            self._connection.send_bytes(cloudpickle.dumps(self._execute(rest[0])))
        elif kind == "end":
            self._end()
            self._connection.send_bytes(cloudpickle.dumps(self._sources))
        return True

    def _begin(self, number: int, path: list[str], directory: str, context: bytes) -> None:
        self._number = number
        self._trouble = ""
        self._data_trouble = False
        # The parent's imports must be found here, before its code is unpacked.
        sys.path[:] = path
        try:
            os.chdir(directory)
            run: RunContext = cloudpickle.loads(context)
            note_imported(self._sources)
            self._runner = UnitRunner(run, worker=number, beat=self._beat, own_process=True)
        except BaseException as error:  # the module of build may raise anything
            self._trouble = f"a worker cannot load the run: {describe(error)}"
            self._data_trouble = isinstance(error, CorruptDataError)

    def _execute(self, task: Task | CheckTask) -> Event:
        if self._runner is not None:
            return self._runner.execute(task)
        if isinstance(task, CheckTask):
            return CheckDone(self._number, (), error=self._trouble)
        kind: Literal["data", "error"] = "data" if self._data_trouble else "error"
        return UnitFailed(self._number, task, kind, self._trouble)

    def _end(self) -> None:
        note_imported(self._sources)  # what was imported while the run went on
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def exit_with_parent(fd: int) -> None:
    """Leave at once when the coordinator is gone, whatever the main thread does."""
    poll = select.poll()
    poll.register(fd, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    while True:
        for _, event in poll.poll():
            if event & (select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)):
                leave()


def leave() -> NoReturn:
    """End this process, and with it what its trials started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
