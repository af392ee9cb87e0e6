"""Dropout's random numbers in a recorded step, drawn by the C core instead of PyTorch.

PyTorch draws them one at a time; the core makes the generator's numbers in vectors, which is much
faster. The bits and the generator's state afterwards are the same, which is tested once per
process. If they differ, for example because PyTorch uses Intel's library, PyTorch draws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import cerebro._core as _core
from cerebro.torch.elementwise import is_dense, is_native


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
