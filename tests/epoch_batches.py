"""The rows of an epoch's batches, found without the loader, for tests of what trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import cerebro._core as _core


def sizes(rows: int, batch_size: int, drop_last: bool = False) -> list[int]:
    """Return the number of rows of each batch of a mix."""
    if drop_last or rows == 0:
        return [batch_size] * (rows // batch_size)
    count = max(1, round(rows / batch_size))
    return [rows // count + (batch < rows % count) for batch in range(count)]


def in_shard_order(batch: Any, shard_of: Any) -> Any:
    """Sort the rows of a batch by shard; those of one shard keep their order."""
    return batch[np.argsort(shard_of[batch], kind="stable")]


def of_mix(
    shards: Sequence[Any],
    mix: Sequence[int],
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
    order: Any = None,
) -> list[list[Any]]:
    """Return the rows of each batch of a mix: slices of one permutation, or of `order`.

    `shards` has the names of each shard's rows.
    """
    mix = [shard for shard in mix if len(shards[shard])]
    if not mix:
        return []
    names = np.concatenate([np.asarray(shards[shard]) for shard in mix])
    shard_of = np.repeat(mix, [len(shards[shard]) for shard in mix])
    if order is None:
        order = _core.permutation(len(names), seed, "rows", epoch, mix[0])
    ends = np.cumsum(sizes(len(names), batch_size, drop_last))
    batches = np.split(order, ends)[:-1]  # without what drop_last leaves out
    return [names[in_shard_order(batch, shard_of)].tolist() for batch in batches]


def of_rows(shards: Sequence[Any], batch_size: int, **options: Any) -> list[list[Any]]:
    """Return the batches of an epoch with ``shuffle="rows"``."""
    return of_mix(shards, range(len(shards)), batch_size, **options)
