"""Define the tables of a run store, its files, and the migration of older versions.

SQLite's ``user_version`` holds the store's version. Readers accept every version from
`OLDEST_READABLE` on without migrating the store. The first process that opens the store for writing
migrates it, one version after the other, in one transaction.
"""

from __future__ import annotations

import datetime
import sqlite3
from collections.abc import Callable
from pathlib import Path

from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.files import check_folder, check_no_link, is_network_file_system
from cerebro.machine.installation import update_hint

SCHEMA_VERSION = 4

OLDEST_READABLE = 4

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE trials (
    number INTEGER PRIMARY KEY,
    config TEXT NOT NULL,
    status TEXT NOT NULL,
    epochs INTEGER NOT NULL,
    parent INTEGER,
    error TEXT,
    traceback TEXT,
    resumable INTEGER NOT NULL DEFAULT 0,  -- 1: the run left it unfinished
    parent_epoch INTEGER,  -- of a clone: the epoch whose state it began with
    raised TEXT  -- JSON: of the user's exception the names of its bases, and its place
);
CREATE TABLE epochs (
    trial INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    seconds REAL NOT NULL,
    state_hash TEXT NOT NULL,
    state_file TEXT,
    PRIMARY KEY (trial, epoch)
) WITHOUT ROWID;
CREATE TABLE metrics (
    trial INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    name TEXT NOT NULL,
    value REAL,  -- NULL stands for NaN, which SQLite does not have
    PRIMARY KEY (trial, epoch, name)
);
CREATE TABLE units (
    id INTEGER PRIMARY KEY,
    trial INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    part INTEGER NOT NULL,  -- of the epoch; -1: validation
    worker INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    started REAL NOT NULL,
    seconds REAL NOT NULL,
    rows INTEGER NOT NULL,
    batches INTEGER NOT NULL,
    hopped INTEGER NOT NULL,
    state_bytes INTEGER NOT NULL
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    trial INTEGER,
    text TEXT NOT NULL
);
CREATE TABLE decisions (
    id INTEGER PRIMARY KEY,
    round INTEGER NOT NULL,
    trial INTEGER NOT NULL,
    epoch INTEGER NOT NULL,  -- that was reported; of a suggestion, the next one
    decision TEXT NOT NULL,  -- continue, pause, stop; begin, resume, clone
    epochs INTEGER  -- of a suggestion: how many are to be done
);
CREATE TABLE extensions (
    trial INTEGER NOT NULL,
    position INTEGER NOT NULL,  -- units
    epochs INTEGER NOT NULL,  -- what info.epochs is from there on
    PRIMARY KEY (trial, position)
);
"""


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}
"""By version: the function that migrates to it from the version before."""


class OtherVersionError(CorruptDataError):
    """A store is intact, but of a version that this Cerebro cannot read."""


def version_of(connection: sqlite3.Connection, file: Path) -> int:
    """Return a store's version.

    Raises
    ------
    OtherVersionError
        If another Cerebro wrote the store, and this one cannot read it.
    CorruptDataError
        If it is not a store.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise OtherVersionError(
            f"{file} has store version {version}, of a newer Cerebro; this one reads "
            f"{OLDEST_READABLE} to {SCHEMA_VERSION}: update it ({update_hint()})"
        )
    if 0 < version < OLDEST_READABLE:
        raise OtherVersionError(
            f"{file} has store version {version}, of a Cerebro before its first release; this one "
            f"reads {OLDEST_READABLE} to {SCHEMA_VERSION}: repeat the search in a new folder"
        )
    if version <= 0:
        raise CorruptDataError(
            f"{file} has store version {version}: it is not a run store, or its creation was "
            "interrupted"
        )
    return version


def migrate(connection: sqlite3.Connection, file: Path) -> None:
    """Migrate a store to `SCHEMA_VERSION`, entirely or not at all.

    Parameters
    ----------
    connection
        In autocommit mode (``isolation_level=None``).
    file
        The store's file, for messages.

    Raises
    ------
    CorruptDataError
        If this version of Cerebro cannot read the store.
    """
    if version_of(connection, file) == SCHEMA_VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Read the version again: another process may have migrated the store meanwhile.
        for version in range(version_of(connection, file) + 1, SCHEMA_VERSION + 1):
            MIGRATIONS[version](connection)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


FILE = "run.sqlite"

BUSY_SECONDS = 60.0
"""How many seconds a commit waits for readers, and a reader for a commit. They block each other
only without WAL.
"""

PARTS = ("states", "trials", "control")
"""The folders in a run's folder."""

FILES = (FILE, *(FILE + end for end in ("-wal", "-shm", "-journal", ".new")), "owner.lock")
"""The files in a run's folder that are opened, or created if they are missing."""


def check_is_plain(folder: Path) -> None:
    """Raise CorruptDataError if an entry in a run's folder is a symbolic link.

    Writing to a run must not change a file that a link points to. The path to the folder itself may
    contain links.
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
        If the folder does not hold a run.
    CorruptDataError
        If an entry in it is a symbolic link.
    """
    check_is_plain(folder)
    if not (folder / FILE).exists():
        lacks = f"it has no {FILE}" if folder.exists() else "there is no such folder"
        raise InputError(
            f"{folder} is not a run: {lacks}; give the folder that was a search's run="
        )
    return folder / FILE


def journal_mode(folder: Path) -> str:
    """Return WAL or, for network disks, which cannot share memory, a rollback journal."""
    return "DELETE" if is_network_file_system(folder) else "WAL"


def default_run_path() -> Path:
    """Return ``runs/<time>``, a folder that does not exist yet."""
    return unused_folder(Path("runs", datetime.datetime.now().strftime("%Y%m%d-%H%M%S")))


def unused_folder(base: Path) -> Path:
    """Return `base`, or ``<base>-2`` and so on if `base` exists."""
    folder, n = base, 2
    while folder.exists():
        folder, n = base.with_name(f"{base.name}-{n}"), n + 1
    return folder
