"""Write rows passed in place of a dataset: arrays, tables and PyTorch datasets.

Training data is written as `shard` writes it, except that 64-bit floats become float32, the type
that networks use. Validation and evaluation data are converted to the training data's types and
classes, and get its transforms.
"""

from __future__ import annotations

import contextlib
import os
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
from cerebro.data.raw_rows import make_changed
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
        names = like.columns.keys() if wanted is None else wanted
        made, rows = make_changed(rows, like, what, names)
        change = _Like(like, names, made, what).convert
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
    """Reduces chunks to the wanted columns of the training data, with its types and classes.

    `made` has columns of all chunks, which `cerebro.data.raw_rows` has made of them.
    """

    def __init__(
        self, train: Dataset, wanted: Collection[str], made: Mapping[str, ColumnData], what: str
    ) -> None:
        self._columns = train.columns
        self._wanted = [name for name in train.columns if name in wanted]
        self._made = made
        self._what = what
        self._rows = 0  # of the chunks before

    def convert(self, table: Table) -> Table:
        rows = slice(self._rows, self._rows + next(iter(table.values())).rows)
        made = {n: replace(data, values=data.values[rows]) for n, data in self._made.items()}
        own = [name for name in self._wanted if name not in made]
        columns = {name: data for name, data in table.items() if name in own}
        if not columns and not made:
            unread = len(self._wanted) < len(self._columns)
            read = f", of which the model reads {', '.join(self._wanted)}" if unread else ""
            raise InputError(
                f"{self._what} has the columns {', '.join(table)}, but the training data has "
                f"{', '.join(self._columns)}{read}: give the same names"
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
