"""Choose how a program repeats a recorded call: which function it calls, and into which memory.

If an operator has a variant that writes into existing memory, the program calls this variant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cerebro.torch.cpu_recorder import Call
from cerebro.torch.nested_arguments import address_of, all_tensors, as_list, form_of, tensors_in

RESIZES = {
    "binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss",
}  # fmt: skip
"""Operators whose `out=` variants temporarily change the shape of `out`, mostly with a warning."""

ASKS_FOR_GRADIENTS = {"mkldnn_rnn_layer"}
"""Operators that compute differently, with different last bits, if gradients are off."""

_ARITHMETIC = {
    f"aten.{name}{overload}"
    for name in ("add", "sub", "mul", "div")
    for overload in ("_.Tensor", ".out")
}

_ABOUT_MEMORY = {"dtype", "layout", "device", "pin_memory", "memory_format"}


def make_runnable(
    call: Call, args: list[Any], kwargs: dict[str, Any], outs: list[Any]
) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return an operator, and (function, arguments, keywords) that repeat a call into `outs`."""
    if call.about.mutates:
        addresses = {address_of(t) for t in tensors_in([args, kwargs])}
        results = [t if _is_made(t, addresses) else None for t in outs]
        if not any(t is not None for t in results):
            return call.func, (call.func, args, kwargs)
        return call.func, (partial(_call_and_copy, call.func._op, results), args, kwargs)
    if call.name in ("clone", "_to_copy"):
        copy = torch.ops.aten.copy_.default
        return copy, (copy, [outs[0], args[0]], {})
    copying = call.func, (partial(_call_and_copy, call.func._op, outs), args, kwargs)
    if call.name in ASKS_FOR_GRADIENTS:
        mode = torch.enable_grad if call.has_gradients else torch.no_grad
        run = partial(_call_in_mode, mode, call.func._op)
        return call.func, (partial(_call_and_copy, run, outs), args, kwargs)
    overload = _find_out_variant(call.func)
    several = len(call.func._schema.returns) == 1 and len(outs) != 1
    are_tensors = all(isinstance(t, torch.Tensor) for t in outs)
    if overload is None or not are_tensors or call.name in RESIZES:
        return copying
    variant, names, allowed = overload
    is_list = several or "[]" in str(call.func._schema.returns[0].type)

    def name_outputs(memory: list[Any]) -> dict[str, Any]:
        rest = {key: value for key, value in kwargs.items() if key in allowed}
        return rest | ({names[0]: memory} if is_list else dict(zip(names, memory, strict=True)))

    # Some variants need an `out` of another shape than their result, so try them on other memory.
    beside = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in outs]
    expected = [(address_of(t), form_of(t)) for t in beside]
    variant(*args, **name_outputs(beside))
    if [(address_of(t), form_of(t)) for t in beside] != expected:
        return copying
    filled = name_outputs(outs)
    kwargs.clear()
    kwargs.update(filled)
    return variant, (variant, args, kwargs)


def takes_number(func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator converts the number ``args[1]`` to a tensor in every call.

    A tensor that is created in advance gives the same bits.
    """
    if str(func) not in _ARITHMETIC or isinstance(args[1], (torch.Tensor, bool)):
        return False
    dtype = args[0].dtype
    are_same = all(t.dtype == dtype for t in all_tensors([args, kwargs]))
    return dtype in (torch.float32, torch.float64) and are_same


def find_binding(run: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return PyTorch's function for an operator if it calls exactly that operator.

    Its argument parser takes half as long as the operator's.
    """
    if isinstance(run, partial):
        return run
    name = str(run._schema.name).partition("::")[2]
    place = torch.Tensor if name.endswith("_") else torch
    function = getattr(place, name, None)
    if function is not None and not hasattr(function, "__code__"):
        tried = _Tried()
        try:
            with tried:
                function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError):
            return run._op
        if [func for func, _, _ in tried.calls] == [run]:
            called = all_tensors([list(tried.calls[0][1]), dict(tried.calls[0][2])])
            if all(map(is_, called, all_tensors([args, kwargs]))):
                return function
    return run._op


class _Tried(TorchDispatchMode):  # type: ignore[misc]
    """A context that records operators and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_made(value: Any, given: set[int]) -> bool:
    """Return whether a result is a tensor in new memory."""
    return isinstance(value, torch.Tensor) and value.numel() > 0 and address_of(value) not in given


def _call_in_mode(mode: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode():
        return run(*args, **kwargs)


def _call_and_copy(run: Callable[..., Any], outs: list[Any], *args: Any, **kwargs: Any) -> None:
    for to, value in zip(outs, as_list(run(*args, **kwargs)), strict=True):
        if isinstance(to, torch.Tensor) and to.numel():
            to.copy_(value)


@functools.cache
def _find_out_variant(func: Any) -> Any:
    """Return an operator's `out=` overload and the names of its outputs and other arguments."""
    schema = func._schema
    expected = [(a.name, str(a.type)) for a in schema.arguments if a.name not in _ABOUT_MEMORY]
    names = {a.name for a in schema.arguments}
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        arguments = variant._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        fits = [pair for pair in rest if pair[0] not in _ABOUT_MEMORY] == expected
        fits = fits and names.issuperset(name for name, _ in rest)
        if outs and fits and len(outs) == len(schema.returns):
            return variant, outs, {name for name, _ in rest}
    return None
