"""Access files and the disk below them: plain files, write errors, file systems, free space.

A run's folder may contain anything: a link to a file elsewhere, a pipe without a writer, gigabytes
where a page is expected, endlessly nested JSON. One rule prevents all of these problems. The user
chooses the folder, by any path, even through links. Its content must be plain: files or folders but
no links, with names that contain neither a slash nor ``..``.
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

MAX_DIGITS = 400  # of an integer; Python's own limit, if any, is ten times this

_NEVER_WAIT = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


class LinkError(CorruptDataError, OSError):
    """Raised if a symbolic link is in place of a file or folder to be opened or created."""


def expand_path(path: str) -> str:
    """Replace ``~`` and variables such as ``$HOME`` in a path, as a shell would.

    Variables that are not set stay as they are, and so does a path that exists as written.
    """
    if os.path.lexists(path):
        return path
    return os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111


def path_of(argument: str, value: Any) -> Path:
    """Convert an argument to a Path, `expand_path`; raise InputError if it is not a path."""
    if isinstance(value, str) and "://" in value:
        raise InputError(
            f"{argument} must be a path on this machine, not the URL {value!r}: datasets may be "
            "in object storage, and cerebro.resume() takes the URL of a run's copy"
        )
    try:
        text = expand_path(os.fspath(value))
        path = Path(text)
    except TypeError:
        raise InputError(f"{argument} must be a path, not {value!r}") from None
    # Path drops the "./" of "./~", which would then be expanded to the home folder.
    is_bare = str(path).startswith("~") and not text.startswith("~")
    return path.absolute() if is_bare else path


def is_plain_name(name: object) -> bool:
    """Return whether `name` can refer only to an entry of the folder in which it is looked up."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and "\0" not in name
        and len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES
    )


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Read a regular file of up to `limit` bytes; raise OSError, or CorruptDataError for others."""
    fd = open_plain(path, os.O_RDONLY)
    with open(fd, "rb") as file:  # noqa: PTH123
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise CorruptDataError(f"{path} is not a regular file")
        if limit is None:
            return file.read()
        content = file.read(limit + 1) if info.st_size <= limit else None
        if content is None or len(content) > limit:
            raise CorruptDataError(f"{path} is too large: more than {limit} bytes")
        return content


def open_plain(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> int:
    """Open a file as `os.open` does, but raise LinkError for a link, and never wait for a pipe."""
    try:
        return os.open(path, flags | _NEVER_WAIT, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link_error(path) from None
        raise


def check_folder(path: Path) -> None:
    """Raise CorruptDataError if `path` exists but is a link or is not a folder."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(info.st_mode):
        raise _link_error(path)
    if not stat.S_ISDIR(info.st_mode):
        raise CorruptDataError(f"{path} is not a folder")


def check_no_link(path: Path) -> None:
    if path.is_symlink():
        raise _link_error(path)


def load_json(content: bytes, path: str | os.PathLike[str]) -> Any:
    """Parse JSON strictly: only UTF-8, no duplicate keys, no NaN, no extremely long numbers.

    Raises CorruptDataError, which names `path`, if the content is truncated or damaged.
    """
    try:
        return json.loads(
            content.decode(),
            object_pairs_hook=_check_unique,
            parse_constant=_refuse_constant,
            parse_int=_whole_number,
            parse_float=_finite_number,
        )
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{path} is cut or damaged: {error}") from None


def _link_error(path: str | os.PathLike[str]) -> LinkError:
    return LinkError(
        f"{os.fspath(path)} is a symbolic link, which is not followed here: replace it with its "
        "target"
    )


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a field occurs twice")
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number with {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


def _finite_number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number too large for a float")
    return value


class StorageError(OSError):
    """Raised if the run's own files cannot be written; no trial is to blame."""


class ExhaustedError(StorageError):
    """Raised if this process has no file descriptors left; other workers may have some."""


@contextlib.contextmanager
def explain_storage_errors() -> Iterator[None]:
    """Convert an OSError into a StorageError whose message says how to fix the problem."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        cause = error.strerror or str(error)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ExhaustedError(
                f"the worker process has run out of file descriptors ({cause}): is a file, a "
                "socket or a subprocess left open in every batch?"
            ) from error
        raise StorageError(
            f"{cause} (the run's folder must be writable and have room for states: free some "
            "space, or choose another run= or state_dir=)"
        ) from error


def is_full(error: BaseException) -> bool:
    """Return whether an error means a full disk, wherever it occurred, for example in a print."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


NETWORK_FILE_SYSTEMS = (
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs",
    "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb2", "smb3", "smbfs", "vboxsf",
    "virtiofs",
)  # fmt: skip


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system that holds `path`, which need not exist; or "unknown"."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    best, kind = "", "unknown"
    for mount, mounted in parse_mounts(_read_mounts()):
        inside = place == Path(mount) or Path(mount) in place.resolve().parents
        if inside and len(mount) >= len(best):
            best, kind = mount, mounted
    return kind


def _read_mounts() -> bytes:
    try:
        return Path("/proc/self/mountinfo").read_bytes()
    except OSError:  # not Linux
        return b""


def parse_mounts(table: bytes) -> Iterator[tuple[str, str]]:
    """Parse ``/proc/self/mountinfo``: yield each mount point and its file system type."""
    for line in table.splitlines():
        fields, _, right = line.partition(b" - ")
        place = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), fields.split()[4])
        yield os.fsdecode(place), os.fsdecode(right.split()[0])


def is_mount_point(path: Path) -> bool:
    """Return whether something is mounted at `path`, such as another folder of its file system."""
    if path.is_mount():
        return True
    return os.path.realpath(path) in (place for place, _ in parse_mounts(_read_mounts()))


def is_network_file_system(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is on a network file system, where locks and mmap are less reliable."""
    return file_system(path) in NETWORK_FILE_SYSTEMS


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's file system; on tmpfs, at most the available memory."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    return min(free, available_memory()) if is_memory(folder) else free


def is_memory(folder: Path) -> bool:
    return file_system(folder) in ("tmpfs", "ramfs", "hugetlbfs")
