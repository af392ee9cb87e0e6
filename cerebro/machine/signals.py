"""Handle Ctrl-C and SIGTERM: the first signal ends a run, later ones do not disturb its cleanup."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

INTERRUPTED = 130
"""The exit status after Ctrl-C."""
TERMINATED = 143
"""The exit status after SIGTERM."""


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM; code that cleans up after Ctrl-C also handles it."""


def _terminate(signum: int, frame: object) -> None:
    raise Terminated


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM raise `Terminated` in the block, as Ctrl-C raises KeyboardInterrupt.

    This works only in the main thread, which alone receives signals, and only if SIGTERM has its
    default handler.
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
def hears_sigterm(heard: Callable[[], None]) -> Iterator[None]:
    """Call `heard` on SIGTERM in the block instead of raising `Terminated`.

    Used for code that must not be interrupted at an arbitrary point. Works only inside
    `terminable`.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not _terminate:
        yield
        return
    signal.signal(signal.SIGTERM, lambda signum, frame: heard())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, _terminate)


@contextmanager
def uninterrupted(after: BaseException | None = None) -> Iterator[None]:
    """Defer Ctrl-C during a cleanup, and also SIGTERM inside `terminable`.

    Parameters
    ----------
    after
        The cause of the cleanup. After an interrupt, further interrupts are dropped, because the
        first is being carried out. After any other cause, they are delivered at the end of the
        block.
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
    if before is None or before is signal.SIG_IGN:  # None: a handler that was not set by Python
        yield
        return
    signal.signal(number, lambda signum, frame: heard.append(signum))
    try:
        yield
    finally:
        signal.signal(number, before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
