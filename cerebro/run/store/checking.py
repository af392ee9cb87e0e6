"""Check that a file is a run store, because a file from elsewhere may contain anything.

SQLite accepts any value in any column, and runs the views, triggers and generated columns that a
file defines. Before rows are read, their tables must therefore be plain tables, and every value
must have the type of its column. SQLite itself searches for violations, so valid rows cost no
Python time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from cerebro.errors import CorruptDataError, one_line
from cerebro.machine.files import is_plain_name
from cerebro.run.records import Status

_TEXT = "typeof({0}) != 'text'"
_OPTIONAL_TEXT = "typeof({0}) NOT IN ('text', 'null')"
_COUNT = "(typeof({0}) != 'integer' OR {0} < 0)"
_OPTIONAL_COUNT = "(typeof({0}) NOT IN ('integer', 'null') OR {0} < 0)"
_WHOLE = "typeof({0}) != 'integer'"
_NUMBER = "typeof({0}) NOT IN ('real', 'integer')"
_OPTIONAL_NUMBER = "typeof({0}) NOT IN ('real', 'integer', 'null')"
_STATUSES = ", ".join(f"'{status}'" for status in get_args(Status))
_STATUS = f"({{0}} IS NULL OR {{0}} NOT IN ({_STATUSES}))"
_FILE = (
    "(typeof({0}) NOT IN ('text', 'null') OR {0} IN ('', '.', '..') OR instr({0}, '/') > 0 "
    "OR instr({0}, char(0)) > 0)"
)

# By table and column: a condition that is true for invalid values.
_WRONG: dict[str, dict[str, str]] = {
    "meta": {"key": _TEXT, "value": _TEXT},
    "trials": {
        "number": _COUNT,
        "config": _TEXT,
        "status": _STATUS,
        "epochs": _COUNT,
        "parent": _OPTIONAL_COUNT,
        "parent_epoch": _OPTIONAL_COUNT,
        "resumable": _COUNT,
        "error": _OPTIONAL_TEXT,
        "traceback": _OPTIONAL_TEXT,
        "raised": _OPTIONAL_TEXT,
    },
    "epochs": {
        "trial": _COUNT,
        "epoch": _COUNT,
        "seconds": _NUMBER,
        "state_hash": _TEXT,
        "state_file": _FILE,
    },
    "metrics": {"trial": _COUNT, "epoch": _COUNT, "name": _TEXT, "value": _OPTIONAL_NUMBER},
    "units": {
        **dict.fromkeys(("trial", "epoch", "step", "worker", "attempt", "rows"), _COUNT),
        **dict.fromkeys(("batches", "hopped", "state_bytes"), _COUNT),
        **dict.fromkeys(("started", "seconds"), _NUMBER),
        "part": _WHOLE,  # -1: validation
    },
    "events": {"time": _NUMBER, "kind": _TEXT, "trial": _OPTIONAL_COUNT, "text": _TEXT},
}

# The keys of the table meta that readers need, and the types or values that they must have.
_META: dict[str, Any] = {
    "id": str,
    "status": str,
    "points": list,
    "space": dict,
    "searcher_class": {"class": str, "adaptive": (True, False)},
    "parts": int,
    "environment": dict,
    "build": {"module": str, "qualname": str},
    "data_checksum": str,
    "data": {"path": str, "checksum": str, "rows": list, "transforms": dict, "operations": list},
    "settings": {
        "metric": str,
        "mode": ("min", "max"),
        "select": ("best", "last"),
        "seed": int,
        "epochs": int,
        "keep": ("best", "last", "all"),
        "stagger": (True, False),
        "shuffle": ("rows", "shards"),
        "max_retries": int,
        "searcher_name": str,
        "space": str,
    },
}


def defend_connection(connection: sqlite3.Connection) -> None:
    """Make SQLite run no code from the file, check the file's pages, and write nothing to it."""
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA query_only = ON")


def check_tables(connection: sqlite3.Connection, file: Path) -> None:
    """Raise CorruptDataError unless all tables exist and are plain tables."""
    odd = connection.execute(
        "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index') "
        "OR upper(sql) LIKE 'CREATE VIRTUAL%'"
    ).fetchone()
    if odd is not None:
        raise _damage_error(file, f"it has a {odd[0]} {odd[1]}, which a run store does not have")
    _check_length(connection, file)
    for table, columns in _WRONG.items():
        # Generated columns are hidden columns; computing one could take forever.
        rows = connection.execute(f"PRAGMA table_xinfo({table})").fetchall()
        plain = {row["name"] for row in rows if row["hidden"] == 0}
        if not columns.keys() <= plain or len(plain) != len(rows):
            raise _damage_error(file, f"its table {table} is not that of a run store")


def check_rows(connection: sqlite3.Connection, *tables: str, where: str = "1") -> None:
    """Raise TypeError if a row that meets the SQL condition `where` has an invalid value."""
    for table in tables:
        wrong = " OR ".join(text.format(name) for name, text in _WRONG[table].items())
        row = connection.execute(
            f"SELECT * FROM {table} WHERE ({where}) AND ({wrong}) LIMIT 1"
        ).fetchone()
        if row is not None:
            raise TypeError(one_line(f"in {table}: {tuple(row)}", 200))


def check_meta(meta: Mapping[str, Any]) -> None:
    """Raise LookupError or TypeError if the run's description is incomplete or invalid."""
    _check(meta, _META, "")
    if not meta["status"].isidentifier():
        raise TypeError(f"status is {one_line(repr(meta['status']), 50)}")
    devices = meta["settings"]["devices"]
    is_list = isinstance(devices, (list, tuple)) and len(devices) > 0
    if not is_list or not all(isinstance(name, str) for name in devices):
        raise TypeError(f"settings.devices is {one_line(repr(devices), 50)}")
    if meta["validation"] is not None:
        _check(meta, {"validation": _META["data"]}, "")
    for name in ("validation", "folds"):
        if (meta[name] is None) != (meta[f"{name}_checksum"] is None):
            raise TypeError(f"{name}_checksum is {one_line(repr(meta[f'{name}_checksum']), 50)}")
    if meta["folds"] is not None:
        _check(meta, {"folds": {"name": str, "folds": list}}, "")
        for fold in meta["folds"]["folds"]:
            _check({"fold": fold}, {"fold": {"train": list, "validation": list}}, "")
        if not meta["folds"]["folds"]:
            raise TypeError("its list of folds is empty")


def check_config(config: Any) -> dict[str, Any]:
    """Return a trial's configuration; raise TypeError if it is not a mapping."""
    if not isinstance(config, dict):
        raise TypeError(f"a configuration is not a mapping but {one_line(repr(config), 50)}")
    return config


def check_state_file(name: str | None) -> str | None:
    """Return a state's file name; raise TypeError if it leads out of the states' folder."""
    if name is not None and not is_plain_name(name):
        raise TypeError(f"{one_line(name, 50)!r} is not the name of a state")
    return name


def _check_length(connection: sqlite3.Connection, file: Path) -> None:
    """Reject a store whose last page was cut off, because SQLite fills missing bytes with zeros.

    Pages that are still in a log may be missing from the file. While a transaction is open, no
    process removes a log that is not empty.
    """
    (page,) = connection.execute("PRAGMA page_size").fetchone()
    logs = (file.with_name(file.name + end) for end in ("-wal", "-journal"))
    if file.stat().st_size % page and not any(log.exists() and log.stat().st_size for log in logs):
        raise _damage_error(file, "it is truncated within a page")


def _check(values: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    for key, kind in wanted.items():
        value = values[key]
        if isinstance(kind, dict):
            right = isinstance(value, dict)
        elif isinstance(kind, tuple):
            right = value in kind
        else:
            right = isinstance(value, kind) and not isinstance(value, bool)
        if not right:
            raise TypeError(f"{where}{key} is {one_line(repr(value), 50)}")
        if isinstance(kind, dict):
            _check(value, kind, f"{where}{key}.")


def _damage_error(file: Path, what: str) -> CorruptDataError:
    return CorruptDataError(f"{file} is damaged: {one_line(what, 200)}")
