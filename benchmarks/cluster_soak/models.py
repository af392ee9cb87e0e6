"""The model: its states are too large for Ray's messages, and it can be paused."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.faults.models import EVENTS, Counted, LeastSquares

HELD = ".held"
"""Training pauses while a file exists with the pipe's name and this suffix."""
HELD_SECONDS = 60.0


def wait_while_held() -> None:
    pipe = os.environ.get(EVENTS)
    end = time.monotonic() + HELD_SECONDS
    while pipe is not None and Path(pipe + HELD).exists() and time.monotonic() < end:
        time.sleep(0.005)


class Held(Counted):
    """Begins its unit, then waits while paused."""

    def train_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        metrics = super().train_batch(batch)
        wait_while_held()
        return metrics


def build(config: dict[str, Any], info: Any) -> Held:
    return Held(LeastSquares(config), info.trial, "numpy")
