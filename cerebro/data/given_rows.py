"""Write rows passed in place of a dataset: arrays, tables and PyTorch datasets.

Training data is written as `shard` writes it, except that 64-bit floats become float32, the type
that networks use. Validation and evaluation data are converted to the training data's types and
classes, and get its transforms.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cerebro.data.columns import ColumnData, cell_at, check_codes, missing_value_error
from cerebro.data.containers import is_container, unpack
from cerebro.data.dataset import Dataset
from cerebro.data.dtypes import convert, find_first_text, quote_cell
from cerebro.data.manifest import Column
from cerebro.data.raw_rows import make_changed
from cerebro.data.recipe import has_arrays
from cerebro.data.sharding import shard
from cerebro.data.sources import is_torch, open_source
from cerebro.data.sources.arrays import is_pair
from cerebro.data.sources.base import Source, Table
from cerebro.data.sources.row_by_row import is_huggingface
from cerebro.data.view import describe_shape
from cerebro.errors import InputError

FOLDERS = ("data", "validation")  # of a run, into which data passed as rows is written
_GIVEN = "given "  # begins the kind of source of a dataset that was made from rows in memory


def was_given(data: Dataset) -> bool:
    """Return whether the user gave a dataset's rows in memory, and so has not called `shard`."""
    return str(data.shards.manifest.source["kind"]).startswith(_GIVEN)


def is_rows(value: Any) -> bool:
    """Return whether `value` is rows that `shard` reads, not a dataset, path or fraction."""
    if is_container(value):
        return True
    if isinstance(value, (Dataset, str, bytes, os.PathLike)):
        return False
    if isinstance(value, (Mapping, Source)) or is_pair(value):
        return True
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], Mapping)
    if hasattr(value, "__array__") or hasattr(value, "__arrow_c_stream__"):
        return bool(getattr(value, "ndim", 1) > 0)  # a NumPy scalar is a fraction
    return is_torch(value) or is_huggingface(value)


def write_given_rows(
    data: Any, validation: Any, folder: Path, tell: Callable[[str], object] = lambda _: None
) -> tuple[Any, Any]:
    """Replace rows by datasets, which are written to the subfolders ``data`` and ``validation``.

    `tell` gets a sentence about what of a DataLoader or the like is not used, if anything.
    """
    data, validation, remark = unpack(data, validation)
    if remark:
        tell(remark)
    if is_rows(data):
        data = write(data, folder / FOLDERS[0])
    if is_rows(validation):
        train = Dataset(data) if isinstance(data, (str, os.PathLike)) else data
        like = train if isinstance(train, Dataset) else None
        validation = write(validation, folder / FOLDERS[1], like, what="validation")
    return data, validation


def write(
    rows: Any,
    folder: Path,
    like: Dataset | None = None,
    *,
    wanted: Collection[str] | None = None,
    what: str = "data",
    **options: Any,
) -> Dataset:
    """Write rows as a dataset, or reuse the one in the folder if it holds the same rows.

    The rows get the column types of `like`, the training data; None: they are the training data.
    Of its columns, they get only the `wanted` ones (None: all). `what` names the rows in errors;
    `options` are those of `shard`.
    """
    change = _narrow_table
    if like is not None:
        columns = {n: c for n, c in like.columns.items() if wanted is None or n in wanted}
        made, rows = make_changed(rows, like, what, columns)
        change = _Like(columns, made, what).convert
    source = open_source(rows)
    data = shard(_Changed(source, change), folder, exist_ok=True, progress=False, **options)
    if like is None:
        return data
    for name, column in data.columns.items():
        other = like.columns[name]
        if (column.shape, column.ragged) != (other.shape, other.ragged):
            raise InputError(
                f"{what}: column {name!r} has rows of shape {describe_shape(column)}, but "
                f"{describe_shape(other)} in the training data"
            )
    transforms = {name: steps for name, steps in like.transforms.items() if name in data.columns}
    return data.with_transforms(transforms) if transforms else data


@contextlib.contextmanager
def write_temporary(
    rows: Any, like: Dataset, what: str, wanted: Collection[str] | None = None
) -> Iterator[Dataset]:
    """Yield a dataset with the rows in their order; it is deleted at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="cerebro-rows-") as folder:
        target = Path(folder, "data")
        yield write(rows, target, like, wanted=wanted, what=what, shards=1, shuffle=False)


def as_matrix(rows: Sequence[Any]) -> Any:
    """Return rows as an array; raise InputError if they differ in length."""
    try:
        return np.asarray(rows)
    except ValueError:
        raise InputError(
            "predict: the rows differ in length: give them by the name of their column"
        ) from None


def as_column(value: Any, column: Column) -> Any:
    """Return an array or a list for ``predict`` as the training data has it: numbers as floats."""
    if isinstance(value, (list, tuple)) and not any(hasattr(item, "ndim") for item in value):
        value = np.asarray(value)
    dtype = column.dtype
    if dtype not in ("float16", "float32", "float64"):
        return value
    if isinstance(value, np.ndarray):
        return value.astype(dtype, copy=False) if value.dtype.kind in "biuf" else value
    if type(value).__module__ == "torch":
        return value.to(getattr(sys.modules["torch"], dtype))
    return value


def are_batches(value: Any, columns: Mapping[str, Column]) -> bool:
    """Return whether a list of dictionaries is batches, whose arrays have one dimension more."""
    if not (isinstance(value, list) and has_arrays(value[0])):
        return False
    known = [name for name in value[0] if name in columns and np.ndim(value[0][name])]
    rows = [len(columns[name].shape) + columns[name].ragged for name in known]
    return not known or any(np.ndim(value[0][n]) > row for n, row in zip(known, rows, strict=True))


def check_array_rows(value: Mapping[str, Any], columns: Mapping[str, Column]) -> None:
    """Raise InputError for a single row in place of an array of rows."""
    for name, array in value.items():
        if name in columns and columns[name].shape and len(array) and not np.ndim(array[0]):
            shape = describe_shape(columns[name])
            raise InputError(
                f"predict: {name!r} has one number for each row, but the training data's rows have "
                f"shape {shape}: if it is one row, give a list of it"
            )


def has_sequences(value: Mapping[Any, Any], columns: Mapping[str, Column]) -> bool:
    """Return whether a mapping has lists of sequences, which only a dataset can pad."""
    ragged = (name for name in value if name in columns and columns[name].ragged)
    return any(isinstance(value[name], (list, tuple)) for name in ragged)


def has_names(value: Mapping[Any, Any], columns: Mapping[str, Column]) -> bool:
    """Return whether a mapping has the names of categories, for which the model needs codes."""
    for name, array in value.items():
        if name in columns and columns[name].classes is not None:
            array = np.asarray(array) if isinstance(array, (list, tuple)) else array
            kind = getattr(getattr(array, "dtype", None), "kind", None)
            if kind is not None and kind in "USTO":
                return True
    return False


class _Changed(Source):
    """A source whose chunks are changed before they are written."""

    def __init__(self, source: Source, change: Callable[[Table], Table]) -> None:
        self.kind = _GIVEN + source.kind
        self.whole = source.whole
        self.declaration = source.declaration
        self._source = source
        self._change = change

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        yield from map(self._change, self._source.chunks(wanted))
        self.remark = self._source.remark

    def unpacked_bytes(self, wanted: Sequence[str] | None) -> int | None:
        return self._source.unpacked_bytes(wanted)

    def fingerprint(self) -> str | None:
        return self._source.fingerprint()


def _narrow_table(table: Table) -> Table:
    """Make float64 float32; chunks of other types may be float64 only together."""
    narrowed = {}
    for name, data in table.items():
        if data.dtype == "float64":
            values = convert(data.values, data.dtype, "float32", name)
            data = replace(data, values=values, dtype="float32")
        narrowed[name] = replace(data, narrow=True)
    return narrowed


class _Like:
    """Reduces chunks to columns of the training data, converted to their types and classes.

    `made` has columns of all chunks, which `cerebro.data.raw_rows` has made of them.
    """

    def __init__(
        self, columns: Mapping[str, Column], made: Mapping[str, ColumnData], what: str
    ) -> None:
        self._columns = columns
        self._made = made
        self._what = what
        self._rows = 0  # of the chunks before

    def convert(self, table: Table) -> Table:
        rows = slice(self._rows, self._rows + next(iter(table.values())).rows)
        made = {n: replace(data, values=data.values[rows]) for n, data in self._made.items()}
        own = self._columns.keys() - made.keys()
        columns = {name: data for name, data in table.items() if name in own}
        if not columns and not made:
            raise InputError(
                f"{self._what} has the columns {', '.join(table)}, but the training data has "
                f"{', '.join(self._columns)}: give the same names"
            )
        converted = {name: self._column(name, data) for name, data in (columns | made).items()}
        self._rows = rows.stop
        return converted

    def _column(self, name: str, data: ColumnData) -> ColumnData:
        column = self._columns[name]
        data = data.as_ragged() if column.ragged and data.values.ndim > 1 else data
        data = data if column.ragged else data.as_fixed() or data  # a list of rows of one length
        if data.names is not None and column.classes is None:
            row, cell = cell_at(data, find_first_text(data.names, data.values))
            raise InputError(
                f"{self._what}: column {name!r} has names ({quote_cell(cell)} in row "
                f"{self._rows + row}), but numbers in the training data: give the same kind"
            )
        if data.names is None and column.classes is not None:
            raise InputError(
                f"{self._what}: column {name!r} has numbers, but names in the training data "
                f"({quote_cell(column.classes[0])}): give the same kind"
            )
        if data.absent is not None and not column.dtype.startswith(("float", "bfloat")):
            raise missing_value_error(name, data.absent)
        if data.names is not None and column.classes is not None:
            data = _recode_classes(name, data, column.classes)
        values = convert(data.values, data.dtype, column.dtype, name)
        return ColumnData(values, column.dtype, data.offsets, data.names, data.ordered)


def _recode_classes(name: str, data: ColumnData, classes: Sequence[str]) -> ColumnData:
    """Return a category column with the training data's codes for its names.

    Names that the training data lacks get further codes: it is an error only if a model reads the
    column; see `cerebro.data.validation.find_unfit_columns`.
    """
    codes = check_codes(name, data)
    names = list(data.names or ())
    place = {label: code for code, label in enumerate(classes)}
    used = np.bincount(codes.reshape(-1), minlength=len(names)) > 0
    table = [place.setdefault(names[i], len(place)) if used[i] else -1 for i in range(len(names))]
    values = np.array(table, np.int64)[codes]
    return ColumnData(values, "int64", data.offsets, list(place), ordered=True)
