"""Elementwise operators of a recorded step, run by the C core instead of PyTorch.

The rounding of float32 arithmetic is standardized, so the core can compute the same bits as
PyTorch. Two things depend on PyTorch's build and on the processor: whether a multiplication and the
addition after it are rounded once or twice, and which square root is called. Both are tested once
per process; PyTorch runs the operators whose results differ.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import cerebro._core as _core

PARALLEL = 32768
"""The number of elements from which PyTorch uses several threads, if it has several."""

log = logging.getLogger("cerebro.torch")


class Operation:
    """An elementwise operation of the C core: its name, tensors and number."""

    __slots__ = ("name", "number", "operands", "out", "place", "value")

    def __init__(self, name: str, out: Any, operands: Sequence[Any]) -> None:
        self.name = name
        self.out = out
        self.operands = operands
        self.number: float | None = None
        self.place: tuple[Any, Any] | None = None  # the container and key of the recorded number
        self.value: Any = None


class Block:
    """A sequence of operations that run without Python."""

    def __init__(self, operations: Sequence[Operation], rounding: _Rounding) -> None:
        numbers = [op.number for op in operations if op.number is not None]
        self.numbers = array("d", numbers or [0.0])
        """The numbers that the operations read when they run; write to the array to change one."""
        self.places: dict[tuple[int, Any], tuple[array[float], int]] = {}
        """The array and index of each recorded number, by its container's id and its key."""
        calls, index = [], 0
        for op in operations:
            at = -1
            if op.number is not None:
                at, index = index, index + 1
                if op.place is not None:
                    container, key = op.place
                    self.places[id(container), key] = (self.numbers, at)
            addresses = [tensor.data_ptr() for tensor in op.operands]
            first, second, third = (*addresses, 0, 0, 0)[:3]
            value = 0 if op.value is None else op.value.data_ptr()
            size = op.out.numel()
            calls.append((op.name, size, op.out.data_ptr(), first, second, third, at, value))
        self._memory = [(op.out, op.operands, op.value) for op in operations]
        self.run = _core.Elementwise(calls, self.numbers, rounding.fused, rounding.sqrt)


def make_operations(func: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Operation] | None:
    """Return the core's operations for a call; None if it cannot compute the same bits."""
    rule = _rules().get(func)
    if rule is None:
        return None
    names = [argument.name for argument in func._schema.arguments]
    places: dict[str, tuple[Any, Any]] = {n: (args, i) for i, n in enumerate(names[: len(args)])}
    places |= {name: (kwargs, name) for name in kwargs}
    result = rule(_Arguments(places))
    if result is None:
        return None
    items = result if isinstance(result, list) else [result]
    return items if all(map(_is_exact, items)) else None


def _is_exact(one: Operation) -> bool:
    tensors = [one.out, *one.operands]
    if one.name not in measure_rounding().names or not all(map(is_dense, tensors)):
        return False
    if len({(t.shape, t.stride()) for t in tensors}) != 1:
        return False
    return bool(one.out.numel() <= PARALLEL or torch.get_num_threads() == 1)


# --- from PyTorch's operators ----------------------------------------------------


class _Arguments:
    def __init__(self, places: dict[str, tuple[Any, Any]]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Any:
        container, key = self._places[name]
        return container[key]

    @property
    def out(self) -> Any:
        names = [name for name in ("out", "grad_input") if name in self._places]
        return self[names[0] if names else "self"]

    def make_numbered(self, name: str, operands: Sequence[str], number: str) -> Operation | None:
        """Return an operation with the number in the argument `number`, which defaults to 1."""
        operation = Operation(name, self.out, [self[operand] for operand in operands])
        if number not in self._places:
            operation.number = 1.0
        elif _is_number(self[number]):
            operation.number = float(self[number])
            operation.place = self._places[number]
        elif _is_value(self[number], operation.out):
            operation.value = self[number]
        else:
            return None
        return operation


def _make_binary(name: str, given: _Arguments) -> Operation | None:
    """Return a product or quotient with a tensor or a number."""
    other = given["other"]
    if _is_number(other) or _is_value(other, given.out):
        return given.make_numbered(f"{name}_number", ["self"], "other")
    return Operation(name, given.out, [given["self"], other])


def _make_sum(given: _Arguments) -> Operation | None:
    other = given["other"]
    if not (_is_number(other) or _is_value(other, given.out)):
        return given.make_numbered("add", ["self", "other"], "alpha")
    if "alpha" in given._places and given["alpha"] != 1:
        return None
    return given.make_numbered("add_number", ["self"], "other")


def _make_copy(given: _Arguments) -> Operation | None:
    source = given["src"]
    return Operation("copy", given.out, [source]) if is_dense(source) else None


def _make_zero(given: _Arguments) -> Operation | None:
    operation = Operation("fill", given.out, [])
    operation.number = 0.0
    return operation


def _make_counting(given: _Arguments) -> list[Operation] | None:
    """Return the operations that increase each of an optimizer's counts of steps."""
    counts, number = given["self"], given["scalar"]
    if type(number) is not int or any(count.dim() != 0 for count in counts):
        return None
    additions = [Operation("add_number", count, [count]) for count in counts]
    for addition in additions:
        addition.number = float(number)
    return additions


def _make_rule(name: str, operands: Sequence[str], number: str) -> Callable[[_Arguments], Any]:
    return lambda given: given.make_numbered(name, operands, number)


@functools.cache
def _rules() -> dict[Any, Callable[[_Arguments], Operation | list[Operation] | None]]:
    aten = torch.ops.aten
    sum_of, product = _make_sum, functools.partial(_make_binary, "mul")
    quotient = functools.partial(_make_binary, "div")
    lerp = _make_rule("lerp", ["self", "end"], "weight")
    addcmul = _make_rule("addcmul", ["self", "tensor1", "tensor2"], "value")
    addcdiv = _make_rule("addcdiv", ["self", "tensor1", "tensor2"], "value")

    def make_root(given: _Arguments) -> Operation:
        return Operation("sqrt", given.out, [given["self"]])

    def make_relu(given: _Arguments) -> Operation:
        return Operation("relu", given.out, [given["self"]])

    threshold = _make_rule("threshold_backward", ["grad_output", "self"], "threshold")
    return {
        **dict.fromkeys((aten.add_.Tensor, aten.add_.Scalar, aten.add.out), sum_of),
        **dict.fromkeys((aten.mul_.Tensor, aten.mul_.Scalar, aten.mul.out), product),
        **dict.fromkeys((aten.div_.Tensor, aten.div_.Scalar, aten.div.out), quotient),
        aten.lerp_.Scalar: lerp,
        aten.lerp.Scalar_out: lerp,
        aten.addcmul_.default: addcmul,
        aten.addcmul.out: addcmul,
        aten.addcdiv_.default: addcdiv,
        aten.addcdiv.out: addcdiv,
        aten.sqrt_.default: make_root,
        aten.sqrt.out: make_root,
        aten.relu_.default: make_relu,
        aten.relu.out: make_relu,
        aten.threshold_backward.grad_input: threshold,
        aten.copy_.default: _make_copy,
        aten.zero_.default: _make_zero,
        aten._foreach_add_.Scalar: _make_counting,
        aten.fill_.Scalar: _make_rule("fill", [], "value"),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_value(value: Any, out: Any) -> bool:
    """Return whether a value is a 0-d float32 tensor for an output that is not 0-d."""
    is_single = isinstance(value, torch.Tensor) and value.dim() == 0 and out.dim() > 0
    return is_single and value.dtype == torch.float32 and value.device.type == "cpu"


def is_dense(value: Any) -> bool:
    """Return whether a value is a float32 tensor without gaps, its dimensions in any order."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return value.numel() > 0 and value.device.type == "cpu" and not value.is_neg()


# --- PyTorch's rounding ----------------------------------------------------------


class _Rounding:
    """How the core must round to compute the same bits as PyTorch."""

    def __init__(self, fused: bool, sqrt: int, names: frozenset[str]) -> None:
        self.fused = fused  # whether a multiplication and the addition after it are rounded once
        self.sqrt = sqrt  # the address of the square root to call; 0 for the C library's
        self.names = names  # the operations with PyTorch's bits


@contextmanager
def use_float32() -> Iterator[None]:
    """Make new tensors float32 in this block, whatever the user's default is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_native() -> bool:
    """Return whether recorded steps use the core (not with ``CEREBRO_STEP_ENGINE=python``)."""
    return os.environ.get("CEREBRO_STEP_ENGINE") != "python"


@functools.cache
def measure_rounding() -> _Rounding:
    """Return how PyTorch rounds, from comparisons with the core's operations."""
    if not is_native():
        return _Rounding(False, 0, frozenset())
    with torch.no_grad(), use_float32():
        fused = not _has_same_bits("lerp", False, 0)
        root = next(
            (
                root
                for root in (find_library_function("vmsSqrt"), 0)
                if _has_same_bits("sqrt", fused, root)
            ),
            0,
        )
        names = frozenset(name for name in _EXAMPLES if _has_same_bits(name, fused, root))
    different = sorted(set(_EXAMPLES) - names)
    if different:
        log.info("PyTorch rounds %s differently from the C core", ", ".join(different))
    return _Rounding(fused, root, names)


def find_library_function(name: str) -> int:
    """Return the address of a function in PyTorch's library; 0 if it is missing."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


# By operation: PyTorch's function of tensors a, b, c and a number x, the number of tensors that it
# reads, and whether it reads x.
_EXAMPLES: dict[str, tuple[Callable[[Any, Any, Any, float], Any], int, bool]] = {
    "copy": (lambda a, b, c, x: a.clone(), 1, False),
    "fill": (lambda a, b, c, x: torch.full_like(a, x), 0, True),
    "add": (lambda a, b, c, x: a.add(b, alpha=x), 2, True),
    "add_number": (lambda a, b, c, x: a.add(x), 1, True),
    "mul": (lambda a, b, c, x: a.mul(b), 2, False),
    "mul_number": (lambda a, b, c, x: a.mul(x), 1, True),
    "div": (lambda a, b, c, x: a.div(b), 2, False),
    "div_number": (lambda a, b, c, x: a.div(x), 1, True),
    "sqrt": (lambda a, b, c, x: a.sqrt(), 1, False),
    "lerp": (lambda a, b, c, x: a.lerp(b, x), 2, True),
    "addcmul": (lambda a, b, c, x: a.addcmul(b, c, value=x), 3, True),
    "addcdiv": (lambda a, b, c, x: a.addcdiv(b, c, value=x), 3, True),
    "relu": (lambda a, b, c, x: a.relu(), 1, False),
    "threshold_backward": (
        lambda a, b, c, x: torch.ops.aten.threshold_backward(a, b, x),
        2,
        True,
    ),
}

_SIZES = (7, 1511)
_NUMBERS = (0.1, 0.9, -0.00103, 0.0)


def _has_same_bits(name: str, fused: bool, sqrt: int) -> bool:
    function, operands, numbered = _EXAMPLES[name]
    how = _Rounding(fused, sqrt, frozenset())
    for size in _SIZES:
        a, b, c = (example_values(size, seed) for seed in (3, 5, 7))
        for x in _NUMBERS if numbered else (0.0,):
            operation = Operation(name, torch.empty(size), (a, b, c)[:operands])
            operation.number = x if numbered else None
            Block([operation], how).run()
            if not have_same_floats(operation.out, function(a, b, c, x)):
                return False
    return True


@functools.cache
def example_values(size: int, seed: int) -> Any:
    """Return numbers of many magnitudes, and special values; repeatable."""
    steps = torch.arange(size, dtype=torch.float64)
    phases = (steps * 0.6180339887498949 * seed + 0.1 * seed).frac()
    values = ((phases - 0.4) * torch.exp2((steps * seed) % 37 - 24)).float()
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-41, -1.0])
    values[70 : 70 + 7 * seed : seed] = special[: len(values[70 : 70 + 7 * seed : seed])]
    return values


def have_same_floats(one: Any, two: Any) -> bool:
    """Return whether two float32 tensors have the same bits; all NaN are equal."""
    equal = one.view(torch.int32) == two.view(torch.int32)
    return bool((equal | (one.isnan() & two.isnan())).all())
