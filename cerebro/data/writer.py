"""Write columns to disk: into the shards of a dataset, or into temporary files.

`write_shards` makes one pass over each column of each shard, in chunks. Row i of shard s is the
source's row ``order[first(s) + i]``. If the source is in mapped files and larger than memory,
reading it in random order would read each page many times. Its columns are therefore first
distributed to one temporary file per shard, in one sequential pass, and each file is then shuffled.
Ragged columns are read directly in random order, because their rows are long enough to be worth
reading a page each.

`spool` reads a source that comes in chunks, once, and appends each column to a temporary file,
which is memory-mapped when complete. The source may therefore be larger than memory and need not
know its number of rows. The file is converted if a later chunk has a wider type or rows of another
length.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import cerebro._core as _core
from cerebro.data.columns import (
    ColumnData,
    cell_at,
    merge_codes,
    missing_value_error,
    offsets_of,
    promote_dtypes,
)
from cerebro.data.dtypes import (
    STORAGE,
    Array,
    convert,
    find_first_text,
    not_a_number_error,
    quote_cell,
)
from cerebro.data.layout import OutputColumn
from cerebro.data.manifest import Column, FileEntry, ShardEntry, shard_folder
from cerebro.data.order import GROUP, MOST_BYTES
from cerebro.data.rows import part_index
from cerebro.data.sources.base import Table
from cerebro.data.unfinished import ByteProgress
from cerebro.errors import InputError
from cerebro.machine import durable
from cerebro.machine.resources import total_memory

CHUNK_BYTES = 16 << 20
SHARD_BYTES = 256_000_000  # the default limit of a shard
GROUPED_SHARD_BYTES = SHARD_BYTES // GROUP  # of data whose units read groups of shards
DEFAULT_SHARDS = 8
_PIECE_VALUES = 1 << 20

Rows = range | Array


def default_shards(nbytes: int, rows: int) -> int:
    """Return 8, or more to keep a unit's shards under 256 MB, but never more than `rows`."""
    most = SHARD_BYTES if nbytes <= MOST_BYTES else GROUPED_SHARD_BYTES
    return min(rows, max(DEFAULT_SHARDS, -(-nbytes // (most - 1))))


def write_shards(
    outputs: Sequence[OutputColumn],
    shards: int,
    order: Array | None,
    folder: Path,
    meter: ByteProgress,
) -> list[ShardEntry]:
    """Write the columns into ``folder/shard-00000`` and so on; all files are on disk afterwards.

    Without `order`, rows keep that of the source. A source of more than half of the memory is first
    distributed to temporary files.
    """
    rows = outputs[0].pieces[0][0].rows
    base, extra = divmod(rows, shards)  # the first shards may have one row more
    starts = [shard * base + min(shard, extra) for shard in range(shards + 1)]
    places = [folder / shard_folder(shard) for shard in range(shards)]
    for place in places:
        place.mkdir()
    files: list[dict[str, FileEntry]] = [{} for _ in places]
    total = sum(output.nbytes for output in outputs)
    deal = total > total_memory() // 2 and shards > 1
    source_rows = range(rows) if order is None else order
    meter.begin("writing shards", total)
    for output in outputs:
        is_mapped = any(
            isinstance(data.values, np.memmap) and data.offsets is None for data, _ in output.pieces
        )
        if order is not None and deal and is_mapped:
            parts = _deal_shards(output, starts, order, folder)
        else:
            parts = ((output, source_rows[start:stop]) for start, stop in pairwise(starts))
        for shard, (source, rows_of) in enumerate(parts):
            files[shard] |= _write_column(source, rows_of, places[shard], meter)
    for place in places:
        durable.sync_folder(place)
    return list(map(ShardEntry, np.diff(starts).tolist(), files))


def _deal_shards(
    output: OutputColumn, starts: Sequence[int], order: Array, folder: Path
) -> Iterator[tuple[OutputColumn, Rows]]:
    """Yield, for each shard, a column of its rows in source order, and their shuffled order."""
    column = output.column
    sorted_rows = [np.sort(order[a:b]) for a, b in pairwise(starts)]
    paths = [folder / f".deal-{shard:05d}" for shard in range(len(sorted_rows))]
    step = max(1, CHUNK_BYTES // max(1, column.item_bytes))
    for start in range(0, starts[-1], step):
        chunk = output.rows(slice(start, start + step))
        for path, rows in zip(paths, sorted_rows, strict=True):
            low, high = np.searchsorted(rows, [start, start + len(chunk)])
            with path.open("ab", buffering=0) as file:
                append(file, path, chunk[rows[low:high] - np.uint32(start)])
    for shard, path in enumerate(paths):
        rows = sorted_rows[shard]
        values = np.fromfile(path, chunk.dtype).reshape(len(rows), *column.shape)
        path.unlink()
        dealt = replace(output, pieces=((ColumnData(values, column.dtype), None),), stacked=False)
        yield dealt, np.searchsorted(rows, order[starts[shard] : starts[shard + 1]])


def _write_column(
    output: OutputColumn, rows: Rows, folder: Path, meter: ByteProgress
) -> dict[str, FileEntry]:
    data = output.pieces[0][0]
    if data.offsets is not None:
        return _write_ragged(output, data.offsets, rows, folder, meter)
    column, count = output.column, len(rows)
    step = max(1, CHUNK_BYTES // max(1, column.item_bytes))
    pieces = (rows[start : start + step] for start in range(0, count, step))
    chunks = (output.rows(part_index(piece)) for piece in pieces)
    (name,) = column.file_names
    path = folder / name
    return {name: write_npy(path, column.dtype, column.shape, count, chunks, meter.advance)}


def _write_ragged(
    output: OutputColumn, offsets: Array, rows: Rows, folder: Path, meter: ByteProgress
) -> dict[str, FileEntry]:
    values_name, offsets_name = output.column.file_names
    index = part_index(rows)
    starts, stops = offsets[:-1][index], offsets[1:][index]
    shard_offsets = offsets_of(stops - starts)
    # Cut when a chunk is full, but never within a row.
    per_chunk = max(1, CHUNK_BYTES // max(1, output.column.item_bytes))
    numbers = shard_offsets[1:] // per_chunk
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(starts)]

    def chunks() -> Iterator[Array]:
        for low, high in pairwise(cuts):
            if isinstance(rows, range):
                yield output.rows(slice(int(starts[low]), int(stops[high - 1])))
                continue
            lengths = stops[low:high] - starts[low:high]
            shift = starts[low:high] - (shard_offsets[low:high] - shard_offsets[low])
            yield output.rows(np.repeat(shift, lengths) + np.arange(int(lengths.sum())))

    total, column = int(shard_offsets[-1]), output.column
    path = folder / values_name
    values = write_npy(path, column.dtype, column.shape, total, chunks(), meter.advance)
    path = folder / offsets_name
    offsets_entry = write_npy(path, "int64", (), len(shard_offsets), [shard_offsets])
    return {values_name: values, offsets_name: offsets_entry}


def write_npy(
    path: Path,
    dtype: str,
    shape: tuple[int, ...],
    rows: int,
    chunks: Iterable[Array],
    advance: Callable[[int], None] = lambda count: None,
) -> FileEntry:
    """Write a file of storage values, in chunks; call `advance` with the bytes of each."""
    writer = _core.NpyWriter(os.fspath(path), dtype, shape, rows)
    try:
        for chunk in chunks:
            writer.write(np.ascontiguousarray(chunk))
            advance(chunk.nbytes)
        return FileEntry(*writer.close())
    except BaseException:
        writer.abort()
        raise


def write_rows(column: Column, rows: Any, folder: Path) -> dict[str, FileEntry]:
    """Write rows, an array or `RaggedRows`, to a shard's folder; return the files' entries."""
    arrays = [(rows, column.dtype, column.shape)]
    if column.ragged:
        arrays = [(rows.values, column.dtype, column.shape), (rows.offsets, "int64", ())]
    return {
        name: write_npy(folder / name, dtype, shape, len(array), [array])
        for name, (array, dtype, shape) in zip(column.file_names, arrays, strict=True)
    }


def append(file: FileIO, path: Path, values: Array) -> None:
    """Append values to an unbuffered file; an OSError names the file and what to do."""
    # `ndarray.tofile` would report a full disk without its cause and the file's name.
    remaining = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    try:
        while remaining:  # a write may store only a part
            remaining = remaining[file.write(remaining) :]
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {path}, a temporary copy of a column: {error.strerror}: free some space "
            "there, choose another path, or leave columns out",
        ) from None


# --- sources in chunks ------------------------------------------------------------------------


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
        values = self._map_values()
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

    def _map_values(self) -> Array:
        return _map_file(self.path, STORAGE[self.dtype], (self.values, *self.element_shape))

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
        old = self._map_values().reshape(-1)
        wider = self.path.with_suffix(".wider")
        with wider.open("wb", buffering=0) as file:
            for start in range(0, len(old), _PIECE_VALUES):
                piece = old[start : start + _PIECE_VALUES]
                append(file, wider, self._convert_values(piece, self.dtype, dtype))
        self.file.close()
        wider.replace(self.path)
        self.dtype = dtype
        self.file = self.path.open("ab", buffering=0)


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
