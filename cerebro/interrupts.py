"""Ctrl-C: the first one ends a run, the next ones do not spoil its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C for as long as it takes to clean up; only the main thread hears it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:  # None: set by somebody outside of Python
            signal.signal(signal.SIGINT, before)
