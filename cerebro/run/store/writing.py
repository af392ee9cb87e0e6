"""Write a run's store: with one task beside training, many rows per transaction, and a short log.

The task, a thread, publishes the states that queued rows name, and commits all pending rows;
training waits only when it is far behind. Rows queued as a group are committed together. After the
first failure nothing more is written; a commit that failed in its last step may appear later,
complete. Only a store that is removed while it is open is written again (`OpenFile`): an open file
keeps its rows until it is closed, but SQLite does not notice that its file or its log was deleted,
and would commit to files that no path leads to.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cerebro.arguments import warn_user
from cerebro.errors import CorruptDataError, text_of
from cerebro.machine import durable
from cerebro.machine.disk import Disk
from cerebro.machine.local import LOCAL, Event, Machine
from cerebro.run.records import ActionRecord, EpochRecord, TrialRecord
from cerebro.run.store.schema import (
    BUSY_SECONDS,
    FILE,
    SCHEMA,
    SCHEMA_VERSION,
    check_version,
    encode,
    encode_raised,
    escape_surrogates,
    journal_mode,
    store_of,
    unused_folder,
)

LOGS = ("-wal", "-shm", "-journal")
EVENT = "store put back"
TRIES = 5
"""How often the store is written if it is removed again and again."""

KEPT_BYTES = 4 << 20
"""The size of the log's file after a restart: overwriting is faster than appending."""

LONG_BYTES = 64 << 20
"""The size of the log at which a restart is requested."""

PATIENCE_SECONDS = 1.0
"""How long the restart waits for readers. Rows queue up meanwhile; training continues."""


class OpenFile:
    """The connection of a store's writer, with a short log.

    SQLite restarts the log once all its pages are copied into the file (a checkpoint) and no reader
    uses it, which readers that overlap without a gap would prevent forever. So when the log is
    long, `shorten_log` requests a restart, which makes new readers use the file, and waits a moment
    for the others. Only a reader that holds a snapshot for long lets the log grow.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._file = folder / FILE
        self._disk = disk
        self._connect()

    def _connect(self) -> None:
        connection = self._disk.connect(self._file, "mode=rw", BUSY_SECONDS)  # never a new file
        try:
            mode = journal_mode(self._folder, self._disk)
            connection.execute(f"PRAGMA journal_mode = {mode}")
            connection.execute("PRAGMA synchronous = EXTRA")  # also sync a journal's removal
            connection.execute("SELECT 1 FROM meta").fetchone()  # opens the log
            # SQLite ignores it if its own sync of the log's name fails: commits would be lost.
            durable.sync_folder(self._folder, self._disk)
            connection.execute(f"PRAGMA journal_size_limit = {KEPT_BYTES}")
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        self._long_bytes = LONG_BYTES
        self._parts = {
            path: identity
            for path in (self._folder, self._file, self._log("-wal"), self._log("-shm"))
            if (identity := self._disk.identify(path)) is not None
        }

    def close(self) -> None:
        self.connection.close()

    def shorten_log(self) -> None:
        """Restart the log if it is long; call this after every commit, outside of transactions."""
        try:
            size = self._disk.size(self._log("-wal"))
        except FileNotFoundError:  # the store has a rollback journal instead
            return
        if size <= self._long_bytes:
            return
        connection = self.connection
        connection.execute(f"PRAGMA busy_timeout = {round(1000 * PATIENCE_SECONDS)}")
        (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        connection.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_SECONDS)}")
        # A reader holds a snapshot: do not request a restart after every commit.
        self._long_bytes = 2 * size if busy else LONG_BYTES

    def put_back(self) -> str | None:
        """Write the store again if it, or its log, was removed or replaced; return a message.

        Call this between transactions. Return None if nothing was lost, or if the folder itself is
        gone or renamed. Raise OSError or sqlite3.Error if the store cannot be written.
        """
        identities = {path: self._disk.identify(path) for path in self._parts}
        if identities == self._parts or identities[self._folder] != self._parts[self._folder]:
            return None
        lost = " and ".join(p.name for p in self._parts if identities[p] != self._parts[p])
        old, copied = self.connection, None
        if identities[self._file] not in (None, self._parts[self._file]):
            aside = unused_folder(self._file.with_name(FILE + ".replaced"), self._disk)
            self._disk.rename(self._file, aside)
        for tries_left in reversed(range(TRIES)):
            copied = self._write_again(old)
            try:
                self._connect()
            except sqlite3.OperationalError:  # it has been removed again
                if not tries_left:
                    raise
            if self._parts.get(self._file) == copied:
                break
        old.close()  # its file has no name any more, so SQLite removes no log
        text = f"{lost} was removed or replaced during the run: the store was written again"
        self.connection.execute(
            "INSERT INTO events SELECT NULL, coalesce(max(started + seconds), 0.0), ?, NULL, ? "
            "FROM units",
            (EVENT, text),
        )
        self.connection.commit()
        return f"{self._folder}: {text}"

    def _write_again(self, connection: sqlite3.Connection) -> tuple[int, int] | None:
        """Give a copy of what a connection has open the store's name; return its identity."""
        complete = self._file.with_name(FILE + ".new")
        remove_draft(self._folder, self._disk)
        copy_store(connection, complete, self._disk)
        copied = self._disk.identify(complete)
        for end in LOGS:  # SQLite would take them for the new file's
            self._disk.remove(self._log(end))
        durable.publish([(complete, self._file)], self._disk)
        return copied

    def _log(self, end: str) -> Path:
        return self._file.with_name(FILE + end)


def copy_store(connection: sqlite3.Connection, file: Path, disk: Disk) -> None:
    """Copy a store, as this connection sees it, to a new file."""
    with contextlib.closing(disk.connect(file, "mode=rwc", BUSY_SECONDS)) as target:
        connection.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")  # no log beside it


Files = tuple[str, str]
"""The temporary and the final path of a state."""

UNIT_COLUMNS = (
    "trial", "epoch", "step", "part", "worker", "attempt", "started", "seconds", "rows", "batches",
    "hopped", "state_bytes",
)  # fmt: skip

_TRIALS = f"INSERT INTO trials VALUES ({', '.join(14 * '?')})"
_STATUS = (
    "UPDATE trials SET status = ?, error = ?, traceback = ?, resumable = ?, raised = ?, "
    "began = ?, ended = ? "
    "WHERE number = ?"
)
_EPOCHS = "INSERT OR REPLACE INTO epochs VALUES (?, ?, ?, ?, ?)"
_METRICS = "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)"
_RETIRE = "UPDATE epochs SET state_file = NULL WHERE trial = ? AND epoch = ?"
_UNITS = "INSERT INTO units VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"


class Transaction:
    """The rows of one transaction by table, with the states that they publish and retire.

    Only the latest version of a row is written: a trial that began and ended since the last commit
    is written once, and a state that was kept and retired meanwhile is never synced, because short
    epochs end faster than a disk can sync.
    """

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
        """Add a trial: its configuration, status, epochs, parent, parent's epoch and, for a trial
        whose stream is not its number, origin and stream.
        """
        config, status, epochs, parent, parent_epoch, *origin = columns
        row = [number, config, status, epochs, parent, None, None, 0, parent_epoch, None]
        self._trials[number] = [*row, *(origin or ("searcher", None)), None, None]

    def set_status(self, number: int, status: str, *columns: Any) -> None:
        """Set a trial's status, error, traceback, whether it is resumable, what was raised and,
        once it has begun, when it began and ended.
        """
        columns = (*columns, None, None)[:6]
        row = self._trials.get(number)
        if row is None:
            self._status[number] = (status, *columns, number)
        else:
            row[2], row[5:8], row[9], row[12:] = status, columns[:3], columns[3], columns[4:]

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

    def publish_states(self, disk: Disk) -> None:
        """Make states durable; rows may then name them."""
        if self._publish:
            durable.publish(((new, final) for final, new in self._publish.items()), disk)

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

    def remove_states(self, disk: Disk) -> None:
        """Delete states that no row names any more."""
        for file in (*self._retired.values(), *self._unwanted):
            disk.remove(file)


MAX_ROWS = 10_000
"""The most rows in a transaction, and the most pending rows; beyond it, adding a row blocks."""

MAX_STATE_BYTES = 1 << 30
MIN_STATES = 4
"""How many states may always be pending; more may be, up to `MAX_STATE_BYTES` together."""

# A commit for each short unit would take processor time from workers. Rows of units are only a
# record: resuming reads from the states where a trial is.
UNIT_SECONDS = 0.05
"""How long rows of units may wait for others."""

Row = tuple[Callable[..., None], tuple[Any, ...]]
"""A method of `Transaction` and its arguments."""


@dataclass(slots=True)
class Group:
    """Rows to commit together, with the number and size of the states that they publish."""

    rows: list[Row] = field(default_factory=list)
    states: int = 0
    state_bytes: int = 0


Item = Group | Event | None
"""Rows, an event to set once all rows before it are durable, or None at the end."""


@dataclass(slots=True)
class Backlog:
    """The rows and states that were queued, or written, since the store was opened."""

    rows: int = 0
    states: int = 0
    state_bytes: int = 0

    def add(self, group: Group) -> None:
        self.rows += len(group.rows)
        self.states += group.states
        self.state_bytes += group.state_bytes

    def is_far_ahead_of(self, other: Backlog) -> bool:
        return self.rows - other.rows > MAX_ROWS or (
            self.state_bytes - other.state_bytes > MAX_STATE_BYTES
            and self.states - other.states > MIN_STATES
        )


class Store:
    """The writing side of a run's store, from `create` or `open`, for the coordinator's thread."""

    def __init__(self, folder: Path, machine: Machine = LOCAL) -> None:
        self.folder = folder.absolute()  # the working directory may change
        self.machine, self.disk = machine, machine.disk
        self._file: OpenFile | None = None
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._is_urgent = self.machine.tasks.event()  # the queue has something that cannot wait
        self._group: Group | None = None
        self._handed = Backlog()
        self._written = Backlog()
        self._error: BaseException | None = None
        self._closed = False
        self._news: list[str] = []  # that the writing task has for the user
        self.before_commit: Sequence[Callable[[], None]] = ()
        """Called by the writing task; an exception ends the writing, as a failing disk does."""
        self.listeners: Sequence[Callable[[], None]] = ()
        """Called by the writing task after each commit; they must not raise."""
        self._task = self.machine.tasks.repeat(
            self._write, lambda: not self._queue.empty(), "cerebro-store"
        )

    @classmethod
    def create(cls, folder: Path, meta: dict[str, Any], machine: Machine = LOCAL) -> Store:
        """Create the store of a new run, complete and durable before it gets its final name."""
        disk, temporary = machine.disk, folder / (FILE + ".new")
        remove_draft(folder, disk)
        rows = [(key, encode(value)) for key, value in meta.items()]
        try:
            with contextlib.closing(disk.connect(temporary, "mode=rwc", 0)) as connection:
                connection.executescript(f"BEGIN;{SCHEMA}")  # one commit, not one for each table
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                connection.executemany("INSERT INTO meta VALUES (?, ?)", rows)
                connection.commit()
        except sqlite3.Error as error:
            raise OSError(f"{temporary}: {error}") from error
        disk.rename(temporary, folder / FILE)
        durable.sync_folder(folder, disk)
        return cls(folder, machine)

    @classmethod
    def open(cls, folder: Path, machine: Machine = LOCAL) -> Store:
        """Open the store of an earlier run, which the caller must own, for writing.

        Raise InputError if the folder holds no run, CorruptDataError if the file is not a store of
        the version that this Cerebro reads, and OSError if it cannot be written.
        """
        file = store_of(folder, machine.disk)
        try:
            opened = machine.disk.connect(file, "mode=rw", BUSY_SECONDS)
            with contextlib.closing(opened) as connection:
                connection.execute("PRAGMA synchronous = FULL")
                check_version(connection, file)
        except sqlite3.OperationalError as error:
            raise OSError(f"cannot write {file}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise CorruptDataError(f"{file} cannot be read: {error}") from error
        remove_draft(folder, machine.disk)  # whose journal a power failure may have left
        return cls(folder, machine)

    # --- rows ------------------------------------------------------------

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Commit either all rows added in the block, or in blocks within it, or none of them."""
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
        """Record a property of the whole run; return the length of its value in characters."""
        text = encode(value)
        self._put(Transaction.set_meta, key, text)
        return len(text)

    def add_trial(self, trial: TrialRecord) -> None:
        """Record a new trial; for a clone, also the parent trial and epoch from which it began."""
        parent, epoch = trial.parent, trial.parent_epoch
        row = trial.number, encode(trial.config), trial.status, trial.target_epochs, parent, epoch
        self._put(Transaction.add_trial, *row, trial.origin, trial.stream)

    def set_status(self, trial: TrialRecord) -> None:
        """Record a trial's status; `resumable` means that the run left the trial unfinished."""
        texts = [escape_surrogates(text) or None for text in (trial.error, trial.traceback)]
        row = trial.number, trial.status, *texts, int(trial.resumable), encode_raised(trial.raised)
        self._put(Transaction.set_status, *row, trial.began, trial.ended)

    def set_epochs(self, number: int, epochs: int) -> None:
        self.execute("UPDATE trials SET epochs = ? WHERE number = ?", epochs, number)

    def add_unit(self, **columns: Any) -> None:
        """Record a unit, with a value for each of `UNIT_COLUMNS`."""
        self._put(Transaction.add_unit, *[columns[name] for name in UNIT_COLUMNS])

    def add_epoch(
        self, trial: int, epoch: EpochRecord, publish: tuple[str | Path, str | Path] | None
    ) -> None:
        """Record a finished epoch once its state is durable under its final name.

        `publish` has the state's temporary and final path. An epoch that was trained again, from
        the durable state before it, replaces the first one.
        """
        files = None if publish is None else (os.fspath(publish[0]), os.fspath(publish[1]))
        columns = epoch.seconds, epoch.state_hash, epoch.state_file
        row = Transaction.add_epoch, (trial, epoch.epoch, epoch.metrics, columns, files)
        group = Group([row]) if files is None else Group([row], 1, size_of(files[0], self.disk))
        self._hand_over(group)

    def retire_state(self, trial: int, epoch: int, file: str | Path) -> None:
        """Forget a kept state, then delete its file."""
        self._put(Transaction.retire_state, trial, epoch, os.fspath(file))

    def add_event(self, time: float, kind: str, text: str, trial: int | None = None) -> None:
        """Record an event, `time` seconds after the run's start."""
        self.execute("INSERT INTO events VALUES (NULL, ?, ?, ?, ?)", time, kind, trial, text)

    def execute(self, sql: str, *values: Any) -> None:
        """Add a statement; a transaction runs these statements last, in their order."""
        self._put(Transaction.execute, sql, tuple(escape_surrogates(value) for value in values))

    def add_extension(self, number: int, position: int, epochs: int) -> None:
        """Record that a trial's ``info.epochs`` changes at a position."""
        self.execute("INSERT OR REPLACE INTO extensions VALUES (?, ?, ?)", number, position, epochs)

    def add_decision(
        self, round: int, trial: int, epoch: int, decision: str, epochs: int | None
    ) -> None:
        """Record an adaptive searcher's decision on a reported epoch, or a suggestion."""
        sql = "INSERT INTO decisions VALUES (NULL, ?, ?, ?, ?, ?)"
        self.execute(sql, round, trial, epoch, decision, epochs)

    def add_action(self, action: ActionRecord) -> None:
        """Record a request of the user's and what has become of it."""
        changes = None if action.changes is None else encode(action.changes)
        self.execute(
            "INSERT INTO actions VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            action.request, action.time, action.verb, action.trial, action.child, action.epoch,
            changes, action.epochs, action.sender, action.outcome,
        )  # fmt: skip

    def flush(self) -> None:
        """Wait until all rows added so far are durable."""
        if self._closed:
            return
        done = self.machine.tasks.event()
        self._enqueue(done)
        done.wait()
        self._check()

    def close(self) -> None:
        """Commit the pending rows and end the writing task."""
        self._closed = True
        self._enqueue(None)
        self._task.join()
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
            self._enqueue(group)
            self._handed.add(group)
            if self._handed.is_far_ahead_of(self._written):
                self.flush()

    def _enqueue(self, item: Item) -> None:
        self._queue.put(item)
        can_wait = isinstance(item, Group) and all(f is Transaction.add_unit for f, _ in item.rows)
        if not can_wait:
            self._is_urgent.set()

    def _check(self) -> None:
        while self._news:
            warn_user(self._news.pop(0))
        error = self._error
        if error is not None:
            file = self.folder / FILE if isinstance(error, sqlite3.Error) else self.folder
            raise OSError(
                f"cannot write {file}: {text_of(error)} (the run's folder must be writable and "
                "have free space: delete files, or choose another run=)"
            ) from error

    # --- the writing task ----------------------------------------------------

    def _write(self) -> bool:
        """Wait for items and write them; return False after the last one."""
        items: list[Item] = []
        try:
            if self._file is None and self._error is None:
                self._file = OpenFile(self.folder, self.disk)
            items = self._gather()
            if self._file is not None:
                self._commit(self._file, items)
                release_waiters(items)
                self._file.shorten_log()
                if None in items:
                    self._file.close()
        except BaseException as error:
            # Waiting threads must see the error. Later rows are not written: a page that the kernel
            # could not write is lost, and a later fsync would not report it.
            self._error = error
            with contextlib.suppress(Exception):
                if self._file is not None:
                    self._file.close()
            self._file = None
        release_waiters(items)
        return None not in items

    def _gather(self) -> list[Item]:
        """Wait for an item, then take all pending ones, up to about `MAX_ROWS` rows."""
        items = [self._queue.get()]
        self._is_urgent.wait(UNIT_SECONDS)
        self._is_urgent.clear()  # before the queue is emptied: what comes later sets it again
        rows = 0
        with contextlib.suppress(queue.Empty):
            while rows < MAX_ROWS:
                item = self._queue.get_nowait()
                items.append(item)
                rows += len(item.rows) if isinstance(item, Group) else 0
            self._is_urgent.set()  # there may be more
        return items

    def _put_back(self, file: OpenFile) -> bool:
        """Write the store again if it was removed; return whether it was."""
        news = file.put_back()
        self._news += [] if news is None else [news]
        return news is not None

    def _commit(self, file: OpenFile, items: list[Item]) -> None:
        for call in self.before_commit:
            call()
        self._put_back(file)
        groups = [item for item in items if isinstance(item, Group)]
        transaction = Transaction()
        for group in groups:
            for add, values in group.rows:
                add(transaction, *values)
        transaction.publish_states(self.disk)
        try:
            transaction.write_rows(file.connection)
        except sqlite3.OperationalError:
            # A store with a rollback journal refuses rows if it was removed a moment ago.
            if not self._put_back(file):
                raise
            transaction.write_rows(file.connection)
        transaction.remove_states(self.disk)
        for group in groups:
            self._written.add(group)
        for listener in self.listeners if groups else ():
            listener()


def remove_draft(folder: Path, disk: Disk) -> None:
    """Remove what is left of a store that was being written under its temporary name."""
    for end in ("", "-journal"):
        disk.remove(folder / f"{FILE}.new{end}")


def release_waiters(items: list[Item]) -> None:
    """Wake the threads that wait until the items before them are written."""
    for item in items:
        if item is not None and not isinstance(item, Group):
            item.set()


def size_of(file: str | os.PathLike[str], disk: Disk) -> int:
    """Return a file's size in bytes; 0 if it is missing, which publishing it will report."""
    try:
        return disk.size(file)
    except OSError:
        return 0
