"""Any iterable of row mappings, such as a generator of dicts.

A value in a row may be a number, a string, an array or tensor (of fixed shape, or ragged if the
first dimension differs from row to row), a PIL image, or a list (ragged).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cerebro.data.columns import add_classes, check_complete, copy_value, from_rows
from cerebro.data.sources.base import Source, Table, choose_columns
from cerebro.errors import InputError

CHUNK_ROWS = 4096
CHUNK_BYTES = 32 << 20  # of the values that have nbytes


class RowsSource(Source):
    """Rows of any iterable, read once, without holding all rows in memory unless it is a list."""

    kind = "rows"

    def __init__(self, rows: Iterable[Any]) -> None:
        self.rows = rows
        self.whole = isinstance(rows, (list, tuple))

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        tables = row_chunks(self.rows, wanted, whole=self.whole)
        return iter([next(tables, {})]) if self.whole else tables


def row_chunks(
    rows: Iterable[Any],
    wanted: Sequence[str] | None,
    classes: Mapping[str, Sequence[str]] | None = None,
    whole: bool = False,
) -> Iterator[Table]:
    """Collect rows into tables, or one if `whole`; `classes` has the names of columns of codes."""
    columns: dict[str, list[Any]] = {}
    names: set[str] = set()
    first = row = held = 0
    for row, mapping in enumerate(rows):
        if not isinstance(mapping, Mapping):
            if hasattr(rows, "dataset") and hasattr(rows, "batch_size"):
                raise InputError(
                    f"the source is a {type(rows).__name__}, which makes batches: give the dataset "
                    "that it reads, loader.dataset"
                )
            cure = ""
            if isinstance(rows, tuple) and getattr(mapping, "ndim", 0) > 0:
                cure = "; give whole columns as a mapping of names, or as a pair (x, y)"
            raise InputError(
                f"row {row} is {type(mapping).__name__}: an iterable must give mappings, such as "
                f'{{"x": 1.5, "y": 0}}{cure}'
            )
        if not names:
            columns = {name: [] for name in choose_columns(mapping, wanted)}
            names = set(mapping)
        elif mapping.keys() != names:
            raise InputError(
                f"row {row} has the columns {', '.join(map(str, mapping))}, but rows before it "
                f"have {', '.join(sorted(names))}: give every row the same"
            )
        for name, values in columns.items():
            value = mapping[name] if whole else copy_value(mapping[name])
            values.append(value)
            held += getattr(value, "nbytes", 0)
        if not whole and (row + 1 - first >= CHUNK_ROWS or held >= CHUNK_BYTES):
            yield _make_table(columns, first, classes)
            columns = {name: [] for name in columns}
            first, held = row + 1, 0
    if names and first <= row:
        yield _make_table(columns, first, classes)


def _make_table(
    columns: Mapping[str, list[Any]], first: int, classes: Mapping[str, Sequence[str]] | None
) -> Table:
    table = {name: from_rows(name, values, first) for name, values in columns.items()}
    for name, labels in (classes or {}).items():
        if name in table:
            table[name] = add_classes(name, check_complete(name, table[name]), labels, first)
    return table
