"""Operators of a recorded step that the C core computes, with PyTorch's bits, instead of PyTorch.

These are matrix products, dropout's random numbers, sums of columns (the gradient of a bias) and
the negative log likelihood; for others, see `cerebro.torch.elementwise`. Each call is computed both
ways once, when a program is made, and is left to PyTorch if a bit differs.

PyTorch draws dropout's numbers one at a time; the core makes the generator's numbers in vectors,
which is much faster. The bits and the generator's state afterwards are the same, which is tested
once per process. If they differ, for example because PyTorch uses Intel's library, PyTorch draws.

PyTorch computes the product of float32 matrices with SGEMM. If its library exports this function,
the core calls it with PyTorch's arguments, so the bits are the same.

The order in which PyTorch adds float32 numbers depends on shapes and on the width of the
processor's vectors. On one thread, the core repeats this order, which is tested once per process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import cerebro._core as _core
from cerebro.torch.elementwise import find_library_function, have_same_floats, is_dense, is_native

_MOST = 2**31 - 1
"""BLAS counts with 32-bit integers."""
_BLOCKS = (32, 64)
"""Columns that PyTorch sums at once: four vectors of 32 or 64 bytes."""
_MOST_ROWS = 1 << 16
_MEAN, _SUM = 1, 2
"""PyTorch's numbers for the reductions of losses."""


@dataclass
class NativeCall:
    """The core's function for a call, and the tensors that it reads and writes.

    `outs` are those that it writes, in float32.
    """

    compute: Callable[[], None]
    tensors: list[Any]
    outs: list[Any]


def make_native_call(
    func: Any, run: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> NativeCall | None:
    """Return a recorded call as the core's call; None if PyTorch must compute it.

    This runs the call, with ``run(*args, **kwargs)``, to compare the bits.
    """
    rule = _rules().get(func)
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
def _rules() -> dict[Any, Callable[[Mapping[str, Any]], NativeCall | None]]:
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
    return _draw_bernoulli if fits and is_native() and _equals_pytorch() else None


def _draw_bernoulli(out: Any, p: float = 0.5) -> None:
    generator = torch.default_generator
    _core.draw_bernoulli(generator.get_state, generator.set_state, out.data_ptr(), out.numel(), p)


@functools.cache
def _equals_pytorch() -> bool:
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
            if not (
                torch.equal(draws, expected) and torch.equal(mine.get_state(), its.get_state())
            ):
                return False
    return True


# --- products ----------------------------------------------------------------------


def _make_product(given: Mapping[str, Any]) -> NativeCall | None:
    """Return ``mm.out`` or ``addmm.out``; None if BLAS cannot take the tensors as they are."""
    if given.get("alpha", 1) != 1 or given.get("beta", 1) != 1 or _find_sgemm() == 0:
        return None
    bias = [given["self"]] if "mat1" in given else []
    out, a, b = given["out"], given["mat1" if bias else "self"], given["mat2"]
    tensors = [out, a, b, *bias]
    if not all(map(_is_plain, tensors)) or any(t.dim() != 2 for t in (out, a, b)):
        return None
    is_by_columns = _is_by_columns(out)
    to, a, b = (out, a, b) if is_by_columns else (out.t(), b.t(), a.t())  # like PyTorch
    first, second = _find_layout(a), _find_layout(b)
    if first is None or second is None or not _is_by_columns(to):
        return None
    if bias and (bias[0].dim() != 1 or bias[0].stride() != (1,)):
        return None
    compute = _core.MatMul(
        _find_sgemm(),
        (first[0], second[0]),
        (to.shape[0], to.shape[1], a.shape[1]),
        (a.data_ptr(), first[1]),
        (b.data_ptr(), second[1]),
        (to.data_ptr(), max(to.stride(1), to.shape[0])),
        bias[0].data_ptr() if bias else 0,
        is_by_columns,
    )
    return NativeCall(compute, tensors, [out])


def _is_plain(tensor: Any) -> bool:
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


@functools.cache
def _find_sgemm() -> int:
    """Return the address of SGEMM in PyTorch's library; 0 if it is missing."""
    return find_library_function("sgemm_")


# --- sums and losses ---------------------------------------------------------------


def _make_column_sum(given: Mapping[str, Any]) -> NativeCall | None:
    matrix, out = given["self"], given["out"]
    if given["dim"] != [0] or given.get("dtype") not in (None, torch.float32):
        return None
    if matrix.dim() != 2 or matrix.dtype != torch.float32 or out.dtype != torch.float32:
        return None
    # PyTorch sums a single column as a row, and many rows in more levels. Of columns that do not
    # fill a vector, it takes four at once.
    (rows, columns), block = matrix.shape, _find_block()
    if columns < 2 or rows > _MOST_ROWS or not block or 4 <= columns < block // 4:
        return None
    if not _is_contiguous(matrix) or not _is_contiguous(out):
        return None
    places = (matrix.data_ptr(), 0, out.data_ptr())
    return NativeCall(
        _core.Reduction("sum_columns", (rows, columns), places, block), [matrix, out], [out]
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
def _find_block() -> int:
    """Return how many columns PyTorch sums at once; 0 if its order is another."""
    shapes = ((3, 2), (17, 3), (17, 21), (64, 33), (100, 65), (257, 130), (1000, 40))
    for block in _BLOCKS:
        # The last shape, the largest, has whole blocks and all levels of partial sums.
        if all(_sums_equally(shape, block) for shape in (*shapes, (4200, block + 5))):
            return block
    return 0


def _sums_equally(shape: tuple[int, int], block: int) -> bool:
    numbers, out = _make_numbers(*shape), torch.empty(shape[1])
    _core.Reduction("sum_columns", shape, (numbers.data_ptr(), 0, out.data_ptr()), block)()
    return have_same_floats(out, numbers.sum(0))


@functools.cache
def _adds_losses() -> bool:
    return all(map(_has_same_losses, ((3, 2), (17, 10), (256, 3), (257, 5), (5000, 2))))


def _has_same_losses(shape: tuple[int, int]) -> bool:
    rows, classes = shape
    likelihoods = torch.log_softmax(_make_numbers(*shape), 1)
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


def _make_numbers(rows: int, columns: int) -> Any:
    """Return numbers of several magnitudes; repeatable."""
    size = rows * columns
    phases = (torch.arange(size, dtype=torch.float64) * 0.6180339887498949).frac() - 0.5
    powers = torch.exp2(torch.arange(-6.0, 7.0, dtype=torch.float64))
    return (phases * powers.repeat(size // 13 + 1)[:size]).float().reshape(rows, columns)
