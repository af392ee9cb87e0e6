"""Create the C scheduler of a search, to run or to plan it."""

from __future__ import annotations

import cerebro._core as _core
from cerebro.data import Dataset

LIVE_MODELS = 8
"""The most models that a worker keeps in memory by default."""

LIVE_MODELS_OF_HOLDERS = 64
"""The same for a worker that holds shards, to which all trials come. If it keeps fewer, it reports
which ones it drops."""


def evaluation_cost(validation: Dataset | None) -> float:
    """Return the cost of a validation in trained rows: three evaluated rows cost as much as one."""
    return 0.0 if validation is None else validation.num_rows / 3


def make_schedule(
    train: Dataset,
    validation: Dataset | None,
    *,
    exclusive: bool,
    stagger: bool,
    live_models: int | None,
) -> _core.Schedule:
    """Return a scheduler that has no workers or trials yet.

    Parameters
    ----------
    train, validation
        The data of one trial.
    exclusive
        Whether a worker can train only on the shards that it holds.
    stagger, live_models
        As for `cerebro.search`.
    """
    return _core.Schedule(
        shards=[float(rows) for rows in train._shard_rows()],
        exclusive=exclusive,
        stagger=stagger,
        eval_cost=evaluation_cost(validation),
        live_models=live_models or (LIVE_MODELS_OF_HOLDERS if exclusive else LIVE_MODELS),
    )
