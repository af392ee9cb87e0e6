"""Redirect a trial's output to the trial's log.

In a worker process, file descriptors 1 and 2 point to the trial's log while its unit runs. The log
receives the output of ``print``, ``logging``, warnings, C libraries and subprocesses, and the
traceback of a crash. No trial can close `sys.stdout` and `sys.stderr`; a stream that a trial puts
in their place is removed after the unit.

In the user's process, the descriptors stay unchanged. `sys.stdout`, `sys.stderr` and the logging
handlers that write to them are redirected to the log, including writes to their bytes and to their
descriptors (``subprocess.run(..., stdout=sys.stdout)``). Other output of C code and subprocesses is
not captured.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from cerebro.machine.files import explain_storage_errors, open_plain

NOWHERE = Path(os.devnull)
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_C_LIBRARY = ctypes.CDLL(None)


def log_path(folder: str, trial: int | None) -> Path:
    """Return the path of a trial's log, or of the null device without a trial."""
    return NOWHERE if trial is None else Path(f"{folder}/{trial}.log")


def append_text(path: Path, text: str) -> None:
    """Append text to a log without using the standard streams, which a trial may have replaced."""
    flush_output()
    with contextlib.suppress(OSError):
        file = os.fdopen(open_plain(path, APPEND), "a", 1, "utf-8", "backslashreplace")
        with file:
            file.write(text.rstrip("\n") + "\n")


# --- in a worker process ------------------------------------------------------


class _LastingBytes(io.BufferedWriter):
    """The stream of bytes of a `_LastingStream`, which collects text itself."""

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.flush()
        return written

    def close(self) -> None:
        """Only flush: a stream over this one closes it when it is freed."""
        self.flush()


class _LastingStream(io.TextIOWrapper):
    """A standard stream of a worker; trials cannot close it, because later trials need it."""

    def close(self) -> None:
        self.flush()

    def detach(self) -> Any:
        """Return the stream of bytes, for a new stream over it."""
        self.flush()
        return self.buffer


_lasting: dict[str, TextIO] = {}
_replaced: list[Any] = []  # the earlier streams: if freed, they would be closed, even if in use


def make_streams_last() -> None:
    """Keep the standard streams of this process from being closed by trials."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if before is None:  # the process has no such descriptor
            continue
        raw = io.FileIO(descriptor, "w", closefd=False)
        raw.name = before.name
        stream: Any = _LastingStream(
            _LastingBytes(raw),
            before.encoding,
            before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        stream.mode = before.mode
        for attribute in (name, f"__{name}__"):
            setattr(sys, attribute, stream)
        _replaced.append(before)
        _lasting[name] = stream


class SavedDescriptors:
    """Copies of descriptors 1 and 2; a call points the descriptors there again."""

    def __init__(self) -> None:
        flush_output()
        self._copies: list[int] = []
        for descriptor in (1, 2):
            self._copies.append(os.dup(descriptor))

    def __call__(self) -> None:
        flush_output()
        for descriptor, copy in zip((1, 2), self._copies, strict=True):
            os.dup2(copy, descriptor)

    def __del__(self) -> None:
        for copy in self._copies:
            os.close(copy)


@contextlib.contextmanager
def redirect_descriptors(path: Path) -> Iterator[None]:
    """Redirect file descriptors 1 and 2 of this process to the end of a file."""
    with explain_storage_errors(), os.fdopen(open_plain(path, APPEND), "ab", 0) as log:
        put_back = SavedDescriptors()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        flush_output()
        for name, stream in _lasting.items():  # in place of those that a trial has put there
            # Another one may close its descriptor now, if it is freed.
            setattr(sys, name, stream)
        put_back()
        del put_back


def flush_output() -> None:
    """Flush all output streams; if the disk is full, the output is lost."""
    for stream in (sys.stdout, sys.stderr, *_lasting.values()):
        # A trial may have closed or replaced a stream.
        with contextlib.suppress(Exception):
            stream.flush()
    _C_LIBRARY.fflush(None)  # C's own streams, all of them


# --- in the user's process ----------------------------------------------------


class SwitchedStream(io.TextIOBase):
    """Replaces a standard stream: writes to the log of the trial whose unit is running.

    There is one object for all trials, because handlers and libraries keep the stream with which
    they were created. Between units it writes to the stream that it replaces. Like a worker's
    stream, it has a descriptor, a stream of bytes, and settings.
    """

    def __init__(self, name: str) -> None:
        self._name = name  # the name of the stream in sys
        self._path: Path | None = None
        self._file: TextIO | None = None
        self._descriptor = -1
        self._pointed: tuple[int, int] | None = None  # the device and inode it was pointed at
        self._settings: dict[str, Any] = {}
        self.buffer = _Bytes(self)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        stream = self.target()
        with self.storing():
            return 0 if stream is None else int(stream.write(text))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Only flush, because later trials also need the object."""
        self.flush()

    def detach(self) -> Any:
        """Return the stream of bytes, for a new stream over it."""
        self.flush()
        return self.buffer

    def fileno(self) -> int:
        """Return a lasting descriptor that points where writes go, for libraries that keep it.

        Descriptors 1 and 2 are the user's, and the log's own is closed after each unit.
        """
        if not self._has_descriptor():
            self._descriptor = os.open(os.devnull, os.O_WRONLY)
        self._point_descriptor()
        return self._descriptor

    def _has_descriptor(self) -> bool:
        """Return whether the descriptor is still this stream's.

        A trial may have closed it, as by ``os.fdopen(sys.stdout.fileno())``. Then its number may
        belong to another file, which must not be replaced.
        """
        if self._descriptor < 0:
            return False
        with contextlib.suppress(OSError):
            return _identify_file(self._descriptor) == self._pointed
        return False

    def reconfigure(self, **settings: Any) -> None:
        """Change the encoding or the buffering of the log, like `io.TextIOWrapper.reconfigure`."""
        stream: Any = self.target()
        if stream is not None:
            stream.reconfigure(**settings)
        if self._file is not None:  # the next unit opens the log again
            self._settings |= settings

    @property
    def name(self) -> str:
        return f"<{self._name}>"

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8" if self._file is None else self._file.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return "backslashreplace" if self._file is None else self._file.errors

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not made yet, or of a protocol that the stream does not have
            raise AttributeError(name)
        return getattr(self.target(), name)

    def target(self) -> TextIO | None:
        """Return the stream that receives writes now, or None."""
        if self._path is None:
            stream: Any = getattr(sys, self._name)
            return None if stream is self else stream
        if self._file is None:  # the file is created when it is first needed
            with explain_storage_errors():
                log = open_plain(self._path, APPEND)
                self._file = os.fdopen(log, "a", 1, "utf-8", "backslashreplace")
            if self._settings:
                self._file.reconfigure(**self._settings)
        return self._file

    def storing(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a write; a full disk under the log is not the trial's error."""
        return contextlib.nullcontext() if self._path is None else explain_storage_errors()

    def _point_descriptor(self) -> None:
        own = getattr(sys, f"__{self._name}__") if self._path is None else None
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            streams: list[Any] = [self.target(), own, nowhere]
            for stream in streams:
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    os.dup2(stream.fileno(), self._descriptor, inheritable=False)
                    break
        self._pointed = _identify_file(self._descriptor)

    @contextlib.contextmanager
    def redirect_to(self, path: Path, every: list[logging.StreamHandler[Any]]) -> Iterator[None]:
        """Redirect the stream, and the handlers in `every` that write to it, to a file."""
        before: Any = getattr(sys, self._name)
        handlers = [h for h in every if h.stream is before and before is not self]
        self._path = path
        setattr(sys, self._name, self)
        for handler in handlers:
            handler.stream = self
        try:
            if self._has_descriptor():
                self._point_descriptor()
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
            if self._has_descriptor():
                self._point_descriptor()


def _identify_file(descriptor: int) -> tuple[int, int]:
    info = os.fstat(descriptor)
    return info.st_dev, info.st_ino


class _Bytes(io.BufferedIOBase):
    """The stream of bytes of a `SwitchedStream`."""

    def __init__(self, text: SwitchedStream) -> None:
        self._text = text

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        stream: Any = self._text.target()
        with self._text.storing():
            if hasattr(stream, "buffer"):
                stream.flush()  # what was printed before
                stream.buffer.write(data)
                stream.buffer.flush()
            elif stream is not None:  # for example, a notebook's
                stream.write(bytes(data).decode("utf-8", "backslashreplace"))
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._text.flush()

    def close(self) -> None:
        """Only flush: a stream over this one closes it when it is freed."""
        self.flush()

    def fileno(self) -> int:
        return self._text.fileno()

    @property
    def name(self) -> str:
        return self._text.name


_streams = SwitchedStream("stdout"), SwitchedStream("stderr")


@contextlib.contextmanager
def redirect_streams(path: Path) -> Iterator[None]:
    """Append the prints, warnings and logs of Python code to a file."""
    out, err = _streams
    handlers = _find_stream_handlers()
    with out.redirect_to(path, handlers), err.redirect_to(path, handlers):
        yield


_listed: tuple[list[Any], int, list[weakref.ref[logging.StreamHandler[Any]]]] = ([], 0, [])
"""All handlers as `logging` knows them, the number of names of loggers, and what was found."""


def _find_stream_handlers() -> list[logging.StreamHandler[Any]]:
    """Return the handlers that write to a stream other than a file, even without a logger."""
    global _listed
    handlers, names = logging._handlerList, logging.root.manager.loggerDict  # type: ignore[attr-defined]
    before, count, streaming = _listed
    # A process has hundreds of loggers, so they are asked again only after a change.
    if handlers != before or len(names) != count:
        loggers = [logging.root, *names.values()]
        attached = [h for logger in loggers for h in getattr(logger, "handlers", ())]
        every = {id(h): h for h in [*attached, *(reference() for reference in handlers)]}
        streaming = [
            weakref.ref(handler)
            for handler in every.values()
            if isinstance(handler, logging.StreamHandler)
            and not isinstance(handler, logging.FileHandler)
        ]
        _listed = list(handlers), len(names), streaming
    alive = (reference() for reference in streaming)
    # Handlers that have no stream of their own look up sys.stderr at each write.
    return [handler for handler in alive if handler is not None and "stream" in vars(handler)]
