"""Keeps SQLite's write-ahead log short, though readers hold on to it.

Every 1000 pages SQLite copies the log back into the file (a checkpoint), as far as
no reader still needs the old pages, and starts over once all is copied and nobody
reads from the log. Readers that overlap without a gap would keep it from ever
starting over; so when the log is long the writing thread asks for it, which makes
new readers use the file and waits a moment for the others. Only a reader that
holds one snapshot for long makes the log grow, by what is written meanwhile; the
log is cut as soon as that reader has gone.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from cerebro.store.location import BUSY_SECONDS, FILE

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
