"""How a command that trains ends: the exit status, and what an interrupted run has kept."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from cerebro.errors import CerebroError
from cerebro.interrupts import uninterrupted

INTERRUPTED = 130


def interrupted(path: Any) -> int:
    """Say what an interrupted run has kept."""
    with uninterrupted():
        return _say_what_is_kept(path)


def _say_what_is_kept(path: Any) -> int:
    import cerebro

    try:
        kept = cerebro.open(path)
    except (CerebroError, OSError):
        print("\ninterrupted before any trial began; nothing was kept", file=sys.stderr)
        return INTERRUPTED
    epochs = sum(trial.epoch for trial in kept.trials)
    print(
        f"\ninterrupted: {len(kept.trials)} trials with {epochs} finished epochs are kept in "
        f"{kept.path}. To look at them:\n\n"
        f"  python -m cerebro show {shlex.quote(str(kept.path))}",
        file=sys.stderr,
    )
    return INTERRUPTED


def status_of(result: Any) -> int:
    """Give the exit status of a search that returned."""
    if result.status == "finished":
        return 0
    print(f"error: the run is {result.status}, not finished", file=sys.stderr)
    return 1
