"""Describe the space of a recorded run: the range of each setting, and the space as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerebro.errors import InputError
from cerebro.report.format import Range, is_number
from cerebro.space import Space
from cerebro.space.dimensions import (
    Choice,
    Dimension,
    Integer,
    LogUniform,
    Normal,
    Uniform,
    path_name,
)
from cerebro.space.foreign import Quantized


def ranges_of(recorded: Mapping[str, Any]) -> dict[str, Range]:
    """Return the range of each setting, by its dotted name.

    Settings have no range if conditions define different ones, if their values have no bounds, or
    if a function of the user computes them.
    """
    space = _read_space(recorded)
    ranges: dict[str, Range | None] = {}
    for node in space.nodes if space is not None else ():
        if not node.nest:
            name, span = path_name(node.path), _make_range(node.dimension)
            ranges[name] = span if ranges.get(name, span) == span else None
    return {name: span for name, span in ranges.items() if span is not None}


def _read_space(recorded: Mapping[str, Any]) -> Space | None:
    """Return the space; None if a part of it was not recorded."""
    try:
        return Space.from_json(recorded)
    except InputError:
        return None


def _make_range(dimension: Dimension) -> Range | None:
    if isinstance(dimension, Quantized):
        inner = dimension.inner
        if isinstance(inner, Normal):
            return None
        scale = dimension.q if isinstance(inner, Integer) else 1
        low, high = (dimension.nearest(end * scale) for end in (inner.low, inner.high))
        return Range(low, high, is_log=isinstance(inner, LogUniform) or inner.log)
    if isinstance(dimension, LogUniform):
        return Range(dimension.low, dimension.high, is_log=True)
    if isinstance(dimension, Uniform):
        return Range(dimension.low, dimension.high)
    if isinstance(dimension, Integer):
        return Range(dimension.low, dimension.high, is_log=dimension.log)
    if isinstance(dimension, Choice):
        numbers = all(is_number(option) for option in dimension.options)
        # A list such as [32, 64, 128, 256] is meant to be on a log axis.
        is_log = numbers and _is_geometric(sorted(set(dimension.options)))
        return Range(is_log=is_log, options=tuple(dimension.options))
    return None


def _is_geometric(values: list[float]) -> bool:
    """Return whether there are at least three values with growing differences."""
    if len(values) < 3 or values[0] <= 0:
        return False
    return values[-1] - values[-2] > 1.5 * (values[1] - values[0])


def space_lines(recorded: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the name and the description of each setting; empty if not all are recorded."""
    space = _read_space(recorded)
    if space is None:
        return []
    lines = (line.partition("  ") for line in space.describe().splitlines())
    return [(name.strip(), text.strip()) for name, _, text in lines]
