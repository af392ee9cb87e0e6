"""Find data whose shards differ: a search that reads groups of shards would train badly on them.

`cerebro.shard` permutes the rows, so every shard is a random sample. Data written with
``shuffle=False`` keep their order. If they are sorted by class, group or time, a group of shards
has only some of the classes or times, and training on one group after another loses what the others
taught.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from cerebro.arguments import find_stacklevel
from cerebro.data.dtypes import Array
from cerebro.data.order import GROUP
from cerebro.data.view import View
from cerebro.errors import CorruptDataError, InputError

SAMPLE = 1024
"""The rows of a shard that are looked at, evenly spaced."""

MOST_CLASSES = 100
"""An integer column with at most so many values has classes; one with more has quantities."""

LEAST_SHARE = 0.05
"""Shards differ clearly in a column if they explain this share of its variance."""

CHANCES = 4
"""The deviations by which that share may exceed its mean by chance."""


def differing_columns(view: View) -> dict[str, float]:
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
    shares = differing_columns(view) if len(view.parts) > GROUP else {}
    if not shares:
        return
    worst = max(shares, key=lambda name: shares[name])
    others = f" (and in {len(shares) - 1} more columns)" if len(shares) > 1 else ""
    warnings.warn(
        f"the shards of {view.shards.place!r} differ in column {worst!r}{others}: it was written "
        'with shuffle=False, and shuffle="shards" mixes only four shards at a time, which can cost '
        "much accuracy. Write it again with cerebro.shard(..., shuffle=True), or search with "
        'shuffle="rows"',
        stacklevel=find_stacklevel(),
    )


def _sample_values(values: Array) -> Array:
    rows = np.unique(np.linspace(0, len(values) - 1, min(SAMPLE, len(values))).astype(np.int64))
    sample = values[rows].astype(np.float64)
    return sample[np.isfinite(sample)]  # a column of times may have missing values


def _compute_explained_share(samples: Sequence[Array]) -> float:
    """Return the share of the variance that the shards explain, beyond what chance may explain."""
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
