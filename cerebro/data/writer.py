"""Write rows into shards: one pass over each column of each shard, in chunks.

Row i of shard s is the source's row ``order[first(s) + i]``. If the source is in mapped files and
larger than memory, reading it in random order would read each page many times. Its columns are
therefore first distributed to one temporary file per shard, in one sequential pass, and each file
is then shuffled. Ragged columns are read directly in random order, because their rows are long
enough to be worth reading a page each.
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
from cerebro.data.columns import ColumnData, offsets_of
from cerebro.data.dtypes import Array
from cerebro.data.layout import OutputColumn
from cerebro.data.manifest import Column, FileEntry, ShardEntry, shard_folder
from cerebro.data.order import GROUP, MOST_BYTES
from cerebro.data.progress import ByteProgress
from cerebro.data.rows import part_index
from cerebro.machine import durable
from cerebro.machine.resources import total_memory

CHUNK_BYTES = 16 << 20

SHARD_BYTES = 256_000_000  # the default limit of a shard
GROUPED_SHARD_BYTES = SHARD_BYTES // GROUP  # of data whose units read groups of shards

DEFAULT_SHARDS = 8

Rows = range | Array


def default_shards(nbytes: int, rows: int) -> int:
    """Return 8, or more to keep a unit's shards under 256 MB, but never more than `rows`."""
    most = SHARD_BYTES if nbytes <= MOST_BYTES else GROUPED_SHARD_BYTES
    return min(rows, max(DEFAULT_SHARDS, -(-nbytes // (most - 1))))


def shard_starts(rows: int, shards: int) -> list[int]:
    """Return each shard's first row, and then `rows`; the first shards may have one row more."""
    base, extra = divmod(rows, shards)
    return [shard * base + min(shard, extra) for shard in range(shards + 1)]


def write_shards(
    outputs: Sequence[OutputColumn],
    shards: int,
    order: Array | None,
    folder: Path,
    meter: ByteProgress,
    memory_bytes: int | None = None,
) -> list[ShardEntry]:
    """Write the columns into ``folder/shard-00000`` and so on; all files are on disk afterwards.

    Without `order`, rows keep that of the source. A source of more than `memory_bytes` is first
    distributed to temporary files.
    """
    rows = outputs[0].pieces[0][0].rows
    starts = shard_starts(rows, shards)
    files: list[dict[str, FileEntry]] = [{} for _ in range(shards)]
    for shard in range(shards):
        (folder / shard_folder(shard)).mkdir()
    limit = total_memory() // 2 if memory_bytes is None else memory_bytes
    total = sum(output.nbytes for output in outputs)
    deal = total > limit and shards > 1
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
            files[shard] |= _write_column(source, rows_of, folder / shard_folder(shard), meter)
    for shard in range(shards):
        durable.sync_folder(folder / shard_folder(shard))
    names = [name for output in outputs for name in output.column.file_names]
    return [
        ShardEntry(starts[shard + 1] - starts[shard], {name: files[shard][name] for name in names})
        for shard in range(shards)
    ]


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
