"""A program with its memory: its inputs and results, and the numbers set before each replay."""

from __future__ import annotations

from array import array
from typing import Any

import torch

import cerebro._core as _core
from cerebro.torch.cpu_program import Program
from cerebro.torch.optimizer_numbers import COUNTED, Hole, Numbers
from cerebro.torch.outputs import detach_value
from cerebro.torch.step_state import Batch, Values, copy_values, fill
from cerebro.torch.witness import leaves_of


class RecordedProgram:
    def __init__(
        self,
        program: Program,
        static: Batch,
        values: Values,
        gradients: list[tuple[Any, Any]],
        holes: list[Hole],
        free: set[Any],
    ) -> None:
        self.program = program
        self.static = static
        self.gradients = gradients
        self.free = free
        self.compared = 0
        self.held_bytes = program.held_bytes + sum(
            value.untyped_storage().nbytes() for value in tensors_of(static.values())
        )
        self.leaves = leaves_of(program.recording)
        self.values = {name: detach_value(value) for name, value in values.items()}
        self._tensors: dict[Any, Any] = {}  # numbers that are tensors: by group, formula and type
        self._constants: dict[Any, Any] = {}
        self._holes = holes
        program.finish(self._share_tensor)
        placed = [
            Hole(hole.group, hole.formula, *program.find_place(hole.container, hole.key))
            for hole in holes
            if hole.key is not None
        ]
        self._holes = placed + [
            Hole(group, formula, tensor, None)
            for (group, formula, _), tensor in self._tensors.items()
        ]
        self._counted = [hole for hole in self._holes if hole.formula in COUNTED]
        self._set_for: Any = None
        self._without_python: _core.Replay | None = None
        self._is_python_needed = False

    def _share_tensor(self, args: list[Any], dtype: Any) -> Any:
        """Return a tensor with the number ``args[1]``; equal numbers share a tensor."""
        for hole in self._holes:
            if hole.container is args and hole.key == 1:
                hole.key = None  # the tensor is set instead
                key = (hole.group, hole.formula, dtype)
                if key not in self._tensors:
                    self._tensors[key] = torch.zeros((), dtype=dtype)
                return self._tensors[key]
        constant = (repr(args[1]), dtype)
        return self._constants.setdefault(constant, torch.tensor(args[1], dtype=dtype))

    def set_numbers(self, numbers: Numbers) -> None:
        """Set the numbers that come from the optimizers' settings, and from their steps."""
        holes = self._counted
        if numbers.settings is not self._set_for:
            holes, self._set_for = self._holes, numbers.settings
            self._without_python = None
        if not holes:
            return
        counts = numbers.counts()
        values = {group: numbers.values(group, counts[group]) for group in {h.group for h in holes}}
        for hole in holes:
            value = values[hole.group][hole.formula]
            if hole.key is None:
                hole.container.fill_(value)
            else:
                hole.container[hole.key] = value

    def make_replay(self, numbers: Numbers) -> _core.Replay | None:
        """Return the step for `_core.run_unit`; None if it needs Python.

        Call this after :meth:`set_numbers`, which sets the current settings.
        """
        if self._without_python is None and not self._is_python_needed:
            try:
                self._without_python = _core.Replay(
                    inputs=[_describe_input(value) for value in self.static.values()],
                    calls=self.program.calls(),
                    numbers=[_describe_number(hole, numbers) for hole in self._counted],
                    metrics=[_describe_metric(name, value) for name, value in self.values.items()],
                    context=torch._C._AutoDispatchBelowAutograd,
                )
            except NeedsPython:
                self._is_python_needed = True
        return self._without_python

    def replay(self, batch: Batch) -> Values:
        fill(self.static, batch)
        self.program.run()
        return copy_values(self.values)


class NeedsPython(Exception):
    """`_core.Replay` cannot run a part of a step."""


def _describe_input(value: Any) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    if not isinstance(value, torch.Tensor):
        raise NeedsPython
    return value.data_ptr(), _name_of(value.dtype), tuple(value.shape), value.stride()


def _describe_number(hole: Hole, numbers: Numbers) -> tuple[str, float, float, int, int, str]:
    """Return how a number is computed from the count of steps, and its address."""
    lr, beta, steps = numbers.read_inputs(hole.group, hole.formula)
    count = float(steps) + 1
    for step in (count, count + 1, 3 * count + 1000):
        expected = numbers.values(hole.group, step)[hole.formula]
        if _core.step_number(hole.formula, lr, beta, step) != expected:
            raise NeedsPython
    if isinstance(hole.container, array):
        place = hole.container.buffer_info()[0] + hole.key * hole.container.itemsize
        dtype = "float64"
    elif hole.key is None:
        place, dtype = hole.container.data_ptr(), _name_of(hole.container.dtype)
    else:
        raise NeedsPython
    if dtype not in ("float32", "float64") or steps.dtype != torch.float32:
        raise NeedsPython
    return hole.formula, lr, beta, steps.data_ptr(), place, dtype


def _describe_metric(name: str, value: Any) -> tuple[str, Any, Any]:
    value, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    return name, _describe_value(value), None if weight is None else _describe_value(weight)


def _describe_value(value: Any) -> Any:
    """Return a number, or the address and type of a tensor with one number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.data_ptr(), _name_of(value.dtype)
    if isinstance(value, (int, float)):
        return float(value)
    raise NeedsPython


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def tensors_of(values: Any) -> list[Any]:
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return [item for item in flat if isinstance(item, torch.Tensor)]
