"""Writes a run's store: one thread, many rows to a transaction, a short log.

Rows are handed to a thread of their own, which publishes the states they name
(fsync, rename, fsync of the folder) and commits whatever has gathered, so that
training never waits for a disk, unless that falls far behind. What belongs
together is handed over together, as a group, and committed together. The file is
made under a temporary name: where ``run.sqlite`` exists, the run can be opened.

After the first failure nothing more is written: a page that the kernel could not
write is gone, and a later fsync would not say so. What was committed before is
what the run has; a commit that failed in its last step may turn up, whole.

Every 1000 pages SQLite copies the log back into the file (a checkpoint), as far as
no reader still needs the old pages, and starts over once all is copied and nobody
reads from the log. Readers that overlap without a gap would keep it from ever
starting over; so when the log is long the writing thread asks for it, which makes
new readers use the file and waits a moment for the others. Only a reader that
holds one snapshot for long makes the log grow, by what is written meanwhile; the
log is cut as soon as that reader has gone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cerebro.errors import CorruptDataError, text_of
from cerebro.machine import durable
from cerebro.run.records import NOTHING_RAISED, Raised
from cerebro.run.store.batch import Batch, Files
from cerebro.run.store.encoding import encode, encode_raised, storable
from cerebro.run.store.schema import (
    BUSY_SECONDS,
    FILE,
    SCHEMA,
    SCHEMA_VERSION,
    journal_mode,
    migrate,
    store_of,
)

MAX_ROWS = 10_000
"""Of a transaction, and rows that may wait for one: then whoever hands over waits too."""

MAX_STATE_BYTES = 1 << 30

MIN_STATES = 4
"""States that may wait for the disk: `MAX_STATE_BYTES` together, but always `MIN_STATES`."""

Row = tuple[Callable[..., None], tuple[Any, ...]]
"""A method of `Batch` and its arguments."""


@dataclass(slots=True)
class Group:
    """Rows to commit together, and how much they ask of the disk."""

    rows: list[Row] = field(default_factory=list)
    states: int = 0
    state_bytes: int = 0


Item = Group | threading.Event | None
"""What is handed to the writing thread: rows, somebody who waits, the end."""


@dataclass(slots=True)
class Work:
    """How much has been handed over, or written, since the store was opened."""

    rows: int = 0
    states: int = 0
    state_bytes: int = 0

    def add(self, group: Group) -> None:
        self.rows += len(group.rows)
        self.states += group.states
        self.state_bytes += group.state_bytes

    def is_far_ahead_of(self, other: Work) -> bool:
        return self.rows - other.rows > MAX_ROWS or (
            self.state_bytes - other.state_bytes > MAX_STATE_BYTES
            and self.states - other.states > MIN_STATES
        )


class Store:
    """The writing side of a run's store; see the module's text.

    Made by `create` or `open`. One thread calls it: the coordinator's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()  # the working directory may change
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._group: Group | None = None
        self._handed = Work()
        self._written = Work()
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
        durable.sync_folder(folder)
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
        file = store_of(folder)
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
        group = self._group = Group()
        try:
            yield
        finally:
            self._group = None
        self._hand_over(group)

    def set_meta(self, key: str, value: Any) -> int:
        """Record something about the run as a whole; return how many characters that are."""
        text = encode(value)
        self._put(Batch.set_meta, key, text)
        return len(text)

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
        self._put(Batch.add_trial, number, encode(config), status, epochs, parent, parent_epoch)

    def set_status(
        self,
        number: int,
        status: str,
        error: str = "",
        traceback: str = "",
        *,
        resumable: bool = False,
        raised: Raised = NOTHING_RAISED,
    ) -> None:
        """Record how a trial is; `resumable` says that the run left it unfinished."""
        texts = storable(error) or None, storable(traceback) or None
        self._put(Batch.set_status, number, status, *texts, int(resumable), encode_raised(raised))

    def set_epochs(self, number: int, epochs: int) -> None:
        """Record that a trial is to train for another number of epochs."""
        self.execute("UPDATE trials SET epochs = ? WHERE number = ?", epochs, number)

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
        """Record a unit that ran."""
        self._put(
            Batch.add_unit,
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
        publish: tuple[str | Path, str | Path] | None,
    ) -> None:
        """Record a finished epoch once its state is durable under its final name.

        An epoch that was trained again, from the durable state before it, stands in the
        place of the first.

        Parameters
        ----------
        state_file
            The state's name in ``states/``, or None.
        publish
            Its temporary and its final path.
        """
        files: Files | None = None
        if publish is not None:
            files = (os.fspath(publish[0]), os.fspath(publish[1]))
        values = (trial, epoch, metrics, seconds, state_hash, state_file, files)
        if files is None:
            self._put(Batch.add_epoch, *values)
        else:
            self._hand_over(Group([(Batch.add_epoch, values)], 1, size_of(files[0])))

    def retire_state(self, trial: int, epoch: int, file: str | Path) -> None:
        """Forget a kept state, then delete its file."""
        self._put(Batch.retire_state, trial, epoch, os.fspath(file))

    def add_event(self, time: float, kind: str, text: str, trial: int | None = None) -> None:
        """Record what else happened, `time` seconds after the run's start."""
        self.execute("INSERT INTO events VALUES (NULL, ?, ?, ?, ?)", time, kind, trial, text)

    def execute(self, sql: str, *values: Any) -> None:
        """Hand over a statement; of a transaction's rows, such come last, in their order."""
        self._put(Batch.execute, sql, tuple(storable(value) for value in values))

    def add_extension(self, number: int, position: int, epochs: int) -> None:
        """Record that ``info.epochs`` of a trial is another number from a position on."""
        self.execute("INSERT OR REPLACE INTO extensions VALUES (?, ?, ?)", number, position, epochs)

    def add_decision(
        self, round: int, trial: int, epoch: int, decision: str, epochs: int | None
    ) -> None:
        """Record what an adaptive searcher said, of an epoch reported or of one to come."""
        sql = "INSERT INTO decisions VALUES (NULL, ?, ?, ?, ?, ?)"
        self.execute(sql, round, trial, epoch, decision, epochs)

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

    def _put(self, add: Callable[..., None], *values: Any) -> None:
        self._hand_over(Group([(add, values)]))

    def _hand_over(self, group: Group) -> None:
        self._check()
        open_group = self._group
        if open_group is not None:
            open_group.rows += group.rows
            open_group.states += group.states
            open_group.state_bytes += group.state_bytes
        elif group.rows:
            self._queue.put(group)
            self._handed.add(group)
            if self._handed.is_far_ahead_of(self._written):
                self.flush()

    def _check(self) -> None:
        error = self._error
        if error is not None:
            file = self.folder / FILE if isinstance(error, sqlite3.Error) else self.folder
            raise OSError(
                f"cannot write {file}: {text_of(error)} (the run's folder must be writable and "
                "needs room: free some, or choose another run=)"
            ) from error

    # --- the writing thread ----------------------------------------------

    def _write(self) -> None:
        items: list[Item] = []
        try:
            with contextlib.closing(
                sqlite3.connect(self.folder / FILE, timeout=BUSY_SECONDS)
            ) as connection:
                connection.execute(f"PRAGMA journal_mode = {journal_mode(self.folder)}")
                connection.execute("PRAGMA synchronous = FULL")
                log_size = LogSize(connection, self.folder)
                while None not in items:
                    items = self._gather()
                    self._commit(connection, items)
                    release_waiters(items)
                    log_size.check()
        except BaseException as error:
            self._error = error
            # Whoever waits must hear of it; what comes later is not written.
            release_waiters(items)
            while None not in items:
                items = self._gather()
                release_waiters(items)

    def _gather(self) -> list[Item]:
        """Take what has arrived, up to about `MAX_ROWS`; wait for the first."""
        items = [self._queue.get()]
        rows = 0
        with contextlib.suppress(queue.Empty):
            while rows < MAX_ROWS:
                item = self._queue.get_nowait()
                items.append(item)
                rows += len(item.rows) if isinstance(item, Group) else 0
        return items

    def _commit(self, connection: sqlite3.Connection, items: list[Item]) -> None:
        groups = [item for item in items if isinstance(item, Group)]
        batch = Batch()
        for group in groups:
            for add, values in group.rows:
                add(batch, *values)
        batch.write(connection)
        for group in groups:
            self._written.add(group)


def release_waiters(items: list[Item]) -> None:
    """Let those go on who wait for what was handed over before."""
    for item in items:
        if isinstance(item, threading.Event):
            item.set()


def size_of(file: str) -> int:
    """A file's size in bytes; 0 where there is none, which publishing it will say."""
    try:
        return os.stat(file).st_size  # noqa: PTH116
    except OSError:
        return 0


KEPT_BYTES = 4 << 20
"""What the log's file keeps of its length when it starts over: writing in place is faster."""

LONG_BYTES = 64 << 20
"""From here on starting over is asked for."""

PATIENCE_SECONDS = 1.0
"""How long it waits for readers then. Rows gather meanwhile; training goes on."""


class LogSize:
    """Watches the log of one connection.

    Parameters
    ----------
    connection
        The writer's; not in a transaction when `check` is called.
    folder
        The run's folder.
    """

    def __init__(self, connection: sqlite3.Connection, folder: Path) -> None:
        self._connection = connection
        self._log = str(folder / (FILE + "-wal"))
        self._limit = LONG_BYTES
        connection.execute(f"PRAGMA journal_size_limit = {KEPT_BYTES}")

    def check(self) -> None:
        """Start the log over if it is long; called after every commit."""
        try:
            size = os.stat(self._log).st_size  # noqa: PTH116
        except FileNotFoundError:  # a rollback journal is used
            return
        if size <= self._limit:
            return
        connection = self._connection
        connection.execute(f"PRAGMA busy_timeout = {round(1000 * PATIENCE_SECONDS)}")
        (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        connection.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_SECONDS)}")
        # Somebody holds on: not asked again after every commit.
        self._limit = 2 * size if busy else LONG_BYTES
