"""Raw rows as a trained model's inputs, and its outputs as classes and probabilities.

The work is done by `cerebro.data.recipe`, of which saved models have a copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cerebro.data import Dataset, recipe
from cerebro.data.columns import ColumnData
from cerebro.data.sources.arrays import is_bunch
from cerebro.data.sources.base import Source, Table
from cerebro.errors import InputError
from cerebro.model import column_names, read_columns, stored_column

_ACTIVATIONS = {
    **dict.fromkeys(("cross_entropy", "CrossEntropyLoss"), "softmax"),
    **dict.fromkeys(("binary_cross_entropy_with_logits", "BCEWithLogitsLoss"), "sigmoid"),
    **dict.fromkeys(("nll_loss", "NLLLoss"), "exp"),
    **dict.fromkeys(("binary_cross_entropy", "BCELoss"), "none"),
}
"""What makes probabilities of the outputs on which a loss is computed."""


def is_csv(value: Any) -> bool:
    """Return whether this is the path of a CSV file."""
    return isinstance(value, (str, os.PathLike)) and os.fspath(value).lower().endswith(
        (".csv", ".tsv")
    )


def make_inputs(model: Any, rows: Any, train: Dataset | None) -> Source | None:
    """Return raw rows as the columns that a model reads, as its training data was made.

    None: `rows` are of another kind, such as batches, or have the dataset's own columns.
    """
    if isinstance(rows, Mapping) and any(getattr(value, "ndim", 0) for value in rows.values()):
        return None  # arrays, or a batch, are inputs already: transformed, with codes
    if hasattr(rows, "column_names"):
        return None  # an Arrow table has the dataset's own columns
    is_path = isinstance(rows, (str, os.PathLike))
    if (
        (is_path and not is_csv(rows))
        or not recipe.is_rows(rows)
        or is_bunch(rows)
        or train is None
    ):
        if is_csv(rows):
            raise InputError(f"the run's data is missing, which says how to read '{rows}'")
        return None
    names = _find_inputs(model, train)
    known = {made["name"]: made for made in train.shards.manifest.recipe}
    try:
        cells = recipe.read_columns(rows)
        if names is None:  # a model with four methods, which may read any column
            names = [n for n, m in known.items() if all(s["name"] in cells for s in m["sources"])]
            if not any(map(_is_changed, (known[name] for name in names))):
                return None  # unknown names are errors only where the model reads the column
        lost = [name for name in names if name not in known and name in train.columns]
        if (
            not names
            or lost
            or not _are_raw(cells, [known[name] for name in names if name in known])
        ):
            if is_csv(rows) or all(name not in cells for name in names):
                raise recipe.RowsError(_explain_lost(names, lost, train, cells))
            return None
        made = recipe.make_columns(list(known.values()), cells, names)
    except recipe.RowsError as error:
        raise InputError(f"predict: {error}") from None
    except OSError as error:
        raise InputError(f"predict: cannot read '{rows}': {error.strerror}") from None
    return _Made(made, train)


def _find_inputs(model: Any, train: Dataset) -> list[str] | None:
    inputs = getattr(model, "_inputs", None)
    if inputs is None:
        return read_columns(model, train.columns)
    return [stored_column(name, train.columns) for name in column_names("inputs", inputs)]


def _is_changed(made: Mapping[str, Any]) -> bool:
    """Return whether a column is more than a column of the rows under its own name."""
    filled = any(s["fill"] is not None or s["unknown"] is not None for s in made["sources"])
    return filled or made["stacked"] or made["sources"][0]["name"] != made["name"]


def _are_raw(cells: Mapping[str, Any], made: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether cells are one value for each row, and not the dataset's own columns."""
    if not made:
        return False
    for column in made:
        sources = [source["name"] for source in column["sources"]]
        if column["name"] in cells and not any(name in cells for name in sources):
            return False
    first = (cell[0] for cell in cells.values() if len(cell))
    return not any(np.ndim(cell) for cell in first if hasattr(cell, "__array__"))


def _explain_lost(
    names: Sequence[str], lost: Sequence[str], train: Dataset, cells: Mapping[str, Any]
) -> str:
    if train.shards.manifest.source["kind"] == "derived":
        return (
            "the columns of this run's data were computed by derive or features, so that raw rows "
            "cannot become them: compute them alike, and give the dataset"
        )
    if lost:
        return (
            f"column {lost[0]!r} is not made of one value for each row, so that raw rows cannot "
            "become it: give a dataset, or arrays by column"
        )
    there, read = ", ".join(map(str, cells)), ", ".join(names)
    return f"the rows have the columns {there}, but the model reads {read}"


class _Made(Source):
    """Columns that a recipe has made."""

    kind, whole = "rows", True

    def __init__(self, made: Mapping[str, Any], train: Dataset) -> None:
        self._made, self._columns = made, train.columns

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        yield {name: self._column(name, array) for name, array in self._made.items()}

    def _column(self, name: str, array: Any) -> ColumnData:
        classes = self._columns[name].classes
        if classes is not None:
            return ColumnData(array.astype(np.int64), "int64", None, classes, ordered=True)
        return ColumnData(array, array.dtype.name)


# --- outputs --------------------------------------------------------------------------------------


def describe_target(model: Any, data: Dataset | None) -> dict[str, Any] | None:
    """Return how outputs become classes, for `cerebro.data.recipe.decode`; None: no one target."""
    name = getattr(model, "_target", None)
    if not isinstance(name, str) or data is None or name not in data.columns:
        return None
    column = data.columns[name]
    kind = "f" if "float" in column.dtype else "i"
    if hasattr(model, "estimator"):
        activation = "codes" if hasattr(model.estimator, "classes_") else None
    else:
        activation = _find_activation(getattr(getattr(model, "_objective", None), "_loss", None))
    classes = None if column.classes is None else list(column.classes)
    return {"column": name, "classes": classes, "kind": kind, "activation": activation}


def _find_activation(loss: Any) -> str | None:
    """Return what makes probabilities of the loss's outputs, by the one loss that it calls."""
    while isinstance(loss, partial):
        loss = loss.func
    names = {getattr(loss, "__name__", type(loss).__name__)}
    names |= set(getattr(getattr(loss, "__code__", None), "co_names", ()))
    found = {_ACTIVATIONS[name] for name in names if name in _ACTIVATIONS}
    return found.pop() if len(found) == 1 else None


def decode(outputs: Any, output: str, model: Any, data: Dataset | None) -> Any:
    """Return a model's outputs in the form ``output=``; raise InputError if there is no such."""
    try:
        return recipe.decode(outputs, output, describe_target(model, data))
    except recipe.RowsError as error:
        raise InputError(str(error)) from None
