"""Write rows passed in place of a dataset: arrays, tables and PyTorch datasets.

Training data is written as `shard` writes it, except that 64-bit floats become float32, the type
that networks use. Validation and evaluation data are converted to the training data's types and
classes, and get its transforms.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cerebro.data.columns import ColumnData, checked_codes, missing
from cerebro.data.dataset import Dataset
from cerebro.data.dtypes import Array, convert
from cerebro.data.manifest import Column
from cerebro.data.sharding import shard
from cerebro.data.sources import is_torch, open_source
from cerebro.data.sources.base import Source, Table
from cerebro.data.sources.bunches import is_pair
from cerebro.data.sources.huggingface import is_huggingface
from cerebro.errors import InputError

FOLDERS = ("data", "validation")
"""The folders of a run into which data passed as rows is written."""


def is_rows(value: Any) -> bool:
    """Return whether `value` is rows that `shard` reads, not a dataset, path or fraction."""
    if isinstance(value, (Dataset, str, bytes, os.PathLike)):
        return False
    if isinstance(value, (Mapping, Source)) or is_pair(value):
        return True
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], Mapping)
    if hasattr(value, "__array__") or hasattr(value, "__arrow_c_stream__"):
        return bool(getattr(value, "ndim", 1) > 0)  # a NumPy scalar is a fraction
    return is_torch(value) or is_huggingface(value)


def written(data: Any, validation: Any, folder: Path) -> tuple[Any, Any]:
    """Write data in memory to the subfolders ``data`` and ``validation`` of a folder.

    Returns
    -------
    tuple
        Both arguments, with rows replaced by datasets.

    Raises
    ------
    InputError
        As for `shard`, or if the validation rows do not fit the training data.
    """
    if is_rows(data):
        data = write(data, folder / FOLDERS[0])
    if is_rows(validation):
        train = Dataset(data) if isinstance(data, (str, os.PathLike)) else data
        like = train if isinstance(train, Dataset) else None
        validation = write(validation, folder / FOLDERS[1], like, what="validation")
    return data, validation


def write(
    rows: Any, folder: Path, like: Dataset | None = None, *, what: str = "data", **options: Any
) -> Dataset:
    """Write rows as a dataset, or reuse the one in the folder if it holds the same rows.

    Parameters
    ----------
    like
        The training data, whose column types the rows get; None: the rows are the training data.
    what
        The name of the rows in errors.
    options
        Options of `shard`.
    """
    source = open_source(rows)
    made: Source = _Narrowed(source) if like is None else _Like(source, like, what)
    data = shard(made, folder, exist_ok=True, progress=False, **options)
    if like is None:
        return data
    for name, column in data.columns.items():
        other = like.columns[name]
        if (column.shape, column.ragged) != (other.shape, other.ragged):
            raise InputError(
                f"{what}: column {name!r} has rows of shape {_shape(column)}, but "
                f"{_shape(other)} in the training data"
            )
    transforms = {name: steps for name, steps in like.transforms.items() if name in data.columns}
    return data.with_transforms(transforms) if transforms else data


def _shape(column: Column) -> str:
    sizes = (["*"] if column.ragged else []) + [str(size) for size in column.shape]
    return f"({', '.join(sizes)})"


@contextlib.contextmanager
def temporary(rows: Any, like: Dataset, what: str) -> Iterator[Dataset]:
    """Yield a dataset with the rows in their order; it is deleted at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="cerebro-rows-") as folder:
        yield write(rows, Path(folder, "data"), like, what=what, shards=1, shuffle=False)


def narrowed(value: Any, columns: Mapping[str, Column]) -> Any:
    """Return arrays for ``predict``: float64 becomes float32 unless a column is float64."""
    if isinstance(value, Mapping):
        return {
            name: narrowed(array, {name: columns[name]}) if name in columns else array
            for name, array in value.items()
        }
    wide = isinstance(value, np.ndarray) and value.dtype == np.float64
    if not wide or not columns or any(column.dtype == "float64" for column in columns.values()):
        return value
    return value.astype(np.float32)


class _Changed(Source):
    """A source whose chunks are changed before they are written."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.kind = source.kind
        self.whole = source.whole

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        for table in self.source.chunks(wanted):
            yield self.changed(table)

    def changed(self, table: Table) -> Table:
        """Return a chunk of the source as changed for the writer; subclasses implement this."""
        raise NotImplementedError

    def unpacked_bytes(self, wanted: Sequence[str] | None) -> int | None:
        return self.source.unpacked_bytes(wanted)

    def fingerprint(self) -> str | None:
        return self.source.fingerprint()


class _Narrowed(_Changed):
    """A source whose float64 columns are written as float32.

    Chunks of other types may be float64 only together: `narrow` says what to do with them.
    """

    def changed(self, table: Table) -> Table:
        return {name: _narrow(name, data) for name, data in table.items()}


class _Like(_Changed):
    """A source reduced to the training data's columns, and converted to their types and classes."""

    def __init__(self, source: Source, train: Dataset, what: str) -> None:
        super().__init__(source)
        self._columns = train.columns
        self._what = what

    def changed(self, table: Table) -> Table:
        known = {name: data for name, data in table.items() if name in self._columns}
        if not known:
            raise InputError(
                f"{self._what} has the columns {', '.join(table)}, but the training data has "
                f"{', '.join(self._columns)}: give the same names"
            )
        return {name: self._column(name, data) for name, data in known.items()}

    def _column(self, name: str, data: ColumnData) -> ColumnData:
        column = self._columns[name]
        data = data.as_ragged() if column.ragged and data.values.ndim > 1 else data
        data = data if column.ragged else data.as_fixed() or data  # a list of rows of one length
        if (column.classes is None) != (data.names is None):
            kinds = ("numbers", "names") if data.names is not None else ("names", "numbers")
            raise InputError(
                f"{self._what}: column {name!r} has {kinds[1]}, but {kinds[0]} in the training "
                "data: give the same kind"
            )
        if data.absent is not None and not column.dtype.startswith(("float", "bfloat")):
            raise missing(name, data.absent)
        if column.classes is not None:
            codes = self._codes(name, data, column.classes)
            data = ColumnData(codes, "int64", data.offsets, column.classes, ordered=True)
        return ColumnData(
            convert(data.values, data.dtype, column.dtype, name),
            column.dtype,
            data.offsets,
            data.names,
            data.ordered,
        )

    def _codes(self, name: str, data: ColumnData, classes: Sequence[str]) -> Array:
        """Return the training data's codes for these names."""
        place = {label: code for code, label in enumerate(classes)}
        table = np.array([place.get(label, -1) for label in data.names or ()], np.int64)
        codes: Array = table[checked_codes(name, data)]
        if (codes < 0).any():
            label = (data.names or ())[int(data.values[codes < 0][0])]
            raise InputError(
                f"{self._what} has {label!r} in column {name!r}, which the training data does "
                "not have: leave those rows out, or train on some of them"
            )
        return codes


def _narrow(name: str, data: ColumnData) -> ColumnData:
    if data.dtype != "float64":
        return replace(data, narrow=True)
    values = convert(data.values, data.dtype, "float32", name)
    return replace(data, values=values, dtype="float32", narrow=True)
