"""Ctrl-C and SIGTERM: the first ends a run, later ones do not disturb its cleanup."""

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
    """SIGTERM was received; code that cleans up after Ctrl-C handles it, too."""


def _terminate(signum: int, frame: object) -> None:
    raise Terminated


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM raise `Terminated` in the block, as Ctrl-C raises KeyboardInterrupt.

    Only in the main thread, which alone receives signals, and only if SIGTERM has its default
    handler.
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
    """Defer Ctrl-C, and SIGTERM if it is ours, during a cleanup.

    Parameters
    ----------
    after
        The cause of the cleanup. After an interrupt, further ones are dropped: their request is
        being carried out. After any other cause, they are delivered at the end of the block.
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
    if before is None or before is signal.SIG_IGN:  # None: set from outside Python
        yield
        return
    signal.signal(number, lambda signum, frame: heard.append(signum))
    try:
        yield
    finally:
        signal.signal(number, before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
