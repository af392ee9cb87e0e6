"""A data set on disk, and views of it."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import cerebro._core as _core
from cerebro.data import rows as splitting
from cerebro.data.dtypes import Array
from cerebro.data.manifest import (
    Column,
    Manifest,
    MissingFileError,
    checksum_of,
    read_manifest,
    shard_folder,
)
from cerebro.data.rows import (
    Part,
    Selection,
    covers,
    cut,
    part_from_json,
    part_index,
    part_rows,
    part_to_json,
    select_rows,
    take,
)
from cerebro.data.stats import MOST_COUNTS, Stats, column_stats
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.files import path_of
from cerebro.report import format as fmt

if TYPE_CHECKING:
    from cerebro.data.batches import Batches
    from cerebro.transforms import Transform

_PIECE_ROWS = 65_536
_SHOWN_COLUMNS = 20


class RaggedRows(Sequence[NDArray[Any]]):
    """Rows of differing length: a read-only list of arrays.

    Attributes
    ----------
    values
        All elements, one row after the other; shape ``(total, *shape)``.
    offsets
        int64 of shape ``(rows + 1,)``: row i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    def __init__(self, values: Array, offsets: Array) -> None:
        self.values = values
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        index = range(len(self))[row]
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __repr__(self) -> str:
        return f"<{len(self)} ragged rows, {self.values.dtype}, {len(self.values)} values>"


class Dataset:
    """A data set on disk, or a view of some of its rows.

    Opening checks the manifest, and the presence, size and header of every file; it reads no data.
    Files are memory-mapped and never change, so a data set is in memory once, however many views,
    trials and workers use it. `split`, `select` and `with_transforms` return views: data sets that
    select rows of the same files. Data sets can be pickled; the pickle holds the path and the
    selection of rows.

    Parameters
    ----------
    path
        The folder that `cerebro.shard` wrote.

    Raises
    ------
    InputError
        The folder does not exist.
    CorruptDataError
        A file is missing, truncated or differs from the manifest; the message names it.

    Examples
    --------
    >>> train, valid = Dataset("data/digits").split(0.8, 0.2)      # doctest: +SKIP
    >>> for batch in train.batches(32):                            # doctest: +SKIP
    ...     batch["x"], batch["y"]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path_of("path", path).absolute()  # the working directory may change
        self._manifest: Manifest = read_manifest(self._path)
        self._readers = [self._open_shard(shard) for shard in range(len(self._manifest.shards))]
        self._rows: list[Part] = [(0, shard.rows) for shard in self._manifest.shards]
        self._transforms: dict[str, tuple[Transform, ...]] = {}
        self._operations: tuple[dict[str, Any], ...] = ()

    # --- properties -----------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The folder, as an absolute path."""
        return self._path

    @cached_property
    def num_rows(self) -> int:
        """The number of rows in all shards."""
        return sum(self._shard_rows())

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: Any) -> Any:
        """Raise TypeError: a torch ``DataLoader`` and others would read row by row."""
        raise TypeError(
            "a cerebro.Dataset is read in batches, not by row: iterate over "
            "data.batches(batch_size) instead of a DataLoader, or use data.shard(i)['x'][row]"
        )

    @property
    def num_shards(self) -> int:
        """The number of shards of the data set; in a view, some of them may have no rows."""
        return len(self._rows)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns by name, in order."""
        return {column.name: column for column in self._manifest.columns}

    @property
    def classes(self) -> dict[str, list[str] | None]:
        """The class names of each column, by code; None for columns without classes."""
        return {
            name: None if column.classes is None else list(column.classes)
            for name, column in self.columns.items()
        }

    @property
    def transforms(self) -> dict[str, tuple[Transform, ...]]:
        """The transforms of each transformed column."""
        return dict(self._transforms)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the rows on disk, without file headers."""
        return sum(
            self._part_bytes(column, shard)
            for column in self._manifest.columns
            for shard in range(self.num_shards)
        )

    @cached_property
    def checksum(self) -> str:
        """32 hexadecimal digits that differ whenever the data differ.

        XXH3-128 over the columns and the hashes of all files. The checksum of a view covers its
        rows and transforms as well: different views of one data set have different checksums, and
        the same view made twice has the same.
        """
        if not self._transforms and self._is_whole():
            return self._manifest.checksum
        return checksum_of([self._manifest.checksum, self._view_json()])

    def __repr__(self) -> str:
        lines = [f"Dataset({str(self._path)!r}): {self._summary()}"]
        columns = self._describe()
        width = max(map(len, columns))
        lines += [f"  {name:<{width}}  {text}" for name, text in columns.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>"
            for name, text in self._describe().items()
        )
        title = html.escape(str(self._path))
        return (
            f"<div><b>{title}</b><br>{self._summary()}"
            f"<table><thead><tr><th>column</th><th>type</th></tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )

    # --- data -----------------------------------------------------------------------------------

    def shard(self, index: int) -> dict[str, Any]:
        """Return the rows of one shard by column.

        Arrays are read-only, of shape ``(rows, *shape)``, and not copied unless the view has a
        list of rows. Categories are codes, bfloat16 values are their bits as uint16, and
        transforms are not applied. A ragged column is a `RaggedRows`: a list of arrays with
        ``.values`` and ``.offsets``.
        """
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.num_shards:
            raise InputError(f"no shard {index!r}: there are shards 0 to {self.num_shards - 1}")
        found: dict[str, Any] = {}
        for name, column in self.columns.items():
            rows = self._ragged_rows if column.ragged else self._plain_rows
            found[name] = rows(name, int(index), self._rows[index])
        return found

    def batches(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shard: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        framework: str = "torch",
        device: Any = "cpu",
        start: int = 0,
        threads: int | None = None,
        residence: str = "auto",
    ) -> Batches:
        """Return an iterable of batches, each a dict of tensors by column.

        Rows are shuffled at two levels: the shards are visited in an order, and the rows within
        each are permuted; this is not one permutation of all rows. Batches never cross shards; a
        last batch of one row joins the one before it. Iterating again gives the next epoch.

        Parameters
        ----------
        batch_size
            Rows per batch, at least 1.
        seed
            Keys the row order and random transforms, together with the epoch.
        epoch
            The epoch of the first pass.
        shard
            Only this shard; None: all, in the order of ``visit_order(0, epoch, num_shards)``.
        shuffle
            Whether rows are permuted within their shard.
        drop_last
            Whether the last batch of a shard is left out if it is not full.
        framework
            ``"torch"``, ``"numpy"``, ``"jax"`` or ``"dlpack"``.
        device
            Where the tensors are: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. On a GPU they are ordered
            with the stream that is current for the framework when the batch is taken; the guide
            describes their use on other streams.
        start
            Batches to skip at the beginning of the first pass.
        threads
            Threads that gather ahead; 0: each batch is gathered when it is requested; None: one per
            core beyond the first, at most 2 (4 for a GPU).
        residence
            On a GPU: ``"auto"`` keeps shards in its memory, up to half of it, and makes batches
            there; ``"resident"`` keeps as many as fit; ``"streamed"`` keeps none: batches are
            gathered on the CPU and copied while others compute.

        Returns
        -------
        Batches
            Iterating gives ``dict[str, tensor]``; ``len()`` is an epoch's number of batches. A
            column whose rows have shape ``s`` is of shape ``(rows, *s)``. A ragged column ``c`` is
            padded, ``(rows, length, ...)``, beside ``c_mask``, bool ``(rows, length)``, and
            ``c_length``, int64 ``(rows,)``.

        Raises
        ------
        InputError
            An argument is out of its range, or a transform does not fit its column.
        DeviceError
            The device cannot be used.
        """
        from cerebro.data.batches import Batches

        return Batches(
            self,
            batch_size,
            seed=seed,
            epoch=epoch,
            shard=shard,
            shuffle=shuffle,
            drop_last=drop_last,
            framework=framework,
            device=device,
            start=start,
            threads=threads,
            residence=residence,
        )

    def in_order(self, batch_size: int, framework: str) -> Batches:
        """Return batches of all rows in order, without random transforms, for evaluation."""
        from cerebro.data.batches import Batches

        return Batches(self, batch_size, shuffle=False, framework=framework, augment=False)

    def stats(self, column: str, axis: int | None = None) -> Stats:
        """Return mean, standard deviation, minimum, maximum and class counts of a column.

        Parameters
        ----------
        column
            The column's name. Transforms are not applied.
        axis
            The axis of a row to keep, such as -1 for the channels of ``(height, width, channels)``
            images; None: one figure for all values.

        Returns
        -------
        Stats
            Computed in float64: floats, or float64 arrays of ``shape[axis]`` if `axis` is given.
        """
        found = self._column(column)
        runs = (run for shard in range(self.num_shards) for run in self._value_runs(found, shard))
        return column_stats(found, runs, self.num_rows, axis)

    def num_classes(self, column: str = "y") -> int:
        """Return the number of classes of a label column: the outputs that a classifier needs.

        This is the number of names of a category column, 2 for booleans, and the largest label plus
        1 for integers. A view counts all rows of its data set, so that each fold builds the same
        network, with an output for labels that only validation rows have.

        Raises
        ------
        InputError
            The column's rows are not single labels, or labels are negative or too large.
        """
        found = self._column(column)
        if found.dtype.startswith(("float", "bfloat", "complex")):
            raise InputError(
                f"column {column!r} is {found.dtype}, not class labels: name the column of labels, "
                f"or write it as integers with shard(..., dtypes={{{column!r}: 'int64'}})"
            )
        if found.classes is not None:
            return len(found.classes)
        whole = self._view([(0, entry.rows) for entry in self._shards], {})
        shards = [labels for labels in whole._labels(column) if len(labels)]
        if found.dtype == "bool":
            return 2
        low, high = min(int(s.min()) for s in shards), max(int(s.max()) for s in shards)
        if low < 0 or high >= MOST_COUNTS:
            raise InputError(
                f"column {column!r} has labels from {low} to {high}: number the classes from 0"
            )
        return high + 1

    def verify(self) -> None:
        """Read every file and compare its hash with the manifest.

        Raises CorruptDataError, naming the file, for the first one that is missing or differs.
        """
        read_manifest(self._path)
        for shard in range(self.num_shards):
            self._verify_shard(shard)

    # --- views ----------------------------------------------------------------------------------

    def split(
        self,
        *fractions: float,
        stratify: str | None = None,
        groups: str | None = None,
        seed: int = 0,
    ) -> tuple[Dataset, ...]:
        """Return views of disjoint parts of the rows, one for each fraction.

        A part is a contiguous range of every shard's rows, which were shuffled when written (a set
        written with ``shuffle=False`` is split in its original order). With `stratify` or `groups`,
        rows are chosen by label instead.

        Parameters
        ----------
        fractions
            Positive numbers that sum to at most 1; if they sum to less, rows are left over.
        stratify
            A scalar integer, boolean or category column; its values keep the same proportions in
            each part.
        groups
            A scalar integer, boolean or category column; rows with the same value stay together.
        seed
            Keys the choice of rows or groups for `stratify` and `groups`.

        Raises
        ------
        InputError
            The fractions or the seed are invalid, a column is unsuitable, or a part would be empty.
        """
        from cerebro.arguments import whole_number

        bounds = splitting.check_fractions(fractions)
        seed = whole_number("seed", seed, 0, 2**64 - 1)
        if stratify is not None and groups is not None:
            raise InputError("split takes stratify or groups, not both: choose one")
        if stratify is not None:
            chosen = splitting.stratified(self._labels(stratify), bounds, seed)
        elif groups is not None:
            chosen = splitting.grouped(self._labels(groups), bounds, seed)
        else:
            chosen = None
        views = self._cut(bounds) if chosen is None else self._chosen(chosen)
        described: dict[str, Any] = {"fractions": [float(fraction) for fraction in fractions]}
        if chosen is not None:
            described |= {"stratify": stratify, "groups": groups, "seed": seed}
        for part, rows in enumerate(views):
            if sum(map(part_rows, rows)) == 0:
                raise InputError(
                    f"split: part {part + 1} (fraction {fractions[part]:g}) gets none of "
                    f"{self.num_rows} rows: use larger fractions or fewer parts"
                )
        return tuple(
            self._view(rows, {"split": described | {"part": part}})
            for part, rows in enumerate(views)
        )

    def select(self, rows: Selection) -> Dataset:
        """Return a view of some rows; each row stays in its shard.

        Parameters
        ----------
        rows
            A slice, a boolean mask with one value for each row, or row numbers from 0 to
            ``len(self) - 1``, counted across shards. Within a shard, rows keep the order given
            here; a row given twice occurs twice.
        """
        parts = select_rows(self._rows, rows)
        return self._view(parts, {"select": {"rows": sum(map(part_rows, parts))}})

    def with_transforms(self, transforms: Mapping[str, Transform | Sequence[Transform]]) -> Dataset:
        """Return a view whose batches are transformed, such as ``{"x": [Scale(1 / 255)]}``.

        They replace the transforms of the columns named here; other columns keep theirs. They are
        applied in the given order while batches are gathered. Raises InputError, naming the
        column, if a chain does not fit it.
        """
        from cerebro.transforms import compile as compile_transforms

        if not isinstance(transforms, Mapping):
            raise InputError(
                f"with_transforms needs a mapping such as {{'x': [Scale(1 / 255)]}}, not "
                f"{transforms!r}"
            )
        combined = dict(self._transforms)
        for name, chain in transforms.items():
            self._column(name)
            combined[name] = tuple(chain) if isinstance(chain, Sequence) else (chain,)
        compile_transforms(self.columns, combined)
        view = self._view(self._rows, {"transforms": _transforms_json(combined)})
        view._transforms = {name: steps for name, steps in combined.items() if steps}
        return view

    # --- serialization --------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """Return a JSON value from which `from_spec` makes the same view.

        It holds ``path``, ``checksum``, the rows and transforms of the view, and ``operations``, a
        readable history of the view.
        """
        return {
            "path": str(self._path),
            "checksum": self.checksum,
            **self._view_json(),
            "operations": list(self._operations),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, check: bool = True) -> Dataset:
        """Open the data set and make the view that `spec` describes.

        Raises InputError if the data set has changed since; without `check`, only if the number of
        shards has.
        """
        data = cls(spec["path"])
        if len(spec["rows"]) != data.num_shards:
            raise InputError(f"'{data.path}' has changed: its shards differ from the recorded ones")
        data._rows = [
            part_from_json(value, entry.rows)
            for value, entry in zip(spec["rows"], data._shards, strict=True)
        ]
        if spec["transforms"]:
            from cerebro.transforms import transform_from_json

            data._transforms = {
                name: tuple(transform_from_json(step) for step in steps)
                for name, steps in spec["transforms"].items()
            }
        data._operations = tuple(spec["operations"])
        if check and data.checksum != spec["checksum"]:
            raise InputError(
                f"'{data.path}' has changed: its checksum differs from the recorded one"
            )
        return data

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], Dataset], tuple[dict[str, Any]]]:
        return Dataset.from_spec, (self.spec(),)

    # --- for the rest of the library -------------------------------------------------------------

    def _parts(self) -> list[tuple[_core.ShardReader, Part]]:
        """Return each shard's reader and the view's rows in it: a range or uint32 row numbers."""
        return list(zip(self._readers, self._rows, strict=True))

    @property
    def _generation(self) -> int:
        """A number that changes whenever `_parts` changes; see `cerebro.data.placed`."""
        return 0

    def _holds(self, view: Dataset) -> bool:
        """Whether `view`, of the same shards, has only rows of this one and the same transforms.

        A view without transforms also holds views with transforms.
        """
        alike = not self._transforms or self._transforms == view._transforms
        return alike and all(map(covers, self._rows, view._rows))

    def _labels(self, name: str) -> list[Array]:
        """Return a class or group column's values by shard; raise InputError for other columns."""
        column = self._column(name)
        if column.ragged or column.shape or not column.dtype.startswith(("int", "uint", "bool")):
            raise InputError(
                f"column {name!r} cannot define classes or groups: it must have one integer, "
                "boolean or category for each row"
            )
        return self._scalars(name)

    def _scalars(self, name: str) -> list[Array]:
        """Return a numeric column's values by shard; raise InputError unless rows are scalars."""
        column = self._column(name)
        if column.ragged or column.shape:
            raise InputError(f"column {name!r} must have one number for each row")
        return [self._plain_rows(name, shard, part) for shard, part in enumerate(self._rows)]

    def _with_rows(self, rows: Sequence[Part], operation: dict[str, Any]) -> Dataset:
        """Return a view of these rows of each shard, which need not be rows of this view."""
        return self._view(rows, operation)

    def _first_rows(self) -> list[int]:
        """Return the number of each shard's first row in the whole data set."""
        return [0, *accumulate(entry.rows for entry in self._shards)][:-1]

    def _stored_rows(self) -> list[int]:
        """Return the number of rows of each shard of the whole data set."""
        return [entry.rows for entry in self._shards]

    def _shard_rows(self) -> list[int]:
        """Return the number of the view's rows in each shard."""
        return [part_rows(part) for part in self._rows]

    def _is_whole(self) -> bool:
        """Whether this is the whole data set, not a view of some of its rows."""
        return all(
            isinstance(part, tuple) and part == (0, entry.rows)
            for part, entry in zip(self._rows, self._shards, strict=True)
        )

    def _verify_shard(self, shard: int) -> None:
        """Compare a shard's files with their hashes; raise CorruptDataError if one differs.

        The files are reopened, which detects a truncated one by its size; touching the old mapping
        would kill the process.
        """
        for name, digest in self._open_shard(shard).hashes().items():
            if digest != self._shards[shard].files[name].xxh3_64:
                path = self._path / shard_folder(shard) / name
                raise CorruptDataError(
                    f"{path} is damaged: its checksum differs from the manifest's; write the data "
                    "set again"
                )

    def _check_sizes(self, shard: int) -> None:
        """Detect files truncated or removed since they were opened; costs a few system calls.

        Touching the mapping of a truncated file would kill the process.
        """
        folder = self._path / shard_folder(shard)
        for name, entry in self._shards[shard].files.items():
            try:
                whole = (folder / name).lstat().st_size == entry.bytes
            except OSError:
                whole = False
            if not whole:
                self._open_shard(shard)  # raises an error that names the fault

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _shards(self) -> Sequence[Any]:
        return self._manifest.shards

    def _open_shard(self, index: int) -> _core.ShardReader:
        entry = self._manifest.shards[index]
        columns = [
            (
                column.name,
                column.dtype,
                column.shape,
                column.ragged,
                {name: entry.files[name].bytes for name in column.file_names},
            )
            for column in self._manifest.columns
        ]
        try:
            folder = os.fspath(self._path / shard_folder(index))
            return _core.ShardReader(folder, entry.rows, columns)
        except FileNotFoundError as error:
            raise MissingFileError(f"{error.strerror or error}: the data set is damaged") from None

    def _view(self, rows: Sequence[Part], operation: dict[str, Any]) -> Dataset:
        return self._fill(object.__new__(Dataset), rows, operation)

    def _fill(self, view: Dataset, rows: Sequence[Part], operation: dict[str, Any]) -> Dataset:
        view._path = self._path
        view._manifest = self._manifest
        view._readers = self._readers
        view._rows = list(rows)
        view._transforms = dict(self._transforms)
        view._operations = (*self._operations, operation)
        return view

    def _view_json(self) -> dict[str, Any]:
        return {
            "rows": [part_to_json(part) for part in self._rows],
            "transforms": _transforms_json(self._transforms),
        }

    def _cut(self, bounds: Sequence[float]) -> list[list[Part]]:
        rounder = splitting.Rounder(bounds)
        cuts = [rounder.cut(part_rows(part)) for part in self._rows]
        return [
            [cut(part, at[index], at[index + 1]) for part, at in zip(self._rows, cuts, strict=True)]
            for index in range(len(bounds))
        ]

    def _chosen(self, positions: list[list[Array]]) -> list[list[Part]]:
        return [
            [take(part, rows) for part, rows in zip(self._rows, of_part, strict=True)]
            for of_part in positions
        ]

    def _column(self, name: str) -> Column:
        if name not in self.columns:
            raise InputError(f"no column {name!r}: the data set has {', '.join(self.columns)}")
        return self.columns[name]

    def _plain_rows(self, name: str, shard: int, part: Part) -> Array:
        array = self._readers[shard].column(name)[part_index(part)]
        array.setflags(write=False)
        return array

    def _ragged_rows(self, name: str, shard: int, part: Part) -> RaggedRows:
        values, offsets = self._readers[shard].ragged(name)
        if isinstance(part, tuple):
            start, stop = part
            values = values[offsets[start] : offsets[stop]]
            cuts = offsets[start : stop + 1] - offsets[start]
        else:
            rows = part.astype(np.int64)
            lengths = offsets[rows + 1] - offsets[rows]
            cuts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            index = np.repeat(offsets[rows] - cuts[:-1], lengths) + np.arange(int(cuts[-1]))
            values = values[index]
        values.setflags(write=False)
        cuts.setflags(write=False)
        return RaggedRows(values, cuts)

    def _value_runs(self, column: Column, shard: int) -> Iterator[Array]:
        """Yield the view's values in runs that fit in memory: slices, or copies of some rows."""
        part = self._rows[shard]
        step = part_rows(part) if isinstance(part, tuple) else _PIECE_ROWS
        for start in range(0, part_rows(part), max(1, step)):
            piece = cut(part, start, min(start + step, part_rows(part)))
            if column.ragged:
                yield self._ragged_rows(column.name, shard, piece).values
            else:
                yield self._plain_rows(column.name, shard, piece)

    def _part_bytes(self, column: Column, shard: int) -> int:
        part = self._rows[shard]
        if not column.ragged:
            return part_rows(part) * column.item_bytes
        _, offsets = self._readers[shard].ragged(column.name)
        rows = np.arange(*part) if isinstance(part, tuple) else part.astype(np.int64)
        total = int((offsets[rows + 1] - offsets[rows]).sum())
        return total * column.item_bytes + (len(rows) + 1) * offsets.itemsize

    def _summary(self) -> str:
        view = "" if not self._operations else f" (a view of {self._manifest.rows:,})"
        return f"{self.num_rows:,} rows{view}, {self.num_shards} shards, {fmt.size(self.nbytes)}"

    def _describe(self) -> dict[str, str]:
        """Describe each column in one readable line; no more lines than fit on a screen."""
        shown = list(self.columns.items())[:_SHOWN_COLUMNS]
        lines = {name: self._describe_column(column) for name, column in shown}
        if len(self.columns) > _SHOWN_COLUMNS:
            lines["..."] = f"and {len(self.columns) - _SHOWN_COLUMNS} more columns"
        return lines

    def _describe_column(self, column: Column) -> str:
        sizes = (["*"] if column.ragged else []) + [str(size) for size in column.shape]
        text = column.dtype + (f" ({', '.join(sizes)})" if sizes else "")
        if column.classes is not None:
            names = ", ".join(column.classes[:4]) + (", ..." if len(column.classes) > 4 else "")
            text += f", {len(column.classes)} classes: {names}"
        steps = self._transforms.get(column.name, ())
        return " -> ".join([text, *(type(step).__name__ for step in steps)])


def _transforms_json(transforms: Mapping[str, tuple[Transform, ...]]) -> dict[str, Any]:
    return {name: [step.to_json() for step in steps] for name, steps in transforms.items() if steps}
