"""Rows of a view: for each shard a range or a list of row numbers within the shard."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cerebro.data.dtypes import Array
from cerebro.errors import InputError

Rows = NDArray[np.uint32]
Part = tuple[int, int] | Rows  # (start, stop), or row numbers in the shard
Selection = slice | Sequence[int] | Array


def part_rows(part: Part) -> int:
    """The number of rows."""
    return part[1] - part[0] if isinstance(part, tuple) else len(part)


def part_index(part: Part) -> slice | Rows:
    """The part as an index into a shard's column."""
    return slice(*part) if isinstance(part, tuple) else part


def cut(part: Part, start: int, stop: int) -> Part:
    """The rows of `part` at the positions from `start` up to `stop`."""
    if isinstance(part, tuple):
        return part[0] + start, part[0] + stop
    return part[start:stop]


def take(part: Part, positions: Array) -> Part:
    """The rows of `part` at these positions, in this order; a range where they are one."""
    index = positions + part[0] if isinstance(part, tuple) else part[positions]
    rows = index.astype(np.uint32)
    if len(rows) == 0:
        return (0, 0)
    if (np.diff(rows.astype(np.int64)) == 1).all():
        return int(rows[0]), int(rows[-1]) + 1
    rows.setflags(write=False)
    return rows


def select_rows(parts: Sequence[Part], selection: Selection) -> list[Part]:
    """Choose rows by their number in the view: slice, boolean mask or row numbers.

    Shards are kept; within a shard rows keep the order they are asked in, and a row asked for twice
    is there twice. Raises InputError for numbers out of range, a wrong mask, or no row at all.
    """
    starts = np.cumsum([0, *(part_rows(part) for part in parts)])
    if isinstance(selection, slice) and selection.step in (None, 1):
        low, high, _ = selection.indices(int(starts[-1]))
        _check_any(high - low)
        return [
            cut(part, *(int(np.clip(row - start, 0, part_rows(part))) for row in (low, high)))
            for part, start in zip(parts, starts, strict=False)
        ]
    rows = _row_numbers(selection, int(starts[-1]))
    _check_any(len(rows))
    shards = np.searchsorted(starts, rows, side="right") - 1
    grouped = np.argsort(shards, kind="stable")
    bounds = np.searchsorted(shards[grouped], np.arange(len(parts) + 1))
    return [
        take(part, rows[grouped[bounds[shard] : bounds[shard + 1]]] - starts[shard])
        for shard, part in enumerate(parts)
    ]


def _check_any(count: int) -> None:
    if count <= 0:
        raise InputError("select chooses no row: choose at least one")


def _row_numbers(selection: Selection, rows: int) -> Array:
    if isinstance(selection, slice):
        return np.arange(*selection.indices(rows))
    numbers = np.asarray(selection)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iub"):
        raise InputError("select needs a slice, a boolean mask or a list of row numbers")
    if numbers.dtype.kind == "b":
        if len(numbers) != rows:
            raise InputError(f"select: the mask has {len(numbers)} values for {rows} rows")
        return np.flatnonzero(numbers)
    if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= rows):
        wrong = int(numbers[(numbers < 0) | (numbers >= rows)][0])
        raise InputError(f"select: there is no row {wrong}: rows are numbered 0 to {rows - 1}")
    return numbers.astype(np.int64)


def covers(part: Part, other: Part) -> bool:
    """Whether all rows of `other` are rows of `part`."""
    if part_rows(other) == 0:
        return True
    if not isinstance(part, tuple):
        return bool(np.isin(np.arange(*other) if isinstance(other, tuple) else other, part).all())
    ends = (other[0], other[1] - 1) if isinstance(other, tuple) else (other.min(), other.max())
    return bool(part[0] <= ends[0] and ends[1] < part[1])


def part_to_json(part: Part) -> Any:
    """``[start, stop]``, or the row numbers as base64 of zlib of little-endian uint32."""
    if isinstance(part, tuple):
        return list(part)
    packed = zlib.compress(np.ascontiguousarray(part, "<u4").tobytes(), 1)
    return base64.b64encode(packed).decode()


def part_from_json(value: Any, rows: int) -> Part:
    """The inverse of `part_to_json`, for a shard of `rows` rows; InputError for what is no part."""
    try:
        if isinstance(value, list):
            start, stop = (int(number) for number in value)
            part: Part = (start, stop)
            good = 0 <= start <= stop <= rows
        else:
            part = np.frombuffer(zlib.decompress(base64.b64decode(value, validate=True)), "<u4")
            good = len(part) == 0 or int(part.max()) < rows
    except (ValueError, TypeError, zlib.error):
        good = False
    if not good:
        raise InputError(
            "the data set's spec does not fit the data set: it has fewer rows than it had, or its "
            "rows are damaged in the spec"
        )
    return part
