"""Random calls of the core through its binding, checked against what must hold.

``python tests/fuzz/calls.py loader --seconds 60`` makes runs until the time is over. A run is
determined by its seed, which a failure names: ``--seed N --runs 1`` repeats it.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import calls_loader
import calls_schedule
import calls_slots

FUZZERS: dict[str, Callable[[random.Random, Path], int]] = {
    "schedule": calls_schedule.run,
    "loader": calls_loader.run,
    "slots": calls_slots.run,
    "kills": calls_slots.run_kills,
}
"""By name: makes one run with files in an empty folder; returns how many calls it has checked."""

MEMORY = Path("/dev/shm")
"""Where the files lie if it exists: in memory, many times as many runs are possible."""


def fuzz(
    name: str, seed: int, runs: int | None = None, seconds: float | None = None, tell: bool = False
) -> int:
    """Make runs until their number or the time is reached; return how many calls were checked.

    With `tell`, each run first writes its seed to standard error: a fault in C ends the process.
    """
    end = None if seconds is None else time.monotonic() + seconds
    checked = 0
    for number in itertools.count():
        if number == runs or (end is not None and time.monotonic() >= end):
            return checked
        if tell:
            print(f"seed {seed + number}", end="\r", file=sys.stderr, flush=True)
        folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        try:
            checked += FUZZERS[name](random.Random(seed + number), folder)
        except BaseException:
            command = f"python tests/fuzz/calls.py {name} --seed {seed + number} --runs 1"
            print(f"repeat it with: {command}", flush=True)
            raise
        finally:
            shutil.rmtree(folder)
    raise AssertionError("numbers end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=FUZZERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seconds", type=float)
    given = parser.parse_args()
    seconds = 20.0 if given.runs is None and given.seconds is None else given.seconds
    faulthandler.enable()
    checked = fuzz(given.name, given.seed, given.runs, seconds, tell=True)
    print(f"{given.name}: {checked} calls checked, no finding")


if __name__ == "__main__":
    main()
