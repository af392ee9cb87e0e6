"""``shard(missing=, unknown=)``: fill the missing values of a table, and record how.

The table is in memory. What is filled is computed from all of its rows.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cerebro.data import recipe
from cerebro.data.columns import (
    ColumnData,
    check_numbers,
    final_names,
    from_array,
    from_text,
    missing_value_error,
)
from cerebro.data.layout import OutputColumn
from cerebro.data.sources import open_source
from cerebro.data.sources.base import Source, Table, choose_columns
from cerebro.errors import InputError
from cerebro.machine.files import expand_path

MISSING, UNKNOWN = "missing", "unknown"
"""The names of categories that are added."""
_WAYS = ("category", "fill", "mean", "median")


def check_missing(missing: Any) -> Any:
    """Return ``missing=`` in stored form; raise InputError if it is not one."""
    if isinstance(missing, Mapping):
        for name, way in missing.items():
            plain = isinstance(way, (str, bool, int, float)) and way == way
            if not isinstance(name, str) or not plain:
                raise InputError(f"missing: {name!r}: {way!r} is not a name and a constant or way")
        return dict(missing)
    if missing is not None and missing not in _WAYS:
        raise InputError(
            f"missing is {missing!r}: give 'category', 'fill', 'mean', 'median', or a mapping of "
            'columns to these or to constants, such as {"age": "median", "deck": "none"}'
        )
    return missing


def check_unknown(unknown: Any) -> Any:
    """Return ``unknown=`` in stored form; raise InputError if it is not one."""
    names = isinstance(unknown, (list, tuple)) and all(isinstance(n, str) for n in unknown)
    if unknown is None or unknown == "category" or names:
        return list(unknown) if names else unknown
    raise InputError(
        f"unknown is {unknown!r}: give 'category', or a list of the columns of text that get a "
        "category for unknown names"
    )


class FilledSource(Source):
    """A table whose missing values are filled. `changes` says how, after it has been read."""

    whole = True

    def __init__(self, rows: Any, missing: Any, unknown: Any) -> None:
        self._opened = open_source(rows)  # which refuses what is not there
        if self._opened.kind not in ("arrays", "pandas", "csv", "rows") or isinstance(rows, tuple):
            raise InputError(
                f"missing= and unknown= do not take {type(rows).__name__}: give a pandas frame, a "
                "CSV file, a mapping of columns or a list of dictionaries"
            )
        self.kind = self._opened.kind
        self.declaration = self._opened.declaration
        self._rows: Any = rows if isinstance(rows, Mapping) or hasattr(rows, "columns") else None
        if self._rows is None:
            self._rows = expand_path(os.fspath(rows)) if self.kind == "csv" else list(rows)
        self._missing, self._unknown = missing, unknown
        self.targets: frozenset[str] = frozenset()  # columns that become a target
        self.changes: dict[str, dict[str, Any]] = {}

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        try:
            cells = recipe.read_columns(self._rows)
            names = choose_columns(cells, wanted)
            for what, given in (("missing", self._missing), ("unknown", self._unknown)):
                listed = () if isinstance(given, (str, type(None))) else given
                for name in listed:
                    if name not in names:
                        raise InputError(f"{what} has the unknown column {name!r}: there are "
                                         f"{', '.join(names)}")  # fmt: skip
            yield {name: self._fill(name, cells[name]) for name in names}
        except recipe.RowsError as error:
            raise InputError(str(error)) from None

    def _fill(self, name: str, cells: Any) -> ColumnData:
        way = self._missing.get(name) if isinstance(self._missing, Mapping) else self._missing
        series = self._rows[name] if hasattr(self._rows, "columns") else None
        declared = getattr(getattr(series, "dtype", None), "categories", None)
        present = [] if isinstance(cells, np.ndarray) else [
            cell for cell in cells if not recipe.is_missing(cell)
        ]  # fmt: skip
        if any(isinstance(cell, (list, tuple, np.ndarray)) for cell in present[:1]):
            raise InputError(f"column {name!r} has sequences, which missing= does not take")
        if name in self.targets and not isinstance(self._missing, Mapping):
            way = None
            _check_target(name, cells)
        is_text = bool(present) and isinstance(present[0], str)
        if is_text and self.kind == "csv" and name not in self.text:
            is_text = not _are_numbers(name, present)
        if not is_text:
            if name in self.text:
                raise InputError(f"dtypes makes {name!r} text, but the source has numbers")
            return self._fill_numbers(name, cells, way)
        for row, cell in enumerate(cells):
            if not isinstance(cell, str) and not recipe.is_missing(cell):
                raise InputError(
                    f"column {name!r} is text, but row {row} is {cell!r}: make it text"
                )
        if declared is None and name not in self.text:  # "?" would make a column of numbers text
            texts = ["nan" if recipe.is_missing(cell) else cell for cell in cells]
            check_numbers(name, from_text(name, texts))
        known = None if declared is None else [str(label) for label in declared]
        return self._fill_text(name, cells, present, way, known)

    def _fill_numbers(self, name: str, cells: Any, way: Any) -> ColumnData:
        values, absent = recipe.read_numbers(name, cells)
        fill = None
        if isinstance(way, str):
            if way not in _WAYS:
                raise InputError(
                    f"missing: column {name!r} has numbers, which {way!r} cannot fill: give a "
                    "number, 'mean' or 'median'"
                )
            present = values[~absent].astype(np.float64)
            if not len(present):
                raise InputError(f"column {name!r} has no values: leave it out with columns=[...]")
            fill = float(np.mean(present) if way == "mean" else np.median(present))
            if not np.isfinite(fill):
                raise InputError(
                    f"missing: column {name!r} has infinite values, so its {way} is {fill}: "
                    "give a number"
                )
        elif way is not None:
            fill = way
        if fill is not None and values.dtype.kind in "biu":
            fill = type(values.dtype.type(0).item())(round(float(fill)))
        self.changes[name] = {"fill": fill, "unknown": None}
        return from_array(name, recipe.fill_numbers(name, values, absent, fill))

    def _fill_text(
        self, name: str, cells: Any, present: list[str], way: Any, declared: list[str] | None
    ) -> ColumnData:
        names = sorted(set(present)) if declared is None else declared
        fill = None
        if way in ("category", "mean", "median") and MISSING in names and len(present) < len(cells):
            raise InputError(
                f"missing: column {name!r} has the name {MISSING!r}, so gaps need another: give "
                f'missing={{{name!r}: "unstated"}}'
            )
        if way == "fill":
            counts = Counter(present)
            fill = max(names, key=lambda label: counts[label])
        elif way in _WAYS:
            fill = MISSING if len(present) < len(cells) else None
        elif isinstance(way, str):
            fill = way
        elif way is not None:
            raise InputError(f"missing: column {name!r} has text, which {way!r} cannot fill")
        if fill is None and len(present) < len(cells):
            raise missing_value_error(
                name, next(r for r, c in enumerate(cells) if recipe.is_missing(c))
            )
        names = [*names, *([fill] if fill is not None and fill not in names else [])]
        unknown = None
        if self._unknown == "category":
            has_unknown = name not in self.targets
        else:
            has_unknown = name in (self._unknown or ())
        if has_unknown:
            names = names if UNKNOWN in names else [*names, UNKNOWN]
            unknown = names.index(UNKNOWN)
        place = {label: code for code, label in enumerate(names)}
        codes = [place[str(fill) if recipe.is_missing(cell) else cell] for cell in cells]
        self.changes[name] = {"fill": fill, "unknown": unknown}
        return ColumnData(np.array(codes, np.int64), "int64", None, names, ordered=True)


def _check_target(name: str, cells: Any) -> None:
    for row, cell in enumerate(cells):
        if recipe.is_missing(cell):
            raise InputError(
                f"column {name!r} is the target, and is missing in row {row}: leave such rows out, "
                "or name the columns to fill, missing={...}"
            )


def _are_numbers(name: str, cells: Iterable[Any]) -> bool:
    try:
        for row, cell in enumerate(cells):
            recipe.read_number(name, row, cell)
    except recipe.RowsError:
        return False
    return True


def describe_columns(
    outputs: Sequence[OutputColumn], columns: Any, changes: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the recipe of a dataset: how its columns of one value per source are made."""
    made = []
    for output in outputs:
        name = output.column.name
        names = columns[name] if isinstance(columns, Mapping) else name
        pieces = [data for data, _ in output.pieces]
        if any(data.offsets is not None or data.row_shape or data.binary for data in pieces):
            continue
        if output.column.dtype == "complex64":
            continue
        sources = [
            {
                "name": source,
                "categories": None if data.names is None else list(final_names(data)[0]),
                "fill": changes.get(source, {}).get("fill"),
                "unknown": changes.get(source, {}).get("unknown"),
            }
            for source, data in zip(
                [names] if isinstance(names, str) else names, pieces, strict=True
            )
        ]
        dtype = output.column.dtype
        made.append({"name": name, "dtype": dtype, "stacked": output.stacked, "sources": sources})
    return made
