"""Files and the disk under them: plain files, failures to write, file systems, free space.

Such a folder may hold anything: a link to a file elsewhere, a pipe that nobody writes into,
gigabytes where a page is expected, JSON that is nested without end. One rule keeps all of that
out. *The folder itself may be reached by any path, links included: the user chose it. What lies in
it is plain*: names without a slash and without ``..``, that are files or folders themselves and
not links to some.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.resources import available_memory

MAX_NAME_BYTES = 255

MAX_DIGITS = 400  # of a whole number; Python's own limit is ten times that, where it has one

_NEVER_WAIT = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


class LinkError(CorruptDataError, OSError):
    """A symbolic link lies in the place of a file or folder that is to be opened or made."""


def path_of(argument: str, value: Any) -> Path:
    """The path that an argument is; InputError for what is none."""
    try:
        return Path(value)
    except TypeError:
        raise InputError(f"{argument} must be a path, not {value!r}") from None


def is_plain_name(name: object) -> bool:
    """Whether `name` can only mean something in the folder it is looked for in."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and "\0" not in name
        and len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES
    )


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Read a whole file.

    Raises
    ------
    FileNotFoundError
        It is not there.
    CorruptDataError
        It is a link or no regular file, or has more than `limit` bytes.
    """
    fd = open_plain(path, os.O_RDONLY)
    with open(fd, "rb") as file:  # noqa: PTH123
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise CorruptDataError(f"{path} is no regular file")
        if limit is None:
            return file.read()
        content = file.read(limit + 1) if info.st_size <= limit else None
        if content is None or len(content) > limit:
            raise CorruptDataError(f"{path} is larger than any such file: more than {limit} bytes")
        return content


def open_plain(path: str | os.PathLike[str], flags: int) -> int:
    """`os.open` of a file that must not be a link, and never waits for a pipe's other end.

    Raises
    ------
    LinkError
        It is a link.
    OSError
        It cannot be opened.
    """
    try:
        return os.open(path, flags | _NEVER_WAIT, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link(path) from None
        raise


def check_folder(path: Path) -> None:
    """Raise CorruptDataError if `path` is a link or no folder; nothing if it is not there."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(info.st_mode):
        raise _link(path)
    if not stat.S_ISDIR(info.st_mode):
        raise CorruptDataError(f"{path} is no folder")


def check_no_link(path: Path) -> None:
    """Raise LinkError if `path` is a link."""
    if path.is_symlink():
        raise _link(path)


def load_json(content: bytes, path: str | os.PathLike[str]) -> Any:
    """Parse JSON strictly: UTF-8, no key twice, no NaN, no number of endless digits.

    Raises
    ------
    CorruptDataError
        It is cut or damaged; the message names `path`.
    """
    try:
        return json.loads(
            content.decode(),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_int=_whole_number,
            parse_float=_finite_number,
        )
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{path} is cut or damaged: {error}") from None


def _link(path: str | os.PathLike[str]) -> LinkError:
    return LinkError(
        f"{os.fspath(path)} is a symbolic link, and those are not followed here: put what it "
        "points to in its place"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a field is given twice")
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite_number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number beyond all floats")
    return value


NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

FULL = (errno.ENOSPC, errno.EDQUOT)


class StorageError(OSError):
    """The run's own files cannot be written; no trial is to blame."""


class ExhaustedError(StorageError):
    """This process has no file descriptor left for the run's files: another one has."""


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Turn an OSError into a StorageError that says what to do.

    Raises
    ------
    StorageError
        Or ExhaustedError, where all descriptors are taken.
    """
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        if error.errno in NO_DESCRIPTORS:
            raise ExhaustedError(
                f"the worker process has run out of file descriptors ({cause}): is a file, a "
                "socket or a subprocess left open in every batch?"
            ) from error
        raise StorageError(
            f"{cause} (the run's folder must be writable and needs room for states: free some, "
            "or choose another run= or state_dir=)"
        ) from error


def is_full(error: BaseException) -> bool:
    """Whether a disk is full, wherever that was noticed: in a print, say."""
    return isinstance(error, OSError) and error.errno in FULL


NETWORK_FILE_SYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "smb2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
    ]
)


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system that holds `path` (which need not exist yet).

    ``"unknown"`` where the system does not tell.
    """
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return "unknown"
    best, kind = "", "unknown"
    for mount, mounted in mounts(table):
        inside = place == Path(mount) or Path(mount) in place.resolve().parents
        if inside and len(mount) >= len(best):
            best, kind = mount, mounted
    return kind


def mounts(table: bytes) -> Iterator[tuple[str, str]]:
    """Read ``/proc/self/mountinfo``: the place of every mount and the type of its file system."""
    for line in table.splitlines():
        left, _, right = line.partition(b" - ")
        place = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), left.split()[4])
        yield os.fsdecode(place), os.fsdecode(right.split()[0])


def is_network_file_system(path: str | os.PathLike[str]) -> bool:
    """Tell whether `path` is on a network file system, where locks and mmap are less sure."""
    return file_system(path) in NETWORK_FILE_SYSTEMS


MEMORY_FILE_SYSTEMS = frozenset(["tmpfs", "ramfs", "hugetlbfs"])


def free_bytes(folder: Path) -> int:
    """Bytes that can be written to a folder's file system; memory too where it is one."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    return min(free, available_memory()) if is_memory(folder) else free


def is_memory(folder: Path) -> bool:
    """Whether what is written to a folder takes memory and no disk."""
    return file_system(folder) in MEMORY_FILE_SYSTEMS


def device_of(folder: Path) -> int:
    return folder.stat().st_dev
