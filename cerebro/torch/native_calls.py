"""Operators of a recorded step that the C core computes, with PyTorch's bits, instead of PyTorch.

Whether the core rounds elementwise operators and draws dropout's numbers as PyTorch does is tested
once per process. Matrix products, sums of columns (the gradient of a bias) and the negative log
likelihood are computed both ways once, when a program is made. If a bit differs, PyTorch computes
the operator. docs/design/recorded-step-engine.md explains why the bits usually agree.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cerebro._core as _core
from cerebro.torch.cpu_recorder import is_number

PARALLEL = 32768  # elements from which PyTorch uses several threads, if it has several

_MOST = 2**31 - 1  # BLAS counts with 32-bit integers
_WIDTHS = (32, 64)  # columns that PyTorch sums at once: four vectors of 32 or 64 bytes
_MOST_ROWS = 1 << 16
_MEAN, _SUM = 1, 2  # PyTorch's numbers for the reductions of losses

log = logging.getLogger("cerebro.torch")


def is_native() -> bool:
    """Return whether recorded steps use the core (not with ``CEREBRO_STEP_ENGINE=python``)."""
    return os.environ.get("CEREBRO_STEP_ENGINE") != "python"


# --- elementwise operators ---------------------------------------------------------


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
        self.numbers = array("d", numbers or [0.0])  # which the operations read when they run
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
    rule = _list_elementwise_rules().get(func)
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


class _Arguments:
    def __init__(self, places: dict[str, tuple[Any, Any]]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Any:
        container, key = self._places[name]
        return container[key]

    @property
    def out(self) -> Any:
        return self[next((name for name in ("out", "grad_input") if name in self._places), "self")]

    def get(self, name: str, default: Any) -> Any:
        return self[name] if name in self._places else default

    def has_number(self, name: str) -> bool:
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


@functools.cache
def _list_elementwise_rules() -> dict[Any, Callable[[_Arguments], list[Operation] | None]]:
    aten = torch.ops.aten

    def rule(operation: str, *operands: str, number: str = "") -> Any:
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


# --- other operators ---------------------------------------------------------------


@dataclass
class NativeCall:
    """The core's function for a call, all its tensors, and those that it writes, in float32."""

    compute: Callable[[], None]
    tensors: list[Any]
    outs: list[Any]


def make_native_call(
    func: Any, run: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> NativeCall | None:
    """Run a call in both ways; return the core's, or None if PyTorch must compute it."""
    rule = _list_rules().get(func)
    if rule is None or not is_native() or torch.get_num_threads() > 1:
        return None
    names = [argument.name for argument in func._schema.arguments]
    call = rule(dict(zip(names, args, strict=False)) | kwargs)
    if call is None:
        return None
    run(*args, **kwargs)
    expected = [out.clone() for out in call.outs]
    for out in call.outs:
        out.fill_(torch.nan)
    call.compute()
    return call if all(map(have_same_floats, call.outs, expected)) else None


@functools.cache
def _list_rules() -> dict[Any, Callable[[Mapping[str, Any]], NativeCall | None]]:
    aten = torch.ops.aten
    return {
        aten.mm.out: _make_product,
        aten.addmm.out: _make_product,
        aten.sum.IntList_out: _make_column_sum,
        aten.nll_loss_forward.output: _make_nll_loss,
        aten.nll_loss_backward.grad_input: _make_nll_gradient,
    }


# --- draws -------------------------------------------------------------------------


def choose_draw(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Callable[..., None] | None:
    """Return a function that makes a recorded call's draws; None if PyTorch must draw."""
    if func is not torch.ops.aten.bernoulli_.float or any(v is not None for v in kwargs.values()):
        return None
    out, p = (*args, 0.5)[:2]
    fits = len(args) <= 2 and is_dense(out) and isinstance(p, float) and 0 <= p <= 1
    return _draw_bernoulli if fits and is_native() and _draws_like_pytorch() else None


def _draw_bernoulli(out: Any, p: float = 0.5) -> None:
    generator = torch.default_generator
    _core.draw_bernoulli(generator.get_state, generator.set_state, out.data_ptr(), out.numel(), p)


@functools.cache
def _draws_like_pytorch() -> bool:
    mine, its = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    for size in (1, 7, 311, 2048):
        for p in (0.0, 0.2, 0.5, 0.9, 1.0):
            for generator in (mine, its):
                torch.rand(1, generator=generator)  # draws an odd count of numbers
            expected = torch.empty(size).bernoulli_(p, generator=its)
            draws = torch.empty(size)
            try:
                _core.draw_bernoulli(mine.get_state, mine.set_state, draws.data_ptr(), size, p)
            except ValueError:
                return False
            states = mine.get_state(), its.get_state()
            if not torch.equal(draws, expected) or not torch.equal(*states):
                return False
    return True


# --- products ----------------------------------------------------------------------


def _make_product(given: Mapping[str, Any]) -> NativeCall | None:
    """Return ``mm.out`` or ``addmm.out``; None if BLAS cannot take the tensors as they are."""
    sgemm = find_library_function("sgemm_")
    if given.get("alpha", 1) != 1 or given.get("beta", 1) != 1 or sgemm == 0:
        return None
    bias = [given["self"]] if "mat1" in given else []
    out, a, b = given["out"], given["mat1" if bias else "self"], given["mat2"]
    tensors = [out, a, b, *bias]
    if not all(map(_fits_blas, tensors)) or any(t.dim() != 2 for t in (out, a, b)):
        return None
    is_by_columns = _is_by_columns(out)
    to, a, b = (out, a, b) if is_by_columns else (out.t(), b.t(), a.t())  # like PyTorch
    first, second = _find_layout(a), _find_layout(b)
    if first is None or second is None or not _is_by_columns(to):
        return None
    if bias and (bias[0].dim() != 1 or bias[0].stride() != (1,)):
        return None
    compute = _core.MatMul(
        sgemm,
        (first[0], second[0]),
        (to.shape[0], to.shape[1], a.shape[1]),
        (a.data_ptr(), first[1]),
        (b.data_ptr(), second[1]),
        (to.data_ptr(), max(to.stride(1), to.shape[0])),
        bias[0].data_ptr() if bias else 0,
        is_by_columns,
    )
    return NativeCall(compute, tensors, [out])


def _fits_blas(tensor: Any) -> bool:
    """Return whether a tensor is float32, in host memory, and small enough for BLAS."""
    return (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_neg()
        and tensor.numel() > 0
        and max((*tensor.shape, *tensor.stride()), default=1) <= _MOST
    )


def _is_by_columns(out: Any) -> bool:
    """Return whether PyTorch regards a result as stored by columns, as BLAS does."""
    rows, columns = out.shape
    return bool(out.stride(0) == 1 and (columns == 1 or out.stride(1) >= rows))


def _find_layout(matrix: Any) -> tuple[bool, int] | None:
    """Return whether a factor is transposed, and its stride; None if PyTorch would copy it."""
    rows, columns = matrix.shape
    if matrix.stride(0) == 1 and matrix.stride(1) >= rows:
        return False, matrix.stride(1)
    if matrix.stride(1) == 1 and matrix.stride(0) >= columns:
        return True, matrix.stride(0)
    return None


# --- sums and losses ---------------------------------------------------------------


def _make_column_sum(given: Mapping[str, Any]) -> NativeCall | None:
    matrix, out = given["self"], given["out"]
    if given["dim"] != [0] or given.get("dtype") not in (None, torch.float32):
        return None
    if matrix.dim() != 2 or matrix.dtype != torch.float32 or out.dtype != torch.float32:
        return None
    # PyTorch sums a single column as a row, and many rows in more levels. Of columns that do not
    # fill a vector, it takes four at once.
    (rows, columns), width = matrix.shape, _find_width()
    if columns < 2 or rows > _MOST_ROWS or not width or 4 <= columns < width // 4:
        return None
    if not _is_contiguous(matrix) or not _is_contiguous(out):
        return None
    places = (matrix.data_ptr(), 0, out.data_ptr())
    return NativeCall(
        _core.Reduction("sum_columns", (rows, columns), places, width), [matrix, out], [out]
    )


def _make_nll_loss(given: Mapping[str, Any]) -> NativeCall | None:
    loss, total = given["output"], given["total_weight"]
    return _make_loss("nll_loss", given, given["self"], (given["self"], total, loss), [total, loss])


def _make_nll_gradient(given: Mapping[str, Any]) -> NativeCall | None:
    gradient = given["grad_input"]
    parts = (given["grad_output"], given["total_weight"], gradient)
    return _make_loss("nll_gradient", given, gradient, parts, [gradient])


def _make_loss(
    kind: str, given: Mapping[str, Any], matrix: Any, parts: tuple[Any, ...], outs: list[Any]
) -> NativeCall | None:
    """Return a call with the three `parts`; `matrix` is the one with a column for each class."""
    likelihoods, target, reduction = given["self"], given["target"], given["reduction"]
    if likelihoods.dim() != 2 or likelihoods.dtype != torch.float32 or given["weight"] is not None:
        return None
    if target.dtype != torch.int64 or reduction not in (_MEAN, _SUM) or not _adds_losses():
        return None
    if not all(map(_is_contiguous, (*parts, target))):
        return None
    places = tuple(part.data_ptr() for part in parts)
    labels = (target.data_ptr(), given["ignore_index"], reduction == _MEAN)
    compute = _core.Reduction(kind, tuple(matrix.shape), places, target=labels)
    return NativeCall(compute, [*parts, target], outs)


def _is_contiguous(tensor: Any) -> bool:
    return bool(
        tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.int64)
        and not tensor.is_neg()
    )


@functools.cache
def _find_width() -> int:
    """Return how many columns PyTorch sums at once; 0 if its order is another."""
    shapes = ((3, 2), (17, 3), (17, 21), (64, 33), (100, 65), (257, 130), (1000, 40))
    for width in _WIDTHS:
        # The last shape, the largest, fills whole widths and has all levels of partial sums.
        if all(_sums_equally(shape, width) for shape in (*shapes, (4200, width + 5))):
            return width
    return 0


def _sums_equally(shape: tuple[int, int], width: int) -> bool:
    numbers, out = _make_magnitudes(*shape), torch.empty(shape[1])
    _core.Reduction("sum_columns", shape, (numbers.data_ptr(), 0, out.data_ptr()), width)()
    return have_same_floats(out, numbers.sum(0))


@functools.cache
def _adds_losses() -> bool:
    return all(map(_has_same_losses, ((3, 2), (17, 10), (256, 3), (257, 5), (5000, 2))))


def _has_same_losses(shape: tuple[int, int]) -> bool:
    rows, classes = shape
    likelihoods = torch.log_softmax(_make_magnitudes(*shape), 1)
    target = torch.arange(rows) * 7 % classes
    target[::5] = -100
    for reduction in (_MEAN, _SUM):
        loss, count, gradient = torch.empty(()), torch.empty(()), torch.empty(shape)
        labels = (target.data_ptr(), -100, reduction == _MEAN)
        places = (likelihoods.data_ptr(), count.data_ptr(), loss.data_ptr())
        _core.Reduction("nll_loss", shape, places, 0, labels)()
        places = (loss.data_ptr(), count.data_ptr(), gradient.data_ptr())
        _core.Reduction("nll_gradient", shape, places, 0, labels)()
        arguments = (likelihoods, target, None, reduction, -100)
        its, counted = torch.ops.aten.nll_loss_forward(*arguments)
        theirs = torch.ops.aten.nll_loss_backward(its, *arguments, counted)
        pairs = ((loss, its), (count, counted), (gradient, theirs))
        if not all(have_same_floats(mine, other) for mine, other in pairs):
            return False
    return True


def _make_magnitudes(rows: int, columns: int) -> Any:
    """Return numbers of several magnitudes; repeatable."""
    size = rows * columns
    phases = (torch.arange(size, dtype=torch.float64) * 0.6180339887498949).frac() - 0.5
    powers = torch.exp2(torch.arange(-6.0, 7.0, dtype=torch.float64))
    return (phases * powers.repeat(size // 13 + 1)[:size]).float().reshape(rows, columns)


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


@functools.cache
def measure_rounding() -> _Rounding:
    """Return how PyTorch rounds, from comparisons with the core's operations."""
    if not is_native():
        return _Rounding(False, 0)
    with torch.no_grad(), use_float32():
        how = _Rounding(not _has_same_bits("lerp", _Rounding(False, 0)), 0)
        other = how._replace(sqrt=find_library_function("vmsSqrt"))
        how = other if _has_same_bits("sqrt", other) else how
        names = frozenset(name for name in _EXAMPLES if _has_same_bits(name, how))
    different = sorted(set(_EXAMPLES) - names)
    if different:
        log.info("PyTorch rounds %s differently from the C core", ", ".join(different))
    return how._replace(names=names)


@functools.cache
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


def _has_same_bits(name: str, how: _Rounding) -> bool:
    function, operands, numbered = _EXAMPLES[name]
    for size in (7, 1511):
        a, b, c = (example_values(size, seed) for seed in (3, 5, 7))
        for x in (0.1, 0.9, -0.00103, 0.0) if numbered else (0.0,):
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
