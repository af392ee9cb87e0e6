"""Choose the rows of a view: select them by number, or split them by position, class or group.

All functions are pure functions of row counts and labels. A part takes a share of every shard, so
that its shards are similar. Rounding errors are carried over from shard to shard, so the size of a
part over all shards is exact to the row even if shards are small.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cerebro._core as _core
from cerebro.data.dtypes import Array, freeze_array
from cerebro.errors import InputError

Rows = NDArray[np.uint32]
Part = range | Rows  # of a shard; both have a length, and slices that are parts
Selection = slice | Sequence[int] | Array

_NO_ROWS = "select chooses no rows: choose at least one"


def part_index(part: range | Array) -> slice | Array:
    """Return rows as an index into a column."""
    return slice(part.start, part.stop) if isinstance(part, range) else part


def take_rows(part: Part, positions: Array) -> Part:
    """Return the rows of `part` at these positions, in this order; as a range if possible."""
    index = positions + part.start if isinstance(part, range) else part[positions]
    rows = index.astype(np.uint32)
    if len(rows) == 0:
        return range(0)
    if (np.diff(rows.astype(np.int64)) == 1).all():
        return range(int(rows[0]), int(rows[-1]) + 1)
    return freeze_array(rows)


def select_rows(parts: Sequence[Part], selection: Selection) -> list[Part]:
    """Select rows by their number in the view: a slice, a boolean mask or row numbers.

    Each row stays in its shard. Within a shard, rows have the order of the selection; a repeated
    number repeats the row.
    """
    starts = np.cumsum([0, *map(len, parts)])
    if isinstance(selection, slice) and selection.step in (None, 1):
        low, high, _ = selection.indices(int(starts[-1]))
        if high <= low:
            raise InputError(_NO_ROWS)
        return [
            part[max(0, low - start) : max(0, high - start)]
            for part, start in zip(parts, starts, strict=False)
        ]
    rows = _row_numbers(selection, int(starts[-1]))
    if len(rows) == 0:
        raise InputError(_NO_ROWS)
    shards = np.searchsorted(starts, rows, side="right") - 1
    by_shard = np.argsort(shards, kind="stable")
    bounds = np.searchsorted(shards[by_shard], np.arange(len(parts) + 1))
    return [
        take_rows(part, rows[by_shard[bounds[shard] : bounds[shard + 1]]] - starts[shard])
        for shard, part in enumerate(parts)
    ]


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
        raise InputError(f"select: no row {wrong}: rows are numbered 0 to {rows - 1}")
    return numbers.astype(np.int64)


def covers(part: Part, other: Part) -> bool:
    """Return whether all rows of `other` are rows of `part`."""
    if len(other) == 0:
        return True
    if not isinstance(part, range):
        return bool(np.isin(other, part).all())
    low, high = (other[0], other[-1]) if isinstance(other, range) else (other.min(), other.max())
    return bool(part.start <= low and high < part.stop)


def repeats(part: Part) -> bool:
    """Return whether a part has duplicate rows; cheap for ranges and ascending rows."""
    if isinstance(part, range) or bool((part[1:] > part[:-1]).all()):
        return False
    return len(np.unique(part)) < len(part)


def part_to_json(part: Part) -> Any:
    """Return ``[start, stop]``, or the row numbers as base64 of zlib of little-endian uint32."""
    if isinstance(part, range):
        return [part.start, part.stop]
    packed = zlib.compress(np.ascontiguousarray(part, "<u4").tobytes(), 1)
    return base64.b64encode(packed).decode()


def part_from_json(value: Any, rows: int) -> Part:
    """Invert `part_to_json` for a shard of `rows` rows; raise InputError if the part is invalid."""
    try:
        if isinstance(value, list):
            start, stop = (int(number) for number in value)
            part: Part = range(start, stop)
            good = 0 <= start <= stop <= rows
        else:
            part = np.frombuffer(zlib.decompress(base64.b64decode(value, validate=True)), "<u4")
            good = len(part) == 0 or int(part.max()) < rows
    except (ValueError, TypeError, zlib.error):
        good = False
    if not good:
        raise InputError(
            "the dataset's spec does not fit the dataset: rows have been lost, or the spec is "
            "damaged"
        )
    return part


_TOLERANCE = 1e-9


def check_fractions(fractions: Sequence[float]) -> list[float]:
    """Return cumulative fractions; the last is exactly 1 if the sum is 1 up to rounding."""
    if not fractions:
        raise InputError("split needs fractions, such as split(0.8, 0.2)")
    for fraction in fractions:
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float, np.number)):
            raise InputError(f"split: {fraction!r} is not a fraction: give numbers such as 0.8")
        if not fraction > 0 or not math.isfinite(fraction):
            raise InputError(f"split: the fraction {fraction} must be greater than 0")
    total = math.fsum(fractions)
    if total > 1 + _TOLERANCE:
        raise InputError(f"split: the fractions sum to {total:g}: they must sum to at most 1")
    bounds = [math.fsum(fractions[: part + 1]) for part in range(len(fractions))]
    if abs(total - 1) <= _TOLERANCE:
        bounds[-1] = 1.0
    return bounds


class Rounder:
    """Cut runs of rows by cumulative fractions; carry the rounding error over to the next run."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._rows = 0
        self._given = [0] * len(bounds)

    def cut(self, rows: int) -> list[int]:
        """Return the cuts of the next `rows` rows: part p is ``cuts[p]`` up to ``cuts[p + 1]``."""
        self._rows += rows
        cuts = [0]
        for part, bound in enumerate(self._bounds):
            aim = math.floor(bound * self._rows + 0.5 + _TOLERANCE) - self._given[part]
            cuts.append(min(max(aim, cuts[-1]), rows))
            self._given[part] += cuts[-1]
        return cuts


def split_by_class(
    labels: Sequence[Array], bounds: Sequence[float], seed: int
) -> list[list[Array]]:
    """Return ascending row positions by part and shard; parts have equal proportions of classes."""
    shards = len(labels)
    rounder = Rounder(bounds)
    positions: list[list[list[Array]]] = [[[] for _ in labels] for _ in bounds]
    for index, members in enumerate(_list_members(labels)):
        # Each class begins at a different shard; otherwise rounding would favor the same shards.
        for turn in range(shards):
            shard = (index + turn) % shards
            rows = members[shard]
            rows = rows[_core.permutation(len(rows), seed, "split", index, shard)]
            for part, (start, stop) in enumerate(pairwise(rounder.cut(len(rows)))):
                positions[part][shard].append(rows[start:stop])
    return [[np.sort(np.concatenate(rows)) for rows in part] for part in positions]


def deal_folds(labels: Sequence[Array], folds: int, seed: int) -> Array:
    """Return the fold of each row, across shards; folds have equal shares of classes and shards.

    The rows of a class in a shard are permuted, keyed by `seed`, and assigned to the folds in turn:
    the sizes of the folds, and their numbers of rows of each class, differ by at most one row.
    """
    starts = np.cumsum([0, *(len(of_shard) for of_shard in labels)])
    fold_of = np.empty(int(starts[-1]), np.int64)
    count = 0
    for index, members in enumerate(_list_members(labels)):
        for shard, rows in enumerate(members):
            order = rows[_core.permutation(len(rows), seed, "split", index, shard)]
            fold_of[starts[shard] + order] = (count + np.arange(len(rows))) % folds
            count += len(rows)
    return fold_of


def _list_members(labels: Sequence[Array]) -> list[list[Array]]:
    """Return the ascending row positions of each class, by class and shard."""
    classes = np.unique(np.concatenate(labels))
    members: list[list[Array]] = [[] for _ in classes]
    for of_shard in labels:
        order = np.argsort(of_shard, kind="stable")
        cuts = np.searchsorted(of_shard[order], classes)
        for label, rows in enumerate(np.split(order, cuts[1:])):
            members[label].append(rows)
    return members


def split_by_group(
    labels: Sequence[Array], bounds: Sequence[float], seed: int
) -> list[list[Array]]:
    """Return row positions by part and shard that keep the rows of a group together.

    The largest groups come first, equal ones in an order keyed by `seed`; each is assigned to the
    part that lacks the most rows.
    """
    part_of = assign_groups(labels, bounds, seed)
    ends = np.cumsum([len(of_shard) for of_shard in labels])[:-1]
    by_shard = np.split(part_of, ends)
    return [[np.flatnonzero(parts == part) for parts in by_shard] for part in range(len(bounds))]


def assign_groups(labels: Sequence[Array], bounds: Sequence[float], seed: int) -> Array:
    """Return the part of each row; the number of parts stands for a row that is left over."""
    rows = np.concatenate(labels)
    _, codes, counts = np.unique(rows, return_inverse=True, return_counts=True)
    groups, parts = len(counts), len(bounds)
    if groups < parts:
        raise InputError(
            f"split: {groups} groups cannot be split into {parts} parts: use fewer parts"
        )
    lacking = np.diff([0.0, *bounds, 1.0]) * len(rows)
    part_of = np.zeros(groups, np.int64)
    empty = set(range(parts))
    order = np.asarray(_core.permutation(groups, seed, "split"))
    for turn, group in enumerate(order[np.argsort(-counts[order], kind="stable")]):
        part = int(np.argmax(lacking))
        if groups - turn <= len(empty) and part not in empty:
            part = min(empty)
        part_of[group] = part
        lacking[part] -= counts[group]
        empty.discard(part)
    return part_of[codes]
