"""Writes a run's store: one thread, many rows to a transaction.

Rows are handed to a thread of their own, which publishes the states they name
(fsync, rename, fsync of the folder) and commits whatever has gathered, so that
training never waits for a disk. What belongs together is handed over together,
as a group, and committed together. The file is made under a temporary name:
where ``run.sqlite`` exists, the run can be opened.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cerebro import _core
from cerebro.errors import CorruptDataError, InputError
from cerebro.store.encoding import encode, storable
from cerebro.store.location import BUSY_SECONDS, FILE, journal_mode
from cerebro.store.publishing import publish_states
from cerebro.store.schema import SCHEMA, SCHEMA_VERSION, migrate

MAX_GROUP = 10_000


@dataclass
class Row:
    """One statement to commit, the state it publishes and the states it retires.

    ``metrics`` are rows of their table that belong to the same transaction.
    """

    sql: str
    values: tuple[Any, ...]
    publish: tuple[Path, Path] | None = None
    retire: tuple[Path, ...] = field(default=())
    metrics: tuple[tuple[int, int, str, float], ...] = field(default=())


Item = list[Row] | threading.Event | None
"""What is handed to the writing thread: rows to commit together, somebody who waits, the end."""


class Store:
    """The writing side of a run's store; see the module's text.

    Made by `create` or `open`. One thread calls it: the coordinator's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # the working directory may change
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._group: list[Row] | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="cerebro-store", daemon=True)
        self._thread.start()

    @classmethod
    def create(cls, folder: Path, meta: dict[str, Any]) -> Store:
        """Make the store of a new run, complete and durable before it has its name."""
        temporary = folder / (FILE + ".new")
        temporary.unlink(missing_ok=True)
        rows = [(key, encode(value)) for key, value in meta.items()]
        try:
            with contextlib.closing(sqlite3.connect(temporary)) as connection:
                connection.executescript(SCHEMA)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                connection.executemany("INSERT INTO meta VALUES (?, ?)", rows)
                connection.commit()
        except sqlite3.Error as error:
            raise OSError(f"{temporary}: {error}") from error
        temporary.rename(folder / FILE)
        _core.fsync_directory(str(folder))
        return cls(folder)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Go on writing the store of an earlier run, brought forward to today's schema.

        Whoever calls owns the run: two writers would take turns, not fail.

        Raises
        ------
        InputError
            If the folder holds no run.
        CorruptDataError
            If the file is no store that this Cerebro knows.
        OSError
            If it cannot be written.
        """
        file = folder / FILE
        if not file.exists():
            raise InputError(f"{folder} is no run: it has no {FILE}")
        uri = f"{file.resolve().as_uri()}?mode=rw"
        try:
            with contextlib.closing(
                sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
            ) as connection:
                connection.execute("PRAGMA synchronous = FULL")
                migrate(connection, file)
        except sqlite3.OperationalError as error:
            raise OSError(f"cannot write {file}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise CorruptDataError(f"{file} cannot be read: {error}") from error
        return cls(folder)

    # --- rows ------------------------------------------------------------

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Commit all that is handed over in the block together, or none of it.

        A block that raises hands nothing over; a block inside of another belongs to it.
        """
        if self._group is not None:
            yield
            return
        self._group = []
        try:
            yield
            rows = self._group
        finally:
            self._group = None
        self._hand_over(rows)

    def set_meta(self, key: str, value: Any) -> None:
        self._put("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, encode(value))

    def add_trial(
        self,
        number: int,
        config: Any,
        status: str,
        epochs: int,
        parent: int | None,
        parent_epoch: int | None = None,
    ) -> None:
        """Record a new trial; of a clone, also whose state it began with, after which epoch."""
        self._put(
            "INSERT INTO trials VALUES (?, ?, ?, ?, ?, NULL, NULL, 0, ?)",
            *(number, encode(config), status, epochs, parent, parent_epoch),
        )

    def set_status(
        self,
        number: int,
        status: str,
        error: str = "",
        traceback: str = "",
        *,
        resumable: bool = False,
    ) -> None:
        """Record how a trial is; `resumable` says that the run left it unfinished."""
        self._put(
            "UPDATE trials SET status = ?, error = ?, traceback = ?, resumable = ? "
            "WHERE number = ?",
            *(status, error or None, traceback or None, int(resumable), number),
        )

    def set_epochs(self, number: int, epochs: int) -> None:
        """Record that a trial is to train for another number of epochs."""
        self._put("UPDATE trials SET epochs = ? WHERE number = ?", epochs, number)

    def add_unit(
        self,
        *,
        trial: int,
        epoch: int,
        step: int,
        shard: int,
        worker: int,
        attempt: int,
        started: float,
        seconds: float,
        rows: int,
        batches: int,
        hopped: bool,
        state_bytes: int,
    ) -> None:
        self._put(
            "INSERT INTO units VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(trial, epoch, step, shard, worker, attempt, started, seconds),
            *(rows, batches, int(hopped), state_bytes),
        )

    def add_epoch(
        self,
        trial: int,
        epoch: int,
        metrics: dict[str, float],
        seconds: float,
        state_hash: str,
        state_file: str | None,
        publish: tuple[Path, Path] | None,
    ) -> None:
        """Record a finished epoch once its state is durable under its final name.

        An epoch that was trained again, from the durable state before it, stands in the
        place of the first.
        """
        values = (trial, epoch, seconds, state_hash, state_file)
        pairs = tuple((trial, epoch, name, value) for name, value in metrics.items())
        sql = "INSERT OR REPLACE INTO epochs VALUES (?, ?, ?, ?, ?)"
        self._hand_over([Row(sql, values, publish, metrics=pairs)])

    def retire_state(self, trial: int, epoch: int, file: Path) -> None:
        """Forget a kept state, then delete its file."""
        sql = "UPDATE epochs SET state_file = NULL WHERE trial = ? AND epoch = ?"
        self._hand_over([Row(sql, (trial, epoch), None, (file,))])

    def add_event(self, time: float, kind: str, text: str, trial: int | None = None) -> None:
        self._put("INSERT INTO events VALUES (NULL, ?, ?, ?, ?)", time, kind, trial, text)

    def flush(self) -> None:
        """Wait until everything handed over is durable."""
        if self._closed:
            return
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        self._check()

    def close(self) -> None:
        """Commit what is left and end the writing thread."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._check()

    def _put(self, sql: str, *values: Any) -> None:
        self._hand_over([Row(sql, tuple(storable(value) for value in values))])

    def _hand_over(self, rows: list[Row]) -> None:
        self._check()
        if self._group is not None:
            self._group += rows
        elif rows:
            self._queue.put(rows)

    def _check(self) -> None:
        if self._error is not None:
            raise OSError(
                f"cannot write {self._folder / FILE}: {self._error} (the run's folder must be "
                "writable and needs room: free some, and choose another run=)"
            ) from self._error

    # --- the writing thread ----------------------------------------------

    def _write(self) -> None:
        items: list[Item] = []
        try:
            with contextlib.closing(
                sqlite3.connect(self._folder / FILE, timeout=BUSY_SECONDS)
            ) as connection:
                connection.execute(f"PRAGMA journal_mode = {journal_mode(self._folder)}")
                connection.execute("PRAGMA synchronous = FULL")
                while None not in items:
                    items = self._gather()
                    groups = [item for item in items if isinstance(item, list)]
                    self._commit(connection, [row for group in groups for row in group])
                    release_waiters(items)
        except BaseException as error:
            self._error = error
            # Whoever waits must hear of it; what comes later is not written.
            release_waiters(items)
            while None not in items:
                items = self._gather()
                release_waiters(items)

    def _gather(self) -> list[Item]:
        """Take all that has arrived; wait for the first."""
        items = [self._queue.get()]
        with contextlib.suppress(queue.Empty):
            while len(items) < MAX_GROUP:
                items.append(self._queue.get_nowait())
        return items

    def _commit(self, connection: sqlite3.Connection, rows: list[Row]) -> None:
        pairs = [row.publish for row in rows if row.publish is not None]
        retired = {file for row in rows for file in row.retire}
        # What a later row of the group retires again needs no fsync: short epochs
        # follow each other faster than a disk can keep up.
        publish_states([pair for pair in pairs if pair[1] not in retired])
        retired.update(temporary for temporary, final in pairs if final in retired)
        if rows:
            with connection:
                for row in rows:
                    connection.execute(row.sql, row.values)
                    if row.metrics:
                        connection.executemany(
                            "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", row.metrics
                        )
        for file in retired:
            file.unlink(missing_ok=True)


def release_waiters(items: list[Item]) -> None:
    for item in items:
        if isinstance(item, threading.Event):
            item.set()
