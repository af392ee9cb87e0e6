"""Whether steps are replayed, for tests of recorded steps."""

from __future__ import annotations

from typing import Any


def is_captured(model: Any, *, training: bool = True) -> bool:
    """Whether batches of some shape are replayed by a graph."""
    step = _find_step(model, training)
    return step is not None and step.is_captured


def refusal_of(model: Any, *, training: bool = True) -> str | None:
    """Return why steps are ordinary for ever."""
    step = _find_step(model, training)
    return None if step is None else step.refusal


def _find_step(model: Any, training: bool) -> Any:
    steps = model._recorded
    return steps[0 if training else 1] if steps and hasattr(steps[0], "is_captured") else None
