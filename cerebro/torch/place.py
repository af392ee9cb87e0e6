"""Puts a network, its loss and its optimizers on a device, after `build` has made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cerebro.errors import InputError


def place(net: Any, optimizers: Sequence[Any], others: Iterable[Any], device: str | None) -> None:
    """Move what is in host memory to a device, in place: parameters stay the same objects.

    A network that `build` has put somewhere itself is left there.

    Parameters
    ----------
    net
        A `torch.nn.Module`.
    optimizers
        Over its parameters; what they have made already goes along.
    others
        Losses and metrics: those that are modules go along.
    device
        As PyTorch names it; None: nothing is moved.

    Raises
    ------
    InputError
        If the network makes other parameters of itself when it is moved.
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
            f"the network has other parameters on {device} than the optimizer was made of: move it "
            "in build, net.to(info.device), before its optimizer is made"
        )
    for optimizer in optimizers:
        _place_optimizer(optimizer)


def _place_optimizer(optimizer: Any) -> None:
    """Move what an optimizer has made of its parameters before they were moved (Adagrad's sums)."""
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            entries = optimizer.state.get(parameter, {})
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and (key != "step" or on_device):
                    entries[key] = value.to(parameter.device)
