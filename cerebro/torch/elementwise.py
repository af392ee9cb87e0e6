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
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cerebro._core as _core
from cerebro.torch.cpu_recorder import is_number

PARALLEL = 32768
"""The number of elements from which PyTorch uses several threads, if it has several."""

log = logging.getLogger("cerebro.torch")


@dataclass(eq=False)
class Operation:
    """An elementwise operation of the C core: its name, tensors and number."""

    name: str
    out: Any
    operands: Sequence[Any]
    number: float | None = None
    place: tuple[Any, Any] | None = None  # the container and key of the recorded number
    value: Any = None  # a tensor with the number


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
            addresses = [tensor.data_ptr() for tensor in (op.out, *op.operands)]
            padding = (0,) * (4 - len(addresses))
            value = 0 if op.value is None else op.value.data_ptr()
            calls.append((op.name, op.out.numel(), *addresses, *padding, at, value))
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
    operations = rule(_Arguments(places))
    return operations if operations and all(map(_is_exact, operations)) else None


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

    def get(self, name: str, default: Any) -> Any:
        return self[name] if name in self._places else default

    def has_number(self, name: str) -> bool:
        """Return whether an argument is a number, or a tensor with one."""
        return is_number(self[name]) or _is_value(self[name], self.out)

    def make(self, operation: str, *operands: str, number: str = "") -> list[Operation] | None:
        """Return an operation, perhaps with the number in an argument, which defaults to 1."""
        made = Operation(operation, self.out, [self[operand] for operand in operands])
        if not number:
            return [made]
        value = self.get(number, 1)
        if is_number(value):
            made.number, made.place = float(value), self._places.get(number)
        elif _is_value(value, made.out):
            made.value = value
        else:
            return None
        return [made]


def _make_binary(operation: str, given: _Arguments) -> list[Operation] | None:
    """Return a product or quotient with a tensor or a number."""
    if given.has_number("other"):
        return given.make(f"{operation}_number", "self", number="other")
    return given.make(operation, "self", "other")


def _make_sum(given: _Arguments) -> list[Operation] | None:
    if not given.has_number("other"):
        return given.make("add", "self", "other", number="alpha")
    if given.get("alpha", 1) != 1:
        return None
    return given.make("add_number", "self", number="other")


def _make_counting(given: _Arguments) -> list[Operation] | None:
    """Return the operations that increase each of an optimizer's counts of steps."""
    counts, number = given["self"], given["scalar"]
    if type(number) is not int or any(count.dim() != 0 for count in counts):
        return None
    return [Operation("add_number", count, [count], float(number)) for count in counts]


_Rule = Callable[["_Arguments"], "list[Operation] | None"]


@functools.cache
def _rules() -> dict[Any, _Rule]:
    aten = torch.ops.aten

    def rule(operation: str, *operands: str, number: str = "") -> _Rule:
        return methodcaller("make", operation, *operands, number=number)

    product, quotient = (functools.partial(_make_binary, name) for name in ("mul", "div"))
    addcmul, addcdiv = (
        rule(name, "self", "tensor1", "tensor2", number="value") for name in ("addcmul", "addcdiv")
    )
    threshold = rule("threshold_backward", "grad_output", "self", number="threshold")
    functions_by_rule: list[tuple[Any, ...]] = [
        (_make_sum, aten.add_.Tensor, aten.add_.Scalar, aten.add.out),
        (product, aten.mul_.Tensor, aten.mul_.Scalar, aten.mul.out),
        (quotient, aten.div_.Tensor, aten.div_.Scalar, aten.div.out),
        (rule("lerp", "self", "end", number="weight"), aten.lerp_.Scalar, aten.lerp.Scalar_out),
        (addcmul, aten.addcmul_.default, aten.addcmul.out),
        (addcdiv, aten.addcdiv_.default, aten.addcdiv.out),
        (rule("sqrt", "self"), aten.sqrt_.default, aten.sqrt.out),
        (rule("relu", "self"), aten.relu_.default, aten.relu.out),
        (threshold, aten.threshold_backward.grad_input),
        (rule("copy", "src"), aten.copy_.default),
        (lambda given: [Operation("fill", given.out, [], 0.0)], aten.zero_.default),
        (_make_counting, aten._foreach_add_.Scalar),
        (rule("fill", number="value"), aten.fill_.Scalar),
    ]
    return {function: made for made, *functions in functions_by_rule for function in functions}


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


class _Rounding(NamedTuple):
    """How the core must round to compute the same bits as PyTorch."""

    fused: bool  # whether a multiplication and the addition after it are rounded once
    sqrt: int  # the address of the square root to call; 0 for the C library's
    names: frozenset[str] = frozenset()  # the operations with PyTorch's bits


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
        return _Rounding(False, 0)
    with torch.no_grad(), use_float32():
        how = _Rounding(not _has_same_bits("lerp", _Rounding(False, 0)), 0)
        other = how._replace(sqrt=find_library_function("vmsSqrt"))
        if _has_same_bits("sqrt", other):
            how = other
        names = frozenset(name for name in _EXAMPLES if _has_same_bits(name, how))
    different = sorted(set(_EXAMPLES) - names)
    if different:
        log.info("PyTorch rounds %s differently from the C core", ", ".join(different))
    return how._replace(names=names)


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
    "threshold_backward": (lambda a, b, c, x: torch.ops.aten.threshold_backward(a, b, x), 2, True),
}

_SIZES = (7, 1511)
_NUMBERS = (0.1, 0.9, -0.00103, 0.0)


def _has_same_bits(name: str, how: _Rounding) -> bool:
    function, operands, numbered = _EXAMPLES[name]
    for size in _SIZES:
        a, b, c = (example_values(size, seed) for seed in (3, 5, 7))
        for x in _NUMBERS if numbered else (0.0,):
            number = x if numbered else None
            operation = Operation(name, torch.empty(size), (a, b, c)[:operands], number)
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
