"""Failures to write the run's own files, told from those of the user's code."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

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
