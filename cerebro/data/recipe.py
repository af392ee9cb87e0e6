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
_ROUNDED = 0.02  # by which rounded probabilities, or their sum, may differ from 1


class RowsError(ValueError):
    """Raw rows cannot become inputs; the message names the column, the row and the value."""


def is_rows(value: Any) -> bool:
    """Return whether this is raw rows: a frame or a row of one, a path, or dictionaries."""
    if isinstance(value, (list, tuple)):
        return not value or isinstance(value[0], Mapping)
    is_frame = hasattr(value, "columns") or is_frame_row(value)
    return is_frame or isinstance(value, (str, os.PathLike, Mapping))


def is_frame_row(value: Any) -> bool:
    """Return whether this is a row of a pandas frame, whose index has the names of columns."""
    is_series = hasattr(value, "to_dict") and hasattr(value, "index")
    return (
        is_series
        and not hasattr(value, "columns")
        and all(isinstance(name, str) for name in value.index)
    )


def is_csv(value: Any) -> bool:
    """Return whether this is the path of a CSV file."""
    return isinstance(value, (str, os.PathLike)) and os.fspath(value).lower().endswith(
        (".csv", ".tsv")
    )


def has_arrays(rows: Any) -> bool:
    """Return whether this is a mapping of arrays: inputs by column, and not raw rows."""
    if not isinstance(rows, Mapping):
        return False
    arrays = (value for value in rows.values() if getattr(value, "ndim", 0))
    return any(not type(value).__module__.startswith("pandas") for value in arrays)


def is_changed(made: Mapping[str, Any]) -> bool:
    """Return whether a column is more than a column of the rows under its own name."""
    filled = any(s["fill"] is not None or s["unknown"] is not None for s in made["sources"])
    return filled or made["stacked"] or made["sources"][0]["name"] != made["name"]


def is_ambiguous(made: Mapping[str, Any], arrays: Mapping[str, Any]) -> bool:
    """Return whether arrays by column may be rows before or after a column was made of them."""
    if made["name"] in arrays and made["stacked"]:
        return False  # rows do not have it
    return is_changed(made) and any(source["name"] in arrays for source in made["sources"])


def read_columns(rows: Any) -> dict[str, Any]:
    """Return the columns of raw rows by name: arrays, or lists of cells (None: missing)."""
    if isinstance(rows, (str, os.PathLike)):
        if not is_csv(rows):
            raise RowsError(f"'{os.fspath(rows)}' is not a .csv or .tsv file: read it as a frame")
        return _read_csv(os.fspath(rows))
    if is_frame_row(rows):
        rows = rows.to_dict()
    if isinstance(rows, Mapping):
        columns = {name: _cells(value) for name, value in rows.items()}
        single = [n for n, v in columns.items() if not isinstance(v, (list, tuple, np.ndarray))]
        if len(single) == len(columns):
            return {name: [value] for name, value in columns.items()}  # a single row
        if single:
            raise RowsError(
                f"column {single[0]!r} is one value, and others are lists: give all alike"
            )
        return columns
    if hasattr(rows, "columns"):
        names = list(rows.columns)
        check_names("the rows have", names)
        return {name: _cells(rows[name]) for name in names}
    if not rows:
        raise RowsError("there are no rows: give at least one")
    columns = {name: [] for name in rows[0]}
    for number, row in enumerate(rows):
        more = [name for name in row if name not in columns]
        if more:
            raise RowsError(
                f"row {number} has the column {more[0]!r}, which row 0 lacks: give all of them"
            )
        for name, cells in columns.items():
            if name not in row:
                raise RowsError(
                    f"row {number} lacks the column {name!r}: give None if it is missing"
                )
            cells.append(row[name])
    return columns


def check_names(where: str, names: Sequence[Any]) -> None:
    """Raise RowsError if two columns have one name."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RowsError(f"{where} two columns named {twice!r}: rename one")


def _cells(value: Any) -> Any:
    if hasattr(value, "dtype") and not isinstance(value, np.generic):
        plain = isinstance(value.dtype, np.dtype) and value.dtype.kind in "biuf"
        return np.asarray(value) if plain else list(value)
    return value


def _read_csv(path: str) -> dict[str, Any]:
    with open(path, newline="", encoding="utf-8-sig") as file:  # noqa: PTH123 -- or os.PathLike
        separator = "\t" if path.lower().endswith(".tsv") else ","
        lines = csv.reader(file, delimiter=separator, strict=True)
        try:
            header = next(lines, [])
            rows = [line for line in lines if line]
        except (csv.Error, UnicodeDecodeError) as error:
            raise RowsError(
                f"'{path}' cannot be read after line {lines.line_num} ({error}): it must be UTF-8, "
                "with its quotes closed"
            ) from error
    check_names(f"'{path}' has", header)
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
    values = [
        math.nan if is_missing(cell) else read_number(name, row, cell)
        for row, cell in enumerate(cells)
    ]
    absent = np.array([value != value for value in values], bool)  # a cell "nan", too
    numbers = np.array(values) if values else np.zeros(0)
    if numbers.dtype.kind not in "biuf":
        raise RowsError(f"column {name!r} has integers too large for int64: give floats")
    if numbers.dtype.kind == "f":
        for row, value in enumerate(values):
            if isinstance(value, int) and int(float(value)) != value:
                raise RowsError(
                    f"column {name!r} has {value} in row {row}, which float64 cannot hold, and it "
                    "has missing values or fractions: make it text if it is a code"
                )
    return numbers, absent


def read_number(name: str, row: int, cell: Any) -> Any:
    """Return a cell as a number, which it may have as text; raise RowsError if it has none."""
    is_time = isinstance(cell, (np.datetime64, np.timedelta64))  # of ns, its item is an int
    value = cell.item() if hasattr(cell, "item") and not is_time else cell
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
                f"not have: fill it, or train with cerebro.shard(unknown=[{name!r}])"
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
    """Return the inputs of a saved model, which ``model.json`` describes, for raw rows.

    Arrays by the name of their column are inputs already.
    """
    names = [column["column"] for column in about["inputs"]]
    if has_arrays(rows):
        changed = [made["name"] for made in about["recipe"] or () if is_ambiguous(made, rows)]
        changed += [
            column["column"]
            for column in about["inputs"]
            if column["transforms"] and column["column"] in rows
        ]
        if changed:
            raise RowsError(
                f"arrays by column may be rows before or after {changed[0]!r} was made of them: "
                "give raw rows as a frame or lists, or inputs as arguments, predict(array, ...)"
            )
        lost = [name for name in names if name not in rows]
        if lost:
            raise RowsError(f"the arrays lack the column {lost[0]!r}: they have {', '.join(rows)}")
        return [rows[name] for name in names]
    if about["recipe"] is None:
        raise RowsError("the inputs are not made of raw rows: give arrays, see model.json")
    if hasattr(rows, "column_names"):
        raise RowsError("the rows are an Arrow table: give a frame, table.to_pandas()")
    made = make_columns(about["recipe"], rows)
    return [made[name] for name in names]


def decode(outputs: Any, output: str, target: Mapping[str, Any] | None) -> Any:
    """Return a model's outputs as ``"class"`` names or ``"probability"``; ``"raw"``: as they are.

    `target` has ``classes`` (names by code, or null); ``kind``: "f" for real numbers, "i" for
    integers, "labels" for several in each row; and ``activation``, which makes probabilities of
    outputs: softmax, sigmoid, exp; shares or none (they are probabilities: of all classes, or of
    one); codes; largest, if only the class is known; or null if nothing is.
    """
    if output == "raw":
        return outputs
    if output not in ("class", "probability"):
        raise RowsError(f"output must be 'raw', 'class' or 'probability', not {output!r}")
    if target is None or not hasattr(outputs, "shape"):
        raise RowsError(
            f"output={output!r} needs a model that names one target, such as cerebro.torch.Model, "
            "cerebro.keras.Model or a classifier, and has one array of outputs: use output='raw'"
        )
    scores = _read_scores(outputs)
    how, several = target["activation"], scores.ndim > 1 and scores.shape[1] > 1
    if how == "codes" and output == "class":
        return _name(scores, target)
    if how == "largest" and output == "class" and several:
        return _name(scores.argmax(1), target)
    if how is None or how == "largest":
        raise RowsError(
            f"output={output!r}: the loss does not tell how outputs become "
            f"{'classes' if output == 'class' else 'probabilities'} (known are cross_entropy, "
            "nll_loss, binary_cross_entropy and binary_cross_entropy_with_logits, of unchanged "
            "outputs and target): use output='raw'"
        )
    share = _probabilities(scores.astype(np.float64), how)
    if how in ("sigmoid", "none") and (several or target["kind"] == "labels"):
        if target["kind"] != "labels":
            raise RowsError(
                f"output={output!r}: each row has {scores.shape[1]} outputs, but the loss is that "
                "of a single one: use output='raw'"
            )
        return share if output == "probability" else (share > 0.5).astype(np.int64)
    if not several:
        share = share.reshape(len(share))
        share = np.stack([1 - share, share], axis=1)
    return share if output == "probability" else _name(share.argmax(1), target)


def _read_scores(outputs: Any) -> Any:
    """Return outputs as an array; raise RowsError for a row whose outputs are not finite."""
    if hasattr(outputs, "detach"):
        outputs = outputs.detach().cpu()
        if str(outputs.dtype) == "torch.bfloat16":  # NumPy lacks this type
            outputs = outputs.float()
    scores = np.asarray(outputs)
    if scores.dtype.kind == "f":
        finite = np.isfinite(scores.reshape(len(scores), -1)).all(axis=1)
        if not finite.all():
            raise RowsError(
                f"the model's outputs are not finite in row {int(np.argmin(finite))}, so it has no "
                "class: does an input miss a value?"
            )
    return scores


def _probabilities(scores: Any, how: str | None) -> Any:
    with np.errstate(over="ignore"):
        if how == "softmax":
            shares = np.exp(scores - scores.max(1, keepdims=True))
            return shares / shares.sum(1, keepdims=True)
        if how == "sigmoid":
            return 1 / (1 + np.exp(-scores))
        shares = np.exp(scores) if how == "exp" else scores
    valid = not shares.size or (shares.min() >= 0 and shares.max() <= 1 + _ROUNDED)
    if valid and how in ("exp", "shares"):
        valid = bool((abs(shares.sum(1) - 1) <= _ROUNDED).all())
    if not valid:
        raise RowsError(
            "the outputs are not probabilities, which the loss expects (they are between "
            f"{shares.min():g} and {shares.max():g}): use output='raw'"
        )
    return shares


def _name(codes: Any, target: Mapping[str, Any]) -> Any:
    classes = target["classes"]
    if classes is None:
        return codes
    codes = codes.astype(np.int64)
    if codes.size and codes.max() >= len(classes):
        raise RowsError(f"the model has more outputs than the {len(classes)} classes of its target")
    return np.array(classes)[codes]
