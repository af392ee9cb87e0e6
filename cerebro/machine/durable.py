"""Write files that survive a power failure: synced, renamed, and with their folders synced.

Data passed to a function here is safe only once the function has returned: for example, a row of
the run store may name a state only then.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator

from cerebro.machine.disk import AnyPath, Disk
from cerebro.machine.files import LinkError
from cerebro.machine.local import LOCAL


def sync_folder(folder: AnyPath, disk: Disk = LOCAL.disk) -> None:
    """Make additions to and removals from a folder durable; an OSError names the folder."""
    with _explain_errors(f"cannot sync folder {os.fspath(folder)}"):
        try:
            disk.sync_folder(folder)
        except OSError as error:
            if error.errno != errno.EINVAL:  # from file systems that cannot sync folders
                raise


def replace_file(path: AnyPath, data: bytes, disk: Disk = LOCAL.disk) -> None:
    """Replace a file's content in one durable step.

    Readers see either the old bytes or the new ones, even after a power failure. After an OSError
    the old file is untouched and no temporary file is left, unless only syncing the folder failed:
    the new file is then in place, but may not be durable.
    """
    path = os.fspath(path)
    temporary = f"{path}.tmp-{os.urandom(8).hex()}"  # a dead process may have left another
    try:
        with _explain_errors(f"cannot write {path}"):
            disk.write_new(temporary, data, 0o666)
            disk.sync(temporary)
        with _explain_errors(f"cannot replace {path}"):
            disk.rename(temporary, path)
    except FileExistsError:
        raise  # the file of that name belongs to another process
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove(temporary)
        raise
    sync_folder(os.path.dirname(path) or ".", disk)  # noqa: PTH120


def publish(files: Iterable[tuple[AnyPath, AnyPath]], disk: Disk = LOCAL.disk) -> None:
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
            with _explain_errors(f"cannot open {temporary}"):
                disk.begin_writing(temporary)
    for temporary, _ in pairs:
        with _explain_errors(f"cannot sync {temporary} to disk"):
            disk.sync(temporary)
    for temporary, final in pairs:
        with _explain_errors(f"cannot rename {temporary} to {final}"):
            disk.rename(temporary, final)
    for folder in dict.fromkeys(os.path.dirname(final) for _, final in pairs):  # noqa: PTH120
        sync_folder(folder or ".", disk)


@contextlib.contextmanager
def _explain_errors(what: str) -> Iterator[None]:
    """Add the failed operation and the file to the message of an OSError."""
    try:
        yield
    except LinkError:
        raise  # its own message is more precise
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror}") from None
