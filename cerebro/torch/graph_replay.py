"""What the C core needs to replay a graph without Python: addresses, and how to launch it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import cerebro._core as _core
from cerebro.machine import cuda, turns
from cerebro.torch.cpu_program import NeedsPython, describe_input, describe_metric
from cerebro.torch.step_state import Batch, Values

Prepare = Callable[[int], Any]
"""Called when a run of `n` batches begins; see `_core.GraphReplay`."""


def make_replay(
    device: torch.device,
    launch: int | Callable[[], None],
    static: Batch,
    values: Values,
    rates: Sequence[int],
    prepare: Prepare,
) -> Any:
    """Return the `_core.GraphReplay` of a graph, or None if no loader uses the device.

    `launch` is the address of the graph, or replays it. `static` and `values` are the graph's
    inputs and results, which must live as long as the result. Raise NeedsPython if one of them is
    not what the core can fill or read.
    """
    if not _are_there(values, device):
        raise NeedsPython
    opened = cuda.find_opened(str(device))
    if opened is None:
        return None
    return _core.GraphReplay(
        device=opened,
        launch=launch,
        inputs=[describe_input(value) for value in static.values()],
        metrics=[describe_metric(name, value) for name, value in values.items()],
        rates=list(rates),
        prepare=prepare,
        context=turns.give_away,
    )


def _are_there(values: Values, device: torch.device) -> bool:
    """Return whether all results that are tensors are in the device's memory."""
    parts = (part for v in values.values() for part in (v if isinstance(v, tuple) else (v,)))
    return all(part.device == device for part in parts if isinstance(part, torch.Tensor))
