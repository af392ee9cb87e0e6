"""Create the C scheduler of a search, to run or to plan it."""

from __future__ import annotations

import cerebro._core as _core
from cerebro.data import Dataset
from cerebro.data.order import EpochOrder
from cerebro.worker.messages import MAX_LIVE_MODELS, MAX_LIVE_MODELS_ON_GPU


def evaluation_cost(validation: Dataset | None) -> float:
    """Return the cost of a validation in trained rows: three evaluated rows cost as much as one."""
    return 0.0 if validation is None else validation.num_rows / 3


def make_schedule(
    order: EpochOrder,
    validation: Dataset | None,
    *,
    exclusive: bool,
    live_models: int | None,
) -> _core.Schedule:
    """Return a scheduler that has no workers or trials yet; its shards are the parts of an epoch.

    `order` and `validation` are those of one trial. `exclusive` says whether a worker can train
    only on the shards that it holds.
    """
    # Workers that hold shards may have no GPUs. They report which models they drop.
    most = MAX_LIVE_MODELS_ON_GPU if exclusive else MAX_LIVE_MODELS
    return _core.Schedule(
        shards=order.part_rows,
        exclusive=exclusive,
        stagger=order.stagger,
        in_order=order.shuffle == "rows",
        eval_cost=evaluation_cost(validation),
        live_models=live_models or most,
    )
