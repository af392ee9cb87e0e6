"""Whether steps are replayed, for tests of recorded steps."""

from __future__ import annotations

from typing import Any

from cerebro.torch.graph import COMPARED


def is_captured(model: Any) -> bool:
    """Whether batches of one shape are replayed."""
    steps = model._graphed
    return steps._graph is not None and steps._compared >= COMPARED
