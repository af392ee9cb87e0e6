"""Redirect a trial's output to the trial's log.

In a worker process, file descriptors 1 and 2 point to the trial's log while its unit runs. The log
receives the output of ``print``, ``logging``, warnings, C libraries and subprocesses, and the
traceback of a crash.

In the user's process, the descriptors stay unchanged. There, `sys.stdout`, `sys.stderr` and the
logging handlers that write to them are redirected to the log; the output of C code and subprocesses
is not captured.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from cerebro.machine.files import open_plain, storing

_NOWHERE = Path(os.devnull)
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def log_path(folder: str, trial: int | None) -> Path:
    """Return the path of a trial's log; without a trial, that of the null device."""
    return _NOWHERE if trial is None else Path(f"{folder}/{trial}.log")


def append(path: Path, text: str) -> None:
    """Append text to a log without using the standard streams, which a trial may have replaced."""
    flush_output()
    with contextlib.suppress(OSError):
        file = os.fdopen(open_plain(path, APPEND), "a", 1, "utf-8", "backslashreplace")
        with file:
            file.write(text.rstrip("\n") + "\n")


def remove_if_empty(path: Path) -> None:
    """Delete a log if it is empty; in a run of 100,000 trials, most print nothing."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()


# --- in a worker process ------------------------------------------------------


@contextlib.contextmanager
def redirected_descriptors(path: Path) -> Iterator[None]:
    """Redirect file descriptors 1 and 2 of this process to the end of a file."""
    with storing():
        log = open_plain(path, APPEND)
        try:
            saved = _duplicates((1, 2))
        except OSError:
            os.close(log)
            raise
    flush_output()
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        yield
    finally:
        flush_output()
        for descriptor, before in zip((1, 2), saved, strict=True):
            os.dup2(before, descriptor)
            os.close(before)


def _duplicates(descriptors: tuple[int, ...]) -> list[int]:
    """Duplicate either all the descriptors or none of them."""
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
    except OSError:
        for copy in copies:
            os.close(copy)
        raise
    return copies


def flush_output() -> None:
    """Flush all output streams; if the disk is full, the output is lost."""
    for stream in (sys.stdout, sys.stderr):
        # A trial may have closed or replaced a stream.
        with contextlib.suppress(Exception):
            stream.flush()
    c_library().fflush(None)  # C's own streams, all of them


@functools.cache
def c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


# --- in the user's process ----------------------------------------------------


class SwitchedStream(io.TextIOBase):
    """Replaces a standard stream: writes to the log of the trial whose unit is running.

    There is one object for all trials, because handlers and libraries keep the stream with which
    they were created. Between units the object writes to the stream that it replaces.
    """

    def __init__(self, name: str) -> None:
        self._name = name  # the name of the stream in sys
        self._path: Path | None = None
        self._file: TextIO | None = None

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._path is None:
            stream = getattr(sys, self._name)
            return 0 if stream is None or stream is self else int(stream.write(text))
        with storing():
            if self._file is None:  # the file is created by the first write
                self._file = os.fdopen(
                    open_plain(self._path, APPEND), "a", 1, "utf-8", "backslashreplace"
                )
            return self._file.write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @contextlib.contextmanager
    def redirected_to(self, path: Path, every: list[logging.StreamHandler[Any]]) -> Iterator[None]:
        """Redirect the standard stream, and its handlers of `every`, to a file for a unit."""
        before: Any = getattr(sys, self._name)
        handlers = [h for h in every if h.stream is before and before is not self]
        self._path = path
        setattr(sys, self._name, self)
        for handler in handlers:
            handler.stream = self
        try:
            yield
        finally:
            setattr(sys, self._name, before)
            for handler in handlers:
                if handler.stream is self:
                    handler.stream = before
            self._path = None
            if self._file is not None:
                with contextlib.suppress(OSError):  # if the disk is full, the rest is lost
                    self._file.close()
                self._file = None


_streams = SwitchedStream("stdout"), SwitchedStream("stderr")


@contextlib.contextmanager
def redirected_streams(path: Path) -> Iterator[None]:
    """Append the prints, warnings and logs of Python code to a file."""
    out, err = _streams
    handlers = _stream_handlers()
    with out.redirected_to(path, handlers), err.redirected_to(path, handlers):
        yield


_listed: tuple[list[Any], int, list[weakref.ref[logging.StreamHandler[Any]]]] = ([], 0, [])
"""All handlers as `logging` knows them, the number of names of loggers, and what was found."""


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    """Return the handlers that write to a stream other than a file: loggers' and new ones.

    A process has hundreds of loggers. They are asked again only if handlers have been made or have
    gone, or if there are new loggers. A handler without a logger is among those that are returned,
    because it may get one.
    """
    global _listed
    made, names = logging._handlerList, logging.root.manager.loggerDict  # type: ignore[attr-defined]
    before, count, found = _listed
    if made != before or len(names) != count:
        loggers = [logging.root, *names.values()]
        attached = [h for logger in loggers for h in getattr(logger, "handlers", ())]
        every = {id(h): h for h in [*attached, *(reference() for reference in made)]}
        found = [
            weakref.ref(handler)
            for handler in every.values()
            if isinstance(handler, logging.StreamHandler)
            and not isinstance(handler, logging.FileHandler)
        ]
        _listed = list(made), len(names), found
    alive = (reference() for reference in found)
    # Handlers that have no stream of their own look up sys.stderr at each write.
    return [handler for handler in alive if handler is not None and "stream" in vars(handler)]
