"""Decide whether a learning-rate scheduler may run between the steps of a proven unit."""

from __future__ import annotations

from typing import Any

import torch

from cerebro.torch.proof.genuine import is_of_torch
from cerebro.torch.proof.same_program import Proof
from cerebro.torch.proof.values import SOME, Unproven, known


def is_quiet(scheduler: Any) -> bool:
    """Return whether a scheduler changes nothing but its optimizer's settings."""
    kind = type(scheduler)
    schedulers = torch.optim.lr_scheduler
    if kind.__module__ != schedulers.__name__ or getattr(schedulers, kind.__name__, None) != kind:
        return False
    if not is_of_torch(kind.step) or "step" in vars(scheduler):
        return False
    functions = [*getattr(scheduler, "lr_lambdas", ())]
    functions.append(getattr(scheduler, "_scale_fn_custom", None))
    try:
        for function in functions:
            if function is not None:
                Proof().call(known(function), SOME, kind.__name__)
    except Unproven:
        return False
    return all(map(is_quiet, getattr(scheduler, "_schedulers", ())))
