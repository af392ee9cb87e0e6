"""Arrow tables, record batches and their readers, datasets, ``.arrow`` and ``.parquet`` files.

Lists become ragged columns, fixed-size lists and fixed-shape tensors fixed columns, strings and
dictionaries of strings categories. Any object with Arrow's C stream interface is read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cerebro.data.columns import ColumnData, concatenate, missing, offsets_of
from cerebro.data.dtypes import Array
from cerebro.data.sources.base import Source, Table, choose, file_fingerprint
from cerebro.errors import InputError
from cerebro.machine.imports import import_extra

OLDEST_ARROW = 15


def import_arrow(what: str) -> None:
    """Raise InputError if pyarrow is missing, or so old that it unpickles data from files."""
    pa = import_extra("pyarrow", "parquet", f"{what} needs pyarrow")
    if int(pa.__version__.partition(".")[0]) < OLDEST_ARROW:
        raise InputError(
            f"{what} needs pyarrow {OLDEST_ARROW} or later, not {pa.__version__}, which unpickles "
            "extension types: pip install -U pyarrow"
        )


class ArrowSource(Source):
    """Record batches, from a table in memory or a stream."""

    kind = "arrow"

    def __init__(self, source: Any) -> None:
        import_arrow("an Arrow source")
        import pyarrow as pa

        self.whole = isinstance(source, (pa.Table, pa.RecordBatch))
        self._source = source

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        import pyarrow as pa

        source = self._source
        if isinstance(source, (pa.Table, pa.RecordBatch)):
            yield whole_table(source, wanted)
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
        yield from _tables(source, wanted)


class ArrowFileSource(Source):
    """An ``.arrow`` or ``.feather`` file, in Arrow's file or stream format."""

    kind = "arrow file"

    def __init__(self, path: Path) -> None:
        import_arrow(f"'{path}'")
        self.path = path

    def fingerprint(self) -> str:
        return file_fingerprint(self.path)

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as file:
            try:
                yield from _tables(_batches(file), wanted)
            except pa.ArrowInvalid as error:
                raise InputError(
                    f"'{self.path}' is not an Arrow file or is damaged: {error}"
                ) from None


def _tables(batches: Iterable[Any], wanted: Sequence[str] | None) -> Iterator[Table]:
    first = 0
    for batch in batches:
        yield table_of(batch, wanted, first)
        first += batch.num_rows


def _batches(file: Any) -> Iterator[Any]:
    import pyarrow as pa

    if file.read(6) == b"ARROW1":
        reader = pa.ipc.open_file(file)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
    else:
        file.seek(0)
        yield from pa.ipc.open_stream(file)


def whole_table(table: Any, wanted: Sequence[str] | None) -> Table:
    """Return a table in memory as one chunk, without copying columns that are in one piece."""
    return {name: whole_column(name, table.column(name)) for name in _names(table, wanted)}


def whole_column(name: str, array: Any) -> ColumnData:
    """Return an Arrow array or chunked array as a column."""
    parts, first = [], 0
    for chunk in getattr(array, "chunks", [array]):
        if len(chunk):
            parts.append(column_of(name, chunk, first))
        first += len(chunk)
    if not parts:
        raise InputError("the source has no rows: give at least one")
    return concatenate(name, parts)


def table_of(batch: Any, wanted: Sequence[str] | None, first_row: int = 0) -> Table:
    """Return a record batch as a chunk."""
    return {name: column_of(name, batch.column(name), first_row) for name in _names(batch, wanted)}


def _names(table: Any, wanted: Sequence[str] | None) -> list[str]:
    names = table.schema.names
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"the source has two columns named {twice!r}: rename one")
    return choose(names, wanted)


def column_of(name: str, array: Any, first_row: int = 0) -> ColumnData:
    """Return an Arrow array as a column.

    Raises InputError for types that are not numbers, and for nulls except in floats.
    """
    import pyarrow as pa

    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensors(name, array, first_row)
    if isinstance(kind, pa.BaseExtensionType):
        return column_of(name, array.storage, first_row)
    if pa.types.is_dictionary(kind) and not _is_text(kind.value_type):
        return column_of(name, array.dictionary_decode(), first_row)
    if array.null_count and not pa.types.is_floating(kind):  # nulls among floats become NaN
        raise missing(name, first_row + _first_null(array))
    if pa.types.is_dictionary(kind):
        return _dictionary(name, array, first_row)
    if pa.types.is_fixed_size_list(kind):
        return _fixed_lists(name, array, first_row)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(name, array, first_row)
    if _is_text(kind):
        return _dictionary(name, array.dictionary_encode(), first_row)
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


def _first_null(array: Any) -> int:
    return int(array.is_null().to_numpy(zero_copy_only=False).argmax())


def _dictionary(name: str, array: Any, first_row: int) -> ColumnData:
    names = array.dictionary
    if names.null_count:
        plain = array.dictionary_decode()
        if plain.null_count:
            raise missing(name, first_row + _first_null(plain))
        return _dictionary(name, plain.dictionary_encode(), first_row)
    codes = array.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return ColumnData(codes, "int64", None, names.to_pylist())


def _elements(name: str, lists: Any, lengths: Array, first_row: int) -> ColumnData:
    """Return the elements of lists; the error for a missing one names its row."""
    import pyarrow as pa

    flat = lists.flatten()
    if flat.null_count and not pa.types.is_floating(flat.type):
        row = np.searchsorted(np.cumsum(lengths), _first_null(flat), side="right")
        raise missing(name, first_row + int(row))
    return column_of(name, flat)


def _lists(name: str, array: Any, first_row: int) -> ColumnData:
    lengths: Array = np.diff(array.offsets.to_numpy())
    elements = _elements(name, array, lengths, first_row)
    if elements.offsets is not None:
        raise InputError(
            f"column {name!r} is ragged in more than one dimension: only the first may vary"
        )
    return ColumnData(
        elements.values, elements.dtype, offsets_of(lengths), elements.names, elements.ordered
    )


def _fixed_lists(name: str, array: Any, first_row: int) -> ColumnData:
    lengths = np.full(len(array), array.type.list_size)
    elements = _elements(name, array, lengths, first_row)
    if elements.offsets is not None:
        raise InputError(f"column {name!r} has ragged lists within fixed ones: flatten it first")
    shape = (len(array), array.type.list_size, *elements.row_shape)
    return ColumnData(
        elements.values.reshape(shape), elements.dtype, None, elements.names, elements.ordered
    )


def _tensors(name: str, array: Any, first_row: int) -> ColumnData:
    if array.null_count:
        raise missing(name, first_row + _first_null(array))
    values = array.to_numpy_ndarray()
    return ColumnData(np.ascontiguousarray(values), values.dtype.name)


BATCH_ROWS = 16_384


class ParquetSource(Source):
    """A ``.parquet`` file; types are Arrow's."""

    kind = "parquet"

    def __init__(self, path: Path) -> None:
        import_arrow(f"'{path}'")
        self.path = path

    def fingerprint(self) -> str:
        return file_fingerprint(self.path)

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path) as file:
                names = choose(file.schema_arrow.names, wanted)
                first = 0
                for batch in file.iter_batches(BATCH_ROWS, columns=names):
                    yield table_of(batch, names, first)
                    first += batch.num_rows
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InputError(
                f"'{self.path}' is not a Parquet file or is damaged: {error}"
            ) from None
