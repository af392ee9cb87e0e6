"""What a trial prints goes to its own file, from whichever library it comes.

In a worker process, file descriptors 1 and 2 themselves point to the trial's log
while its unit runs: ``print``, ``logging``, warnings, the C library's output and
that of subprocesses all end there, and the traceback of a crash too.

The user's own process keeps its descriptors. There `sys.stdout`, `sys.stderr` and
logging handlers that write to them are led to the log; what C code or
subprocesses print is not caught.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from cerebro.machine.files import open_plain, storing

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def log_path(folder: str, trial: int | None) -> Path:
    """A trial's log; without a trial, nowhere."""
    return Path(os.devnull) if trial is None else Path(folder, f"{trial}.log")


def append(path: Path, text: str) -> None:
    """Add to a log, whatever a trial's code has made of the standard streams."""
    flush_output()
    with contextlib.suppress(OSError):
        file = os.fdopen(open_plain(path, APPEND), "a", 1, "utf-8", "backslashreplace")
        with file:
            file.write(text.rstrip("\n") + "\n")


def remove_if_empty(path: Path) -> None:
    """Delete a log in which there is nothing; of 100,000 trials most print nothing."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()


# --- in a worker's process ----------------------------------------------------


@contextlib.contextmanager
def redirected_descriptors(path: Path) -> Iterator[None]:
    """Append what the process writes to file descriptors 1 and 2 to a file."""
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
    """Copies of descriptors; all or none."""
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
    """Write out what is printed so far; what a full disk does not take is lost."""
    for stream in (sys.stdout, sys.stderr):
        # A trial may have closed a stream or put anything in its place.
        with contextlib.suppress(Exception):
            stream.flush()
    c_library().fflush(None)  # what C code has printed, in all its streams


@functools.cache
def c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


# --- in the user's own process ------------------------------------------------


class SwitchedStream(io.TextIOBase):
    """Stands for a standard stream: writes to the log of the trial whose unit runs.

    It stays the same object for all trials, because handlers and libraries keep
    the stream they were made with. Between units it is the stream it stands for.
    """

    def __init__(self, name: str) -> None:
        self._name = name  # of the attribute of sys
        self._path: Path | None = None
        self._file: TextIO | None = None

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._path is None:
            stream = getattr(sys, self._name)
            return 0 if stream is None or stream is self else int(stream.write(text))
        with storing():
            if self._file is None:  # made when something is written to it
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
    def led_to(self, path: Path) -> Iterator[None]:
        """Put this stream into its place for the time of a unit."""
        before: Any = getattr(sys, self._name)
        handlers = [h for h in _stream_handlers() if h.stream is before and before is not self]
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
                with contextlib.suppress(OSError):  # a full disk: what is left is lost
                    self._file.close()
                self._file = None


_streams = SwitchedStream("stdout"), SwitchedStream("stderr")


@contextlib.contextmanager
def redirected_streams(path: Path) -> Iterator[None]:
    """Append what Python code prints, warns and logs to a file."""
    out, err = _streams
    with out.led_to(path), err.led_to(path):
        yield


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    """Handlers of all loggers that write to a stream; files have their own."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return [
        handler
        for logger in loggers
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
        and not isinstance(handler, logging.FileHandler)
        and "stream" in vars(handler)  # others look up sys.stderr whenever they write
    ]
