"""What an importer offers to the writer."""

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

    Subclasses set `kind` (a word for the manifest) and give `chunks`. A source whose columns lie in
    memory or are mapped sets `whole` and gives one chunk; the chunks of others are spooled to
    temporary files, so that the source may be larger than memory.
    """

    kind = "source"
    whole = False

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        """Yield tables with the same columns; `wanted` are the needed ones (None: all)."""
        raise NotImplementedError

    def unpacked_bytes(self, wanted: Sequence[str] | None) -> int | None:
        """How much there is to read in all, where a source that may be small knows that it is much.

        Asked before anything is spooled: a compressed file may be a thousand times as large.
        """
        return None

    def fingerprint(self) -> str | None:
        """A text that changes when the rows do, cheap to make; None where there is none.

        Not asked of `whole` sources: their columns are hashed.
        """
        return None

    def remark(self) -> str | None:
        """What the user should know of the rows that were read; None: nothing."""
        return None


def choose(available: Iterable[str], wanted: Sequence[str] | None) -> list[str]:
    """The wanted names, all if None; InputError for one that is not there."""
    names = list(available)
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"column name {name!r} is no string: rename the column")
    if wanted is None:
        return names
    for name in wanted:
        if name not in names:
            raise InputError(f"no column {name!r} in the source: it has {', '.join(names)}")
    return list(wanted)


def file_fingerprint(path: Path) -> str:
    """Size and XXH3-128 of a file."""
    size = path.stat().st_size
    digest = _core.xxh3_128(np.memmap(path, np.uint8, "r") if size else b"")
    return f"file:{size}:{digest}"
