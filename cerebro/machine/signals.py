"""Ctrl-C and SIGTERM: the first one ends a run, the next ones do not spoil its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
TERMINATED = 143
"""Exit status after SIGTERM."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: whoever cleans up after Ctrl-C cleans up after it, too."""


def _terminate(signum: int, frame: object) -> None:
    raise Terminated


@contextmanager
def terminable() -> Iterator[None]:
    """Have SIGTERM raise `Terminated` in the block, as Ctrl-C raises KeyboardInterrupt.

    Only in the main thread, which alone hears signals, and only where nobody else
    has said what SIGTERM is to do.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted(after: BaseException | None = None) -> Iterator[None]:
    """Put off Ctrl-C, and SIGTERM if it is ours, for as long as it takes to clean up.

    Parameters
    ----------
    after
        Why there is something to clean up. After an interrupt the next ones are dropped: what they
        ask for is happening. After anything else they are heard at the block's end.
    """
    heard: list[int] = []
    with ExitStack() as stack:
        if _in_main_thread():
            stack.enter_context(_noted(signal.SIGINT, heard))
            if signal.getsignal(signal.SIGTERM) is _terminate:
                stack.enter_context(_noted(signal.SIGTERM, heard))
        yield
    if heard and not isinstance(after, KeyboardInterrupt):
        signal.raise_signal(heard[0])


@contextmanager
def _noted(number: signal.Signals, heard: list[int]) -> Iterator[None]:
    before: Any = signal.getsignal(number)
    if before is None or before is signal.SIG_IGN:  # None: set from outside of Python
        yield
        return
    signal.signal(number, lambda signum, frame: heard.append(signum))
    try:
        yield
    finally:
        signal.signal(number, before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
