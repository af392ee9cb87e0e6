"""Predict every row of a run's data with the model of the fold that held it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cerebro.data import Dataset
from cerebro.data.dtypes import Array
from cerebro.errors import InputError


def join_by_row(data: Dataset, held_out: Sequence[Dataset], predictions: Sequence[Any]) -> Any:
    """Return the predictions of all folds as one array, in the order of the data's rows.

    Each fold has the rows that it held out, and the model's outputs for them. Raises InputError if
    the outputs are not arrays of one shape, a row is held out twice, or the outputs are integers
    and some rows are never held out.
    """
    outputs = [_as_array(fold, prediction) for fold, prediction in enumerate(predictions)]
    kinds = {(output.dtype, output.shape[1:]) for output in outputs}
    if len(kinds) > 1:
        shapes = " and ".join(sorted(f"{dtype} of shape {shape}" for dtype, shape in kinds))
        raise InputError(
            f"the folds predict rows of {shapes}: predict with one fold, such as "
            "trial.folds[0].predict(...)"
        )
    places = [_find_rows(data, view) for view in held_out]
    counts = np.zeros(data.num_rows, np.int64)
    for rows in places:
        counts[rows] += 1
    if counts.max() > 1:
        raise InputError(
            f"row {int(np.argmax(counts > 1))} is held out by {counts.max()} folds, so it has more "
            "than one prediction: predict with one fold, such as trial.folds[0].predict(...)"
        )
    result = np.zeros((data.num_rows, *outputs[0].shape[1:]), outputs[0].dtype)
    if counts.min() == 0:
        if result.dtype.kind not in "fc":
            raise InputError(
                f"{int((counts == 0).sum())} rows are held out by no fold, and predictions of type "
                f"{result.dtype} have no NaN for them: predict with one fold, such as "
                "trial.folds[0].predict(...)"
            )
        result[counts == 0] = np.nan
    for rows, output in zip(places, outputs, strict=True):
        result[rows] = output
    return result


def _find_rows(data: Dataset, view: Dataset) -> Array:
    """Return the row numbers, in `data`, of the rows of a view."""
    numbers, start = [], 0
    for whole, part in zip(data.view.parts, view.view.parts, strict=True):
        held = np.asarray(part, np.int64)
        if isinstance(whole, range):
            numbers.append(start + held - whole.start)
        else:
            order = np.argsort(np.asarray(whole), kind="stable")
            rows = np.asarray(whole, np.int64)[order]
            if (np.diff(rows) == 0).any():
                raise InputError(
                    "the run's data has a row twice, so predictions cannot be put in row order: "
                    "predict with one fold, such as trial.folds[0].predict(...)"
                )
            numbers.append(start + order[np.searchsorted(rows, held)])
        start += len(whole)
    return np.concatenate(numbers)


def _as_array(fold: int, prediction: Any) -> Array:
    if isinstance(prediction, (Mapping, list, tuple)):
        raise InputError(
            f"the model of fold {fold} returns a {type(prediction).__name__} of outputs, not one "
            "array: predict with one fold, such as trial.folds[0].predict(...)"
        )
    if hasattr(prediction, "detach"):
        prediction = prediction.detach().cpu()
        if str(prediction.dtype) == "torch.bfloat16":  # NumPy lacks this type
            prediction = prediction.float()
        return np.asarray(prediction.numpy())
    return np.asarray(prediction)
