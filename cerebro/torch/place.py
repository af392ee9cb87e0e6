"""Move a network, its loss and its optimizers to a device, after `build` has made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cerebro.errors import InputError


def place(net: Any, optimizers: Sequence[Any], others: Iterable[Any], device: str | None) -> None:
    """Move modules and optimizers' states from host memory to a device, in place.

    A network that `build` has already placed stays where it is. Raise InputError if moving the
    network replaces its parameters.
    """
    if device is None or torch.device(device).type == "cpu":
        return
    parameters = list(net.parameters())
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return
    net.to(device)
    for other in others:
        if isinstance(other, torch.nn.Module):
            other.to(device)
    if any(a is not b for a, b in zip(parameters, net.parameters(), strict=True)):
        raise InputError(
            f"the network's parameters on {device} are not those the optimizer was made from: move "
            "it in build, net.to(info.device), before making its optimizer"
        )
    for optimizer in optimizers:
        _place_optimizer(optimizer)


def _place_optimizer(optimizer: Any) -> None:
    """Move the state that an optimizer already has, such as Adagrad's sums."""
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            entries = optimizer.state.get(parameter, {})
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and (key != "step" or on_device):
                    entries[key] = value.to(parameter.device)
