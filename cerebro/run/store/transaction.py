"""Collect the rows of one transaction by table, each in its latest version.

A trial that began and ended since the last commit is written once. A state that was kept and
retired since the last commit is never synced, because short epochs end faster than a disk can sync.
SQLite gets all rows of a table in one call.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from cerebro.machine import durable
from cerebro.run.states import remove_state
from cerebro.run.store.schema import escape_surrogates

Files = tuple[str, str]
"""The temporary and the final path of a state."""

UNIT_COLUMNS = (
    "trial", "epoch", "step", "part", "worker", "attempt", "started", "seconds", "rows", "batches",
    "hopped", "state_bytes",
)  # fmt: skip

_TRIALS = "INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_STATUS = (
    "UPDATE trials SET status = ?, error = ?, traceback = ?, resumable = ?, raised = ? "
    "WHERE number = ?"
)
_EPOCHS = "INSERT OR REPLACE INTO epochs VALUES (?, ?, ?, ?, ?)"
_METRICS = "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)"
_RETIRE = "UPDATE epochs SET state_file = NULL WHERE trial = ? AND epoch = ?"
_UNITS = "INSERT INTO units VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"


class Transaction:
    """The rows of one transaction, with the states that they publish and retire."""

    def __init__(self) -> None:
        self._meta: dict[str, str] = {}
        self._trials: dict[int, list[Any]] = {}
        self._status: dict[int, tuple[Any, ...]] = {}
        self._epochs: dict[tuple[int, int], tuple[float, str, str | None]] = {}
        self._metrics: list[tuple[int, int, str, float]] = []
        self._units: list[tuple[Any, ...]] = []
        self._others: list[tuple[str, tuple[Any, ...]]] = []
        self._publish: dict[str, str] = {}  # final path to temporary path
        self._retired: dict[tuple[int, int], str] = {}
        self._unwanted: list[str] = []

    def set_meta(self, key: str, value: str) -> None:
        self._meta[key] = value

    def add_trial(self, number: int, *columns: Any) -> None:
        """Add a trial: its configuration, status, epochs, parent and parent's epoch."""
        *before_error, parent_epoch = columns
        self._trials[number] = [number, *before_error, None, None, 0, parent_epoch, None]

    def set_status(self, number: int, status: str, *columns: Any) -> None:
        """Set a trial's status, error, traceback, whether it is resumable, and what was raised."""
        row = self._trials.get(number)
        if row is None:
            self._status[number] = (status, *columns, number)
        else:
            row[2], row[5:8], row[9] = status, columns[:3], columns[3]

    def add_unit(self, *values: Any) -> None:
        self._units.append(values)

    def add_epoch(
        self, trial: int, epoch: int, metrics: dict[str, float], columns: Any, files: Files | None
    ) -> None:
        """Add an epoch: its seconds, state's hash and file, and the state's files to publish."""
        self._retired.pop((trial, epoch), None)  # an earlier process retired it; now trained again
        self._epochs[trial, epoch] = columns
        self._metrics += [
            (trial, epoch, escape_surrogates(name), value) for name, value in metrics.items()
        ]
        if files is not None:
            self._publish[files[1]] = files[0]

    def retire_state(self, trial: int, epoch: int, file: str) -> None:
        row = self._epochs.get((trial, epoch))
        if row is None:
            self._retired[trial, epoch] = file
        else:
            self._epochs[trial, epoch] = (*row[:2], None)
            self._unwanted.append(self._publish.pop(file, file))

    def execute(self, sql: str, values: tuple[Any, ...]) -> None:
        """Add a statement; these statements run in order after all other rows."""
        self._others.append((sql, values))

    def publish_states(self) -> None:
        """Make states durable; rows may then name them."""
        if self._publish:
            durable.publish((new, final) for final, new in self._publish.items())

    def write_rows(self, connection: sqlite3.Connection) -> None:
        """Commit the rows, all or none."""
        tables: list[tuple[str, list[Any]]] = [
            (_TRIALS, list(self._trials.values())),
            (_STATUS, list(self._status.values())),
            (_EPOCHS, [(*key, *values) for key, values in self._epochs.items()]),
            (_METRICS, self._metrics),
            (_RETIRE, list(self._retired)),
            (_UNITS, self._units),
            *((sql, [values]) for sql, values in self._others),
            (_META, list(self._meta.items())),
        ]
        if any(rows for _, rows in tables):
            with connection:
                for sql, rows in tables:
                    if rows:
                        connection.executemany(sql, rows)

    def remove_states(self) -> None:
        """Delete states that no row names any more."""
        for file in (*self._retired.values(), *self._unwanted):
            remove_state(file)
