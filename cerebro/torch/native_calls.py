"""Operators of a recorded step that the C core computes, with PyTorch's bits, instead of PyTorch.

These are matrix products (`cerebro.torch.matmul`), and sums and losses
(`cerebro.torch.reductions`); for others, see `cerebro.torch.elementwise`. Each call is computed
both ways once, when a program is made, and is left to PyTorch if a bit differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from cerebro.torch import matmul, reductions
from cerebro.torch.elementwise import have_same_floats, is_native


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
        aten.mm.out: matmul.make_product,
        aten.addmm.out: matmul.make_product,
        aten.sum.IntList_out: reductions.make_column_sum,
        aten.nll_loss_forward.output: reductions.make_nll_loss,
        aten.nll_loss_backward.grad_input: reductions.make_nll_gradient,
    }
