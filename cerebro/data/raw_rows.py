"""Raw rows as a dataset's columns: stacked, coded and filled, as its own rows were.

The work is done by `cerebro.data.recipe`, of which saved models have a copy. Only a frame, a CSV
file and dictionaries are raw rows; arrays and batches have the dataset's own columns already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cerebro.data import recipe
from cerebro.data.columns import ColumnData
from cerebro.data.dataset import Dataset
from cerebro.data.dtypes import Array
from cerebro.data.manifest import Column
from cerebro.data.sources.arrays import is_bunch
from cerebro.data.sources.base import Source, Table
from cerebro.errors import InputError
from cerebro.machine.files import expand_path
from cerebro.model import stored_column

Made = Mapping[str, Any]
"""How one column is made; see `cerebro.data.recipe`."""


def is_raw(rows: Any) -> bool:
    """Return whether rows are a frame, a CSV file or dictionaries, and no arrays or batches."""
    if isinstance(rows, (str, os.PathLike)):
        return recipe.is_csv(rows)
    if hasattr(rows, "column_names") or is_bunch(rows) or recipe.has_arrays(rows):
        return False
    return recipe.is_rows(rows) and not isinstance(rows, Dataset)


def make_source(rows: Any, train: Dataset, names: Sequence[str] | None, what: str) -> Source | None:
    """Return raw rows as the columns `names` of a dataset; None: they have its own columns.

    `names` of None stands for all columns that the rows can become. `what` names the rows in
    errors.
    """
    known = _recipe_of(train)
    with _explain_errors(rows, what):
        cells = recipe.read_columns(expand_path(os.fspath(rows)) if recipe.is_csv(rows) else rows)
        _check_derived(cells, train)
        if names is None:
            names = [made["name"] for made in known.values() if _has_sources(made, cells)]
            if not any(recipe.is_changed(known[name]) for name in names):
                return None  # unknown names are errors only where the model reads the column
        lost = [name for name in names if name not in known and name in train.columns]
        raw = _are_raw(cells, [known[name] for name in names if name in known])
        if raw and not lost:
            return MadeSource(recipe.make_columns(list(known.values()), cells, names), train)
        if recipe.is_csv(rows) or all(name not in cells for name in names):
            raise recipe.RowsError(_explain_lost(names, lost, train, cells))
        return None


def make_changed(
    rows: Any, train: Dataset, what: str, wanted: Collection[str]
) -> tuple[dict[str, ColumnData], Any]:
    """Return the columns that raw rows lack as they are, stacked, filled or renamed; and the rows.

    Only `wanted` columns are made. The rows returned have these columns in place of what they are
    made of. Rows of another kind have none.
    """
    names = _names_of(rows)
    if names is None:
        return {}, rows
    is_table = hasattr(rows, "column_names")  # Arrow, Hugging Face
    with _explain_errors(rows, what):
        recipe.check_names("the rows have", names)
        for name in (name for name in names if isinstance(name, str)):
            if (whole := stored_column(name, train.columns)) != name:
                raise recipe.RowsError(
                    f"the rows have the column {name!r}, which is made of {whole!r}: leave it out, "
                    "or give arrays by column"
                )
        if is_table or is_raw(rows):
            _check_derived(names, train)
        known = _recipe_of(train)
        changed = [name for name in known if name in wanted and recipe.is_changed(known[name])]
        there = [known[name] for name in changed if _has_sources(known[name], names)]
        cells = recipe.read_columns(rows.to_pandas() if is_table else rows) if there else {}
        there = [made for made in there if _are_raw(cells, [made])]
        if not there:
            return {}, _keep_columns(rows, names, wanted)
        arrays = recipe.make_columns(there, cells)
    used = {source["name"] for made in there for source in made["sources"]}
    kept = {name for name in used if name in known and not recipe.is_changed(known[name])}
    rest = {n: cell for n, cell in cells.items() if n in wanted and (n not in used or n in kept)}
    made = {name: _to_column(array, train.columns[name]) for name, array in arrays.items()}
    return made, {**rest, **arrays}


@contextlib.contextmanager
def _explain_errors(rows: Any, what: str) -> Iterator[None]:
    """Raise InputError, which names the rows, for rows that cannot be read or made columns."""
    try:
        yield
    except recipe.RowsError as error:
        raise InputError(f"{what}: {error}") from None
    except OSError as error:
        raise InputError(f"{what}: cannot read '{rows}': {error.strerror}") from None


def _names_of(rows: Any) -> list[Any] | None:
    """Return the names of a table's columns, or of those of dictionaries; None: rows of others."""
    if hasattr(rows, "column_names"):
        return list(rows.column_names) if hasattr(rows, "to_pandas") else None
    if not recipe.is_rows(rows) or recipe.is_frame_row(rows) or is_bunch(rows):
        return None
    if isinstance(rows, (str, os.PathLike)):
        return None  # a folder of images
    if isinstance(rows, (list, tuple)):
        return list(rows[0]) if rows else None
    return list(rows if isinstance(rows, Mapping) else rows.columns)


def _keep_columns(rows: Any, names: Sequence[Any], wanted: Collection[str]) -> Any:
    """Return rows without columns that are not wanted, which may hold anything."""
    kept = [name for name in names if name in wanted]
    if not kept or len(kept) == len(names):
        return rows
    if isinstance(rows, (list, tuple)):
        if any(row.keys() != rows[0].keys() for row in rows):
            return rows  # which are refused
        return [{name: row[name] for name in kept} for row in rows]
    if isinstance(rows, Mapping):
        return {name: rows[name] for name in kept}
    if not hasattr(rows, "column_names"):
        return rows[kept]
    return (getattr(rows, "select_columns", None) or rows.select)(kept)


def _recipe_of(train: Dataset) -> dict[str, Made]:
    return {made["name"]: made for made in train.shards.manifest.recipe}


def _has_sources(made: Made, names: Collection[Any]) -> bool:
    return all(source["name"] in names for source in made["sources"])


def _are_raw(cells: Mapping[str, Any], made: Sequence[Made]) -> bool:
    """Return whether cells are one value for each row, and not the dataset's own columns."""
    if not made:
        return False
    for column in made:
        sources = [source["name"] for source in column["sources"]]
        if column["name"] in cells and not any(name in cells for name in sources):
            return False
    first = (
        cells[s["name"]][0] for m in made for s in m["sources"] if len(cells.get(s["name"], ()))
    )
    return not any(np.ndim(cell) for cell in first if hasattr(cell, "__array__"))


_DERIVED = (
    "the columns of this run's data were computed by derive or features, so that raw rows cannot "
    "become them: compute them alike, and give the dataset"
)


def _check_derived(names: Collection[str], train: Dataset) -> None:
    """Raise RowsError if raw rows have the name of a column that was computed from others."""
    if train.shards.manifest.source["kind"] != "derived":
        return
    if any(name in names for name in train.columns.keys() - _recipe_of(train).keys()):
        raise recipe.RowsError(_DERIVED)


def _explain_lost(
    names: Sequence[str], lost: Sequence[str], train: Dataset, cells: Mapping[str, Any]
) -> str:
    if train.shards.manifest.source["kind"] == "derived":
        return _DERIVED
    if lost:
        return (
            f"column {lost[0]!r} is not made of one value for each row, so that raw rows cannot "
            "become it: give a dataset, or arrays by column"
        )
    there, read = ", ".join(map(str, cells)), ", ".join(names)
    return f"the rows have the columns {there}, but the model reads {read}"


class MadeSource(Source):
    """Columns that a recipe has made."""

    kind, whole = "rows", True

    def __init__(self, made: Mapping[str, Array], train: Dataset) -> None:
        self._table = {name: _to_column(array, train.columns[name]) for name, array in made.items()}

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        yield dict(self._table)


def _to_column(array: Array, column: Column) -> ColumnData:
    if column.classes is not None:
        return ColumnData(array.astype(np.int64), "int64", None, column.classes, ordered=True)
    return ColumnData(array, array.dtype.name)
