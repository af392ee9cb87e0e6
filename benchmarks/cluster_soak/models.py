"""What is trained: a model whose states are too large for Ray's messages, and that can be held."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.faults.models import EVENTS, Counted, LeastSquares

HELD = ".held"
"""While a file named like the pipe and so is there, no training goes on."""
HELD_SECONDS = 60.0


def wait_while_held() -> None:
    pipe = os.environ.get(EVENTS)
    end = time.monotonic() + HELD_SECONDS
    while pipe is not None and Path(pipe + HELD).exists() and time.monotonic() < end:
        time.sleep(0.005)


class Held(Counted):
    """Begins its unit and then waits while it is held."""

    def train_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        metrics = super().train_batch(batch)
        wait_while_held()
        return metrics


def build(config: dict[str, Any], info: Any) -> Held:
    return Held(LeastSquares(config), info.trial, "numpy")
