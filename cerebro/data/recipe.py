"""Make a model's inputs from raw rows, as the columns of its training data were made.

This file needs only NumPy and no other file: `Trial.save` copies it beside a saved model. A recipe
is a list of columns, each a mapping: ``name``; ``dtype``; ``stacked``, whether each row is a
vector; ``sources``, the columns of the raw rows, each with ``name``, ``categories`` (by code; null:
numbers), ``fill`` (in place of a missing value; null: nothing) and ``unknown`` (the code of other
categories; null: they are an error); and, of a saved model, ``transforms``.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False,
             "FALSE": False}  # fmt: skip
_SHOWN = 8  # categories in a message


class RowsError(ValueError):
    """Raw rows cannot become inputs; the message names the column, the row and the value."""


def is_rows(value: Any) -> bool:
    """Return whether this is raw rows: a frame, the path of a CSV file, or dictionaries."""
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], Mapping)
    return isinstance(value, (str, os.PathLike, Mapping)) or hasattr(value, "columns")


def read_columns(rows: Any) -> dict[str, Any]:
    """Return the columns of raw rows by name: arrays, or lists of cells (None: missing)."""
    if isinstance(rows, (str, os.PathLike)):
        return _read_csv(os.fspath(rows))
    if isinstance(rows, Mapping):
        columns = {name: _cells(value) for name, value in rows.items()}
        if not any(isinstance(value, (list, tuple, np.ndarray)) for value in columns.values()):
            return {name: [value] for name, value in columns.items()}  # a single row
        return columns
    if hasattr(rows, "columns"):
        names = list(rows.columns)
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise RowsError(f"the rows have two columns named {twice[0]!r}: rename one")
        return {name: _cells(rows[name]) for name in names}
    columns = {name: [] for name in rows[0]} if rows else {}
    for number, row in enumerate(rows):
        for name, cells in columns.items():
            if name not in row:
                raise RowsError(
                    f"row {number} lacks the column {name!r}: give None if it is missing"
                )
            cells.append(row[name])
    return columns


def _cells(value: Any) -> Any:
    if hasattr(value, "dtype") and not isinstance(value, np.generic):
        plain = isinstance(value.dtype, np.dtype) and value.dtype.kind in "biuf"
        return np.asarray(value) if plain else list(value)
    return value


def _read_csv(path: str) -> dict[str, Any]:
    with open(path, newline="", encoding="utf-8-sig") as file:  # noqa: PTH123 -- or os.PathLike
        lines = csv.reader(file, delimiter="\t" if path.lower().endswith(".tsv") else ",")
        header = next(lines, [])
        rows = [line for line in lines if line]
    for number, line in enumerate(rows):
        if len(line) != len(header):
            raise RowsError(f"'{path}', row {number} has {len(line)} cells, not {len(header)}")
    return {name: [row[at] or None for row in rows] for at, name in enumerate(header)}


def make_columns(
    recipe: Sequence[Mapping[str, Any]], rows: Any, names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return arrays by column of the recipe, of shape (rows,) or, of a stack, (rows, width).

    Columns that the recipe does not name are ignored. `names` are the columns to make; None: all.
    """
    cells = read_columns(rows)
    wanted = {column["name"] for column in recipe} if names is None else set(names)
    made = {column["name"]: _make(column, cells) for column in recipe if column["name"] in wanted}
    lengths = {len(array) for array in made.values()}
    if len(lengths) > 1:
        raise RowsError("the columns of the rows differ in length: give all the same number")
    if 0 in lengths:
        raise RowsError("there are no rows: give at least one")
    return made


def _make(column: Mapping[str, Any], cells: Mapping[str, Any]) -> Any:
    parts = []
    for source in column["sources"]:
        name = source["name"]
        if name not in cells:
            there = ", ".join(map(str, cells)) or "none"
            raise RowsError(f"the rows lack the column {name!r}: they have {there}")
        if source["categories"] is None:
            part = fill_numbers(name, *read_numbers(name, cells[name]), source["fill"])
        else:
            part = _make_codes(source, cells[name])
        parts.append(_convert(name, part, column["dtype"]))
    made = np.stack(parts, axis=1) if column["stacked"] else parts[0]
    for step in column.get("transforms", ()):
        made = transform(made, step)
    return made


def is_missing(cell: Any) -> bool:
    """Return whether a cell is None, NaN, or pandas' NA or NaT."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(cell, (float, np.floating)) and bool(cell != cell)


def read_numbers(name: str, cells: Any) -> tuple[Any, Any]:
    """Return cells as an array of numbers, and which of them are missing (NaN in the array)."""
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "biuf":
        if cells.ndim != 1:
            raise RowsError(f"column {name!r} has rows of shape {cells.shape[1:]}, not numbers")
        return cells, np.isnan(cells) if cells.dtype.kind == "f" else np.zeros(len(cells), bool)
    values = [math.nan if is_missing(c) else _number(name, row, c) for row, c in enumerate(cells)]
    absent = np.array([value != value for value in values], bool)  # a cell "nan", too
    numbers = np.array(values) if values else np.zeros(0)
    if numbers.dtype.kind not in "biuf":
        raise RowsError(f"column {name!r} has integers too large for int64: give floats")
    return numbers, absent


def _number(name: str, row: int, cell: Any) -> Any:
    value = cell.item() if hasattr(cell, "item") else cell
    if isinstance(value, str) and "_" not in value:
        if value in _BOOLEANS:
            return _BOOLEANS[value]
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    if not isinstance(value, (bool, int, float)):
        raise RowsError(
            f"column {name!r} has {cell!r} in row {row}, but numbers in the training data"
        )
    return value


def fill_numbers(name: str, values: Any, absent: Any, fill: Any) -> Any:
    """Return numbers with `fill` for missing ones; None: they stay NaN."""
    if fill is None or not absent.any():
        return values
    return np.where(absent, values.dtype.type(fill), values)


def _make_codes(source: Mapping[str, Any], cells: Any) -> Any:
    """Return the codes of a column of text; raise RowsError for a category that is not known."""
    name, names, unknown = source["name"], source["categories"], source["unknown"]
    codes = {category: code for code, category in enumerate(names)}
    made = []
    for row, given in enumerate(cells):
        cell = source["fill"] if is_missing(given) else given
        if cell is None and unknown is None:
            raise RowsError(
                f"column {name!r} has a missing value in row {row}, which the training data does "
                "not have: fill it"
            )
        if cell is not None and not isinstance(cell, str):
            raise RowsError(f"column {name!r} has {cell!r} in row {row}, but names when trained")
        code = unknown if cell is None else codes.get(cell, unknown)
        if code is None:
            known = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
            raise RowsError(
                f"column {name!r} has {cell!r} in row {row}, which the training data does not "
                f"have: it has {known}"
            )
        made.append(code)
    return np.array(made, np.int64)


def _convert(name: str, values: Any, dtype: str) -> Any:
    kind = np.dtype("float32" if dtype == "bfloat16" else dtype)
    if values.dtype.kind == "f" and kind.kind in "biu":
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise RowsError(f"column {name!r} has a missing value in row {wrong[0]}: fill it")
    with np.errstate(all="ignore"):
        made = values.astype(kind)
        wrong = made.astype(values.dtype) != values if kind.kind in "biu" else (
            np.isinf(made) & np.isfinite(values) if kind.kind == "f" else np.zeros(len(made), bool)
        )  # fmt: skip
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise RowsError(
            f"column {name!r} has {values[row]} in row {row}, which {dtype} cannot hold"
        )
    return made


def has_step(step: Mapping[str, Any]) -> bool:
    """Return whether `transform` computes this step."""
    to = step.get("dtype", "")
    return step["name"] in ("Scale", "Normalize") or (step["name"] == "Cast" and "float" in to)


def transform(values: Any, step: Mapping[str, Any]) -> Any:
    """Return values after one transform, computed as when the model was trained."""
    if step["name"] == "Cast":
        return values.astype("float32" if step["dtype"] == "bfloat16" else step["dtype"])
    if values.dtype.kind in "biu":
        values = values.astype(np.float32)
    kind = np.float64 if values.dtype == np.float64 else np.float32
    wide = values.astype(kind)
    if step["name"] == "Scale":
        whole = round(1 / step["factor"])
        if whole and 1 / whole == step["factor"]:
            wide = wide / kind(whole)
        else:
            wide = wide * kind(step["factor"])
        return wide.astype(values.dtype)
    wide = (wide - np.asarray(step["mean"], kind)).astype(values.dtype).astype(kind)
    return (wide / np.asarray(step["std"], kind)).astype(values.dtype)


def make_inputs(about: Mapping[str, Any], rows: Any) -> list[Any]:
    """Return the inputs of a saved model, which ``model.json`` describes, for raw rows."""
    if about["recipe"] is None:
        raise RowsError("the inputs are not made of raw rows: give arrays, see model.json")
    made = make_columns(about["recipe"], rows)
    return [made[column["column"]] for column in about["inputs"]]


def decode(outputs: Any, output: str, target: Mapping[str, Any] | None) -> Any:
    """Return a model's outputs as ``"class"`` names or ``"probability"``; ``"raw"``: as they are.

    `target` has ``classes`` (names by code, or null), ``kind`` of its numbers, and ``activation``,
    which makes probabilities of outputs: softmax, sigmoid, exp, none; codes; or null if not known.
    """
    if output == "raw":
        return outputs
    if output not in ("class", "probability"):
        raise RowsError(f"output must be 'raw', 'class' or 'probability', not {output!r}")
    if target is None or not hasattr(outputs, "shape"):
        raise RowsError(f"output={output!r} needs a model with one target and one array of outputs")
    scores = np.asarray(outputs.detach().cpu() if hasattr(outputs, "detach") else outputs)
    how, several = target["activation"], scores.ndim > 1 and scores.shape[1] > 1
    if how == "codes" and output == "class":
        return _name(scores, target)
    if how is None and (output == "probability" or not several or target["kind"] == "f"):
        raise RowsError(
            f"output={output!r}: the loss does not tell how outputs become classes (known are "
            "cross_entropy, nll_loss, binary_cross_entropy and binary_cross_entropy_with_logits): "
            "use output='raw'"
        )
    share = _probabilities(scores.astype(np.float64), how)
    if not several:
        share = share.reshape(len(share))
        share = np.stack([1 - share, share], axis=1)
    elif how in ("sigmoid", "none") and target["kind"] == "f":  # several labels in each row
        return share if output == "probability" else (share > 0.5).astype(np.int64)
    return share if output == "probability" else _name(share.argmax(1), target)


def _probabilities(scores: Any, how: str | None) -> Any:
    with np.errstate(over="ignore"):
        if how == "softmax":
            shares = np.exp(scores - scores.max(1, keepdims=True))
            return shares / shares.sum(1, keepdims=True)
        if how == "sigmoid":
            return 1 / (1 + np.exp(-scores))
        return np.exp(scores) if how == "exp" else scores


def _name(codes: Any, target: Mapping[str, Any]) -> Any:
    classes = target["classes"]
    if classes is None:
        return codes
    codes = codes.astype(np.int64)
    if codes.size and codes.max() >= len(classes):
        raise RowsError(f"the model has more outputs than the {len(classes)} classes of its target")
    return np.array(classes)[codes]
