"""Whether a model's steps are replayed, for tests of `cerebro._torch_graph`."""

from __future__ import annotations

from typing import Any

from cerebro._torch_graph import COMPARED


def is_captured(model: Any) -> bool:
    """Whether batches of one shape are replayed."""
    steps = model._graphed
    return steps._graph is not None and steps._compared >= COMPARED
