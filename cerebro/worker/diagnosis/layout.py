"""Compare the memory layouts of a state's tensors before and after a hop.

A packed state has every tensor in C order. A model that keeps what it loads therefore continues
with row-major copies of its column-major tensors, and a product of them may have other last bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cerebro.report.findings import Finding

Layout = tuple[tuple[int, int], ...]
"""The size and the stride, in elements, of each dimension of more than one element."""

CURE = (
    "make it contiguous where it is made, or copy the loaded tensor into the model's own, as in "
    "self.W[...] = state['W']"
)


def read_layouts(leaves: Iterable[tuple[str, Any]]) -> dict[str, Layout]:
    """Return the layouts of the NumPy arrays and PyTorch tensors by their paths."""
    strides = ((path, value, _read_strides(value)) for path, value in leaves)
    return {
        path: tuple(pair for pair in zip(value.shape, value_strides, strict=True) if pair[0] != 1)
        for path, value, value_strides in strides
        if value_strides and 0 not in value.shape
    }


def _read_strides(value: Any) -> tuple[int, ...]:
    """Return an array's strides in elements; empty if the framework chooses the layout."""
    if isinstance(value, np.ndarray):
        return tuple(stride // value.itemsize for stride in value.strides)
    stride = getattr(value, "stride", None)
    return tuple(stride()) if callable(stride) else ()


def find_changed(before: Mapping[str, Layout], after: Mapping[str, Layout]) -> list[str]:
    """Return the paths of the tensors that have the same sizes in another layout."""
    return [
        path
        for path, layout in before.items()
        if path in after and layout != after[path] and _sizes_of(layout) == _sizes_of(after[path])
    ]


def _sizes_of(layout: Layout) -> list[int]:
    return [size for size, _ in layout]


def describe_change(paths: list[str]) -> str:
    """Say that a hop changes the layouts of these tensors."""
    return f"a hop changes the memory layout of {', '.join(paths[:3])}"


def check_layouts(before: Mapping[str, Layout], after: Mapping[str, Layout]) -> list[Finding]:
    """Return a finding if tensors have changed their layout, although training continued equally.

    Tensors of more than two dimensions are often moments of an optimizer, which are computed
    element by element: they give only a hint.
    """
    paths = [path for path in find_changed(before, after) if len(before[path]) > 1]
    matrices = [path for path in paths if len(before[path]) == 2]
    if not paths:
        return []
    return [
        Finding(
            "changed-layout",
            f"{describe_change(matrices or paths)}, so that products may have other last bits",
            CURE,
            "matters" if matrices else "hint",
        )
    ]
