"""The forms of new rows that `Trial.predict` takes in memory: rows, batches, or a model's inputs.

A dataset's columns tell them apart: an array of a column's rows has one dimension more than a row.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cerebro.data import Dataset
from cerebro.data.manifest import Column
from cerebro.data.recipe import has_arrays, is_ambiguous
from cerebro.data.view import describe_shape
from cerebro.errors import InputError
from cerebro.model import column_names, read_columns, stored_column

Columns = Mapping[str, Column]
_FLOATS = ("float16", "float32", "float64")


def find_inputs(model: Any, train: Dataset) -> list[str] | None:
    """Return the stored columns that a model reads; None: perhaps any."""
    inputs = getattr(model, "_inputs", None)
    if inputs is None:
        return read_columns(model, train.columns)
    return [stored_column(name, train.columns) for name in column_names("inputs", inputs)]


def is_one_row(value: Mapping[Any, Any], columns: Columns) -> bool:
    """Return whether a mapping of arrays or lists is a single row, and not one array per column."""
    known = [n for n in value if n in columns and (columns[n].shape or columns[n].ragged)]
    return bool(known) and all(_count_dims(value[n]) == _dims_of_row(columns[n]) for n in known)


def are_batches(value: Any, columns: Columns) -> bool:
    """Return whether a list of dictionaries is batches, and not rows."""
    if not (isinstance(value, list) and has_arrays(value[0])):
        return False
    known = [name for name in value[0] if name in columns and np.ndim(value[0][name])]
    return not known or any(np.ndim(value[0][n]) > _dims_of_row(columns[n]) for n in known)


def has_sequences(value: Mapping[Any, Any], columns: Columns) -> bool:
    """Return whether a mapping has lists of sequences without a mask, which a dataset pads."""
    names = (name for name in value if isinstance(name, str))
    if any(stored_column(name, columns) != name for name in names):
        return False
    ragged = (name for name in value if name in columns and columns[name].ragged)
    return any(isinstance(value[name], (list, tuple)) for name in ragged)


def has_names(value: Mapping[Any, Any], columns: Columns) -> bool:
    """Return whether a mapping has the names of categories, for which the model needs codes."""
    for name, array in value.items():
        if name in columns and columns[name].classes is not None:
            array = np.asarray(array) if isinstance(array, (list, tuple)) else array
            kind = getattr(getattr(array, "dtype", None), "kind", None)
            if kind is not None and kind in "USTO":
                return True
    return False


def as_matrix(what: str, rows: Sequence[Any]) -> Any:
    """Return nested lists as an array; raise InputError if they differ in length."""
    try:
        return np.asarray(rows)
    except ValueError:
        raise InputError(
            f"predict: {what} differ in length: give them as {{column: lists}} if the training "
            "data's rows do, too"
        ) from None


def as_inputs(model: Any, data: Any, train: Dataset) -> Any:
    """Return an array, or arrays by column, with the types of a model's inputs.

    Raise InputError if they may be rows before or after they became inputs.
    """
    inputs, columns = find_inputs(model, train), train.columns
    if isinstance(data, Mapping):
        _check_inputs(inputs, data, train)
        read = columns if inputs is None else {n: columns[n] for n in inputs if n in columns}
        return {n: as_column(n, a, read[n]) if n in read else a for n, a in data.items()}
    if inputs is None:  # of a model with its own `predict`
        _check_inputs(None, dict.fromkeys(columns, data), train)
        is_wide = any(column.dtype == "float64" for column in columns.values())
        return data if is_wide else _narrow(data)
    if len(inputs) > 1 or inputs[0] not in columns:
        return data  # for the model's own error
    column = columns[inputs[0]]
    _check_inputs(inputs, {inputs[0]: data}, train)
    if column.shape and np.ndim(data) <= len(column.shape):
        many = "; for many rows, give array[:, None]" if column.shape == (1,) else ""
        raise InputError(
            f"predict: the array has shape {tuple(data.shape)}, and the training data has rows of "
            f"shape {describe_shape(column)}: for one row, give array[None]{many}"
        )
    return as_column(inputs[0], data, column)


def _check_inputs(inputs: list[str] | None, arrays: Mapping[str, Any], train: Dataset) -> None:
    known = {made["name"]: made for made in train.shards.manifest.recipe}
    for name in train.columns if inputs is None else inputs:
        is_transformed = name in arrays and bool(train.transforms.get(name))
        if is_transformed or (name in known and is_ambiguous(known[name], arrays)):
            raise InputError(
                f"predict: arrays may be rows before or after {name!r} was made of them "
                "(it has transforms, or is filled, stacked or renamed): give raw rows as a frame "
                "or lists, or a dataset; for the model's own inputs, load().predict(arrays)"
            )


def as_column(name: str, value: Any, column: Column) -> Any:
    """Return an array or lists as the training data has the column: numbers of its type."""
    if isinstance(value, (list, tuple)) and not any(hasattr(item, "ndim") for item in value):
        value = as_matrix(f"the rows of {name!r}", value)
    dtype = column.dtype
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        fits = dtype in _FLOATS or (dtype != "bfloat16" and np.can_cast(value.dtype, dtype))
        return value.astype(dtype, copy=False) if fits else _narrow(value)
    if type(value).__module__.partition(".")[0] == "torch":
        torch = sys.modules["torch"]
        is_whole = not value.is_floating_point() and not value.is_complex()
        if dtype in (*_FLOATS, "bfloat16") or (dtype == "int64" and is_whole):
            return value.to(getattr(torch, dtype))
    return value


def _narrow(value: Any) -> Any:
    is_wide = isinstance(value, np.ndarray) and value.dtype == np.float64
    return value.astype(np.float32) if is_wide else value


def _dims_of_row(column: Column) -> int:
    return len(column.shape) + column.ragged


def _count_dims(value: Any) -> int:
    if isinstance(value, (list, tuple)) and value:
        return 1 + _count_dims(value[0])
    return int(np.ndim(value))
