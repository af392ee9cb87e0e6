"""Let workers wait for each other: else the first could end a short run before others start."""

from __future__ import annotations

import os
import time
from pathlib import Path


def meet(folder: Path) -> None:
    """Wait until two processes have come here; return at once before `begin_to_meet`."""
    met = folder / "met"
    if not met.exists():
        return
    with met.open("a") as file:
        file.write(f"{os.getpid()}\n")
    end = time.monotonic() + 60
    while len(set(met.read_text().split())) < 2:
        assert time.monotonic() < end, "no other process trains"
        time.sleep(0.01)


def begin_to_meet(folder: Path) -> None:
    (folder / "met").touch()


class Meet:
    """A callback after whose first trial has begun, `meet` waits; the check of a hop does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_trial_start(self, trial: object) -> None:
        begin_to_meet(self.folder)
