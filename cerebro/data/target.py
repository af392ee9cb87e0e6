"""Find the folder in which a dataset is made: the one that a path leads to."""

from __future__ import annotations

import os
from pathlib import Path

from cerebro.errors import InputError
from cerebro.machine.files import is_mount_point


def real_target(path: Path) -> Path:
    """Return the folder that a path leads to through symbolic links; it need not exist.

    A dataset is made in a folder beside its target, and renamed at the end. A rename replaces an
    empty folder, but neither a link to one nor a mount point. So the folder must be beside the
    target itself, which is also on the disk that the user chose.

    Raises InputError if the path is a link that leads nowhere, or an empty mount point.
    """
    target = Path(os.path.realpath(path))
    if path.is_symlink() and not target.exists():
        raise InputError(
            f"'{path}' is a link to '{target}', which does not exist: make that folder, or choose "
            "another path"
        )
    if is_empty_folder(target) and is_mount_point(target):
        raise InputError(
            f"'{path}' is a mount point, which a dataset cannot replace: give a folder in it, "
            f"such as '{path / 'data'}'"
        )
    return target


def is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
