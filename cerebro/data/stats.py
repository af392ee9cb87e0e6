"""Compute the statistics of a column in float64, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cerebro.data.dtypes import Array, bfloat16_to_float32
from cerebro.data.manifest import Column
from cerebro.errors import InputError

PIECE_BYTES = 8 << 20
MOST_COUNTS = 65_536  # distinct values; a column with more is not a label


@dataclass(frozen=True)
class Stats:
    """Statistics of a column's values.

    Attributes
    ----------
    column
        The column's name.
    rows, values
        The number of rows and of values (row elements) that were counted.
    mean, std, min, max
        Floats over all values; with ``axis=``, arrays with one float64 for each index of that
        axis. `std` is the population standard deviation (divided by n).
    counts
        For scalar integer, boolean and category columns, the number of rows by class name (all
        categories, in the order of their codes) or by value (those that occur, ascending). None for
        other columns, or if there are more than 65,536 distinct values.
    """

    column: str
    rows: int
    values: int
    mean: Any
    std: Any
    min: Any
    max: Any
    counts: dict[Any, int] | None = None

    def __getitem__(self, name: str) -> Any:
        """Return an attribute by name: ``stats["mean"]`` is ``stats.mean``."""
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)


def iterate_pieces(array: Array) -> Iterator[Array]:
    """Yield the array in runs of rows of about 8 MB."""
    step = max(1, PIECE_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), step):
        yield array[start : start + step]


def column_stats(column: Column, runs: Iterable[Array], rows: int, axis: int | None) -> Stats:
    """Return statistics over runs of storage values of shape ``(n, *column.shape)``."""
    if column.dtype == "complex64":
        raise InputError(f"column {column.name!r} is complex: it has no mean, minimum and maximum")
    if axis is not None and not -len(column.shape) <= axis < len(column.shape):
        raise InputError(f"column {column.name!r} has rows of shape {column.shape}: no axis {axis}")
    moments = _Moments()
    plain = column.shape == () and not column.ragged
    counts: dict[Any, int] | None = None
    if plain and column.dtype.startswith(("int", "uint", "bool")):
        counts = {}
    for run in runs:
        for piece in iterate_pieces(run):
            moments.add(_arrange_by_channel(column, piece, axis))
            if counts is not None:
                for value, count in zip(*np.unique(piece, return_counts=True), strict=True):
                    counts[value.item()] = counts.get(value.item(), 0) + int(count)
                counts = counts if len(counts) <= MOST_COUNTS else None
    if moments.values == 0:
        raise InputError(f"column {column.name!r} has no values: all its rows are empty")
    mean, std, low, high = moments.result()
    if axis is None:
        mean, std, low, high = (float(value[0]) for value in (mean, std, low, high))
    if counts is not None and column.classes is not None:
        counts = {name: counts.get(code, 0) for code, name in enumerate(column.classes)}
    elif counts is not None:
        counts = dict(sorted(counts.items()))
    values = moments.values * (1 if axis is None else column.shape[axis])
    return Stats(column.name, rows, values, mean, std, low, high, counts)


class _Moments:
    """Count, mean, squared deviations, minimum and maximum by channel, merged piece by piece.

    Merging (Chan, Golub and LeVeque, 1979) keeps digits that a sum of squares would lose.
    """

    def __init__(self) -> None:
        self.values = 0  # by channel
        self._mean: Any = 0.0
        self._squares: Any = 0.0
        self._low: Any = np.inf
        self._high: Any = -np.inf

    def add(self, values: Array) -> None:
        """Add float64 values of shape ``(n, channels)``."""
        n = len(values)
        if n == 0:
            return
        total = self.values + n
        with np.errstate(invalid="ignore", over="ignore"):  # infinities give NaN, silently
            mean = values.mean(axis=0)
            squares = np.square(values - mean).sum(axis=0)
            delta = mean - self._mean
            self._squares = self._squares + squares + delta * delta * (self.values * n / total)
            self._mean = self._mean + delta * (n / total)
        self._low = np.minimum(self._low, values.min(axis=0))
        self._high = np.maximum(self._high, values.max(axis=0))
        self.values = total

    def result(self) -> tuple[Any, Any, Any, Any]:
        return self._mean, np.sqrt(self._squares / self.values), self._low, self._high


def _arrange_by_channel(column: Column, piece: Array, axis: int | None) -> Array:
    """Return the piece as float64 of shape (n, channels); if `axis` is None, with one channel."""
    if column.dtype == "bfloat16":
        piece = bfloat16_to_float32(piece)
    if axis is None:
        return piece.astype(np.float64).reshape(-1, 1)
    channel = axis % len(column.shape) + 1
    moved = np.moveaxis(piece.astype(np.float64), channel, -1)
    return moved.reshape(-1, column.shape[axis])
