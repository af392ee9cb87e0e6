"""Where a run's store is, and what the disk under it can do."""

from __future__ import annotations

import datetime
from pathlib import Path

from cerebro.environment import is_network_file_system
from cerebro.errors import InputError
from cerebro.plain_files import check_folder, check_no_link

FILE = "run.sqlite"

BUSY_SECONDS = 60.0
"""How long a commit waits for readers and a reader for a commit, where they keep each
other waiting: without WAL."""


PARTS = ("states", "trials", "control")
"""The folders in a run's folder."""

FILES = (FILE, *(FILE + end for end in ("-wal", "-shm", "-journal", ".new")), "owner.lock")
"""The files in a run's folder that are opened or made whether they were there or not."""


def check_is_plain(folder: Path) -> None:
    """Raise CorruptDataError if something in a run's folder is a symbolic link.

    What is written to a run must not end up where somebody else's link points. The folder
    itself may be reached by a link.
    """
    for name in PARTS:
        check_folder(folder / name)
    for name in FILES:
        check_no_link(folder / name)


def store_of(folder: Path) -> Path:
    """Return the file of a run's store.

    Raises
    ------
    InputError
        If the folder holds no run.
    CorruptDataError
        If something in it is a symbolic link.
    """
    check_is_plain(folder)
    if not (folder / FILE).exists():
        lacks = f"it has no {FILE}" if folder.exists() else "there is no such folder"
        raise InputError(f"{folder} is no run: {lacks}; give the folder that a search had as run=")
    return folder / FILE


def journal_mode(folder: Path) -> str:
    """WAL, which needs memory shared between readers; a rollback journal on network disks."""
    return "DELETE" if is_network_file_system(folder) else "WAL"


def default_run_path() -> Path:
    """Return ``runs/<time>``, a folder that does not exist yet."""
    return unused_folder(Path("runs", datetime.datetime.now().strftime("%Y%m%d-%H%M%S")))


def unused_folder(base: Path) -> Path:
    """Return `base`, or ``<base>-2`` and so on if something is there."""
    folder, n = base, 2
    while folder.exists():
        folder, n = base.with_name(f"{base.name}-{n}"), n + 1
    return folder
