"""Sums of a recorded step, added up by the C core in PyTorch's order.

The order in which PyTorch adds float32 numbers depends on shapes and on the width of the
processor's vectors. On one thread, the core repeats this order for the sums of columns (the
gradient of a bias) and for the negative log likelihood. Both are tested once per process; PyTorch
computes what differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import cerebro._core as _core
from cerebro.torch.elementwise import have_same_floats

_BLOCKS = (32, 64)
"""Columns that PyTorch sums at once: four vectors of 32 or 64 bytes."""
_MOST_ROWS = 1 << 16
_MEAN, _SUM = 1, 2
"""PyTorch's numbers for the reductions of losses."""


class Reduction:
    """A sum of the core; for `kind` and the three `parts`, see `cerebro._core.Reduction`.

    `matrix` is the index of the part with the matrix's shape, `outs` those of the written parts.
    For losses, `target` has the classes, the ignored class, and whether the loss is a mean.
    """

    def __init__(
        self,
        kind: str,
        matrix: int,
        parts: Sequence[Any],
        outs: Sequence[int],
        target: tuple[Any, int, bool] | None = None,
    ) -> None:
        self._kind = kind
        self._matrix = matrix
        self._parts = parts
        self._outs = outs
        self._target = target

    @property
    def tensors(self) -> list[Any]:
        parts = [part for part in self._parts if part is not None]
        return parts if self._target is None else [*parts, self._target[0]]

    @property
    def outs(self) -> list[Any]:
        return [self._parts[index] for index in self._outs]

    def prepare(self) -> Any:
        """Return the core's function; None if it cannot take these tensors."""
        if not all(map(_is_dense, self.tensors)):
            return None
        rows, columns = self._parts[self._matrix].shape
        first, second, third = (0 if p is None else p.data_ptr() for p in self._parts)
        sizes, places = (rows, columns), (first, second, third)
        if self._target is None:
            return _core.Reduction(self._kind, sizes, places, _find_block())
        classes, ignored, mean = self._target
        return _core.Reduction(
            self._kind, sizes, places, target=(classes.data_ptr(), ignored, mean)
        )


def make_column_sum(given: Mapping[str, Any]) -> Reduction | None:
    """Return a recorded ``sum.IntList_out`` as a sum of the core; None if the core lacks it."""
    matrix, out = given["self"], given["out"]
    if given["dim"] != [0] or given.get("dtype") not in (None, torch.float32):
        return None
    if matrix.dim() != 2 or matrix.dtype != torch.float32 or out.dtype != torch.float32:
        return None
    # PyTorch sums a single column as a row, and many rows in more levels. Of columns that do not
    # fill a vector, it takes four at once.
    rows, columns = matrix.shape
    if columns < 2 or rows > _MOST_ROWS or not _find_block() or 4 <= columns < _find_block() // 4:
        return None
    return Reduction("sum_columns", 0, [matrix, None, out], [2])


def make_nll_loss(given: Mapping[str, Any]) -> Reduction | None:
    """Return a recorded ``nll_loss_forward.output`` as a sum of the core, or None."""
    target = _read_target(given)
    if target is None:
        return None
    parts = [given["self"], given["total_weight"], given["output"]]
    return Reduction("nll_loss", 0, parts, [1, 2], target)


def make_nll_gradient(given: Mapping[str, Any]) -> Reduction | None:
    """Return a recorded ``nll_loss_backward.grad_input`` as a sum of the core, or None."""
    target = _read_target(given)
    if target is None:
        return None
    parts = [given["grad_output"], given["total_weight"], given["grad_input"]]
    return Reduction("nll_gradient", 2, parts, [2], target)


def _read_target(given: Mapping[str, Any]) -> tuple[Any, int, bool] | None:
    likelihoods, target = given["self"], given["target"]
    if likelihoods.dim() != 2 or likelihoods.dtype != torch.float32 or given["weight"] is not None:
        return None
    if target.dtype != torch.int64 or given["reduction"] not in (_MEAN, _SUM) or not _adds_losses():
        return None
    return target, given["ignore_index"], given["reduction"] == _MEAN


def _is_dense(tensor: Any) -> bool:
    return bool(
        tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.int64)
        and not tensor.is_neg()
    )


# --- PyTorch's order ---------------------------------------------------------------


@functools.cache
def _find_block() -> int:
    """Return how many columns PyTorch sums at once; 0 if its order is another."""
    for block in _BLOCKS:
        # The last shape, the largest, has whole blocks and all levels of partial sums.
        if all(map(_make_comparison(block), (*_SHAPES, (4200, block + 5)))):
            return block
    return 0


_SHAPES = ((3, 2), (17, 3), (17, 21), (64, 33), (100, 65), (257, 130), (1000, 40))


def _make_comparison(block: int) -> Callable[[tuple[int, int]], bool]:
    def is_equal(shape: tuple[int, int]) -> bool:
        numbers, out = _make_numbers(*shape), torch.empty(shape[1])
        _core.Reduction("sum_columns", shape, (numbers.data_ptr(), 0, out.data_ptr()), block)()
        return have_same_floats(out, numbers.sum(0))

    return is_equal


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
