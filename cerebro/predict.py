"""Predictions of any model for any data: whole, and in row order."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from cerebro.data import Dataset
from cerebro.errors import InputError


def predict(model: Any, data: Any, batch_size: int) -> Any:
    """Return a model's predictions, rows in the order of `data`.

    Parameters
    ----------
    model
        Has ``predict(data)``, or ``predict_batch(batch)`` giving an array or tensor
        whose first axis is the batch's rows.
    data
        A `cerebro.Dataset`.

    Raises
    ------
    InputError
        If the model can do neither.
    """
    if hasattr(model, "predict"):
        return model.predict(data)
    if not hasattr(model, "predict_batch"):
        raise InputError(
            f"{type(model).__name__} has no predict_batch(batch): add one, or use load() and "
            "your own code"
        )
    from cerebro.data.batches import make_loader

    if not isinstance(data, Dataset):
        raise InputError(f"predict needs a cerebro.Dataset, not {type(data).__name__}")
    loader = make_loader(
        data,
        batch_size,
        seed=0,
        shuffle=False,
        framework=getattr(model, "framework", "dlpack"),
        augment=False,
    )
    with contextlib.closing(loader):
        loader.begin(range(data.num_shards), 0)
        return joined([model.predict_batch(batch) for batch in loader])


def joined(parts: list[Any]) -> Any:
    """Concatenate arrays or tensors along the first axis."""
    if parts and type(parts[0]).__module__.startswith("torch"):
        import torch

        return torch.cat(parts)
    return np.concatenate([np.asarray(part) for part in parts])
