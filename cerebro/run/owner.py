"""Determine the owner of a run: the one process that may train it.

The owner holds a POSIX lock on ``owner.lock`` in the run's folder, which also names it: ``{"pid":
4711, "host": "node7", "start": ...}``. The lock ends with the process, and forks do not inherit it.
A network file system may show a lock on one host only. There, the owner also renews the file's
modification time; an owner on a different host counts as dead if this time is old.

A lock can be lost: with its file, when the process closes any descriptor of the file, or on a file
system that grants every lock. So on its own host an owner is also known by its mark (`Beacon`) and
by the number and start in the file. At every commit it makes a missing file again. For a run of
this process, answers come from memory: opening and closing the file would lose the lock.

The mark is an abstract Unix socket (Linux only) with the folder's device and inode as its name. The
kernel gives a name to one process at a time and frees it when the process ends. Nobody can delete
it. Containers with their own network do not see it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cerebro.errors import InputError
from cerebro.machine.files import is_network_file_system, open_plain
from cerebro.machine.resources import start_of

Key = tuple[int, int]
"""The device and inode of a run's folder."""

_PEER = struct.Struct("iII")  # struct ucred: process, user, group
_WAITING = 4096
"""How many processes may ask for the owner's number between two commits."""


class Taken(Exception):
    """Another process of this host has the mark; the argument is its number, 0 if unknown."""


class Beacon:
    """The mark of one run; see the module's docstring. Raises `Taken` if another process has it."""

    def __init__(self, folder: Path, key: Key) -> None:
        self._open = contextlib.ExitStack()
        self._mark: socket.socket | None = None
        if sys.platform != "linux":
            return
        mark = None
        try:
            # While the folder is open, no new folder gets its inode.
            self._open.callback(os.close, os.open(folder, os.O_PATH | os.O_CLOEXEC))
            mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            mark.bind(_socket_name(key))
            mark.listen(_WAITING)
            mark.setblocking(False)
            self._mark = self._open.enter_context(mark)
        except OSError as error:
            if mark is not None:
                mark.close()
            pid = find_holder(key) if error.errno == errno.EADDRINUSE else None
            if pid is not None:
                self.close()
                raise Taken(pid) from None

    def answer(self) -> None:
        """Release the processes that have asked for the owner's number."""
        with contextlib.suppress(OSError):
            while self._mark is not None:
                self._mark.accept()[0].close()

    def close(self) -> None:
        """Remove the mark, or this fork's copy of it."""
        self._open.close()


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


FILE = "owner.lock"
RENEW_SECONDS = 10.0
STALE_SECONDS = 60.0
"""The file's age after which an owner on a different host counts as dead."""

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True)
class Process:
    pid: int
    host: str
    start: str | None = field(default=None, compare=False)
    """When it began (`start_of`); None if unknown."""

    @classmethod
    def current(cls) -> Process:
        return cls(os.getpid(), os.uname().nodename, start_of(os.getpid()))

    def is_certainly_alive(self) -> bool:
        """Return whether this very process, not one with its number, runs on this host."""
        is_other = self.host == os.uname().nodename and self.pid != os.getpid()
        return is_other and self.start is not None and start_of(self.pid) == self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Owner:
    """The right to train a run; see the module's docstring. Call `take` to get it."""

    def __init__(self, folder: Path, fd: int, key: Key, beacon: Beacon) -> None:
        self.process = Process.current()
        self._folder = folder
        self._fd = fd
        self._key = key
        self._beacon = beacon
        self._released = threading.Event()
        if is_network_file_system(folder):
            threading.Thread(target=self._renew, name="cerebro-owner", daemon=True).start()

    @classmethod
    def take(cls, folder: Path) -> Owner:
        """Become the owner of a run.

        Raise InputError, which names the process, if one already trains the run; NoLocksError if
        the file system has no locks; and OSError if the folder cannot be written.
        """
        with _guard:
            key = _key_of(folder)
            if _find_owner_here(key) is not None:
                raise LiveRunError(_refusal(folder, "this process"))
            try:
                beacon = Beacon(folder, key)
            except Taken as taken:
                raise LiveRunError(_refusal(folder, _name_process(folder, *taken.args))) from None
            try:
                fd = _locked_file(folder)
            except BaseException:
                beacon.close()
                raise
            owner = _owners[key] = cls(folder.absolute(), fd, key, beacon)
        return owner

    @classmethod
    def take_over(cls, folder: Path) -> Owner:
        """Become the owner of a run that exists already; errors as for `take`."""
        try:
            return cls.take(folder)
        except OSError as error:
            if error.errno not in _DENIED:
                raise
            raise PermissionError(
                f"this user cannot write {error.filename or folder} ({error.strerror}), so cannot "
                "train the run: have its owner resume it, get the right to write to the whole "
                "folder, or resume a copy of it"
            ) from error

    def keep(self) -> None:
        """Make the lock's file again if it is missing; called at every commit.

        Raises InputError if another process has taken the run.
        """
        with _guard:
            if self._released.is_set() or self.process.pid != os.getpid():
                return
            self._beacon.answer()
            with contextlib.suppress(OSError):  # the store says what is wrong with the folder
                if _key_of(self._folder) != self._key:
                    return
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat((self._folder / FILE).lstat(), os.fstat(self._fd)):
                        return
                old, self._fd = self._fd, _locked_file(self._folder)
                os.close(old)

    def release(self) -> None:
        """Let other processes train the run. Further calls do nothing."""
        with _guard:
            if self._released.is_set() or self.process.pid != os.getpid():
                return
            self._released.set()
            _owners.pop(self._key, None)
            with contextlib.suppress(OSError):
                _write_text(self._fd, "")
            os.close(self._fd)
            self._beacon.close()

    def _renew(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            # The folder may be unreachable for some time.
            with _guard, contextlib.suppress(OSError):
                os.utime(self._fd)

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def owner_of(folder: Path) -> Process | None:
    """Return the process that is training a run, or None. Does not take the lock."""
    with _guard, contextlib.suppress(OSError):
        key = _key_of(folder)
        owner = _find_owner_here(key)
        if owner is not None:
            return owner.process
        with contextlib.suppress(OSError), _open_file(folder / FILE) as fd:
            if _is_locked(fd, folder) or _is_alive(folder, fd, writable=False):
                return _read_process(fd) or Process(0, "another host")
        pid = find_holder(key)
        if pid is not None:
            return Process(pid, os.uname().nodename)
    return None


def check_locks(folder: Path) -> None:
    """Raise NoLocksError if SQLite cannot read a run because its file system has no locks."""
    with _guard:
        try:
            if _find_owner_here(_key_of(folder)) is None:
                with _open_file(folder / FILE) as fd:
                    _is_locked(fd, folder)
        except NoLocksError:
            raise
        except OSError:  # reading the store says what is wrong
            return


class LiveRunError(InputError):
    """Raised if another process, or this one, trains the run already."""


class NoLocksError(OSError):
    """Raised if a run is on a file system without locks, which its store needs."""


_owners: dict[Key, Owner] = {}
"""Owners in this process or inherited by a fork, by device and inode of the folder."""
_guard = threading.Lock()


def _leave_to_parent() -> None:
    """In a fork, close the copies of the marks, which would outlive their owner."""
    global _guard
    _guard = threading.Lock()
    for owner in _owners.values():
        owner._beacon.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _key_of(folder: Path) -> Key:
    info = folder.stat()
    return info.st_dev, info.st_ino


def _find_owner_here(key: tuple[int, int]) -> Owner | None:
    owner = _owners.get(key)
    return owner if owner is not None and owner.process.pid == os.getpid() else None


def _refusal(folder: Path, who: str) -> str:
    return (
        f"{folder} is being trained by {who}: wait until it ends, or stop it first with "
        f"python -m cerebro stop {shlex.quote(str(folder))}"
    )


@contextlib.contextmanager
def _open_file(file: Path) -> Iterator[int]:
    fd = open_plain(file, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _locked_file(folder: Path) -> int:
    """Return a descriptor of the lock's file, which this process has locked; see `Owner.take`."""
    fd = open_plain(folder / FILE, os.O_RDWR | os.O_CREAT)
    try:
        if not _take_lock(fd, folder) or _is_alive(folder, fd, writable=True):
            raise LiveRunError(_refusal(folder, str(_read_process(fd) or "another process")))
        _write_text(fd, json.dumps(asdict(Process.current())))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _take_lock(fd: int, folder: Path) -> bool:
    """Take the lock; return False if another process has it."""
    with _explain_missing_locks(folder):
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
    return True


@contextlib.contextmanager
def _explain_missing_locks(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise NoLocksError(
            f"the file system of {folder} has no locks, which a run needs: keep runs on a local "
            "disk, copy this one there, or mount the file system with locks (Lustre: -o flock; "
            "NFS: without nolock)"
        ) from error


def _is_locked(fd: int, folder: Path) -> bool:
    """Return whether another process has the lock, without taking it; may raise NoLocksError."""
    # struct flock, of type F_WRLCK, from 0 to the end.
    layout, lock, type_at = "hhqqi", (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0), 0
    if sys.platform == "darwin":
        layout, lock, type_at = "qqihh", (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET), 3
    request = struct.pack(layout, *lock)
    with _explain_missing_locks(folder):
        answer = struct.unpack(layout, fcntl.fcntl(fd, fcntl.F_GETLK, request))
    return bool(answer[type_at] != fcntl.F_UNLCK)


def _read_process(fd: int) -> Process | None:
    """Return the process that wrote the file; None if the file is empty or incomplete."""
    try:
        fields = json.loads(os.pread(fd, 4096, 0))
        start = fields.get("start")
        process = Process(int(fields["pid"]), str(fields["host"]), start and str(start))
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return None
    # kill() takes other numbers as groups of processes.
    return process if 0 < process.pid < 2**31 else None


def _write_text(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)


def _name_process(folder: Path, pid: int) -> str:
    """Return a process of this host as text; for 0, look its number up in the file."""
    if pid > 0:
        return str(Process(pid, os.uname().nodename))
    with contextlib.suppress(OSError), _open_file(folder / FILE) as fd:
        return str(_read_process(fd) or "another process")
    return "another process"


def _is_alive(folder: Path, fd: int, *, writable: bool) -> bool:
    """Return whether the process named in the file lives, although its lock is not visible."""
    process = _read_process(fd)
    if process is None or process.is_certainly_alive():
        return process is not None
    if process.host == os.uname().nodename or not is_network_file_system(folder):
        return False  # a moved folder: a lock would be visible here
    now = time.time()
    if writable:  # the clock that sets the modification times of the folder's files
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            now = os.fstat(file.fileno()).st_mtime
    return now - os.fstat(fd).st_mtime < STALE_SECONDS  # has it been renewed recently?
