"""Makes the states durable that rows name: a row must never be ahead of its file."""

from __future__ import annotations

import os
from pathlib import Path

from cerebro import _core


def publish_states(pairs: list[tuple[Path, Path]]) -> None:
    """Make complete files durable under their final names.

    Parameters
    ----------
    pairs
        Temporary and final path of each.

    Raises
    ------
    OSError
        Naming the file. After a failing fsync the file is to be taken for lost,
        whatever a second fsync says: the kernel has dropped what it could not write.
    """
    for temporary, _ in pairs:
        fd = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(temporary)) from error
        finally:
            os.close(fd)
    for temporary, final in pairs:
        temporary.rename(final)
    for folder in {str(final.parent) for _, final in pairs}:
        _core.fsync_directory(folder)
