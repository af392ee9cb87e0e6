"""A run's complete stored data, for tests of the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cerebro.run.records import TrialRecord
from cerebro.run.store import read_meta, read_trials, reader


@dataclass(frozen=True)
class StoredRun:
    """A snapshot of a run."""

    meta: dict[str, Any]
    trials: list[TrialRecord]
    """By number, with their epochs."""
    units: int
    """The number of recorded units."""


def read_run(folder: Path) -> StoredRun:
    """Read a run's store."""
    with reader(folder) as connection:
        (units,) = connection.execute("SELECT count(*) FROM units").fetchone()
        return StoredRun(read_meta(connection), read_trials(connection), units)
