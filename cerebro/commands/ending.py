"""How a command that trains ends: the exit status, and what an interrupted run has kept."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from cerebro.interrupts import INTERRUPTED, uninterrupted


def interrupted(error: KeyboardInterrupt) -> int:
    """Say what an interrupted run has kept, and how it goes on: the error knows."""
    with uninterrupted(error):
        text = str(error) or "interrupted before any trial began; nothing was kept"
        print(f"\n{text}", file=sys.stderr)
    return INTERRUPTED


def status_of(result: Any) -> int:
    """Give the exit status of a search that returned."""
    if result.status == "finished":
        return 0
    print(
        f"error: the run is {result.status}, not finished; to go on: "
        f"python -m cerebro resume {shlex.quote(str(result.path))}",
        file=sys.stderr,
    )
    return 1
