"""Run a unit whose steps may be recorded: notify the model before it and check it afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class RecordedStepDiffers(Exception):
    """Raised if a unit's replayed steps differ from ordinary steps or fail, with a message."""


@contextlib.contextmanager
def replay_recorded_steps(model: Any, *, training: bool) -> Iterator[None]:
    """Let a model of `cerebro.torch` replay recorded steps in a unit.

    Raise RecordedStepDiffers if the unit must run again with ordinary steps, from the state before
    it.
    """
    begin = getattr(model, "begin_recorded_unit", None)
    if begin is not None:
        begin(training=training)
    try:
        yield
    except Exception as error:
        if begin is None or not model.has_failed_replay(training=training):
            raise
        # If the ordinary step fails, too, its traceback has the user's line.
        text = " ".join(str(error).split())[:300]
        raise RecordedStepDiffers(f"it fails: {type(error).__name__}: {text}") from error
    if begin is not None:
        how = model.end_recorded_unit(training=training)
        if how is not None:
            raise RecordedStepDiffers(how)
