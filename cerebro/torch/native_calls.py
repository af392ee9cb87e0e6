"""Operators of a recorded step that the C core computes, with PyTorch's bits, instead of PyTorch.

These are matrix products, dropout's random numbers, and sums and losses
(`cerebro.torch.reductions`); for others, see `cerebro.torch.elementwise`. Each call is computed
both ways once, when a program is made, and is left to PyTorch if a bit differs.

PyTorch draws dropout's numbers one at a time; the core makes the generator's numbers in vectors,
which is much faster. The bits and the generator's state afterwards are the same, which is tested
once per process. If they differ, for example because PyTorch uses Intel's library, PyTorch draws.

PyTorch computes the product of float32 matrices with SGEMM. If its library exports this function,
the core calls it with PyTorch's arguments, so the bits are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

import cerebro._core as _core
from cerebro.torch import reductions
from cerebro.torch.elementwise import find_library_function, have_same_floats, is_dense, is_native


class NativeCall(Protocol):
    """A call that the core computes."""

    @property
    def tensors(self) -> list[Any]:
        """The tensors that the call reads and writes."""

    @property
    def outs(self) -> list[Any]:
        """The tensors that it writes, in float32."""

    def prepare(self) -> Callable[[], None] | None:
        """Return the core's function; None if it cannot take these tensors."""


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
    compute = None if call is None else call.prepare()
    if call is None or compute is None:
        return None
    run(*args, **kwargs)
    expected = [out.clone() for out in call.outs]
    for out in call.outs:
        out.fill_(torch.nan)
    compute()
    return call if all(map(have_same_floats, call.outs, expected)) else None


@functools.cache
def _rules() -> dict[Any, Callable[[Mapping[str, Any]], NativeCall | None]]:
    aten = torch.ops.aten
    return {
        aten.mm.out: make_product,
        aten.addmm.out: make_product,
        aten.sum.IntList_out: reductions.make_column_sum,
        aten.nll_loss_forward.output: reductions.make_nll_loss,
        aten.nll_loss_backward.grad_input: reductions.make_nll_gradient,
    }


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
