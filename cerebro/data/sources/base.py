"""The interface between importers and the writer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

import cerebro._core as _core
from cerebro.data.columns import ColumnData
from cerebro.errors import InputError

Table = dict[str, ColumnData]


class Source:
    """Rows in columns, read whole or in chunks.

    Subclasses set `kind` (a word for the manifest) and implement `chunks`. A source whose columns
    are in memory or memory-mapped sets `whole` and yields one chunk. The chunks of others are
    spooled to temporary files, so that the source may be larger than memory.
    """

    kind = "source"
    whole = False

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        """Yield tables with the same columns; `wanted` lists the needed ones (None: all)."""
        raise NotImplementedError

    def unpacked_bytes(self, wanted: Sequence[str] | None) -> int | None:
        """Return the size of the data to read, or None if the source does not know it.

        Called before anything is spooled: a compressed file may expand a thousandfold.
        """
        return None

    def fingerprint(self) -> str | None:
        """Return a cheap string that changes when the rows do, or None.

        Not called for `whole` sources: their columns are hashed.
        """
        return None

    def remark(self) -> str | None:
        """Return a warning about the rows that were read, or None."""
        return None


def choose(available: Iterable[str], wanted: Sequence[str] | None) -> list[str]:
    """Return the wanted names, or all if None; raise InputError for a missing one."""
    names = list(available)
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"column name {name!r} is not a string: rename the column")
    if wanted is None:
        return names
    for name in wanted:
        if name not in names:
            raise InputError(f"no column {name!r} in the source: it has {', '.join(names)}")
    return list(wanted)


def file_fingerprint(path: Path) -> str:
    """Return the size and XXH3-128 of a file."""
    size = path.stat().st_size
    digest = _core.xxh3_128(np.memmap(path, np.uint8, "r") if size else b"")
    return f"file:{size}:{digest}"
