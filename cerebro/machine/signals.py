"""Handle Ctrl-C and SIGTERM, and wake threads that wait.

The first signal ends a run; later ones do not disturb its cleanup.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""The exit status after Ctrl-C."""
TERMINATED = 143
"""The exit status after SIGTERM."""
READER_LEFT = 141
"""The exit status when the reader of standard output has left: 128 + SIGPIPE."""


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM; code that cleans up after Ctrl-C also handles it."""


_depth = 0
"""The number of `defer_interrupts` blocks that the main thread is in."""
_heard: list[int] = []
"""The signals that these blocks have deferred."""


def _hear(signum: int, frame: FrameType | None) -> None:
    if _depth:
        _heard.append(signum)
        return
    _heard.clear()
    if signum == signal.SIGTERM:
        raise Terminated
    signal.default_int_handler(signum, frame)


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise `Terminated` in the block, as Ctrl-C raises KeyboardInterrupt.

    Works only in the main thread, which alone receives signals, and only if SIGTERM has its default
    handler.
    """
    defaults: dict[signal.Signals, Any] = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    here = _in_main_thread()
    taken = [n for n, default in defaults.items() if here and signal.getsignal(n) is default]
    for number in taken:
        signal.signal(number, _hear)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) is _hear:
                signal.signal(number, defaults[number])


@contextmanager
def call_on_sigterm(heard: Callable[[], None]) -> Iterator[None]:
    """Call `heard` on SIGTERM in the block instead of raising `Terminated`.

    For code that must not be interrupted at an arbitrary point. Works only inside
    `raise_on_sigterm`.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not _hear:
        yield
        return
    signal.signal(signal.SIGTERM, lambda signum, frame: heard())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, _hear)


def defer_interrupts(after: BaseException | None = None) -> AbstractContextManager[None]:
    """Defer Ctrl-C in the block, and also SIGTERM inside `raise_on_sigterm`.

    Interrupts are delivered at the end of the block. If the block cleans up after an interrupt,
    given as `after`, they are dropped.
    """
    if not _in_main_thread():
        return nullcontext()
    if signal.getsignal(signal.SIGINT) is _hear:
        return _Deferral(after)
    return _defer_with_handlers(after)


class _Deferral:
    """Makes the handlers of `raise_on_sigterm` note signals, which costs less than new handlers."""

    def __init__(self, after: BaseException | None) -> None:
        self._drops = isinstance(after, KeyboardInterrupt)
        self._before = 0

    def __enter__(self) -> None:
        global _depth
        self._before = len(_heard)
        _depth += 1

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        global _depth
        _depth -= 1
        if _heard and (self._drops or kind is not None):
            del _heard[self._before :]
        if _heard and not _depth:
            signal.raise_signal(_heard[0])


@contextmanager
def _defer_with_handlers(after: BaseException | None) -> Iterator[None]:
    heard: list[int] = []
    with contextlib.ExitStack() as stack:  # restores both handlers, even if a signal raises between
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            is_ours = handler is _hear or number is signal.SIGINT
            if is_ours and handler not in (None, signal.SIG_IGN):  # None: not set by Python
                stack.callback(signal.signal, number, handler)
                signal.signal(number, lambda signum, frame: heard.append(signum))
        yield
    if heard and not isinstance(after, KeyboardInterrupt):
        signal.raise_signal(heard[0])


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


PIPE_BYTES = 4096


class WakePipe:
    """A pipe that is readable from a call of `wake` until `clear`.

    `wake` may be called from any thread, even after `close`: the writing end stays open until the
    object is deleted, because otherwise the number of the closed descriptor might by then belong to
    a different file.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._is_set = False

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # a full pipe wakes it anyway; or the pipe is closed
            os.write(self._write, b"x")
        self._is_set = True  # not before: `clear` would leave the pipe readable for good

    def clear(self) -> None:
        if not self._is_set:
            return
        self._is_set = False
        with contextlib.suppress(OSError):
            while len(os.read(self._read, PIPE_BYTES)) == PIPE_BYTES:
                pass  # a shorter piece was the last one: reading again would fail, which costs more

    def close(self) -> None:
        fd, self._read = self._read, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        try:
            self.close()
            os.close(self._write)
        except (OSError, AttributeError, TypeError):
            return  # when Python exits, `os` may be None


def wait_for(descriptors: Iterable[int], seconds: float) -> set[int]:
    """Return the readable descriptors, after up to `seconds` (may be infinite) for the first."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    limit = None if math.isinf(seconds) else math.ceil(1000 * seconds)
    return {descriptor for descriptor, _ in poll.poll(limit)}
