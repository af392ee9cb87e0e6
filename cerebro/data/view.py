"""A view: some rows of a dataset, and how batches draw and transform them.

`cerebro.data.Dataset` is what users see of a view. The rest of the library asks the view itself,
and its shards, for rows, sizes and checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cerebro._core as _core
from cerebro.arguments import check_whole_number
from cerebro.data import rows as splitting
from cerebro.data.dtypes import Array
from cerebro.data.manifest import Column, checksum_of
from cerebro.data.order import Sampling
from cerebro.data.rows import (
    Part,
    Rows,
    covers,
    part_from_json,
    part_index,
    part_to_json,
    take_rows,
)
from cerebro.data.shards import Shards
from cerebro.errors import InputError
from cerebro.report import format as fmt
from cerebro.transforms import Transform, transform_from_json

_PIECE_ROWS = 65_536
_SHOWN_COLUMNS = 20


@dataclass(frozen=True, eq=False)
class View:
    """Some rows of each shard of a dataset, and how batches draw and transform them."""

    shards: Shards
    parts: Sequence[Part]  # of each shard
    transforms: Mapping[str, tuple[Transform, ...]] = field(default_factory=dict)
    sampling: Sampling | None = None
    operations: tuple[Mapping[str, Any], ...] = ()
    """How the view was made, for people."""

    @classmethod
    def of_all(cls, shards: Shards) -> View:
        return cls(shards, [range(rows) for rows in shards.stored_rows])

    def change(self, operation: Mapping[str, Any], **changes: Any) -> View:
        return replace(self, operations=(*self.operations, operation), **changes)

    def keep_transforms(self, view: View, columns: Sequence[Column]) -> View:
        """Take over a view's transforms of columns that were copied in stored form."""
        names = {column.name for column in columns}
        kept = {name: steps for name, steps in view.transforms.items() if name in names}
        return self.change({"transforms": to_json(kept)}, transforms=kept) if kept else self

    # --- rows -----------------------------------------------------------------------------------

    @cached_property
    def shard_rows(self) -> list[int]:
        """The number of rows in each shard."""
        return list(map(len, self.parts))

    @cached_property
    def num_rows(self) -> int:
        return sum(self.shard_rows)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the rows on disk, without file headers."""
        columns, shards = self.shards.manifest.columns, range(len(self.parts))
        return sum(self.part_bytes(column, shard) for column in columns for shard in shards)

    def part_bytes(self, column: Column, shard: int) -> int:
        """Return the bytes of a column's rows in a shard."""
        part = self.parts[shard]
        if not column.ragged:
            return len(part) * column.item_bytes
        if self.shards.url is not None:  # an estimate: a description must not copy all shards here
            entry = self.shards.manifest.shards[shard]
            size = sum(entry.files[name].bytes for name in column.file_names)
            return int(size * len(part) // entry.rows)
        _, offsets = self.shards.reader(shard).ragged(column.name)
        rows = np.asarray(part, np.int64)
        total = int((offsets[rows + 1] - offsets[rows]).sum())
        return total * column.item_bytes + (len(rows) + 1) * offsets.itemsize

    @property
    def stored_bytes(self) -> int:
        """The rows' share of the bytes of all files, from the manifest: equal on every machine."""
        manifest = self.shards.manifest
        files = sum(entry.nbytes for entry in manifest.shards)
        return files * self.num_rows // max(1, manifest.rows)

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the dataset, in their order."""
        return all(
            isinstance(part, range) and part == range(rows)
            for part, rows in zip(self.parts, self.shards.stored_rows, strict=True)
        )

    def holds(self, view: View) -> bool:
        """Return whether a view of the same shards selects a subset of this view's rows.

        Transforms and sampling must be equal too, unless this view has none.
        """
        alike = not self.transforms or self.transforms == view.transforms
        alike = alike and self.sampling in (None, view.sampling)
        return alike and all(map(covers, self.parts, view.parts))

    def column(self, name: str) -> Column:
        columns = self.shards.columns
        if name not in columns:
            raise InputError(f"no column {name!r}: the dataset has {', '.join(columns)}")
        return columns[name]

    def read(self, name: str, shard: int) -> Any:
        return self.shards.read(name, shard, self.parts[shard])

    def scalars(self, name: str) -> list[Array]:
        """Return a numeric column's values by shard; raise InputError unless rows are scalars."""
        column = self.column(name)
        if column.ragged or column.shape:
            raise InputError(f"column {name!r} must have one number for each row")
        return [self.read(name, shard) for shard in range(len(self.parts))]

    def labels(self, name: str) -> list[Array]:
        """Return a class or group column's values by shard; raise InputError for other columns."""
        column = self.column(name)
        if column.ragged or column.shape or not column.dtype.startswith(("int", "uint", "bool")):
            raise InputError(
                f"column {name!r} cannot define classes or groups: it must have one integer, "
                "boolean or category for each row"
            )
        return self.scalars(name)

    def runs(self, column: Column) -> Iterator[Array]:
        """Yield a column's values in runs that fit in memory: slices, or copies of single rows."""
        for shard, part in enumerate(self.parts):
            step = len(part) if isinstance(part, range) else _PIECE_ROWS
            for start in range(0, len(part), max(1, step)):
                rows = self.shards.read(column.name, shard, part[start : start + step])
                yield rows.values if column.ragged else rows

    # --- parts of the rows ----------------------------------------------------------------------

    def split(
        self, fractions: Sequence[float], stratify: str | None, groups: str | None, seed: int
    ) -> list[tuple[dict[str, Any], list[Part]]]:
        """Return the operation and the rows of each view that `Dataset.split` makes."""
        bounds = splitting.check_fractions(fractions)
        seed = check_whole_number("seed", seed, 0, 2**64 - 1)
        if stratify is not None and groups is not None:
            raise InputError("split takes stratify or groups, not both: choose one")
        if groups is None and len(bounds) > 1 and any(map(splitting.repeats, self.parts)):
            raise InputError(
                "split: this view repeats rows, and the same row could be in several parts: split "
                "first, then repeat rows of the training part, or give groups="
            )
        operation: dict[str, Any] = {"fractions": [float(fraction) for fraction in fractions]}
        if stratify is None and groups is None:
            rounder = splitting.Rounder(bounds)
            cut = [[part[a:b] for a, b in pairwise(rounder.cut(len(part)))] for part in self.parts]
            parts = list(map(list, zip(*cut, strict=True)))
        else:
            if stratify is not None:
                positions = splitting.split_by_class(self.labels(stratify), bounds, seed)
            else:
                positions = splitting.split_by_group(self.labels(str(groups)), bounds, seed)
            parts = [list(map(take_rows, self.parts, rows)) for rows in positions]
            operation |= {"stratify": stratify, "groups": groups, "seed": seed}
        for number, rows in enumerate(parts):
            if sum(map(len, rows)) == 0:
                raise InputError(
                    f"split: part {number + 1} (fraction {fractions[number]:g}) gets none of "
                    f"{self.num_rows} rows: use larger fractions or fewer parts"
                )
        return [
            ({"split": operation | {"part": number}}, rows) for number, rows in enumerate(parts)
        ]

    # --- for loaders ----------------------------------------------------------------------------

    def loader_parts(self) -> list[tuple[_core.ShardReader, tuple[int, int] | Rows]]:
        """Return each shard's reader and rows, ``(start, stop)`` or numbers, for the C loader."""
        return [
            (reader, (part.start, part.stop) if isinstance(part, range) else part)
            for reader, part in self.shards.map_parts(self.parts)
        ]

    def weight_sums(self, *, across: bool) -> list[tuple[NDArray[np.uint64] | None, int]] | None:
        """Return each shard's running sums of weights, and the sum before its first row.

        With `across`, the sums run through all shards. None if each row is taken once. All loaders
        of the view share them.
        """
        sampling = self.sampling
        if sampling is None:
            return None
        if across:
            whole = self._all_sums
            return [
                (whole[start:end], 0 if start == 0 else int(whole[start - 1]))
                for start, end in pairwise(accumulate(self.shard_rows, initial=0))
            ]
        parts = self.shards.map_parts(self.parts)
        for shard, (reader, part) in enumerate(parts):
            if shard not in self._sums:
                values = reader.column(sampling.column)[part_index(part)]
                sums = sampling.sum_weights(values, shard)
                if sums is not None:
                    self._sums[shard] = sums
        return [(self._sums.get(shard), 0) for shard in range(len(parts))]

    @cached_property
    def _sums(self) -> dict[int, NDArray[np.uint64]]:
        return {}

    @cached_property
    def _all_sums(self) -> NDArray[np.uint64]:
        assert self.sampling is not None
        sums = self.sampling.sum_weights(np.concatenate(self.scalars(self.sampling.column)), None)
        return np.zeros(0, np.uint64) if sums is None else sums

    # --- descriptions ---------------------------------------------------------------------------

    @cached_property
    def checksum(self) -> str:
        checksum = self.shards.manifest.checksum
        if not self.transforms and self.sampling is None and self.is_whole:
            return checksum
        return checksum_of([checksum, self._rows_to_json()])

    def spec(self) -> dict[str, Any]:
        """Return a JSON value from which `open_spec` makes the same view."""
        return {
            "path": self.shards.place,
            "checksum": self.checksum,
            **({} if self.shards.url is None else {"set": self.shards.manifest.checksum}),
            **self._rows_to_json(),
            "operations": list(self.operations),
        }

    def _rows_to_json(self) -> dict[str, Any]:
        view: dict[str, Any] = {
            "rows": [part_to_json(part) for part in self.parts],
            "transforms": to_json(self.transforms),
        }
        if self.sampling is not None:  # older checksums of views without sampling stay valid
            view["sampling"] = self.sampling.to_json()
        return view

    @classmethod
    def open_spec(cls, shards: Shards, spec: Mapping[str, Any], *, check: bool) -> View:
        """Make the view of these shards that `spec` describes; see `Dataset.from_spec`."""
        if len(spec["rows"]) != len(shards.stored_rows):
            raise InputError(
                f"'{shards.place}' has changed: its shards differ from the recorded ones; restore "
                "it"
            )
        view = cls(
            shards,
            list(map(part_from_json, spec["rows"], shards.stored_rows)),
            {
                name: tuple(transform_from_json(step) for step in steps)
                for name, steps in spec["transforms"].items()
            },
            Sampling.from_json(spec.get("sampling")),
            tuple(spec["operations"]),
        )
        if view.sampling is not None:
            view.sampling.check(view.column(view.sampling.column))
        if check and view.checksum != spec["checksum"]:
            raise InputError(
                f"'{shards.place}' has changed: its checksum differs from the recorded one; "
                "restore it"
            )
        return view

    def summary(self) -> str:
        view = "" if not self.operations else f" (a view of {self.shards.manifest.rows:,})"
        drawn = "" if self.sampling is None else f", {self.sampling}"
        size = fmt.size(self.nbytes)
        return f"{self.num_rows:,} rows{view}, {len(self.parts)} shards, {size}{drawn}"

    def describe_columns(self) -> dict[str, str]:
        """Return a readable line for each column, but no more lines than fit on a screen."""
        columns = self.shards.columns
        shown = list(columns.items())[:_SHOWN_COLUMNS]
        lines = {name: self._describe_column(column) for name, column in shown}
        if len(columns) > _SHOWN_COLUMNS:
            lines["..."] = f"and {len(columns) - _SHOWN_COLUMNS} more columns"
        return lines

    def _describe_column(self, column: Column) -> str:
        shape = describe_shape(column)
        text = column.dtype if shape == "()" else f"{column.dtype} {shape}"
        if column.classes is not None:
            names = ", ".join(column.classes[:4]) + (", ..." if len(column.classes) > 4 else "")
            text += f", {len(column.classes)} classes: {names}"
        steps = self.transforms.get(column.name, ())
        return " -> ".join([text, *(type(step).__name__ for step in steps)])


def describe_shape(column: Column) -> str:
    """Return the shape of a column's rows, such as ``(*, 3)`` if they are ragged."""
    return f"({', '.join([*(['*'] if column.ragged else []), *map(str, column.shape)])})"


def to_json(transforms: Mapping[str, tuple[Transform, ...]]) -> dict[str, Any]:
    """Return a JSON value of the transforms of each transformed column."""
    return {name: [step.to_json() for step in steps] for name, steps in transforms.items() if steps}
