"""``.npz`` files: every member is a column. Members are streamed, compressed or not."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cerebro.data.columns import ColumnData, from_array
from cerebro.data.dtypes import Array
from cerebro.data.sources.base import Source, Table, choose, file_fingerprint
from cerebro.errors import InputError

CHUNK_BYTES = 16 << 20


class NpzSource(Source):
    """The members are read side by side, so that columns can be larger than memory."""

    kind = "npz"

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        return file_fingerprint(self.path)

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                files = {name.removesuffix(".npy"): name for name in archive.namelist()}
                members = {
                    name: _Member(name, archive.open(files[name])) for name in choose(files, wanted)
                }
                yield from _side_by_side(members)
        except (zipfile.BadZipFile, EOFError, zlib.error) as error:
            raise InputError(f"'{self.path}' is no npz file or is damaged: {error}") from None


def _side_by_side(members: dict[str, _Member]) -> Iterator[Table]:
    counts = {name: member.rows for name, member in members.items()}
    if len(set(counts.values())) > 1:
        text = ", ".join(f"{name!r} has {count}" for name, count in counts.items())
        raise InputError(f"columns differ in length: {text} rows; give all the same number")
    if not members:
        return
    rows = next(iter(counts.values()))
    step = max(1, CHUNK_BYTES // max(1, *(member.row_bytes for member in members.values())))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        yield {name: member.read(count) for name, member in members.items()}


class _Member:
    """One array of the archive, read from front to back."""

    def __init__(self, name: str, stream: Any) -> None:
        self.name = name
        self._stream = stream
        try:
            major, _ = np.lib.format.read_magic(stream)
            header = (
                np.lib.format.read_array_header_1_0
                if major == 1
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, self._dtype = header(stream)
        except ValueError as error:
            raise InputError(f"column {name!r} is no .npy file or is damaged: {error}") from None
        if self._dtype.hasobject:
            raise InputError(
                f"column {name!r} has dtype object, which would have to be unpickled: save it with "
                "a numeric or string dtype, or leave it out with columns=[...]"
            )
        if not shape:
            raise InputError(f"column {name!r} is a single value: give one value for each row")
        self.rows: int = shape[0]
        self._shape = shape[1:]
        self.row_bytes = self._dtype.itemsize * int(np.prod(self._shape, dtype=np.int64))
        self._whole: Array | None = None
        if fortran and len(shape) > 1:  # rows do not lie together: no way but to read all
            count = self.rows * self.row_bytes
            self._whole = self._array(count).reshape(shape[::-1]).transpose()
        self._next = 0

    def read(self, rows: int) -> ColumnData:
        self._next += rows
        if self._whole is not None:
            return from_array(self.name, self._whole[self._next - rows : self._next])
        array = self._array(rows * self.row_bytes)
        return from_array(self.name, array.reshape(rows, *self._shape))

    def _array(self, count: int) -> Array:
        content = self._stream.read(count)
        if len(content) != count:
            raise InputError(f"column {self.name!r}: the file ends early; it was cut or damaged")
        return np.frombuffer(content, self._dtype)
