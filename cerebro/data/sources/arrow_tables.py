"""Arrow tables, record batches and their readers, datasets, ``.arrow`` and ``.parquet`` files.

Lists become ragged columns, fixed-size lists and fixed-shape tensors become columns of fixed shape,
and strings and dictionaries of strings become categories; a dictionary declares them, in its order.
The inner lists of lists must have the same length. Any object with Arrow's C stream interface can
be read too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from cerebro.data.columns import (
    ColumnData,
    concatenate,
    missing_value_error,
    offsets_of,
    too_ragged_error,
)
from cerebro.data.dtypes import Array
from cerebro.data.sources.base import FileSource, Source, Table, choose_columns, file_fingerprint
from cerebro.errors import InputError
from cerebro.machine.imports import import_extra

OLDEST_ARROW = 15
BATCH_ROWS = 16_384
_VECTOR = ["type", "size", "indices", "values"]  # of Spark's ML library: the fields of a vector

RowOf = Callable[[int], int]  # the row of the source with the element at a place, for errors


def import_arrow(what: str) -> None:
    """Raise InputError if pyarrow is missing, or so old that it unpickles data from files."""
    pa = import_extra("pyarrow", "parquet", f"{what} needs pyarrow")
    if int(pa.__version__.partition(".")[0]) < OLDEST_ARROW:
        raise InputError(
            f"{what} needs pyarrow {OLDEST_ARROW} or later, not {pa.__version__}, which unpickles "
            "extension types: pip install -U pyarrow"
        )


class ArrowSource(Source):
    """Record batches from a table in memory or from a stream."""

    kind = "arrow"

    def __init__(self, source: Any) -> None:
        import_arrow("an Arrow source")
        import pyarrow as pa

        self.whole = isinstance(source, (pa.Table, pa.RecordBatch))
        self.declaration = "table[{}].dictionary_encode()" if self.whole else ""
        self._source = source

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        import pyarrow as pa

        source = self._source
        if isinstance(source, (pa.Table, pa.RecordBatch)):
            yield {
                name: whole_column(name, source.column(name), self.binary)
                for name in choose_columns(source.schema.names, wanted)
            }
            return
        if hasattr(source, "scanner"):
            source = source.scanner()
        if hasattr(source, "to_reader"):
            source = source.to_reader()
        if not isinstance(source, pa.RecordBatchReader):
            try:
                source = pa.RecordBatchReader.from_stream(source)
            except (pa.ArrowInvalid, TypeError) as error:
                raise InputError(f"the source does not give an Arrow table: {error}") from None
        yield from read_tables(source, wanted, self.binary)


class ArrowFileSource(FileSource):
    """An ``.arrow`` or ``.feather`` file, in Arrow's file or stream format."""

    kind = "arrow file"

    def __init__(self, path: Path) -> None:
        import_arrow(f"'{path}'")
        super().__init__(path)

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as file:
            try:
                yield from read_tables(_read_batches(file), wanted, self.binary)
            except pa.ArrowInvalid as error:
                raise InputError(
                    f"'{self.path}' is not an Arrow file or is damaged: {error}"
                ) from None


def read_tables(
    batches: Iterable[Any], wanted: Sequence[str] | None, binary: Collection[str]
) -> Iterator[Table]:
    first = 0
    for batch in batches:
        yield {
            name: column_of(name, batch.column(name), partial(add, first), binary)
            for name in choose_columns(batch.schema.names, wanted)
        }
        first += batch.num_rows


def _read_batches(file: Any) -> Iterator[Any]:
    import pyarrow as pa

    if file.read(6) == b"ARROW1":
        reader = pa.ipc.open_file(file)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
    else:
        file.seek(0)
        yield from pa.ipc.open_stream(file)


def whole_column(name: str, array: Any, binary: Collection[str] = ()) -> ColumnData:
    parts, first = [], 0
    for chunk in getattr(array, "chunks", [array]):
        if len(chunk):
            parts.append(column_of(name, chunk, partial(add, first), binary))
        first += len(chunk)
    if not parts:
        raise InputError("the source has no rows: give at least one")
    return concatenate(name, parts)


def column_of(name: str, array: Any, row_of: RowOf, binary: Collection[str] = ()) -> ColumnData:
    """Return an Arrow array as a column; `binary` names columns that may hold binary values."""
    import pyarrow as pa

    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        if array.null_count:
            raise missing_value_error(name, row_of(_first_null(array)))
        values = np.ascontiguousarray(array.to_numpy_ndarray())
        return ColumnData(values, values.dtype.name)
    if isinstance(kind, pa.BaseExtensionType):
        return column_of(name, array.storage, row_of)
    if pa.types.is_dictionary(kind) and not _is_text(kind.value_type):
        return column_of(name, array.dictionary_decode(), row_of)
    if array.null_count and not pa.types.is_floating(kind):  # nulls among floats become NaN
        raise missing_value_error(name, row_of(_first_null(array)))
    if pa.types.is_dictionary(kind):
        return _dictionary(name, array, row_of)
    if pa.types.is_fixed_size_list(kind):
        return _lists(name, array, row_of, kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(name, array, row_of)
    if _is_text(kind):
        return replace(_dictionary(name, array.dictionary_encode(), row_of), ordered=False)
    if _is_binary(kind) and name in binary:
        return _bytes(array)
    if pa.types.is_struct(kind) and [kind[i].name for i in range(kind.num_fields)] == _VECTOR:
        raise InputError(
            f"column {name!r} holds vectors of Spark ML: convert them with "
            f"pyspark.ml.functions.vector_to_array({name!r})"
        )
    if _is_binary(kind):
        raise InputError(
            f"column {name!r} has Arrow's type {kind}: say what the bytes hold, as in "
            f'dtypes={{{name!r}: ("float32", (40,))}}, or leave it out with columns=[...]'
        )
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise InputError(
            f"column {name!r} has Arrow's type {kind}: convert it to numbers or strings first, or "
            "leave it out with columns=[...]"
        )
    values = array.to_numpy(zero_copy_only=False)
    return ColumnData(values, values.dtype.name)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    views = getattr(pa.types, "is_string_view", lambda _: False)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or views(kind))


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    views = getattr(pa.types, "is_binary_view", lambda _: False)
    plain = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or views(kind)
    return bool(plain or pa.types.is_fixed_size_binary(kind))


def _bytes(array: Any) -> ColumnData:
    """Return binary values as rows of uint8, ragged if they differ in length."""
    import pyarrow as pa

    array = array.cast(pa.large_binary())
    _, offsets, buffer = array.buffers()
    ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(buffer or b"", np.uint8)
    flat = data[ends[0] : ends[-1]] if len(ends) else data[:0]
    ragged = ColumnData(flat, "uint8", offsets_of(np.diff(ends)), binary=True)
    if not len(flat):  # empty rows have no length
        return ragged
    return ragged.as_fixed() or ragged


def _first_null(array: Any) -> int:
    return int(array.is_null().to_numpy(zero_copy_only=False).argmax())


def _dictionary(name: str, array: Any, row_of: RowOf) -> ColumnData:
    """Return a column of a dictionary's categories; it may have a null, or a name twice."""
    labels = array.dictionary.to_pylist()
    names = [label for label in dict.fromkeys(labels) if label is not None]
    codes = array.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    if len(names) != len(labels):
        numbers = {label: code for code, label in enumerate(names)}
        codes = np.array([numbers.get(label, -1) for label in labels], np.int64)[codes]
        if (codes < 0).any():
            raise missing_value_error(name, row_of(int((codes < 0).argmax())))
    return ColumnData(codes, "int64", None, names, ordered=True)


def _lists(name: str, array: Any, row_of: RowOf, size: int | None = None) -> ColumnData:
    """Return lists as a ragged column or, if their type has a size, as one of fixed shape."""
    lengths: Array = (
        np.diff(array.offsets.to_numpy()) if size is None else np.full(len(array), size)
    )
    ends = np.cumsum(lengths)

    def row_of_element(place: int) -> int:
        return row_of(int(np.searchsorted(ends, place, side="right")))

    elements = column_of(name, array.flatten(), row_of_element)
    fixed = elements.as_fixed() if elements.rows else replace(elements, offsets=None)
    if fixed is None:
        assert elements.offsets is not None
        inner = np.diff(elements.offsets)
        raise too_ragged_error(name, row_of_element(int((inner != inner[0]).argmax())))
    if size is None:
        return replace(fixed, offsets=offsets_of(lengths))
    shape = (len(array), size, *fixed.row_shape)
    return replace(fixed, values=fixed.values.reshape(shape))


class ParquetSource(Source):
    """A ``.parquet`` file, or a folder with the parts of a table; columns have Arrow's types.

    The files are read in the order of their names, except names that begin with ``.`` or ``_``,
    which engines use for their own purposes.
    """

    kind = "parquet"

    def __init__(self, path: Path) -> None:
        import_arrow(f"'{path}'")
        self.paths = _list_parts(path) if path.is_dir() else [path]

    def fingerprint(self) -> str:
        return " ".join(file_fingerprint(path) for path in self.paths)

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        batches = (batch for path in self.paths for batch in _parquet_batches(path, wanted))
        return read_tables(batches, wanted, self.binary)


def _list_parts(folder: Path) -> list[Path]:
    entries = sorted(path for path in folder.iterdir() if path.name[0] not in "._")
    partitions = [path.name for path in entries if path.is_dir()]
    if partitions:
        raise InputError(
            f"'{folder}' has the folder '{partitions[0]}': partitions are not read; give "
            f"pyarrow.dataset.dataset('{folder}', partitioning='hive')"
        )
    parts = [path for path in entries if path.suffix.lower() == ".parquet"]
    if not parts:
        raise InputError(
            f"'{folder}' is a folder without .parquet files: for class folders use "
            f"cerebro.images('{folder}')"
        )
    return parts


def _parquet_batches(path: Path, wanted: Sequence[str] | None) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = choose_columns(dict.fromkeys(file.schema_arrow.names), wanted)
            yield from file.iter_batches(BATCH_ROWS, columns=names)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InputError(f"'{path}' is not a Parquet file or is damaged: {error}") from None
