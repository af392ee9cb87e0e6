"""Where a run's store is, and what the disk under it can do."""

from __future__ import annotations

import datetime
from pathlib import Path

from cerebro.environment import is_network_file_system

FILE = "run.sqlite"

BUSY_SECONDS = 60.0
"""How long a commit waits for readers and a reader for a commit, where they keep each
other waiting: without WAL."""


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
