"""Messages from other threads to the coordinator's thread, and a descriptor that wakes it."""

from __future__ import annotations

import queue
import threading
from typing import Any

from cerebro.machine.wake_pipe import WakePipe


class Mailbox:
    """A queue that can be waited for together with other descriptors."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pipe = WakePipe()
        self._reader = 0  # the thread that took messages last

    def fileno(self) -> int:
        """Return the descriptor that is readable while the queue is not empty."""
        return self._pipe.fileno()

    def put(self, letter: Any) -> None:
        """Add a message. May be called from any thread, and after `close`."""
        self._queue.put(letter)
        if threading.get_ident() != self._reader:  # which looks before it waits again
            self._pipe.wake()

    def take(self) -> list[Any]:
        self._reader = threading.get_ident()
        self._pipe.clear()
        return [self._queue.get() for _ in range(self._queue.qsize())]

    def close(self) -> None:
        self._pipe.close()
