"""Define the tables of a run store, its version, its files and how values are encoded.

A store whose version, SQLite's ``user_version``, is not `SCHEMA_VERSION` is refused.
"""

from __future__ import annotations

import json
import math
import sqlite3
import sys
from pathlib import Path
from typing import Any

from cerebro.errors import CorruptDataError, InputError, one_line
from cerebro.machine.disk import Disk
from cerebro.machine.imports import explain_other_version
from cerebro.run.records import NOTHING_RAISED, Raised

SCHEMA_VERSION = 8
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
    raised TEXT,  -- JSON: of the user's exception the names of its bases, and its place
    origin TEXT NOT NULL DEFAULT 'searcher',  -- 'user': a command added it
    stream INTEGER,  -- the number in its seed and order; NULL: its own number
    began REAL,  -- when its first unit was dispatched, in seconds since the run's start
    ended REAL  -- when it ended for good; NULL while it is open
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
CREATE TABLE actions (
    id INTEGER PRIMARY KEY,
    request TEXT NOT NULL UNIQUE,
    time REAL NOT NULL,  -- seconds since the run's start
    verb TEXT NOT NULL,  -- clone, add, extend, stop, pause, unpause
    trial INTEGER,  -- NULL: the whole run; of an added trial also NULL
    child INTEGER,  -- the trial that it added
    epoch INTEGER,  -- of a warm clone: the parent's epoch with whose state it began
    changes TEXT,  -- JSON: the settings that a clone changes, or all of an added trial
    epochs INTEGER,  -- the target of the clone, the added or the extended trial
    sender TEXT NOT NULL,
    outcome TEXT NOT NULL  -- 'done', perhaps ': ' and a note; or 'refused: ' and why
);
"""


class OtherVersionError(CorruptDataError):
    """A store is intact, but not of the version that this Cerebro reads."""


def check_version(connection: sqlite3.Connection, file: Path) -> None:
    """Raise OtherVersionError for another version's store, CorruptDataError if it is no store."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version == SCHEMA_VERSION:
        return
    if version <= 0:
        raise CorruptDataError(
            f"{file} has store version {version}: it is not a run store, or its creation was "
            "interrupted"
        )
    again = "repeat the search in a new folder"
    raise OtherVersionError(explain_other_version(file, "store", version, SCHEMA_VERSION, again))


FILE = "run.sqlite"
BUSY_SECONDS = 60.0
"""How long commits and readers wait for each other; they do so only without WAL."""

PARTS = ("states", "trials", "control")
"""The folders in a run's folder."""

FILES = (FILE, *(FILE + end for end in ("-wal", "-shm", "-journal", ".new")), "owner.lock")
"""The files in a run's folder that are opened, or created if they are missing."""


def store_of(folder: Path, disk: Disk) -> Path:
    """Return the file of a run's store.

    Raise InputError if the folder holds no run, and CorruptDataError if an entry is a symbolic
    link: writing to a run must not change a file elsewhere. The folder's own path may have links.
    """
    for name in PARTS:
        disk.check_folder(folder / name)
    for name in FILES:
        disk.check_no_link(folder / name)
    if not disk.exists(folder / FILE):
        lacks = f"it has no {FILE}" if disk.exists(folder) else "there is no such folder"
        raise InputError(
            f"{folder} is not a run: {lacks}; give the folder that was a search's run="
        )
    return folder / FILE


def journal_mode(folder: Path, disk: Disk) -> str:
    """Return WAL or, for network disks, which cannot share memory, a rollback journal."""
    return "DELETE" if disk.is_remote(folder) else "WAL"


def unused_folder(base: Path, disk: Disk) -> Path:
    """Return `base`, or ``<base>-2`` and so on if `base` exists."""
    folder, n = base, 2
    while disk.exists(folder):
        folder, n = base.with_name(f"{base.name}-{n}"), n + 1
    return folder


def encode(value: Any) -> str:
    """Return JSON in which tuples and non-finite numbers are tagged: {"$float": "nan"}."""
    return _ENCODER.encode(_add_tags(value))


def decode(text: str) -> Any:
    return _DECODER.decode(text)


def _add_tags(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, dict):
        return {str(key): _add_tags(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [_add_tags(item) for item in value]}
    if isinstance(value, list):
        return [_add_tags(item) for item in value]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if hasattr(value, "item"):  # NumPy scalars
        return _add_tags(value.item())
    raise InputError(f"cannot record {value!r} in the run store: it is not a JSON value")


def _remove_tags(value: dict[str, Any]) -> Any:
    if len(value) == 1 and "$float" in value:
        return float(value["$float"])
    if len(value) == 1 and "$tuple" in value:
        return tuple(value["$tuple"])
    # The configurations of many trials have the same names.
    return {sys.intern(key): item for key, item in value.items()}


def encode_raised(raised: Raised) -> str | None:
    if not raised.bases:
        return None
    return encode({"bases": list(raised.bases), "place": raised.place})


def decode_raised(text: str | None) -> Raised:
    """Return the exception that `encode_raised` encoded; raise TypeError for invalid text."""
    if text is None:
        return NOTHING_RAISED
    fields = decode(text)
    bases, place = fields["bases"], fields["place"]
    if not isinstance(bases, list) or not all(isinstance(name, str) for name in (*bases, place)):
        raise TypeError(f"the column raised has the invalid value {one_line(text, 100)}")
    return Raised(tuple(map(sys.intern, bases)), place)


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(object_hook=_remove_tags)


def escape_surrogates(value: Any) -> Any:
    """Escape lone surrogates, which paths and errors may contain but UTF-8 cannot encode."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
