"""Reads from a run's store what only whoever goes on with the run needs."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any


@dataclass
class Answers:
    """What an adaptive searcher has said about a trial."""

    reported: int = -1
    """The last epoch that it has heard of."""
    asleep: bool = False
    """Whether it has paused the trial and not resumed it."""


def read_answers(connection: sqlite3.Connection) -> dict[int, Answers]:
    """Read what an adaptive searcher has said, by trial; empty for any other."""
    answers: dict[int, Answers] = {}
    if not _has_table(connection, "decisions"):
        return answers
    for trial, epoch, decision in connection.execute(
        "SELECT trial, epoch, decision FROM decisions ORDER BY id"
    ):
        answer = answers.setdefault(trial, Answers())
        if decision in ("continue", "pause", "stop"):
            answer.reported = epoch
        else:  # begin, clone and resume name the epoch that comes next
            answer.reported = epoch - 1
        answer.asleep = decision == "pause"
    return answers


def read_said(connection: sqlite3.Connection, after: int = 0) -> list[tuple[Any, ...]]:
    """Read what an adaptive searcher has said, in order, but for the first so many.

    Trial, epoch, decision, and of suggestions until how many epochs.
    """
    if not _has_table(connection, "decisions"):
        return []
    sql = "SELECT trial, epoch, decision, epochs FROM decisions ORDER BY id LIMIT -1 OFFSET ?"
    return [tuple(row) for row in connection.execute(sql, (after,))]


def count_said(connection: sqlite3.Connection) -> int:
    """Count what an adaptive searcher has said."""
    if not _has_table(connection, "decisions"):
        return 0
    (count,) = connection.execute("SELECT count(*) FROM decisions").fetchone()
    return int(count)


def read_clock(connection: sqlite3.Connection) -> float:
    """Where the run's clock stands, in seconds: at the last thing that is recorded."""
    (units,) = connection.execute("SELECT max(started + seconds) FROM units").fetchone()
    (events,) = connection.execute("SELECT max(time) FROM events").fetchone()
    return max(units or 0.0, events or 0.0)


def read_unit_seconds(connection: sqlite3.Connection) -> dict[tuple[int, int, int], float]:
    """Read how long units took, by trial, epoch and step, of epochs without a row."""
    rows = connection.execute(
        "SELECT u.trial, u.epoch, u.step, u.seconds FROM units u LEFT JOIN "
        "(SELECT trial, max(epoch) AS epoch FROM epochs GROUP BY trial) e ON e.trial = u.trial "
        "WHERE u.epoch > coalesce(e.epoch, -1) ORDER BY u.id"
    )
    return {(trial, epoch, step): seconds for trial, epoch, step, seconds in rows}


def read_extensions(
    connection: sqlite3.Connection, condition: str = "1"
) -> list[tuple[int, int, int]]:
    """Read from which positions on ``info.epochs`` of which trials was which number."""
    if not _has_table(connection, "extensions"):
        return []
    sql = "SELECT trial, position, epochs FROM extensions "
    sql += f"WHERE {condition} ORDER BY trial, position"
    return [(trial, position, epochs) for trial, position, epochs in connection.execute(sql)]


def _has_table(connection: sqlite3.Connection, name: str) -> bool:
    sql = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(sql, (name,)).fetchone() is not None
