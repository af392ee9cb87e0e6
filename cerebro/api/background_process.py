"""Be the process of a search in the background: see `cerebro.api.background`."""

from __future__ import annotations

import contextlib
import linecache
import os
import shutil
import sys
import traceback
import warnings
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from cerebro.api.search import search
from cerebro.errors import CerebroError, RunError, text_of
from cerebro.executors.process import warm_workers
from cerebro.executors.wire import pickle_event, unpickle
from cerebro.machine import libraries, program
from cerebro.report.progress import Lines, Snapshot
from cerebro.results.result import Result
from cerebro.run.folder import BACKGROUND_LOG, rows_in
from cerebro.worker.trial_warnings import Watch

MOST_TEXT = 10_000  # of a traceback, in characters: fits into the socket's buffer


class Relay(Lines):
    """Tells the process that asked for the search what happens before training; logs the rest."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(sys.stdout)
        self._connection = connection
        self._has_begun = False

    def tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # the reader has gone
            self._connection.send_bytes(pickle_event(message))

    def phase(self, what: str) -> None:
        super().phase(what)
        self.tell("phase", what)

    def advise(self, text: str) -> None:
        super().advise(text)
        self.tell("advise", text)

    def warn(self, message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, line))
        if not self._has_begun:
            is_plain = category.__module__ == "builtins"
            self.tell("warning", str(message), category if is_plain else UserWarning)

    def run_started(self, snapshot: Snapshot) -> None:
        self._begin(Path(snapshot.path))
        super().run_started(snapshot)

    def _begin(self, folder: Path) -> None:
        """Let the output go to a file in the run's folder."""
        sys.stdout.flush()
        sys.stderr.flush()
        with (folder / BACKGROUND_LOG).open("ab") as log:
            with os.fdopen(os.dup(1), "rb") as before:
                before.seek(0)
                shutil.copyfileobj(before, log)
            log.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        self._has_begun = True
        self.tell("started", str(folder))

    def end(self, result: Result | None, error: BaseException | None) -> None:
        """Tell how the search has ended."""
        if result is not None and not self._has_begun:  # there was nothing to train
            self.tell("started", str(result.path))
        text = ""
        if error is not None:
            traceback.print_exception(error)
            if not isinstance(error, CerebroError):
                text = "".join(traceback.format_exception(error))[-MOST_TEXT:]
        warm_workers.close()
        self.tell("ended", make_sendable(error), text)


def make_sendable(error: BaseException | None) -> BaseException | None:
    """Return an error that arrives as it is, else one with its text; None for a stop."""
    if not isinstance(error, Exception):
        return None
    with contextlib.suppress(Exception):  # of the user's class
        message = pickle_event(error)
        if len(message) <= 2 * MOST_TEXT and type(unpickle(message)) is type(error):
            return error
    return RunError(f"{type(error).__name__}: {text_of(error, 2000)}")


def main(fd: int) -> None:
    """Search as the process at the other end of a socket says."""
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    relay = Relay(connection)
    relay.tell("pid", os.getpid())
    warnings.showwarning = relay.warn  # type: ignore[assignment]
    message = connection.recv_bytes()
    here, rows = unpickle(message)
    sys.path[:], sys.argv[:] = here["path"], here["argv"]
    os.chdir(here["directory"])
    linecache.cache.update(here["cells"])
    own_main = sys.modules["__main__"]  # by which a run names a `build` of the user's program
    file, name = here["main"]
    if file is not None:
        own_main.__file__ = file
    own_main.__spec__ = None if name is None else ModuleSpec(name, None)
    program.inherit(here["program"])
    rows_in.set(rows)
    result, error = None, None
    try:
        libraries.apply_settings(here["libraries"])  # JAX's decide the types of arrays in arguments
        message = connection.recv_bytes()
        arguments = unpickle(message)
        Watch(here["filters"])  # applies them; only now are the user's categories imported
        result = search(**arguments, progress=cast(Any, relay))
    except BaseException as caught:
        error = caught
    relay.end(result, error)
