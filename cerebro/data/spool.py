"""Temporary files for sources that are read in chunks.

The source is read once. Each column is appended to a separate file, which is memory-mapped when
complete. A source may therefore be larger than memory and need not know its number of rows. The
file is converted if a later chunk has a wider type or rows of another length.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from cerebro.data.columns import (
    ColumnData,
    cell_at,
    merge_codes,
    missing_value_error,
    offsets_of,
    promote_dtypes,
)
from cerebro.data.dtypes import STORAGE, Array, convert
from cerebro.data.number_cells import find_first_text, not_a_number_error, quote_cell
from cerebro.data.progress import ByteProgress
from cerebro.data.sources.base import Table
from cerebro.data.writer import append
from cerebro.errors import InputError

_PIECE_VALUES = 1 << 20


def spool(chunks: Iterable[Table], folder: Path, meter: ByteProgress) -> Table:
    """Read all chunks into files in `folder`; return the mapped columns."""
    columns: dict[str, _Spooled] = {}
    process = os.getpid()
    try:
        for chunk in chunks:
            _check_process(process)
            if not columns:
                columns = {
                    name: _Spooled(name, folder / f"{index:05d}", data)
                    for index, (name, data) in enumerate(chunk.items())
                }
            if chunk.keys() != columns.keys():
                raise InputError("the source's columns change from row to row: make them the same")
            for name, data in chunk.items():
                columns[name].append(data)
                meter.advance(data.nbytes)
        _check_process(process)
        return {name: column.finish() for name, column in columns.items()}
    finally:
        for column in columns.values():
            column.close()


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise InputError(
            "the source has forked this process, which must not go on with the rows: end it with "
            "os._exit(0)"
        )


class _Spooled:
    """A column that is being spooled: a file of elements and, unless rows are scalars, of lengths.

    The rows become fixed again at the end if all of them had one shape.
    """

    def __init__(self, name: str, path: Path, first: ColumnData) -> None:
        self.name = name
        self.path = path
        self.dtype = first.dtype
        self.names: dict[str, int] | None = None if first.names is None else {}
        self.ordered = first.ordered
        self.binary = first.binary
        self.narrow = first.narrow
        self.absent: int | None = None  # the first missing value in a chunk without floats
        self.has_floats = False
        self.rows = 0
        self.values = 0  # elements along the first dimension
        self.length = _length_of_rows(first)
        self.element_shape = first.row_shape if self.length is None else first.row_shape[1:]
        self.file = path.open("wb", buffering=0)
        self.lengths: FileIO | None = None
        if not _is_flat(first):
            self.lengths = self._lengths_path.open("wb", buffering=0)

    def append(self, data: ColumnData) -> None:
        self._note_absent(data)
        data = self._fit_chunk(data)
        values = data.values
        if self.names is not None:
            values = merge_codes(self.name, data, self.names, self.rows)
        values = self._convert_values(values, data.dtype, self.dtype)
        append(self.file, self.path, values)
        if self.lengths is not None and data.offsets is not None:
            append(self.lengths, self._lengths_path, np.diff(data.offsets))
        self.values += len(values)
        self.rows += data.rows

    def finish(self) -> ColumnData:
        """Return the column, with the file of values mapped."""
        self.close()
        if self.absent is not None and not self.has_floats:
            raise missing_value_error(self.name, self.absent)
        values = self._map_values(self.values)
        offsets = None
        if self.length is not None:
            values = values.reshape(self.rows, self.length, *self.element_shape)
        elif self.lengths is not None:
            offsets = offsets_of(_map_file(self._lengths_path, np.dtype(np.int64), (self.rows,)))
        names = None if self.names is None else list(self.names)
        return ColumnData(values, self.dtype, offsets, names, self.ordered, binary=self.binary)

    def close(self) -> None:
        self.file.close()
        if self.lengths is not None:
            self.lengths.close()

    @property
    def _lengths_path(self) -> Path:
        return self.path.with_suffix(".lengths")

    def _map_values(self, count: int) -> Array:
        return _map_file(self.path, STORAGE[self.dtype], (count, *self.element_shape))

    def _note_absent(self, data: ColumnData) -> None:
        """Record a missing value, which is an error unless this or another chunk has floats."""
        if self.absent is None:
            self.absent = data.absent
        if data.absent is None and data.dtype.startswith(("float", "bfloat")):
            self.has_floats = True
        plain = data.names is None and self.names is None
        plain = plain and _is_flat(data) and self.lengths is None
        if self.absent is not None and not plain:
            raise missing_value_error(self.name, self.absent)

    def _fit_chunk(self, data: ColumnData) -> ColumnData:
        """Make file and chunk agree in type, shape and raggedness, or raise InputError."""
        length = _length_of_rows(data)
        element_shape = data.row_shape if length is None else data.row_shape[1:]
        if data.offsets is not None and len(data.values) == 0:  # empty rows have no type
            empty = np.zeros((0, *self.element_shape), STORAGE[self.dtype])
            none = None if self.names is None else ()
            data = ColumnData(empty, self.dtype, data.offsets, none, self.ordered)
            element_shape = self.element_shape
        elif self.lengths is not None and self.length is None and self.values == 0:
            self.dtype, self.element_shape = data.dtype, element_shape
            self.names = None if data.names is None else {}
        if (data.names is None) != (self.names is None):
            raise self._mixed_error(data)
        if _is_flat(data) != (self.lengths is None) or element_shape != self.element_shape:
            raise InputError(
                f"column {self.name!r}: rows may differ only in the length of their first "
                f"dimension, but after row {self.rows} they have a different shape"
            )
        if length != self.length:
            self.length = None
        if data.dtype != self.dtype:
            wider = promote_dtypes(self.name, self.dtype, data.dtype)
            self._widen("float32" if self.narrow and wider == "float64" else wider)
        return data if self.lengths is None else data.as_ragged()

    def _mixed_error(self, data: ColumnData) -> InputError:
        if data.names is not None:
            row, cell = cell_at(data, find_first_text(data.names, data.values))
            return not_a_number_error(self.name, self.rows + row, cell)
        return InputError(
            f"column {self.name!r} mixes strings and numbers: it begins with strings "
            f"({quote_cell(next(iter(self.names or ()), ''))}), and row {self.rows} has numbers; "
            "make all of them one kind"
        )

    def _convert_values(self, values: Array, source: str, target: str) -> Array:
        """Convert values, with the same bits wherever chunks end."""
        # Large integers are rounded as if the whole column had been float64.
        if self.narrow and target == "float32" and source in ("int64", "uint64"):
            values, source = convert(values, source, "float64", self.name), "float64"
        return convert(values, source, target, self.name)

    def _widen(self, dtype: str) -> None:
        if dtype == self.dtype:
            return
        old = self._map_values(self.values).reshape(-1)
        wider = self.path.with_suffix(".wider")
        file = wider.open("wb", buffering=0)
        try:
            for start in range(0, len(old), _PIECE_VALUES):
                piece = old[start : start + _PIECE_VALUES]
                append(file, wider, self._convert_values(piece, self.dtype, dtype))
        except BaseException:
            file.close()
            raise
        self.file.close()
        wider.replace(self.path)
        self.file = file
        self.dtype = dtype


def _is_flat(data: ColumnData) -> bool:
    """Return whether rows are scalars."""
    return data.offsets is None and not data.row_shape


def _length_of_rows(data: ColumnData) -> int | None:
    """Return the length of all rows; None if they are scalars or ragged."""
    return data.row_shape[0] if data.offsets is None and data.row_shape else None


def _map_file(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", shape=shape)
