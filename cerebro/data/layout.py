"""Make a dataset's columns from a source's: select, rename, stack and convert them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cerebro.data.columns import ColumnData, cell_at, check_numbers, final_names, promote_dtypes
from cerebro.data.dtypes import (
    STORAGE,
    TEXT,
    Array,
    convert,
    find_first_text,
    parse_dtype,
    quote_cell,
    reinterpret,
)
from cerebro.data.manifest import MAX_DIMENSIONS, MAX_ROWS, Column, check_columns
from cerebro.data.sources.base import Table, check_lengths, choose_columns
from cerebro.errors import InputError

Columns = Mapping[str, "str | Sequence[str]"] | Sequence[str]


@dataclass(frozen=True)
class OutputColumn:
    """A column of the dataset, and how to make its rows from the source's columns.

    `pieces` are the source's columns, several if they are stacked, each with a table that renumbers
    its categories (None: no renumbering).
    """

    column: Column
    pieces: tuple[tuple[ColumnData, Array | None], ...]
    stacked: bool = False

    @property
    def nbytes(self) -> int:
        data = self.pieces[0][0]
        if data.offsets is not None:
            return int(data.offsets[-1]) * self.column.item_bytes + data.offsets.nbytes
        return data.rows * self.column.item_bytes

    def rows(self, order: Array | slice) -> Array:
        """Return the rows in this order, in storage type; for a ragged column, the elements."""
        parts = []
        for data, table in self.pieces:
            values = data.values[order]
            if table is not None:
                values = table[values]
            parts.append(convert(values, data.dtype, self.column.dtype, self.column.name))
        if not self.stacked:
            return parts[0]
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def source_columns(columns: Columns | None) -> list[str] | None:
    """Return the names of the source's columns that `columns` uses, each once; None: all."""
    names: dict[str, None] = {}
    if columns is None:
        return None
    if isinstance(columns, (str, bytes)) or not isinstance(columns, (Mapping, Sequence)):
        raise InputError(
            f'columns is {columns!r}: give a list of names or a mapping such as {{"x": ["a", "b"]}}'
        )
    if not columns:
        raise InputError("columns is empty: name at least one, or leave the argument out")
    for value in columns.values() if isinstance(columns, Mapping) else columns:
        if not value:
            raise InputError("columns has an empty stack: name at least one column in it")
        stack = [value] if isinstance(value, str) else list(value)
        for name in stack:
            if not isinstance(name, str):
                raise InputError(f"columns: {name!r} is not a column name")
            if stack.count(name) > 1:
                raise InputError(f"columns stacks {name!r} twice: name it once")
            names[name] = None
    return list(names)


def lay_out(
    table: Table, columns: Columns | None, dtypes: Mapping[str, Any] | None, declaration: str = ""
) -> list[OutputColumn]:
    """Apply ``columns=`` and ``dtypes=`` to a source's columns; `declaration` is the source's."""
    check_rows(table)
    choose_columns(table, source_columns(columns))
    if isinstance(columns, Mapping):
        inputs = columns
    else:
        names = list(table) if columns is None else columns
        if len(set(names)) != len(names):
            raise InputError("columns names a column twice: name each once")
        inputs = {name: name for name in names}
    types = {name: parse_dtype(dtype) for name, dtype in (dtypes or {}).items()}
    for name in types.keys() - inputs.keys():
        raise InputError(f"dtypes has the unknown column {name!r}: there are {', '.join(inputs)}")
    texts = {name for name, (dtype, _) in types.items() if dtype == TEXT}
    _check_cells(table, inputs, texts, declaration)
    outputs = []
    for name, sources in inputs.items():
        dtype, shape = types.get(name, (None, None))
        if isinstance(sources, str):
            data = table[sources]
            if dtype is not None and shape is not None:
                data = _reshape_rows(name, data, dtype, shape)
            outputs.append(_make_output(name, data, None if dtype == TEXT else dtype))
        elif dtype == TEXT:
            raise InputError(
                f"dtypes makes {name!r} text, but it is a stack: name its columns apart"
            )
        elif shape is not None:
            raise InputError(f"dtypes gives {name!r} a shape, but it is a stack: give a type only")
        else:
            outputs.append(_stack_columns(name, {key: table[key] for key in sources}, dtype))
    check_columns(tuple(output.column for output in outputs))
    return outputs


def _check_cells(
    table: Table,
    inputs: Mapping[str, str | Sequence[str]],
    texts: Collection[str],
    declaration: str,
) -> None:
    """Raise InputError for text among numbers, and for numbers where `texts` says text."""
    for name, sources in inputs.items():
        if name in texts and isinstance(sources, str):
            if table[sources].names is None:
                raise InputError(
                    f"dtypes makes {name!r} text, but the source has {table[sources].dtype}: make "
                    "its values strings first (only a CSV file's cells have no type)"
                )
            continue
        for source in [sources] if isinstance(sources, str) else sources:
            output = name if isinstance(sources, str) else source
            way = f"keep them as text with cerebro.shard(..., dtypes={{{output!r}: {TEXT!r}}})"
            if declaration and not table[source].row_shape:
                way = f"declare the column: {declaration.format(repr(source))}"
            cure = f"; if its cells are names or codes, not numbers, {way}"
            check_numbers(source, table[source], cure)


def check_rows(table: Table) -> None:
    counts = {name: data.rows for name, data in table.items()}
    if not any(counts.values()):
        raise InputError("the source has no rows: give at least one")
    check_lengths(counts)
    rows = max(counts.values())
    if rows > MAX_ROWS:
        raise InputError(f"{rows} rows are more than {MAX_ROWS}: write several datasets")


def _reshape_rows(name: str, data: ColumnData, dtype: str, shape: tuple[int, ...]) -> ColumnData:
    """Return rows of one shape, from binary values or from lists with that many elements."""
    fixed = data.as_fixed()
    if fixed is None:
        raise InputError(
            f"{_describe_uneven_rows(name, data)}, but {dtype} of shape {shape} needs rows of one "
            "length"
        )
    if fixed.binary:
        return ColumnData(reinterpret(fixed.values, dtype, shape, name), dtype)
    if fixed.names is not None or math.prod(fixed.row_shape) != math.prod(shape):
        content = "text" if fixed.names is not None else f"rows of shape {fixed.row_shape}"
        raise InputError(f"column {name!r} has {content}, which cannot become shape {shape}")
    return ColumnData(fixed.values.reshape(fixed.rows, *shape), fixed.dtype)


def _describe_uneven_rows(name: str, data: ColumnData) -> str:
    """Begin the error of a ragged column: name the first row that is not as long as row 0."""
    assert data.offsets is not None
    lengths = np.diff(data.offsets)
    row = int((lengths != lengths[0]).argmax())
    return (
        f"column {name!r} has rows of differing length ({lengths[0]} in row 0, {lengths[row]} in "
        f"row {row})"
    )


def _make_output(name: str, data: ColumnData, dtype: str | None) -> OutputColumn:
    classes, codes = (None, None) if data.names is None else final_names(data)
    dtype = dtype or data.dtype
    if classes is not None and STORAGE[dtype].kind not in "iu":
        raise InputError(
            f"column {name!r} holds categories ({_first_cell(data)}): {dtype} cannot hold their "
            "codes; convert it to numbers first, or give no dtype"
        )
    if len(data.row_shape) > MAX_DIMENSIONS:
        raise InputError(f"column {name!r} has rows of more than {MAX_DIMENSIONS} dimensions")
    column = Column(name, dtype, data.row_shape, data.offsets is not None, classes)
    return OutputColumn(column, ((data, codes),))


def _first_cell(data: ColumnData) -> str:
    """Return the first cell of a category column that is not a number, and its row."""
    assert data.names is not None
    if not data.values.size:
        return "no cell"
    row, cell = cell_at(data, find_first_text(data.names, data.values))
    return f"{quote_cell(cell)} in row {row}"


def _stack_columns(name: str, sources: Table, dtype: str | None) -> OutputColumn:
    """Put columns side by side, cast to a common type; each row becomes one vector."""
    pieces, width = [], 0
    has_numbers = any(data.names is None for data in sources.values())
    as_float = dtype is not None and STORAGE[dtype].kind not in "iu"
    for key, data in sources.items():
        if data.names is not None and not data.ordered and (has_numbers or as_float):
            what = "numbers" if has_numbers else f"{dtype}, which cannot hold codes"
            raise InputError(
                f"column {key!r} is text ({_first_cell(data)}) and cannot be stacked into "
                f"{name!r} with {what}: convert it to numbers, or keep it as a separate column of "
                "categories"
            )
        fixed = data.as_fixed()
        if fixed is None:
            raise InputError(
                f"{_describe_uneven_rows(key, data)} and cannot be stacked into {name!r}: keep it "
                "as a separate column"
            )
        pieces.append((fixed, None if fixed.names is None else final_names(fixed)[1]))
        width += math.prod(fixed.row_shape)
    kinds = [data.dtype for data, _ in pieces]
    common = dtype or promote_dtypes(name, *kinds)
    return OutputColumn(Column(name, common, (width,)), tuple(pieces), stacked=True)
