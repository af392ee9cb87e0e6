"""The interface between importers and the writer."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cerebro._core as _core
from cerebro.data.columns import ColumnData
from cerebro.errors import InputError

Table = dict[str, ColumnData]


class Source:
    """Rows in columns, read whole or in chunks.

    Subclasses set `kind` (the source's kind in the manifest) and implement `chunks`. A source whose
    columns are in memory or memory-mapped sets `whole` and yields one chunk. The chunks of other
    sources are spooled to temporary files, so these sources may be larger than memory.
    """

    kind = "source"
    whole = False
    binary: Collection[str] = ()
    """The columns whose binary values ``dtypes=`` describes; in other columns they are an error."""
    text: Collection[str] = ()
    """The columns that ``dtypes=`` reads as text, in a source whose cells have no types."""
    declaration = ""
    """For errors: the user's code that declares a column of text as categories; ``{}``: the name's
    ``repr``. Empty if the source's type cannot."""
    remark: str | None = None  # a warning about the rows that were read

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        """Yield tables that all have the columns `wanted` (None: all columns of the source)."""
        raise NotImplementedError

    def unpacked_bytes(self, wanted: Sequence[str] | None) -> int | None:
        """Return the bytes to spool, if known: a compressed file may expand a thousandfold."""
        return None

    def fingerprint(self) -> str | None:
        """Return a cheap string that changes with the rows, or None; `whole` rows are hashed."""
        return None


class FileSource(Source):
    """A file, which is compared by its content."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fingerprint(self) -> str:
        return file_fingerprint(self.path)


def choose_columns(
    available: Iterable[str], wanted: Sequence[str] | None, where: str = "the source"
) -> list[str]:
    """Return `wanted`, or all names if it is None; raise InputError if one is missing or twice."""
    names = list(available)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{where} has two columns named {twice!r}: rename one")
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"column name {name!r} is not a string: rename the column")
    if wanted is None:
        return names
    for name in wanted:
        if name not in names:
            raise InputError(f"no column {name!r} in the source: it has {', '.join(names)}")
    return list(wanted)


def check_lengths(rows: Mapping[str, int]) -> None:
    """Raise InputError unless all columns have the same number of rows."""
    if len(set(rows.values())) > 1:
        text = ", ".join(f"{name!r} has {count}" for name, count in rows.items())
        raise InputError(f"columns differ in length: {text} rows; give all the same number")


def file_fingerprint(path: Path) -> str:
    """Return the size and the XXH3-128 of a file as one string."""
    size = path.stat().st_size
    digest = _core.xxh3_128(np.memmap(path, np.uint8, "r") if size else b"")
    return f"file:{size}:{digest}"


def is_instance(source: Any, module: str, name: str) -> bool:
    """Return whether `source` is an instance of this class, without importing its package."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(source, kind)
