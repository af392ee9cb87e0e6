"""The run store: ``run.sqlite`` in the run's folder.

One process writes, any number read, also while the run goes on. Rows are handed
to a thread of their own, which publishes the states they name (fsync, rename,
fsync of the folder) and commits many rows in one transaction, so that training
never waits for a disk. The file is made under a temporary name: where
``run.sqlite`` exists, the run can be opened.

The tables are plain SQLite, readable without Cerebro:

``meta``    key, JSON value: settings, data, build, environment, status
``trials``  number, JSON configuration, status, epochs asked for, error, parent
``epochs``  trial, epoch, seconds, state hash, file of the state
``metrics`` trial, epoch, name, value: ``train_*``, ``val_*`` and the short names
``units``   one row per unit that ran: where, when, how many rows
``events``  what else happened: workers lost, retries, warnings
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import queue
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cerebro import _core
from cerebro.environment import is_network_file_system
from cerebro.errors import CorruptDataError, InputError

FILE = "run.sqlite"
SCHEMA_VERSION = 1
MAX_GROUP = 10_000
BUSY_SECONDS = 60.0
"""How long a commit waits for readers, where they keep it waiting: without WAL."""

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE trials (
    number INTEGER PRIMARY KEY,
    config TEXT NOT NULL,
    status TEXT NOT NULL,
    epochs INTEGER NOT NULL,
    parent INTEGER,
    error TEXT,
    traceback TEXT
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
    shard INTEGER NOT NULL,
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
"""


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


class Store:
    """The writing side of a run's store; see the module's text."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()  # the working directory may change
        self._queue: queue.SimpleQueue[Row | threading.Event | None] = queue.SimpleQueue()
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

    # --- rows ------------------------------------------------------------

    def set_meta(self, key: str, value: Any) -> None:
        self._put("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, encode(value))

    def add_trial(
        self, number: int, config: Any, status: str, epochs: int, parent: int | None
    ) -> None:
        self._put(
            "INSERT INTO trials VALUES (?, ?, ?, ?, ?, NULL, NULL)",
            *(number, encode(config), status, epochs, parent),
        )

    def set_status(self, number: int, status: str, error: str = "", traceback: str = "") -> None:
        self._put(
            "UPDATE trials SET status = ?, error = ?, traceback = ? WHERE number = ?",
            *(status, error or None, traceback or None, number),
        )

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
        """Record a finished epoch once its state is durable under its final name."""
        self._check()
        values = (trial, epoch, seconds, state_hash, state_file)
        pairs = tuple((trial, epoch, name, value) for name, value in metrics.items())
        sql = "INSERT INTO epochs VALUES (?, ?, ?, ?, ?)"
        self._queue.put(Row(sql, values, publish, metrics=pairs))

    def retire_state(self, trial: int, epoch: int, file: Path) -> None:
        """Forget a kept state, then delete its file."""
        self._check()
        sql = "UPDATE epochs SET state_file = NULL WHERE trial = ? AND epoch = ?"
        self._queue.put(Row(sql, (trial, epoch), None, (file,)))

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
        self._check()
        self._queue.put(Row(sql, tuple(storable(value) for value in values)))

    def _check(self) -> None:
        if self._error is not None:
            raise OSError(
                f"cannot write {self._folder / FILE}: {self._error} (the run's folder must be "
                "writable and needs room: free some, and choose another run=)"
            ) from self._error

    # --- the writing thread ----------------------------------------------

    def _write(self) -> None:
        group: list[Row | threading.Event | None] = []
        try:
            with contextlib.closing(
                sqlite3.connect(self._folder / FILE, timeout=BUSY_SECONDS)
            ) as connection:
                connection.execute(f"PRAGMA journal_mode = {journal_mode(self._folder)}")
                connection.execute("PRAGMA synchronous = FULL")
                while None not in group:
                    group = self._gather()
                    self._commit(connection, [item for item in group if isinstance(item, Row)])
                    release_waiters(group)
        except BaseException as error:
            self._error = error
            # Whoever waits must hear of it; what comes later is not written.
            release_waiters(group)
            while None not in group:
                group = self._gather()
                release_waiters(group)

    def _gather(self) -> list[Row | threading.Event | None]:
        """Take all that has arrived; wait for the first."""
        group = [self._queue.get()]
        with contextlib.suppress(queue.Empty):
            while len(group) < MAX_GROUP:
                group.append(self._queue.get_nowait())
        return group

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
                            "INSERT INTO metrics VALUES (?, ?, ?, ?)", row.metrics
                        )
        for file in retired:
            file.unlink(missing_ok=True)


def storable(value: Any) -> Any:
    """Escape lone surrogates, which a path or an error may hold and UTF-8 cannot."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def release_waiters(group: list[Row | threading.Event | None]) -> None:
    for item in group:
        if isinstance(item, threading.Event):
            item.set()


def journal_mode(folder: Path) -> str:
    """WAL, which needs memory shared between readers; a rollback journal on network disks."""
    return "DELETE" if is_network_file_system(folder) else "WAL"


def default_run_path() -> Path:
    """Return ``runs/<time>``, a folder that does not exist yet."""
    base = Path("runs", datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    folder, n = base, 2
    while folder.exists():
        folder, n = base.with_name(f"{base.name}-{n}"), n + 1
    return folder


def publish_states(pairs: list[tuple[Path, Path]]) -> None:
    """Make complete files durable under their final names."""
    for temporary, _ in pairs:
        fd = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    for temporary, final in pairs:
        temporary.rename(final)
    for folder in {str(final.parent) for _, final in pairs}:
        _core.fsync_directory(folder)


# --- reading -----------------------------------------------------------------


@contextlib.contextmanager
def reader(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open a run's store for reading; works while the run goes on.

    Raises
    ------
    InputError
        If the folder holds no run.
    CorruptDataError
        If the file is no run store of a version that this Cerebro reads.
    """
    file = folder / FILE
    if not file.exists():
        raise InputError(f"{folder} is no run: it has no {FILE}")
    uri = f"{file.resolve().as_uri()}?{_access(file)}"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != SCHEMA_VERSION:
                raise CorruptDataError(
                    f"{file} has store version {version}; this Cerebro reads {SCHEMA_VERSION}"
                )
            connection.execute("BEGIN")  # all tables as they are at one moment
            yield connection
    except sqlite3.DatabaseError as error:
        raise CorruptDataError(f"{file} cannot be read: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError) as error:
        raise CorruptDataError(
            f"{file} is damaged: a row cannot be read ({type(error).__name__}: {error})"
        ) from error


def _access(file: Path) -> str:
    """How SQLite is to open a store: where nothing can be written, it must not look for a WAL."""
    if os.access(file.parent, os.W_OK):
        return "mode=rw"
    return "mode=ro" if file.with_name(FILE + "-wal").exists() else "mode=ro&immutable=1"


def read_meta(connection: sqlite3.Connection) -> dict[str, Any]:
    rows: Iterable[sqlite3.Row] = connection.execute("SELECT key, value FROM meta")
    return {row["key"]: decode(row["value"]) for row in rows}


def encode(value: Any) -> str:
    """JSON, with tuples and numbers that are not finite tagged: {"$float": "nan"}."""
    return json.dumps(_tagged(value), separators=(",", ":"), allow_nan=False)


def decode(text: str) -> Any:
    return json.loads(text, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, dict):
        return {str(key): _tagged(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if hasattr(value, "item"):  # NumPy scalars
        return _tagged(value.item())
    raise InputError(f"cannot record {value!r} in the run store: it is no JSON value")


def _untagged(value: dict[str, Any]) -> Any:
    if len(value) == 1 and "$float" in value:
        return float(value["$float"])
    if len(value) == 1 and "$tuple" in value:
        return tuple(value["$tuple"])
    return value
