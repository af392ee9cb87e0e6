"""Read a run's store, finished or live, without ever writing to it."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cerebro.errors import CerebroError, CorruptDataError, one_line, text_of
from cerebro.run.owner import NoLocksError, check_locks
from cerebro.run.records import EpochRecord, Ranking, Status, TrialRecord
from cerebro.run.store.checking import (
    check_config,
    check_rows,
    check_state_file,
    check_tables,
    defend_connection,
)
from cerebro.run.store.schema import FILE, check_version, connect, decode, decode_raised, store_of

READ_AT_ONCE = 500
"""The most trials that one query selects by number."""

_UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
    StopIteration,
)  # fmt: skip
"""The exceptions that using a damaged row may raise."""


@contextlib.contextmanager
def reader(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open a run's store for reading, also while the run is live; all reads see the same snapshot.

    Close it soon: while it is open, the writer cannot restart its log. Raise InputError if the
    folder holds no run, and CorruptDataError if the file is not a store of this version.
    """
    file = store_of(folder)
    try:
        check_locks(folder)  # SQLite would wait for a minute, then say "locked"
        with contextlib.closing(_open_store(file)) as connection:
            yield connection
    except CerebroError:
        raise
    except (sqlite3.Error, NoLocksError) as error:
        raise CorruptDataError(f"{file} cannot be read: {text_of(error)}") from error
    except _UNREADABLE as error:
        raise CorruptDataError(
            f"{file} is damaged: a row cannot be read ({type(error).__name__}: {text_of(error)})"
        ) from error


def _open_store(file: Path) -> sqlite3.Connection:
    try:
        return _begin_snapshot(file, _choose_access(file))
    except sqlite3.OperationalError as error:
        # After a power failure, a rollback journal may exist beside a log; SQLite rolls it back
        # first.
        if "readonly" not in str(error) or not os.access(file.parent, os.W_OK):
            raise
        return _begin_snapshot(file, "mode=rw")


def _begin_snapshot(file: Path, access: str) -> sqlite3.Connection:
    connection = connect(file, access)
    try:
        connection.row_factory = sqlite3.Row
        defend_connection(connection)
        check_version(connection, file)
        connection.execute("BEGIN")  # one snapshot of all tables
        check_tables(connection, file)
    except BaseException:
        connection.close()
        raise
    return connection


def _choose_access(file: Path) -> str:
    """Return the mode in which to open a store: read-only if possible."""
    if file.with_name(FILE + "-wal").exists():
        return "mode=ro"  # a writable reader that closes last would copy a dead run's log
    # Without a log, SQLite needs write access to use the log of a writer that starts, or to roll
    # back the journal of a writer that died. Where it cannot write, it must not look for either.
    return "mode=rw" if os.access(file.parent, os.W_OK) else "mode=ro&immutable=1"


def check_whole_store(folder: Path) -> None:
    """Raise CorruptDataError if SQLite finds damage in a store, before its run is resumed."""
    with reader(folder) as connection:
        (text,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if text != "ok":
        raise CorruptDataError(
            f"{folder / FILE} is damaged ({one_line(text, 200)}): restore a copy of it, or "
            "extract the readable rows (sqlite3 run.sqlite .recover)"
        )


def read_meta(connection: sqlite3.Connection) -> dict[str, Any]:
    check_rows(connection, "meta")
    rows: Iterable[sqlite3.Row] = connection.execute("SELECT key, value FROM meta")
    return {row["key"]: decode(row["value"]) for row in rows}


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
    records = {record.number: record for record in _read_trial_rows(connection, of_trials)}
    for trial, position, epochs in read_extensions(connection, of_others):
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


def _read_trial_rows(connection: sqlite3.Connection, condition: str) -> Iterator[TrialRecord]:
    for row in connection.execute(
        "SELECT number, config, status, epochs, parent, parent_epoch, resumable, error, traceback, "
        f"raised FROM trials WHERE {condition} ORDER BY number"
    ):
        number, config, status, epochs, parent, parent_epoch, resumable = row[:7]
        error, traceback, raised = row[7:]
        yield TrialRecord(
            number=number,
            config=check_config(decode(config)),
            status=cast(Status, sys.intern(status)),
            target_epochs=epochs,
            parent=parent,
            parent_epoch=parent_epoch,
            resumable=bool(resumable),
            error=error,
            traceback=traceback,
            raised=decode_raised(raised),
        )


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
    """The last decision of an adaptive searcher on a trial."""

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


def count_decisions(connection: sqlite3.Connection) -> int:
    (count,) = connection.execute("SELECT count(*) FROM decisions").fetchone()
    return int(count)


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


def read_extensions(
    connection: sqlite3.Connection, condition: str = "1"
) -> list[tuple[int, int, int]]:
    """Read the changes of ``info.epochs``: trial, first position of the new value, epochs."""
    sql = "SELECT trial, position, epochs FROM extensions "
    sql += f"WHERE {condition} ORDER BY trial, position"
    return [(trial, position, epochs) for trial, position, epochs in connection.execute(sql)]
