"""Compute statistics of a column, piece by piece in float64, and how much its shards differ.

A search that reads groups of shards would train badly on shards that differ. `cerebro.shard`
permutes the rows, so every shard is a random sample. Data written with ``shuffle=False`` keep their
order. If they are sorted by class, group or time, a group of shards has only some of the classes or
times, and training on one group after another loses what the others taught.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cerebro.arguments import warn_user
from cerebro.data.dtypes import Array, bfloat16_to_float32
from cerebro.data.manifest import Column
from cerebro.data.order import GROUP
from cerebro.data.view import View
from cerebro.errors import CorruptDataError, InputError

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
    countable = plain and column.dtype.startswith(("int", "uint", "bool"))
    counts: dict[Any, int] | None = {} if countable else None
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


# --- shards that differ -------------------------------------------------------------------------

SAMPLE = 1024  # the rows of a shard that are looked at, evenly spaced
MOST_CLASSES = 100  # an integer column with at most so many values has classes, others quantities
LEAST_SHARE = 0.05  # of a column's variance that shards explain if they differ clearly
CHANCES = 4  # the deviations by which that share may exceed its mean by chance


def _find_differing_columns(view: View) -> dict[str, float]:
    """Return the share of the variance that shards explain, for columns in which they differ.

    Only columns with one number for each row count, and only data written with ``shuffle=False``.
    The share is the correlation ratio (eta squared) of a sample; for classes, of all their
    indicators together.
    """
    if view.shards.manifest.arguments.get("shuffle") is True:  # derived sets do not say
        return {}
    shards = [shard for shard, rows in enumerate(view.shard_rows) if rows > 1]
    shares = {}
    for name, column in view.shards.columns.items():
        if column.ragged or column.shape or column.dtype in ("complex64", "bfloat16"):
            continue
        try:
            samples = [_sample_values(view.read(name, shard)) for shard in shards]
        except (CorruptDataError, InputError):  # reported where the data are read
            return {}
        share = _compute_explained_share(samples)
        if share > LEAST_SHARE:
            shares[name] = share
    return shares


def check_shards(data: Any) -> None:
    """Warn if shards read in groups differ; raise InputError if all weights of one are 0."""
    view = data.view
    view.weight_sums(across=False)
    shares = _find_differing_columns(view) if len(view.parts) > GROUP else {}
    if not shares:
        return
    worst = max(shares, key=lambda name: shares[name])
    others = f" (and in {len(shares) - 1} more columns)" if len(shares) > 1 else ""
    warn_user(
        f"the shards of {view.shards.place!r} differ in column {worst!r}{others}: it was written "
        'with shuffle=False, and shuffle="shards" mixes only four shards at a time, which can cost '
        "much accuracy. Write it again with cerebro.shard(..., shuffle=True), or search with "
        'shuffle="rows"'
    )


def _sample_values(values: Array) -> Array:
    rows = np.unique(np.linspace(0, len(values) - 1, min(SAMPLE, len(values))).astype(np.int64))
    sample = values[rows].astype(np.float64)
    return sample[np.isfinite(sample)]  # a column of times may have missing values


def _compute_explained_share(samples: Sequence[Array]) -> float:
    """Return the between-shard share of the variance, minus the share expected by chance."""
    samples = [sample for sample in samples if len(sample)]
    rows = sum(map(len, samples))
    if len(samples) < 2 or rows <= len(samples):
        return 0.0
    values = np.concatenate(samples)
    values /= np.abs(values).max() or 1.0  # squares of the largest numbers would overflow
    sizes = np.array([len(sample) for sample in samples])
    shard = np.repeat(np.arange(len(samples)), sizes)
    classes, codes = np.unique(values, return_inverse=True)
    if len(classes) <= MOST_CLASSES:
        table = np.zeros((len(samples), len(classes)))
        np.add.at(table, (shard, codes.reshape(-1)), 1.0)
        shares = table.sum(0) / rows
        total = rows * float(1 - (shares**2).sum())
        means = table / sizes[:, None] - shares
    else:
        centred = values - values.mean()
        total = float((centred**2).sum())
        means = (np.bincount(shard, centred) / sizes)[:, None]
    if len(classes) == 1 or total == 0:
        return 0.0
    between = float((sizes[:, None] * means**2).sum())
    # Shards of a few rows differ by chance: of k shards with n rows in all, by about (k - 1) / n.
    freedom = len(samples) - 1
    by_chance = (freedom + CHANCES * math.sqrt(2 * freedom)) / (rows - 1)
    return max(0.0, between / total - by_chance)
