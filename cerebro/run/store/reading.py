"""Read a run's store, finished or live, without writing to it and without trusting it.

SQLite accepts any value in any column, and runs the views, triggers and generated columns that a
file defines; a file from elsewhere may contain anything. Before rows are read, their tables must
therefore be plain tables, and every value must have the type of its column. SQLite itself searches
for violations, so valid rows cost no Python time.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from cerebro.errors import CerebroError, CorruptDataError, one_line, text_of
from cerebro.machine.disk import Disk
from cerebro.machine.files import is_plain_name
from cerebro.machine.local import LOCAL
from cerebro.run.owner import NoLocksError, check_locks
from cerebro.run.records import OUTSIDE, ActionRecord, EpochRecord, Ranking, Status, TrialRecord
from cerebro.run.store.schema import (
    BUSY_SECONDS,
    FILE,
    check_version,
    decode,
    decode_raised,
    store_of,
)

READ_AT_ONCE = 500
"""The most trials that one query selects by number."""

_UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
    StopIteration,
)  # fmt: skip
"""The exceptions that using a damaged row may raise."""


@contextlib.contextmanager
def reader(folder: Path, disk: Disk = LOCAL.disk) -> Iterator[sqlite3.Connection]:
    """Open a run's store for reading, also while the run is live; all reads see the same snapshot.

    Close it soon: while it is open, the writer cannot restart its log. Raise InputError if the
    folder holds no run, and CorruptDataError if the file is not a store of this version.
    """
    file = store_of(folder, disk)
    try:
        check_locks(folder)  # SQLite would wait for a minute, then say "locked"
        with contextlib.closing(_open_store(file, disk)) as connection:
            yield connection
    except CerebroError:
        raise
    except (sqlite3.Error, NoLocksError) as error:
        raise CorruptDataError(f"{file} cannot be read: {text_of(error)}") from error
    except _UNREADABLE as error:
        raise CorruptDataError(
            f"{file} is damaged: a row cannot be read ({type(error).__name__}: {text_of(error)})"
        ) from error


def _open_store(file: Path, disk: Disk) -> sqlite3.Connection:
    try:
        return _begin_snapshot(file, disk, _choose_access(file, disk))
    except sqlite3.OperationalError as error:
        # After a power failure, a rollback journal may exist beside a log; SQLite rolls it back
        # first.
        if "readonly" not in str(error) or not disk.may_write(file.parent):
            raise
        return _begin_snapshot(file, disk, "mode=rw")


def _begin_snapshot(file: Path, disk: Disk, access: str) -> sqlite3.Connection:
    connection = disk.connect(file, access, BUSY_SECONDS)
    try:
        connection.row_factory = sqlite3.Row
        # Run no code from the file, check its pages, and write nothing to it.
        for setting in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
            connection.execute(f"PRAGMA {setting}")
        check_version(connection, file)
        connection.execute("BEGIN")  # one snapshot of all tables
        check_tables(connection, file, disk)
    except BaseException:
        connection.close()
        raise
    return connection


def _choose_access(file: Path, disk: Disk) -> str:
    """Return the mode in which to open a store: read-only if possible."""
    if disk.exists(file.with_name(FILE + "-wal")):
        return "mode=ro"  # a writable reader that closes last would copy a dead run's log
    # Without a log, SQLite needs write access to use the log of a writer that starts, or to roll
    # back the journal of a writer that died. Where it cannot write, it must not look for either.
    return "mode=rw" if disk.may_write(file.parent) else "mode=ro&immutable=1"


def check_whole_store(folder: Path, disk: Disk = LOCAL.disk) -> None:
    """Raise CorruptDataError if SQLite finds damage in a store, before its run is resumed."""
    with reader(folder, disk) as connection:
        (text,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if text != "ok":
        raise CorruptDataError(
            f"{folder / FILE} is damaged ({one_line(text, 200)}): restore a copy of it, or "
            "extract the readable rows (sqlite3 run.sqlite .recover)"
        )


def read_meta(connection: sqlite3.Connection) -> dict[str, Any]:
    check_rows(connection, "meta")
    rows = connection.execute("SELECT key, value FROM meta")
    return {key: decode(value) for key, value in rows}


def read_trials(
    connection: sqlite3.Connection, numbers: Sequence[int] | None = None
) -> list[TrialRecord]:
    """Read trials with their epochs: all of them by number, or the given ones in their order."""
    if numbers is None:
        check_rows(connection, "trials", "epochs", "metrics")
        return list(_read_some(connection, "1", "1").values())
    records: dict[int, TrialRecord] = {}
    for begin in range(0, len(numbers), READ_AT_ONCE):
        in_batch = f"IN ({', '.join(str(int(n)) for n in numbers[begin : begin + READ_AT_ONCE])})"
        check_rows(connection, "trials", where=f"number {in_batch}")
        check_rows(connection, "epochs", "metrics", where=f"trial {in_batch}")
        records |= _read_some(connection, f"number {in_batch}", f"trial {in_batch}")
    return [records[number] for number in numbers]


def _read_some(
    connection: sqlite3.Connection, of_trials: str, of_others: str
) -> dict[int, TrialRecord]:
    """Read the trials that an SQL condition selects in the table ``trials``, and in the others."""
    records: dict[int, TrialRecord] = {}
    for row in connection.execute(
        "SELECT number, config, status, epochs AS target_epochs, parent, parent_epoch, resumable, "
        "error, traceback, raised, stream, began, ended "
        f"FROM trials WHERE {of_trials} ORDER BY number"
    ):
        fields = dict(row)
        config = fields["config"] = decode(row["config"])
        if not isinstance(config, dict):
            raise TypeError(f"a configuration is not a mapping but {one_line(repr(config), 50)}")
        fields["status"] = sys.intern(row["status"])
        fields["resumable"] = bool(row["resumable"])
        fields["raised"] = decode_raised(row["raised"])
        records[row["number"]] = TrialRecord(**fields)
    for trial, position, epochs in connection.execute(
        f"SELECT trial, position, epochs FROM extensions WHERE {of_others} ORDER BY trial, position"
    ):
        records[trial].extensions += ((position, epochs),)
    for trial, epoch, seconds, state_hash, state_file in connection.execute(
        "SELECT trial, epoch, seconds, state_hash, state_file FROM epochs "
        f"WHERE {of_others} ORDER BY trial, epoch"
    ):
        file = check_state_file(state_file)
        records[trial].epochs.append(EpochRecord(epoch, {}, seconds, state_hash, file))
    # in the order in which the model reports them
    for trial, epoch, name, value in connection.execute(
        f"SELECT trial, epoch, name, value FROM metrics WHERE {of_others} ORDER BY rowid"
    ):
        metrics = _epoch_of(records[trial], epoch).metrics
        metrics[sys.intern(name)] = math.nan if value is None else value
    return records


def read_ranking(connection: sqlite3.Connection, by: Ranking, n: int) -> list[int]:
    """Return the numbers of the `n` best trials, best first; see `cerebro.run.records.score`."""
    best, order = ("min", "") if by.mode == "min" else ("max", "DESC")
    last = "epoch = (SELECT max(epoch) FROM epochs AS e WHERE e.trial = metrics.trial)"
    rows = connection.execute(
        f"SELECT trial FROM metrics WHERE name = ? AND abs(value) < 9e999 "
        f"AND {'1' if by.select == 'best' else last} "
        f"GROUP BY trial ORDER BY {best}(value) {order}, trial LIMIT ?",
        (by.metric, n),
    )
    return [int(trial) for (trial,) in rows]


def _epoch_of(record: TrialRecord, epoch: int) -> EpochRecord:
    """Return a trial's epoch by its number; usually all epochs from 0 on exist."""
    epochs = record.epochs
    if epoch < len(epochs) and epochs[epoch].epoch == epoch:
        return epochs[epoch]
    for candidate in epochs:
        if candidate.epoch == epoch:
            return candidate
    raise LookupError(f"trial {record.number} has metrics of epoch {epoch}, which has no row")


@dataclass
class LastDecision:
    reported: int = -1
    """The last epoch that was reported to the searcher."""
    paused: bool = False
    """Whether the searcher has paused the trial and not resumed it."""


def read_last_decisions(connection: sqlite3.Connection) -> dict[int, LastDecision]:
    """Read an adaptive searcher's last decision on each trial; empty for other searchers."""
    last: dict[int, LastDecision] = {}
    for trial, epoch, decision in connection.execute(
        "SELECT trial, epoch, decision FROM decisions ORDER BY id"
    ):
        # For begin, clone and resume, the row names the next epoch.
        reported = epoch if decision in ("continue", "pause", "stop") else epoch - 1
        last[trial] = LastDecision(reported, paused=decision == "pause")
    return last


def read_decisions(connection: sqlite3.Connection, after: int = 0) -> list[tuple[Any, ...]]:
    """Read trial, epoch, decision and target epochs of decisions, without the first `after`."""
    sql = "SELECT trial, epoch, decision, epochs FROM decisions ORDER BY id LIMIT -1 OFFSET ?"
    return [tuple(row) for row in connection.execute(sql, (after,))]


def count_rows(connection: sqlite3.Connection, table: str, where: str = "1") -> int:
    (count,) = connection.execute(f"SELECT count(*) FROM {table} WHERE {where}").fetchone()
    return int(count)


def read_actions(connection: sqlite3.Connection) -> list[ActionRecord]:
    """Read the user's requests to a run, in the order of their outcomes."""
    check_rows(connection, "actions")
    rows = connection.execute(
        "SELECT request, time, verb, trial, child, epoch, changes, epochs, sender, outcome "
        "FROM actions ORDER BY id"
    )
    actions = []
    for row in map(dict, rows):
        changes = None if row["changes"] is None else decode(row["changes"])
        if changes is not None and not isinstance(changes, dict):
            raise TypeError(f"the changes of an action are not a mapping but {type(changes)}")
        actions.append(ActionRecord(**{**row, "changes": changes}))
    return actions


def read_clock(connection: sqlite3.Connection) -> float:
    """Return the time of the last recorded unit or event, in seconds since the run's start."""
    (units,) = connection.execute("SELECT max(started + seconds) FROM units").fetchone()
    (events,) = connection.execute("SELECT max(time) FROM events").fetchone()
    return max(units or 0.0, events or 0.0)


def read_unit_seconds(connection: sqlite3.Connection) -> dict[tuple[int, int, int], float]:
    """Read the seconds of units whose epoch has no row, by trial, epoch and step."""
    rows = connection.execute(
        "SELECT u.trial, u.epoch, u.step, u.seconds FROM units u LEFT JOIN "
        "(SELECT trial, max(epoch) AS epoch FROM epochs GROUP BY trial) e ON e.trial = u.trial "
        "WHERE u.epoch > coalesce(e.epoch, -1) ORDER BY u.id"
    )
    return {(trial, epoch, step): seconds for trial, epoch, step, seconds in rows}


# --- damage ------------------------------------------------------------------

_TEXT = "typeof({0}) != 'text'"
_OPTIONAL_TEXT = "typeof({0}) NOT IN ('text', 'null')"
_COUNT = "(typeof({0}) != 'integer' OR {0} < 0)"
_OPTIONAL_COUNT = "(typeof({0}) NOT IN ('integer', 'null') OR {0} < 0)"
_WHOLE = "typeof({0}) != 'integer'"
_NUMBER = "typeof({0}) NOT IN ('real', 'integer')"
_OPTIONAL_NUMBER = "typeof({0}) NOT IN ('real', 'integer', 'null')"
_ORIGIN = f"{{0}} != CASE WHEN coalesce(stream, 0) < {OUTSIDE} THEN 'searcher' ELSE 'user' END"
_STATUS = f"({{0}} IS NULL OR {{0}} NOT IN {get_args(Status)})"
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
        "origin": _ORIGIN,
        "stream": _OPTIONAL_COUNT,
        "began": _OPTIONAL_NUMBER,
        "ended": _OPTIONAL_NUMBER,
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
    "actions": {
        **dict.fromkeys(("request", "verb", "sender", "outcome"), _TEXT),
        **dict.fromkeys(("trial", "child", "epoch", "epochs"), _OPTIONAL_COUNT),
        "time": _NUMBER,
        "changes": _OPTIONAL_TEXT,
    },
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


def check_tables(connection: sqlite3.Connection, file: Path, disk: Disk) -> None:
    """Raise CorruptDataError unless all tables exist and are plain tables."""
    odd = connection.execute(
        "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index') "
        "OR upper(sql) LIKE 'CREATE VIRTUAL%'"
    ).fetchone()
    if odd is not None:
        raise _damage_error(file, f"it has a {odd[0]} {odd[1]}, which a run store does not have")
    _check_length(connection, file, disk)
    for table, columns in _WRONG.items():
        # Generated columns are hidden columns; computing one could take forever.
        rows = connection.execute(f"PRAGMA table_xinfo({table})").fetchall()
        plain = {row["name"] for row in rows if row["hidden"] == 0}
        if not columns.keys() <= plain or len(plain) != len(rows):
            raise _damage_error(file, f"its table {table} is not that of a run store")


def check_rows(connection: sqlite3.Connection, *tables: str, where: str = "1") -> None:
    """Raise TypeError if a row matching the SQL condition `where` has an invalid value."""
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


def check_state_file(name: str | None) -> str | None:
    """Return a state's file name; raise TypeError if it leads out of the states' folder."""
    if name is not None and not is_plain_name(name):
        raise TypeError(f"{one_line(name, 50)!r} is not the name of a state")
    return name


def _check_length(connection: sqlite3.Connection, file: Path, disk: Disk) -> None:
    """Reject a store whose last page was cut off, because SQLite fills missing bytes with zeros.

    Pages that are still in a log may be missing from the file. While a transaction is open, no
    process removes a log that is not empty.
    """
    (page,) = connection.execute("PRAGMA page_size").fetchone()
    logs = (file.with_name(file.name + end) for end in ("-wal", "-journal"))
    if disk.size(file) % page and not any(disk.exists(log) and disk.size(log) for log in logs):
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
