"""Open a store's file for the writing thread, and put it back if somebody removes it.

An open file that is removed lives on until it is closed, with all its rows. SQLite does not notice
that its file, or its log, has lost its name, so commits would go on into files that nobody finds.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from cerebro.machine import durable
from cerebro.run.store.schema import BUSY_SECONDS, FILE, journal_mode, unused_folder

LOGS = ("-wal", "-shm", "-journal")
EVENT = "store put back"
TRIES = 5
"""How often the store is written if it is removed again and again."""


class OpenFile:
    """The connection of a store's writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / FILE
        self._connect()

    def _connect(self) -> None:
        uri = f"{self._file.as_uri()}?mode=rw"  # never a new, empty file
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS)
        try:
            connection.execute(f"PRAGMA journal_mode = {journal_mode(self._folder)}")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("SELECT 1 FROM meta").fetchone()  # opens the log
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        self._parts = {
            path: identity
            for path in (self._folder, self._file, self._log("-wal"), self._log("-shm"))
            if (identity := _identify_file(path)) is not None
        }

    def close(self) -> None:
        self.connection.close()

    def put_back(self) -> str | None:
        """Write the store again if it, or its log, was removed or replaced; return a message.

        Call this between transactions. Returns None if nothing was lost, or if the folder itself is
        gone or renamed. Raises OSError or sqlite3.Error if the store cannot be written.
        """
        identities = {path: _identify_file(path) for path in self._parts}
        if identities == self._parts or identities[self._folder] != self._parts[self._folder]:
            return None
        lost = " and ".join(p.name for p in self._parts if identities[p] != self._parts[p])
        old, copied = self.connection, None
        if identities[self._file] not in (None, self._parts[self._file]):
            self._file.rename(unused_folder(self._file.with_name(FILE + ".replaced")))
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
        complete.unlink(missing_ok=True)
        copy_store(connection, complete)
        copied = _identify_file(complete)
        for end in LOGS:  # SQLite would take them for the new file's
            self._log(end).unlink(missing_ok=True)
        durable.publish([(complete, self._file)])
        return copied

    def _log(self, end: str) -> Path:
        return self._file.with_name(FILE + end)


def copy_store(connection: sqlite3.Connection, file: Path) -> None:
    """Copy a store, as this connection sees it, to a new file."""
    with contextlib.closing(sqlite3.connect(file)) as target:
        connection.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")  # no log beside it


def _identify_file(path: Path) -> tuple[int, int] | None:
    """Return a file's device and inode; None if it does not exist."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino
