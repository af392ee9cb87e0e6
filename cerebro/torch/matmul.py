"""Matrix products of a recorded step, computed by PyTorch's BLAS without PyTorch's dispatch.

PyTorch computes the product of float32 matrices with SGEMM. If its library exports this function,
the core calls it with PyTorch's arguments, so the bits are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

import cerebro._core as _core
from cerebro.torch.elementwise import find_library_function

_MOST = 2**31 - 1
"""BLAS counts with 32-bit integers."""


class Product:
    """``out = a @ b``, plus `bias` in every row."""

    def __init__(self, out: Any, a: Any, b: Any, bias: Any = None) -> None:
        self.tensors = [out, a, b] if bias is None else [out, a, b, bias]

    @property
    def outs(self) -> list[Any]:
        return self.tensors[:1]

    def prepare(self) -> Any:
        """Return the core's function; None if BLAS cannot take the tensors as they are."""
        if not all(map(_is_plain, self.tensors)) or any(t.dim() != 2 for t in self.tensors[:3]):
            return None
        out, a, b, *bias = self.tensors
        is_by_columns = _is_by_columns(out)
        if not is_by_columns:  # like PyTorch, because BLAS stores matrices by columns
            out, a, b = out.t(), b.t(), a.t()
        first, second = _find_layout(a), _find_layout(b)
        if first is None or second is None or not _is_by_columns(out):
            return None
        if bias and (bias[0].dim() != 1 or bias[0].stride() != (1,)):
            return None
        return _core.MatMul(
            _find_sgemm(),
            (first[0], second[0]),
            (out.shape[0], out.shape[1], a.shape[1]),
            (a.data_ptr(), first[1]),
            (b.data_ptr(), second[1]),
            (out.data_ptr(), max(out.stride(1), out.shape[0])),
            bias[0].data_ptr() if bias else 0,
            is_by_columns,
        )


def make_product(given: Mapping[str, Any]) -> Product | None:
    """Return a recorded ``mm.out`` or ``addmm.out`` as a product of the core, or None."""
    if given.get("alpha", 1) != 1 or given.get("beta", 1) != 1 or _find_sgemm() == 0:
        return None
    if "mat1" in given:
        return Product(given["out"], given["mat1"], given["mat2"], given["self"])
    return Product(given["out"], given["self"], given["mat2"])


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
    """Return whether PyTorch regards a result as stored by columns."""
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
