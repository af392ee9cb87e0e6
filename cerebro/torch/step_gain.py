"""Measure what ``graph=True`` would bring to a model's training step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from cerebro.torch.model import Model

STEPS = 8
"""How many steps of each kind are measured."""
LONGEST = 0.005
"""Longer ordinary steps are not measured, in seconds: they are mostly arithmetic."""


def measured_gain(model: Any, batch: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the seconds of an ordinary step and of a replayed one.

    Parameters
    ----------
    model
        A model that may be changed, and is not used afterwards.
    batch
        A training batch; it is not changed.

    Returns
    -------
    tuple of float or None
        None if the user has chosen `graph`, or if the step cannot be recorded.
    """
    if type(model) is not Model or not model.may_be_recorded:
        return None
    model.train_batch(dict(batch))
    ordinary = _seconds(lambda: model.train_batch(dict(batch)), 1)
    if ordinary > LONGEST:
        return None
    ordinary = min(ordinary, _seconds(lambda: model.train_batch(dict(batch)), STEPS))
    log = logging.getLogger("cerebro.torch")
    before, log.disabled = log.disabled, True  # a refusal is no news here
    try:
        model.record()
        for _ in range(STEPS):
            model.train_batch(dict(batch))
        if not model.replays:
            return None
        return ordinary, _seconds(lambda: model.train_batch(dict(batch)), STEPS)
    finally:
        log.disabled = before


def _seconds(step: Callable[[], Any], count: int) -> float:
    """Return the CPU seconds of the fastest of some steps."""
    best = float("inf")
    for _ in range(count):
        begun = time.thread_time()
        step()
        best = min(best, time.thread_time() - begun)
    return best
