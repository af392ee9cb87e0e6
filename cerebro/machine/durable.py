"""Write files that survive a power failure: synced, renamed, and with their folders synced.

Data passed to a function here is safe only once the function has returned: for example, a row of
the run store may name a state only then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator

from cerebro.machine.files import LinkError, open_plain

if sys.platform == "darwin":
    import fcntl

Path = str | os.PathLike[str]


def sync_folder(folder: Path) -> None:
    """Make additions to and removals from a folder durable; an OSError names the folder."""
    with _explain_errors(f"cannot open folder {os.fspath(folder)}"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _explain_errors(f"cannot sync folder {os.fspath(folder)}"):
            _sync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # from file systems that cannot sync folders
            raise
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content in one durable step.

    Readers see either the old bytes or the new ones, even after a power failure. After an OSError
    the old file is untouched and no temporary file is left, unless only syncing the folder failed:
    the new file is then in place, but may not be durable.
    """
    path = os.fspath(path)
    temporary = f"{path}.tmp-{os.urandom(8).hex()}"  # a dead process may have left another
    with _explain_errors(f"cannot create {temporary}"):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with _explain_errors(f"cannot write {path}"), open(fd, "wb") as file:  # noqa: PTH123
            file.write(data)
            file.flush()
            _sync(fd)
        with _explain_errors(f"cannot replace {path}"):
            os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise
    sync_folder(os.path.dirname(path) or ".")  # noqa: PTH120


def publish(files: Iterable[tuple[Path, Path]]) -> None:
    """Make complete files durable under their final names.

    `files` has their temporary and final paths; existing files are replaced. First all files are
    synced, then all are renamed, then their folders are synced. Writing starts for all files before
    the first one is waited for. Only one descriptor is open at a time.

    Raises OSError with the operation and the file. If a file could not be synced, nothing was
    renamed, and that file is lost, because a second sync may succeed without the data. If a rename
    or the sync of a folder failed, some files may have their final name, but none is known to be
    durable.
    """
    pairs = [(os.fspath(temporary), os.fspath(final)) for temporary, final in files]
    if len(pairs) > 1:
        for temporary, _ in pairs:
            with _open_for_sync(temporary) as fd:
                _begin_writing(fd)
    for temporary, _ in pairs:
        with _open_for_sync(temporary) as fd:
            _sync(fd)
    for temporary, final in pairs:
        with _explain_errors(f"cannot rename {temporary} to {final}"):
            os.replace(temporary, final)  # noqa: PTH105
    for folder in dict.fromkeys(os.path.dirname(final) for _, final in pairs):  # noqa: PTH120
        sync_folder(folder or ".")


def _begin_writing(fd: int) -> None:
    """Ask the system to start writing a file, if supported; the later sync completes this.

    On Linux this also drops pages that are already on the disk, which makes later reads a little
    slower. Otherwise, syncing many small files would cost twice as much.
    """
    if sys.platform != "darwin":
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync(fd: int) -> None:
    if sys.platform == "darwin":  # fsync does not flush the drive's cache
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


@contextlib.contextmanager
def _open_for_sync(path: str) -> Iterator[int]:
    with _explain_errors(f"cannot open {path}"):
        fd = open_plain(path, os.O_RDONLY)
    with _explain_errors(f"cannot sync {path} to disk"):
        try:
            yield fd
        finally:
            os.close(fd)  # NFS writes here, and reports a failure only once


@contextlib.contextmanager
def _explain_errors(what: str) -> Iterator[None]:
    """Add the failed operation and the file to the message of an OSError."""
    try:
        yield
    except LinkError:
        raise  # its own message is more precise
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror}") from None
