"""Determine the owner of a run: the one process that may train it.

A process that trains a run holds a lock on ``owner.lock`` in the run's folder; the file also names
the process: ``{"pid": 4711, "host": "node7"}``. The lock (POSIX, on the whole file) ends with its
process, no matter how the process dies, and forks do not inherit it. On a network file system a
lock may be visible on one host only. There, the owner also renews the file's modification time; an
owner on a different host counts as dead if this time is old.

A process loses its locks on a file when it closes any descriptor of that file. For a run that this
process itself trains, the answers therefore come from memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cerebro.errors import InputError
from cerebro.machine.files import is_network_file_system, open_plain

FILE = "owner.lock"
RENEW_SECONDS = 10.0
STALE_SECONDS = 60.0
"""The file's age after which an owner on a different host counts as dead."""

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True)
class Process:
    """A process that trains a run."""

    pid: int
    host: str

    @classmethod
    def current(cls) -> Process:
        return cls(os.getpid(), os.uname().nodename)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Owner:
    """The right to train a run; see the module's docstring. Call `take` to get it."""

    def __init__(self, folder: Path, fd: int, key: tuple[int, int]) -> None:
        self.process = Process.current()
        self._folder = folder
        self._fd = fd
        self._key = key
        self._released = threading.Event()
        if is_network_file_system(folder):
            threading.Thread(target=self._renew, name="cerebro-owner", daemon=True).start()

    @classmethod
    def take(cls, folder: Path) -> Owner:
        """Become the owner of a run.

        Raises
        ------
        InputError
            If this process or another one already trains the run; the message names the process.
        OSError
            If the folder cannot be written.
        """
        with _guard:
            key = _key_of(folder)
            if _mine(key) is not None:
                raise InputError(_refusal(folder, "this process"))
            fd = open_plain(folder / FILE, os.O_RDWR | os.O_CREAT)
            try:
                if not _lock(fd) or _lives_elsewhere(folder, fd, writable=True):
                    raise InputError(_refusal(folder, str(_read(fd) or "another process")))
                _write(fd, json.dumps(asdict(Process.current())))
                owner = _owners[key] = cls(folder.absolute(), fd, key)
            except BaseException:
                os.close(fd)
                raise
        return owner

    def release(self) -> None:
        """Let other processes train the run. Further calls do nothing."""
        with _guard:
            if self._released.is_set() or self.process.pid != os.getpid():
                return
            self._released.set()
            _owners.pop(self._key, None)
            with contextlib.suppress(OSError):
                _write(self._fd, "")
            os.close(self._fd)

    def _renew(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # the folder may be unreachable for some time
                os.utime(self._fd)

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def owner_of(folder: Path) -> Process | None:
    """Return the process that is training a run, or None. Does not take the lock."""
    with _guard, contextlib.suppress(OSError):
        owner = _mine(_key_of(folder))
        if owner is not None:
            return owner.process
        with _opened(folder / FILE) as fd:
            if _is_locked(fd) or _lives_elsewhere(folder, fd, writable=False):
                return _read(fd) or Process(0, "another host")
    return None


_owners: dict[tuple[int, int], Owner] = {}
"""Owners in this process or inherited by a fork, by device and inode of the folder."""
_guard = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_guard=threading.Lock()))


def _key_of(folder: Path) -> tuple[int, int]:
    info = folder.stat()
    return info.st_dev, info.st_ino


def _mine(key: tuple[int, int]) -> Owner | None:
    owner = _owners.get(key)
    return owner if owner is not None and owner.process.pid == os.getpid() else None


def _refusal(folder: Path, who: str) -> str:
    return (
        f"{folder} is being trained by {who}: wait until it ends, or stop it first with "
        f"python -m cerebro stop {shlex.quote(str(folder))}"
    )


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    fd = open_plain(file, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Take the lock; return False if another process has it.

    On a file system without locks, return False if the owner named in the file is alive on this
    host.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in _NO_LOCKS:
            return not _lives_here(fd)
        raise
    return True


def _is_locked(fd: int) -> bool:
    """Return whether another process has the lock. Does not take it."""
    # struct flock, of type F_WRLCK, from 0 to the end.
    layout = "qqihh" if sys.platform == "darwin" else "hhqqi"
    fields = {"l_type": fcntl.F_WRLCK, "l_whence": os.SEEK_SET, "l_start": 0, "l_len": 0}
    names = ["l_type", "l_whence", "l_start", "l_len", "l_pid"]
    if sys.platform == "darwin":
        names = ["l_start", "l_len", "l_pid", "l_type", "l_whence"]
    request = struct.pack(layout, *(fields.get(name, 0) for name in names))
    try:
        answer = struct.unpack(layout, fcntl.fcntl(fd, fcntl.F_GETLK, request))
    except OSError:
        return _lives_here(fd)
    return bool(answer[names.index("l_type")] != fcntl.F_UNLCK)


def _read(fd: int) -> Process | None:
    """Return the process that wrote the file; None if the file is empty or incomplete."""
    try:
        found = json.loads(os.pread(fd, 4096, 0))
        process = Process(int(found["pid"]), str(found["host"]))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return (
        process if 0 < process.pid < 2**31 else None
    )  # kill() takes other numbers as groups of processes


def _write(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)


def _lives_here(fd: int) -> bool:
    """Return whether the process named in the file runs on this host; used without locks."""
    process = _read(fd)
    if process is None or process.host != os.uname().nodename or process.pid == os.getpid():
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _lives_elsewhere(folder: Path, fd: int, *, writable: bool) -> bool:
    """Return whether an owner on another host, whose lock is not visible here, is still alive.

    It is alive if it has renewed the file recently.
    """
    process = _read(fd)
    if process is None or process.host == os.uname().nodename:
        return False
    if not is_network_file_system(folder):
        return False  # a moved folder: a lock would be visible here
    return _file_time(folder, writable=writable) - os.fstat(fd).st_mtime < STALE_SECONDS


def _file_time(folder: Path, *, writable: bool) -> float:
    """Return the time of the clock that sets the modification times of the folder's files."""
    if writable:
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    return time.time()
