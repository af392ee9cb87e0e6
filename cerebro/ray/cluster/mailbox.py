"""What other threads tell the coordinator's, with a descriptor that wakes it."""

from __future__ import annotations

import contextlib
import os
import queue
from typing import Any


class Mailbox:
    """A queue that can be waited for beside other descriptors."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False

    def fileno(self) -> int:
        """Readable while there is something to take."""
        return self._read

    def put(self, letter: Any) -> None:
        """Add something; from any thread, also after the end."""
        self._queue.put(letter)
        if not self._closed:
            with contextlib.suppress(OSError):  # full: the reader will wake anyway
                os.write(self._write, b"x")

    def take(self) -> list[Any]:
        """Return all that there is, in order."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
        letters = []
        while True:
            try:
                letters.append(self._queue.get_nowait())
            except queue.Empty:
                return letters

    def close(self) -> None:
        # The writing end stays open until nobody can have it in hand any more: a number
        # that was given to another file meanwhile would be written to.
        self._closed = True
        os.close(self._read)

    def __del__(self) -> None:
        try:
            os.close(self._write)
        except (OSError, AttributeError):
            return  # when Python ends, `os` may be None
