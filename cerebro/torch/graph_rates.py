"""The optimizer's settings while steps are replayed: what may change, and what must not.

Between steps, the learning rate is a number, as schedulers and states require; within a step, it is
a tensor that the graph reads. All other settings are constants of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cerebro.torch.optimizer_step import groups_of
from cerebro.torch.updates import Updates

TENSOR_RATES: tuple[type, ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers that read the learning rate from a tensor on the device."""


class Rates:
    """The learning rates of optimizers as tensors that a graph reads."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = [item for item in optimizers if type(item) in TENSOR_RATES]
        self._tensors: dict[int, Any] = {}  # by the number of the group
        self._filled: dict[int, float] = {}

    def fill(self) -> None:
        for number, rate in self._list():
            if number not in self._tensors:
                device = groups_of(self._optimizers)[number]["params"][0].device
                # Graphs, PyTorch's fused kernels and the core read and write float32.
                made = torch.tensor(float(rate), dtype=torch.float32, device=device)
                self._tensors[number] = made
            elif self._filled.get(number) != rate:
                self._tensors[number].fill_(float(rate))
            self._filled[number] = rate

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Replace the optimizers' learning rates with tensors during the block."""
        self.fill()
        groups = groups_of(self._optimizers)
        replaced = [(groups[number], rate) for number, rate in self._list()]
        for number, _ in self._list():
            groups[number]["lr"] = self._tensors[number]
        try:
            yield
        finally:
            for group, rate in replaced:
                group["lr"] = rate

    def addresses(self) -> list[int]:
        """Return where the learning rates are that :meth:`read` returns."""
        return [self._tensors[number].data_ptr() for number, _ in self._list()]

    def read(self) -> list[float]:
        return [rate for _, rate in self._list()]

    def note_filled(self, rates: Sequence[float]) -> None:
        """Note that something else will have filled the tensors, with rates as :meth:`read` has."""
        self._filled.update(zip((number for number, _ in self._list()), rates, strict=True))

    def forget_filled(self) -> None:
        """Fill all tensors the next time: a run that was to fill them may have ended early."""
        self._filled.clear()

    def _list(self) -> list[tuple[int, Any]]:
        """Return the numbers of the groups whose rate is a number, and the rates."""
        groups = enumerate(groups_of(self._optimizers))
        return [(i, g["lr"]) for i, g in groups if not isinstance(g["lr"], torch.Tensor)]


class Settings:
    """The settings of optimizers that are constants in a graph."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._values = [constants for _, constants in self._list()]

    def find_change(self) -> str | None:
        """Return what has changed since this object was made; None if nothing has."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if len(groups) != len(self._values):
            return "the optimizer"
        for group, before in zip(groups, self._values, strict=True):
            for key, value in before.items():
                if group.get(key) != value:
                    return f"the optimizer's {key!r}"
        return None

    def _list(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for optimizer in self._optimizers:
            free = {"params", "initial_lr"} | ({"lr"} if type(optimizer) in TENSOR_RATES else set())
            for group in optimizer.param_groups:
                items = ((key, value) for key, value in group.items() if key not in free)
                yield group, {k: v for k, v in items if not isinstance(v, torch.Tensor)}


class Schedule:
    """Schedulers that step after every batch, before the batches of a run that Python does not see.

    This needs schedulers of PyTorch's, which depend on nothing but the number of their steps.
    """

    def __init__(self, updates: Updates, rates: Rates) -> None:
        self._updates = updates
        self._rates = rates

    def step_ahead(self, n: int, settings: Settings) -> Any:
        """Step the schedulers for `n` batches.

        Return the rates before each of the batches, a float32 array of ``n`` rows, or None if the
        rates are always the present ones. If another setting changes before the last batch, or a
        scheduler fails, step nothing, and return the number of batches before that.
        """
        undo = self._updates.note_schedule()
        rows: list[list[float]] = []
        for _ in range(n):
            if settings.find_change() is not None:
                undo()
                return len(rows)
            rows.append(self._rates.read())
            try:
                self._updates.step_schedulers()
            except Exception:  # the batch whose scheduler fails is an ordinary step, and raises it
                undo()
                return len(rows) - 1
        if all(row == rows[0] for row in rows):
            return None
        self._rates.note_filled(rows[-1])
        return np.array(rows, np.float32)


def make_capturable(optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            elif type(optimizer) is torch.optim.SGD and not group.get("differentiable"):
                # Otherwise, SGD reads the learning rate's tensor on the host.
                group["fused"], group["foreach"] = True, False
