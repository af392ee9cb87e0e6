"""A pipe that wakes a thread which waits for descriptors."""

from __future__ import annotations

import contextlib
import os


class WakePipe:
    """Readable from `wake` until `clear`.

    ``select`` takes it like any other descriptor. `wake` may be called from any thread, also
    after `close`: the writing end stays open until the object is deleted, because the number of
    a closed descriptor may by then belong to a different file.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._read

    def wake(self) -> None:
        """Wake the thread that waits."""
        with contextlib.suppress(OSError):  # full: it wakes anyway; or closed
            os.write(self._write, b"x")

    def clear(self) -> None:
        """Make the pipe unreadable again."""
        with contextlib.suppress(OSError):
            while os.read(self._read, 4096):
                pass

    def close(self) -> None:
        """Close the reading end."""
        fd, self._read = self._read, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        try:
            self.close()
            os.close(self._write)
        except (OSError, AttributeError, TypeError):
            return  # when Python ends, `os` may be None
