"""Mark a run as owned by a process of this host, without a file.

The mark is an abstract Unix socket (Linux only) with the folder's device and inode as its name. The
kernel gives a name to one process at a time and frees it when the process ends. Nobody can delete
it, and it needs no file locks. Containers with their own network do not see it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from pathlib import Path

from cerebro.machine.processes import start_of

Key = tuple[int, int]
"""The device and inode of a run's folder."""

_PEER = struct.Struct("iII")  # struct ucred: process, user, group
_WAITING = 4096
"""How many processes may ask for the owner's number between two commits."""


class Taken(Exception):
    """Raised if another process of this host has the mark; `pid` is its number, 0 if unknown."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pid = pid


class Beacon:
    """The mark of one run; see the module's docstring. Raises `Taken` if another process has it."""

    def __init__(self, folder: Path, key: Key) -> None:
        self._open: list[socket.socket | int] = []
        if sys.platform != "linux":
            return
        mark = None
        try:
            # While the folder is open, no new folder gets its inode.
            self._open.append(os.open(folder, os.O_PATH | os.O_CLOEXEC))
            mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            mark.bind(_socket_name(key))
            mark.listen(_WAITING)
            mark.setblocking(False)
            self._open.append(mark)
        except OSError as error:
            if mark is not None:
                mark.close()
            pid = find_holder(key) if error.errno == errno.EADDRINUSE else None
            if pid is not None:
                self.close()
                raise Taken(pid) from None

    def answer(self) -> None:
        """Release the processes that have asked for the owner's number."""
        for mark in self._open:
            with contextlib.suppress(OSError):
                while not isinstance(mark, int):
                    mark.accept()[0].close()

    def close(self) -> None:
        """Remove the mark, or this fork's copy of it."""
        while self._open:
            mark = self._open.pop()
            if isinstance(mark, int):
                os.close(mark)
            else:
                mark.close()


def find_holder(key: Key) -> int | None:
    """Return the ID of the process that holds a run's mark: 0 if unknown, None if none does."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_socket_name(key))
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        except BlockingIOError:  # more have asked than it has answered
            return 0
        except OSError:
            return None
    pid = int(_PEER.unpack(credentials)[0])
    # A fork made by C code may keep the mark of a process that has ended.
    return pid if pid == 0 or start_of(pid) is not None else None


def _socket_name(key: Key) -> str:
    return "\0cerebro-run-{}-{}".format(*key)
