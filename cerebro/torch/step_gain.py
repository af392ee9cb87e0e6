"""Measure what ``graph=True`` would bring to a model's training step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from cerebro.torch.model import Model

STEPS = 8
"""The number of measured steps of each kind."""
LONGEST = 0.005
"""Ordinary steps of more seconds are not measured: they are mostly arithmetic."""


def measure_gain(model: Any, batch: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the seconds of an ordinary step and of a replayed step.

    The model is changed, the batch is not. Return None if the user has chosen `graph`, or if the
    step cannot be recorded.
    """
    if type(model) is not Model or not model.may_be_recorded:
        return None
    model.train_batch(dict(batch))
    ordinary = _time_steps(lambda: model.train_batch(dict(batch)), 1)
    if ordinary > LONGEST:
        return None
    ordinary = min(ordinary, _time_steps(lambda: model.train_batch(dict(batch)), STEPS))
    log = logging.getLogger("cerebro.torch")
    before, log.disabled = log.disabled, True  # do not report a refusal
    try:
        model.record()
        for _ in range(STEPS):
            model.train_batch(dict(batch))
        if not model.replays:
            return None
        return ordinary, _time_steps(lambda: model.train_batch(dict(batch)), STEPS)
    finally:
        log.disabled = before


def _time_steps(step: Callable[[], Any], count: int) -> float:
    """Return the CPU seconds of the fastest of `count` steps."""
    best = float("inf")
    for _ in range(count):
        begun = time.thread_time()
        step()
        best = min(best, time.thread_time() - begun)
    return best
