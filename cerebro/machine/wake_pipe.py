"""Wake a thread that waits for descriptors."""

from __future__ import annotations

import contextlib
import math
import os
import select
from collections.abc import Iterable

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
    """Return the descriptors that are readable, after waiting up to `seconds` for the first one.

    Waits without a limit if `seconds` is infinite.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    limit = None if math.isinf(seconds) else math.ceil(1000 * seconds)
    return {descriptor for descriptor, _ in poll.poll(limit)}
