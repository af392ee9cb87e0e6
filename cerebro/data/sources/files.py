"""``.csv`` files with a header line, and ``.npz`` files.

All cells of a CSV column determine its type: int64 for integers, float64 for other numbers, bool
for ``true`` and ``false``, categories for anything else, and for all cells of a column that
``dtypes=`` makes "str". The file is therefore read twice, first for the types. An empty cell is a
missing value. Python's own parser is used, so that the result does not depend on the installed
packages.

Each member of an ``.npz`` file is a column and is streamed, whether it is compressed or not.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import math
import struct
import tokenize
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.lib import format as npy

from cerebro.data.columns import ColumnData, from_array, from_text, missing_value_error
from cerebro.data.dtypes import Array
from cerebro.data.manifest import MAX_BYTES, MAX_ROWS
from cerebro.data.sources.base import FileSource, Table, check_lengths, choose_columns
from cerebro.errors import InputError, text_of

try:
    from lzma import LZMAError
except ImportError:  # Python built without it; zipfile then raises the error itself

    class LZMAError(Exception):  # type: ignore[no-redef]
        """Never raised."""


CHUNK_ROWS = 16_384
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False,
             "FALSE": False}  # fmt: skip

Cells = Sequence[str]


class CsvSource(FileSource):
    """A file of comma-separated values; tab-separated if the name ends in ``.tsv``."""

    kind = "csv"

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        types: dict[str, str | None] = dict.fromkeys(self.text, "text")
        for _, columns in self._read(wanted):
            for name, cells in columns.items():
                types[name] = _widen_type(types.get(name), cells)
        for first, columns in self._read(wanted):
            yield {
                name: _make_column(name, cells, types[name], first)
                for name, cells in columns.items()
            }

    def _read(self, wanted: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Cells]]]:
        """Yield, for each chunk, the number of its first row and its cells by column."""
        with self.path.open(newline="", encoding="utf-8-sig") as file:
            delimiter = "\t" if self.path.suffix.lower() == ".tsv" else ","
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            try:
                header = next(reader, None)
                if header is None:
                    raise InputError(f"'{self.path}' is empty: it needs a line of column names")
                names = choose_columns(header, wanted, f"'{self.path}'")
                places = {name: header.index(name) for name in names}
                first = 0
                lines = self._read_rows(reader, len(header))
                while rows := list(islice(lines, CHUNK_ROWS)):
                    cells = list(zip(*rows, strict=True))
                    self._refuse_nul(header, cells)
                    yield first, {name: cells[place] for name, place in places.items()}
                    first += len(rows)
            except csv.Error as error:
                line = reader.line_num
                raise InputError(f"'{self.path}', line {line}: {error}") from None
            except UnicodeDecodeError as error:
                raise InputError(f"'{self.path}' is not UTF-8: {error}; convert it") from None

    def _read_rows(self, reader: Iterator[list[str]], width: int) -> Iterator[list[str]]:
        for cells in filter(None, reader):  # without empty lines
            if len(cells) != width:
                line = reader.line_num  # type: ignore[attr-defined]
                raise InputError(
                    f"'{self.path}', line {line} has {len(cells)} cells, but the header has "
                    f"{width}: quote cells that contain a comma"
                )
            yield cells

    def _refuse_nul(self, header: Sequence[str], columns: Sequence[Cells]) -> None:
        """Raise InputError for a NUL character, which only new Python versions can read."""
        for name, cells in zip(header, columns, strict=True):
            if "\0" in name or "\0" in "".join(cells):
                raise InputError(
                    f"'{self.path}', column {name!r} has a NUL character: is it a CSV file?"
                )


def _widen_type(known: str | None, cells: Cells) -> str | None:
    """Return the narrowest type, at least `known`, that fits all cells; None if all are empty."""
    filled = [cell for cell in cells if cell] if "" in cells else cells
    if not filled:
        return known
    if known in (None, "bool") and all(cell in _BOOLEANS for cell in filled):
        return "bool"
    if known == "bool":  # true and 1 have only text in common
        return "text"
    if known not in ("float64", "text") and _parses(filled, int):
        return "int64"
    return "float64" if known != "text" and _parses(filled, float) else "text"


def _parses(cells: Cells, kind: type[int] | type[float]) -> bool:
    if "_" in "".join(cells):  # 1_000 is a number only in Python
        return False
    try:
        deque(map(kind, cells), maxlen=0)
    except ValueError:
        return False
    return True


def _make_column(name: str, cells: Cells, kind: str | None, first: int) -> ColumnData:
    if "" in cells:
        if kind != "float64":
            raise missing_value_error(name, first + cells.index(""))
        cells = [cell or "nan" for cell in cells]
    if kind == "text":
        return from_text(name, cells, first)
    if kind == "bool":
        return ColumnData(np.array([_BOOLEANS[cell] for cell in cells]), "bool")
    if kind == "float64":
        return ColumnData(np.fromiter(map(float, cells), np.float64, len(cells)), "float64")
    try:
        return ColumnData(np.fromiter(map(int, cells), np.int64, len(cells)), "int64")
    except OverflowError:
        raise InputError(
            f"column {name!r} has integers too large for int64: leave it out with columns=[...]"
        ) from None


# --- .npz files ---------------------------------------------------------------------------------

CHUNK_BYTES = 16 << 20

# Raised by zipfile and its decompressors for damaged or encrypted archives, unknown compression
# and impossible layouts.
_UNREADABLE = (
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    LZMAError,
    struct.error,
    ValueError,
    OverflowError,
    RuntimeError,
)

# Raised by Python's parser for a header that is not a literal, or too deep or large to parse.
_NO_HEADER = (ValueError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError)


class NpzSource(FileSource):
    """An ``.npz`` file whose members are read in parallel, so columns may be larger than memory."""

    kind = "npz"

    def unpacked_bytes(self, wanted: Sequence[str] | None) -> int:
        with self._explain_errors(), zipfile.ZipFile(self.path) as archive:
            members = self._list_members(archive)
            return sum(members[name].file_size for name in choose_columns(members, wanted))

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        with self._explain_errors(), zipfile.ZipFile(self.path) as archive:
            infos = self._list_members(archive)
            members = {
                name: _Member(name, archive.open(infos[name]), infos[name].file_size)
                for name in choose_columns(infos, wanted)
            }
            yield from _read_side_by_side(members)

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn errors of a damaged archive into an InputError that names it."""
        try:
            yield
        except InputError:
            raise
        except (*_UNREADABLE, OSError) as error:
            # bz2's errors about its data have no number; EINVAL: an offset before the file's start.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            raise InputError(
                f"'{self.path}' is not an npz file or is damaged: {text_of(error)}"
            ) from None

    def _list_members(self, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
        infos = archive.infolist()
        names = [info.filename.removesuffix(".npy") for info in infos]
        return dict(zip(choose_columns(names, None, f"'{self.path}'"), infos, strict=True))


def _read_side_by_side(members: dict[str, _Member]) -> Iterator[Table]:
    check_lengths({name: member.rows for name, member in members.items()})
    if not members:
        return
    rows = next(iter(members.values())).rows
    step = max(1, CHUNK_BYTES // max(1, *(member.row_bytes for member in members.values())))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        yield {name: member.read(count) for name, member in members.items()}


class _Member:
    """One array of the archive, read from front to back.

    The archive states how many bytes a member has, and the member's header how many it needs. The
    member is unpacked only if both numbers agree.
    """

    def __init__(self, name: str, stream: Any, file_bytes: int) -> None:
        self.name = name
        self._stream = stream
        shape, fortran, self._dtype = self._read_header()
        self._check_dtype()
        if not shape:
            raise InputError(f"column {name!r} is a single value: give one value for each row")
        # Sizes of 0 count as 1, so that the product of any subset fits as well.
        extent = math.prod(max(1, size) for size in shape) * self._dtype.itemsize
        if min(shape) < 0 or extent > MAX_BYTES or shape[0] > MAX_ROWS:
            raise InputError(f"column {name!r} has a header with the impossible shape {shape}")
        self.rows: int = shape[0]
        self._shape = shape[1:]
        self.row_bytes = self._dtype.itemsize * math.prod(self._shape)
        held = file_bytes - stream.tell()
        if held != self.rows * self.row_bytes:
            raise InputError(
                f"column {name!r} has {held} bytes, but its header gives "
                f"{self.rows * self.row_bytes}: the file is truncated or damaged"
            )
        self._rest: Array | None = None
        if fortran and len(shape) > 1:  # rows are not contiguous: read the whole array
            count = self.rows * self.row_bytes
            self._rest = self._array(count).reshape(shape[::-1]).transpose()

    def _read_header(self) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        """Return shape, order and type. The header is a Python literal, which is never executed."""
        try:
            major, _ = npy.read_magic(self._stream)
            read = npy.read_array_header_1_0 if major == 1 else npy.read_array_header_2_0
            shape, fortran, dtype = read(self._stream)
        except _NO_HEADER as error:
            raise InputError(
                f"column {self.name!r} is not a .npy file or is damaged: {text_of(error)}"
            ) from None
        return tuple(int(size) for size in shape), fortran, dtype

    def _check_dtype(self) -> None:
        if self._dtype.hasobject:
            raise InputError(
                f"column {self.name!r} has dtype object, which would have to be unpickled: save it "
                "with a numeric or string dtype, or leave it out with columns=[...]"
            )
        if self._dtype.itemsize == 0 or self._dtype.subdtype is not None:
            raise InputError(
                f"column {self.name!r} has dtype {self._dtype}: save it with a numeric or string "
                "dtype, or leave it out with columns=[...]"
            )

    def read(self, rows: int) -> ColumnData:
        if self._rest is None:
            array = self._array(rows * self.row_bytes).reshape(rows, *self._shape)
        else:
            array, self._rest = self._rest[:rows], self._rest[rows:]
        return from_array(self.name, array)

    def _array(self, count: int) -> Array:
        content = self._stream.read(count)
        if len(content) != count:
            raise InputError(f"column {self.name!r}: the file ends early: truncated or damaged")
        return np.frombuffer(content, self._dtype)
