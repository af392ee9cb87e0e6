"""Whether steps are replayed, and how often they are compared, for tests of recorded steps."""

from __future__ import annotations

from typing import Any

from cerebro.torch.graph import COMPARED
from cerebro.torch.recorded_step import RecordedStep


def is_captured(model: Any) -> bool:
    """Whether batches of one shape are replayed."""
    steps = model._graphed
    return steps._graph is not None and steps._compared >= COMPARED


def counted_comparisons(monkeypatch: Any) -> dict[str, int]:
    """Count the comparisons on a batch of a unit, and those after its end."""
    found = {"_checked": 0, "_compared_once_more": 0}

    def count(name: str, method: Any) -> None:
        def counted(*arguments: Any) -> Any:
            found[name] += 1
            return method(*arguments)

        monkeypatch.setattr(RecordedStep, name, counted)

    for name in found:
        count(name, getattr(RecordedStep, name))
    return found
