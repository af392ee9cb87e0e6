"""Deletes files of states that nothing names any more, when a run is closed.

As a rule there are none: a state is deleted after the row that gives it up, slots
with their trial. What a killed worker had half-written, or a process that died
between a commit and a deletion, is found here.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from cerebro.store import reader

_EPOCH = re.compile(r"\d+-epoch-\d+\.safetensors(\.new)?", re.ASCII)
_SLOTS = re.compile(r"(\d+)\.(a|b|slots)", re.ASCII)


def sweep(run: Path, state_dir: Path) -> list[str]:
    """Delete what a closed run does not need; return the names.

    Needed are the states that epochs name, and the slots of trials that can go on. Files
    of other names are not the run's.

    Parameters
    ----------
    run
        The run's folder. Nobody may be writing to the run.
    state_dir
        Where its slots are.
    """
    with reader(run) as connection:
        named = {
            name
            for (name,) in connection.execute(
                "SELECT state_file FROM epochs WHERE state_file IS NOT NULL"
            )
        }
        over = {
            number
            for (number,) in connection.execute(
                "SELECT number FROM trials WHERE resumable = 0 "
                "AND status IN ('stopped', 'finished', 'diverged', 'failed')"
            )
        }

    def is_left_over(folder: Path, name: str) -> bool:
        slots = _SLOTS.fullmatch(name)
        if slots is not None:
            return folder == state_dir and int(slots.group(1)) in over
        return folder == states and _EPOCH.fullmatch(name) is not None and name not in named

    states = run / "states"
    swept = []
    for folder in dict.fromkeys((states, state_dir)):
        with os.scandir(folder) as entries:
            found = [entry.name for entry in entries if is_left_over(folder, entry.name)]
        for name in found:
            with contextlib.suppress(FileNotFoundError):
                (folder / name).unlink()
        swept += found
    return sorted(swept)
