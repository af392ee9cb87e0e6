"""Deletes files of states that nothing names any more, when a run is closed.

As a rule there are none: a state is deleted after the row that gives it up, slots
with their trial. What a killed worker had half-written, or a process that died
between a commit and a deletion, is found here.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cerebro.state_files import trial_of_kept, trial_of_slots
from cerebro.store import reader


def sweep(run: Path, state_dir: Path) -> list[str]:
    """Delete what a closed run does not need; return the names.

    Needed are the states that epochs name, and all files of trials that can go on: one of
    them may be of an epoch whose row could not be written. Files of other names are not
    the run's.

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
        trials = {
            number: bool(is_open)
            for number, is_open in connection.execute(
                "SELECT number, resumable = 1 "
                "OR status NOT IN ('stopped', 'finished', 'diverged', 'failed') FROM trials"
            )
        }

    def is_left_over(folder: Path, name: str) -> bool:
        slots, kept = trial_of_slots(name), trial_of_kept(name)
        if slots is not None:
            return folder == state_dir and not trials.get(slots, True)
        if kept is None or folder != states or name in named:
            return False
        return not trials.get(kept, False)

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
