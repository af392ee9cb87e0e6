"""Write a column's rows from memory to files in a shard's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import cerebro._core as _core
from cerebro.data.dtypes import Array
from cerebro.data.manifest import Column, FileEntry


def write_column(column: Column, values: Any, folder: Path) -> dict[str, FileEntry]:
    """Write rows to a shard's folder; return file entries in the order of `column.file_names`.

    `values` are an array of storage values or, if the column is ragged, an object with ``values``
    and ``offsets``, such as `cerebro.data.dataset.RaggedRows`.
    """
    if not column.ragged:
        (name,) = column.file_names
        return {name: _write_file(folder / name, column.dtype, column.shape, values)}
    values_name, offsets_name = column.file_names
    return {
        values_name: _write_file(
            folder / values_name, column.dtype, column.shape, np.asarray(values.values)
        ),
        offsets_name: _write_file(folder / offsets_name, "int64", (), values.offsets),
    }


def _write_file(path: Path, dtype: str, shape: tuple[int, ...], values: Array) -> FileEntry:
    writer = _core.NpyWriter(os.fspath(path), dtype, shape, len(values))
    try:
        writer.write(np.ascontiguousarray(values))
        return FileEntry(*writer.close())
    except BaseException:
        writer.abort()
        raise
