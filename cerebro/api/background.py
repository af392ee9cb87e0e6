"""Search in a separate process, which keeps running when the caller's process ends.

The new process (`cerebro.api.background_process`) gets what a worker would: the user's modules as
this process has them, the settings of the libraries, the filters of warnings, and the arguments,
with ``build`` by value. It then calls `cerebro.search`. Until training begins, it tells this
process over a socket what it does, and how that ends: so mistakes raise here, as they do in the
foreground. At its end it sends the exception that has ended the search, if anyone still listens.
All else is in the run's folder.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Literal, ParamSpec, Protocol, cast, overload

from cerebro.api.run import Live, Run
from cerebro.arguments import warn_user
from cerebro.errors import InputError, RunError
from cerebro.executors.wire import UNSENDABLE, pickle_by_value, pickle_message, unpickle
from cerebro.machine import environment, libraries, program
from cerebro.machine.imports import PACKAGE
from cerebro.machine.signals import defer_interrupts
from cerebro.results.result import Result
from cerebro.results.saved_run import SavedRun
from cerebro.run.folder import rows_in, write_rows
from cerebro.run.owner import LiveRunError
from cerebro.worker.trial_warnings import carry_filters

P = ParamSpec("P")

PROGRAM = """
import os, sys
if os.fork():
    os._exit(0)
sys.path[:] = filter(None, sys.path)
from cerebro.api.background_process import main
main(int(sys.argv[1]))
"""
"""The process is detached, so that nothing waits for it or ends it. The working directory is
not first on the path: a file there with the name of a library would hide it.
"""

LEAVE_SECONDS = 5.0
TAIL_BYTES = 4096


class SearchFunction(Protocol[P]):
    """The type of `cerebro.search`, which with ``background=True`` returns a `Run`."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the second one does not take True
        self,
        build: Callable[..., Any],
        space: Any,
        data: Any,
        *,
        background: Literal[True],
        **options: Any,
    ) -> Run: ...

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...


def may_return_run(function: Callable[P, Result]) -> SearchFunction[P]:
    """Tell type checkers that `function` returns a `Run` with ``background=True``."""
    return cast(SearchFunction[P], function)


def start_search(arguments: Mapping[str, Any], show: Any) -> Run:
    """Start a search with these arguments; return once training has begun.

    `show` is a display of this process. Raises what the search raises before that, and InputError
    if an argument cannot be sent.
    """
    given = {k: v for k, v in arguments.items() if k not in ("background", "progress")}
    data, validation, run, if_exists = (
        given.pop(name) for name in ("data", "validation", "run", "if_exists")
    )
    with write_rows(data, validation, run, if_exists, show) as (data, validation, folder):
        # A folder for "new" is made by now.
        given |= {"data": data, "validation": validation, "run": folder}
        given["if_exists"] = if_exists if if_exists == "resume" else "error"
        message = _pickle_arguments(given)
        child = Child()
        try:
            child.send(message, rows_in.get())
            live = Run(child.await_start(show), build=given["build"], live=child)
        except LiveRunError:
            child.end()
            if if_exists != "resume" or not _is_the_same_length(folder, given):
                raise
            live = Run(folder, build=given["build"])
        except BaseException:
            child.end()
            raise
    live.follow(show)
    return live


def _is_the_same_length(folder: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a live run trains as many epochs and trials; the rest has been compared."""
    settings = SavedRun(folder).settings
    return all(settings[name] == given[name] for name in ("epochs", "n_trials"))


def _pickle_arguments(arguments: Mapping[str, Any]) -> bytes:
    try:
        return pickle_by_value(dict(arguments))
    except UNSENDABLE as error:
        for name, value in arguments.items():
            try:
                pickle_by_value(value)
            except UNSENDABLE as cause:
                inside = " (create the objects that it needs inside build)"
                raise InputError(
                    f"{name} cannot be sent to the process of a background search ({cause}): give "
                    f"objects that pickle can copy{inside if name == 'build' else ''}, or leave "
                    "background=True out"
                ) from error
        raise


def _describe_here() -> dict[str, Any]:
    """Return what the new process takes over from this one."""
    main = sys.modules["__main__"]
    cells = {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}
    return {
        "path": list(sys.path),
        "argv": list(sys.argv),
        "directory": os.getcwd(),  # noqa: PTH109
        "main": (
            getattr(main, "__file__", None),
            getattr(getattr(main, "__spec__", None), "name", None),
        ),
        "cells": cells,  # their source, which no file has
        "program": program.Program.capture(),
        "libraries": libraries.present_settings(),
        "filters": carry_filters(),
    }


class Child(Live):
    """The process of a search, seen from the one that has started it."""

    def __init__(self) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._end: tuple[BaseException | None, str] | None = None
        self.pid = 0
        ours, theirs = socket.socketpair()
        path = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = dict(os.environ) | environment.read_variables()
        variables["PYTHONPATH"] = os.pathsep.join(path)
        with theirs:
            subprocess.run(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C and the end of a kernel are not for it
                env=variables,
                check=True,
            )
        self._connection = Connection(ours.detach())

    def send(self, arguments: bytes, rows: Path | None) -> None:
        """Send what the search needs; `rows` is the run's folder if it holds the data already."""
        with contextlib.suppress(OSError):  # if it has died, `await_start` says so
            here = pickle_message((_describe_here(), rows), is_plain=True)
            self._connection.send_bytes(here)
            self._connection.send_bytes(arguments)

    def await_start(self, show: Any) -> Path:
        """Return the run's folder once training has begun; pass on what is said until then."""
        while True:
            kind, *rest = self._receive()
            if kind == "pid":
                (self.pid,) = rest
            elif kind in ("phase", "advise"):
                getattr(show, kind)(*rest)
            elif kind == "warning":
                _warn(*rest)
            elif kind == "started":
                return Path(rest[0])
            else:
                self._end = rest[0], rest[1]
                self._reap()
                raise self.error or RunError(f"the search was stopped{self._read_tail()}")

    def _receive(self) -> Any:
        try:
            message = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise RunError(
                f"the process of the search ended before training began{self._read_tail()}"
            ) from None
        return unpickle(message)

    def _read_tail(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - TAIL_BYTES))
        text = self._log.read().decode("utf-8", "replace").strip()
        return f"; its last lines:\n{text}" if text else ""

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        try:
            while self._end is None and self._connection.poll(seconds):
                message = self._connection.recv_bytes()
                kind, *rest = unpickle(message)
                if kind == "pid":
                    (self.pid,) = rest
                    break
                if kind == "ended":
                    self._end = rest[0], rest[1]
                    self._reap()
        except (EOFError, OSError):  # killed
            self._end = None, ""
            self._reap()
        return self._end is not None

    def _reap(self) -> None:
        """Wait for the end of the process, which leaves quickly unless the user's code waits."""
        with contextlib.suppress(EOFError, OSError):
            if self._connection.poll(LEAVE_SECONDS):
                self._connection.recv_bytes()
        with contextlib.suppress(ChildProcessError):  # usually it is not this process's child
            os.waitpid(self.pid, os.WNOHANG)

    @property
    def error(self) -> BaseException | None:
        return None if self._end is None else self._complete(*self._end)

    def _complete(self, error: BaseException | None, text: str) -> BaseException | None:
        """Add the traceback in the other process to an error of the user's code."""
        if error is not None and text:
            error.__cause__ = RuntimeError(f"in the process of the search:\n{text}")
        return error

    def end(self) -> None:
        """Stop a search that has not begun, and wait until it has cleaned up."""
        is_told = False
        with defer_interrupts():
            while self._end is None:
                if self.pid and not is_told:
                    is_told = True
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self.pid, signal.SIGTERM)
                self.wait(0.1)


def _warn(text: str, category: type[Warning]) -> None:
    if category is UserWarning:
        warn_user(text)
    else:
        warnings.warn(text, category, stacklevel=4)
