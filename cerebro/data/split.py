"""Splitting rows into parts or folds: by position, by class, by group.

Pure functions over row counts and labels. A part takes a share of every shard, so that its shards
stay alike. Shares are rounded with the error carried on, so that the sizes over all shards are
right to the row even where shards are small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cerebro import _core
from cerebro.data.dtypes import Array
from cerebro.errors import InputError

_TOLERANCE = 1e-9


def check_fractions(fractions: Sequence[float]) -> list[float]:
    """Cumulative fractions; the last is exactly 1 if they sum to 1 but for rounding.

    Raises InputError unless there is one at least, all are positive and they sum to at most 1.
    """
    if not fractions:
        raise InputError("split needs fractions, such as split(0.8, 0.2)")
    for fraction in fractions:
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float, np.number)):
            raise InputError(f"split: {fraction!r} is no fraction: give numbers such as 0.8")
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
    """Cuts runs of rows by cumulative fractions, carrying the rounding error on."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._rows = 0
        self._given = [0] * len(bounds)

    def cut(self, rows: int) -> list[int]:
        """Cuts of the next run: part p is from ``cuts[p]`` up to ``cuts[p + 1]``."""
        self._rows += rows
        cuts = [0]
        for part, bound in enumerate(self._bounds):
            aim = math.floor(bound * self._rows + 0.5 + _TOLERANCE) - self._given[part]
            cuts.append(min(max(aim, cuts[-1]), rows))
            self._given[part] += cuts[-1]
        return cuts


def stratified(labels: Sequence[Array], bounds: Sequence[float], seed: int) -> list[list[Array]]:
    """Positions by part and shard, ascending, such that parts have the classes in proportion.

    `labels` has the label of each row, by shard. Which rows of a class go where is drawn by `seed`.
    """
    parts = len(bounds)
    shards = len(labels)
    rounder = Rounder(bounds)
    found: list[list[list[Array]]] = [[[] for _ in labels] for _ in range(parts)]
    for index, members in enumerate(_members(labels)):
        # Each class begins at another shard: the rounding would else always favour the same ones.
        for turn in range(shards):
            shard = (index + turn) % shards
            rows = members[shard]
            rows = rows[_core.permutation(len(rows), seed, "split", index, shard)]
            cuts = rounder.cut(len(rows))
            for part in range(parts):
                found[part][shard].append(rows[cuts[part] : cuts[part + 1]])
    return [[np.sort(np.concatenate(rows)) for rows in part] for part in found]


def dealt(labels: Sequence[Array], folds: int, seed: int) -> Array:
    """The fold of each row, over all shards: folds have the classes, and the shards, in proportion.

    `labels` has the label of each row, by shard. The rows of a class in a shard come in an order
    drawn by `seed` and are dealt out one by one. So the sizes of the folds differ by one row at
    most, and so do their numbers of rows of any class.
    """
    starts = np.cumsum([0, *(len(of_shard) for of_shard in labels)])
    fold_of = np.empty(int(starts[-1]), np.int64)
    count = 0
    for index, members in enumerate(_members(labels)):
        for shard, rows in enumerate(members):
            order = rows[_core.permutation(len(rows), seed, "split", index, shard)]
            fold_of[starts[shard] + order] = (count + np.arange(len(rows))) % folds
            count += len(rows)
    return fold_of


def _members(labels: Sequence[Array]) -> list[list[Array]]:
    """Positions of the rows of each class (ascending), by class and shard."""
    classes = np.unique(np.concatenate(labels))
    members: list[list[Array]] = [[] for _ in classes]
    for of_shard in labels:
        order = np.argsort(of_shard, kind="stable")
        cuts = np.searchsorted(of_shard[order], classes)
        for label, rows in enumerate(np.split(order, cuts[1:])):
            members[label].append(rows)
    return members


def grouped(labels: Sequence[Array], bounds: Sequence[float], seed: int) -> list[list[Array]]:
    """Positions by part and shard such that the rows of a group stay together.

    Groups come in an order drawn by `seed`, each to the part that lacks most rows. Raises
    InputError if there are fewer groups than parts.
    """
    part_of = part_of_groups(labels, bounds, seed)
    ends = np.cumsum([len(of_shard) for of_shard in labels])[:-1]
    by_shard = np.split(part_of, ends)
    return [[np.flatnonzero(parts == part) for parts in by_shard] for part in range(len(bounds))]


def part_of_groups(labels: Sequence[Array], bounds: Sequence[float], seed: int) -> Array:
    """The part of each row, over all shards; see `grouped`."""
    names, codes, counts = np.unique(
        np.concatenate(labels), return_inverse=True, return_counts=True
    )
    if len(names) < len(bounds):
        raise InputError(
            f"split: {len(names)} groups cannot be split into {len(bounds)} parts: use fewer parts"
        )
    return _assign(counts, bounds, seed)[codes]


def _assign(counts: Array, bounds: Sequence[float], seed: int) -> Array:
    """The part of each group; the number after the last stands for the rows left over."""
    rows = int(counts.sum())
    targets = np.diff([0.0, *bounds, 1.0]) * rows
    parts = len(bounds)
    lacking = targets.copy()
    part_of = np.zeros(len(counts), np.int64)
    empty = set(range(parts))
    for turn, group in enumerate(_core.permutation(len(counts), seed, "split")):
        part = int(np.argmax(lacking))
        if len(counts) - turn <= len(empty) and part not in empty:
            part = min(empty)
        part_of[group] = part
        lacking[part] -= counts[group]
        empty.discard(part)
    return part_of
