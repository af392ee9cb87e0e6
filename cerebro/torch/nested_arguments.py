"""Nested arguments and results of operators: find, copy and compare the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

TENSORS = (torch.Tensor, torch.nn.Parameter)
LEAVES = {
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
"""Types of most arguments that are neither tensors nor containers."""


def address_of(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def copy_arguments(value: Any, found: list[tuple[Any, Any]]) -> Any:
    """Return a copy of nested arguments with detached tensors, which keep their current shapes.

    Add all tensors, paired with their copies, to `found`.
    """
    kind = type(value)
    if kind in LEAVES:
        return value
    if kind in TENSORS:
        copy = value.detach() if value.layout == torch.strided else value
        found.append((value, copy))
        return copy
    if isinstance(value, (list, tuple)):
        return [copy_arguments(item, found) for item in value]
    if isinstance(value, dict):
        return {key: copy_arguments(item, found) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        found.append((value, value))
    return value


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in LEAVES:
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def all_tensors(value: Any) -> list[Any]:
    if type(value) in LEAVES:
        return []
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in all_tensors(item)]
    return []


def tensors_in(value: Any) -> list[Any]:
    """Return the strided tensors among nested arguments."""
    return [tensor for tensor in all_tensors(value) if tensor.layout == torch.strided]


def pair_leaves(left: Any, right: Any, path: Any = ()) -> Iterable[tuple[Any, Any, Any]]:
    """Yield the corresponding leaves of two nested arguments, with their paths."""
    if type(left) is type(right) and isinstance(left, (list, dict)):
        keys, theirs = (list(v) if isinstance(v, dict) else range(len(v)) for v in (left, right))
        if keys == theirs:
            for key in keys:
                yield from pair_leaves(left[key], right[key], (*path, key))
            return
    yield path, left, right


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def form_of(tensor: Any) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype
