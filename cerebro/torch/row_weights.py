"""The weighted mean of a loss over a batch's rows, for ``Model(weight=)``."""

from __future__ import annotations

from typing import Any

import torch

from cerebro.data.order import require_weights
from cerebro.data.rows import part_index
from cerebro.errors import CerebroError, InputError
from cerebro.model import Batch

_HALF = (torch.float16, torch.bfloat16)


def check_weight(weight: Any, loss: Any, step: Any) -> None:
    """Raise InputError unless the rows of a loss can be weighted by the column `weight`.

    `step` is the model's `step` or `train_step`, or None.
    """
    if not isinstance(weight, str):
        raise InputError(f"weight must be a column's name, not {weight!r}")
    if step is not None:
        raise InputError(
            "step= and train_step= compute the loss by themselves: leave out weight, and return "
            "the loss as (weighted mean, sum of weights)"
        )
    if loss is None:
        raise InputError(
            "weight needs loss=, a function with one value for each row: the loss in the network's "
            "output is a mean already"
        )
    if getattr(loss, "reduction", "none") != "none":
        kind = type(loss).__name__
        raise InputError(
            f"weight needs a loss for each row, and {kind} gives the batch's "
            f"{loss.reduction}: use {kind}(reduction='none')"
        )


# Passed checks by (checksum of the data, column, shards), because each build in a worker checks.
_checked: set[tuple[str, str, tuple[int, ...]]] = set()


def check_column(data: Any, weight: str) -> None:
    """Raise InputError unless a dataset's weights are finite, at least 0, and not all 0.

    The training step checks a column that is missing, or that transforms change. Shards on another
    node are checked there; damaged shards are reported by the unit that reads them.
    """
    column = data.columns.get(weight)
    if column is None or column.ragged or weight in data.transforms:
        return
    if column.dtype in ("bfloat16", "complex64"):
        return
    try:
        parts = data.shards.map_parts(data.view.parts)
        here = tuple(shard for shard, (_, part) in enumerate(parts) if len(part))
        for shard in here:
            data.shards.check_sizes(shard)
    except CerebroError:
        return
    key = (f"{data.path}:{data.checksum}", weight, here)
    if key in _checked:
        return
    total = 0.0
    for shard, (reader, part) in enumerate(parts):
        values = reader.column(weight)[part_index(part)]
        require_weights(values, weight, shard)
        total += float(values.sum(dtype="float64"))
    all_here = sum(len(part) for _, part in parts) == data.num_rows
    if total == 0 and all_here:
        raise InputError(f"column {weight!r}: all weights are 0, so there is nothing to learn")
    _checked.add(key)


def weighted_mean(losses: Any, batch: Batch, weight: str, *, required: bool) -> tuple[Any, Any]:
    """Return ``sum(weight * loss) / sum(weight)`` and the sum of the weights, 0-d tensors.

    `losses` have the shape ``(rows, ...)`` and are averaged per row; weights have the shape
    ``(rows,)`` or ``(rows, 1)``. Without the column `weight`, all rows have the weight 1, unless it
    is `required`. Raise InputError if a shape is wrong or the column is missing.
    """
    rows = len(next(iter(batch.values())))
    if not isinstance(losses, torch.Tensor) or losses.dim() == 0 or len(losses) != rows:
        shape = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise InputError(
            f"weight needs a loss for each of the batch's {rows} rows, but the loss is "
            f"{shape or 'one number'}: use reduction='none', for a function as in "
            "functools.partial(torch.nn.functional.cross_entropy, reduction='none')"
        )
    if losses.dim() > 1:
        losses = losses.flatten(1).mean(1)
    wide = losses.is_floating_point() and losses.dtype not in _HALF
    kind = losses.dtype if wide else torch.float32
    if weight not in batch:
        if required:
            raise InputError(
                f"weight names the column {weight!r}, but the data has {', '.join(batch)}"
            )
        weights = losses.new_ones(rows, dtype=kind)
    else:
        column = batch[weight]
        if column.numel() != rows:
            raise InputError(
                f"the column {weight!r} must have one weight for each row, not rows of shape "
                f"{tuple(column.shape[1:])}"
            )
        weights = column.reshape(-1).to(kind)
    total = weights.sum()
    # If all weights are 0, 0 / 0 would turn the network into NaN.
    return (losses * weights).sum() / total.clamp(min=torch.finfo(kind).tiny), total
