"""A dataset on disk, and views of it."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

import cerebro._core as _core
from cerebro.data import rows as splitting
from cerebro.data.bucket import BucketData, PulledShards
from cerebro.data.copies import copied_columns
from cerebro.data.dtypes import Array
from cerebro.data.manifest import (
    FILE_NAME,
    Column,
    Manifest,
    checksum_of,
    read_manifest,
    shard_folder,
)
from cerebro.data.rows import (
    Part,
    Selection,
    covers,
    cut_part,
    part_from_json,
    part_index,
    part_rows,
    part_to_json,
    select_rows,
    take_rows,
)
from cerebro.data.sampling import Sampling, make_sampling
from cerebro.data.shard_files import open_shard, verify_shard
from cerebro.data.stats import MOST_COUNTS, Stats, column_stats
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.files import path_of
from cerebro.machine.objects import is_url
from cerebro.report import format as fmt

if TYPE_CHECKING:
    from cerebro.data.batches import Batches
    from cerebro.data.shard_work import MakesShards
    from cerebro.transforms import Transform

_PIECE_ROWS = 65_536
_SHOWN_COLUMNS = 20
_MOST_NUMBERED = 20_000_000
"""The most rows of a shuffled dataset whose numbers in the source are computed."""


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
    """A dataset on disk, or a view of some of its rows.

    Opening a dataset checks the manifest, and the presence, size and header of every file; it
    reads no data. Files are memory-mapped and never change, so a dataset is in memory once,
    regardless of how many views, trials and workers use it. `split`, `select`, `with_transforms`
    and `with_sampling` return views: datasets that use rows of the same files. Datasets can be
    pickled; the pickle contains the path and the selection of rows.

    Parameters
    ----------
    path
        The folder that `cerebro.shard` wrote, or the URL of one in object storage, such as
        ``"s3://bucket/set"`` (any URL of fsspec). Its shards are copied once into this machine's
        cache (``$CEREBRO_CACHE``, else ``~/.cache/cerebro``) when they are first read.

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

    _bucket: BucketData | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if isinstance(path, str) and is_url(path):
            self._open_bucket(BucketData.find(path))
            return
        self._path = path_of("path", path).absolute()  # the working directory may change
        self._manifest: Manifest = read_manifest(self._path)
        self._readers: Sequence[_core.ShardReader] = [
            self._open_shard(shard) for shard in range(len(self._manifest.shards))
        ]
        self._show_all()

    def _open_bucket(self, bucket: BucketData) -> None:
        """Make this the whole dataset in a bucket; its shards are pulled when they are needed."""
        self._bucket = bucket
        self._path, self._manifest = bucket.folder, bucket.manifest
        self._readers = PulledShards(bucket)
        self._show_all()

    def _show_all(self) -> None:
        self._rows: list[Part] = [(0, shard.rows) for shard in self._manifest.shards]
        self._transforms: dict[str, tuple[Transform, ...]] = {}
        self._sampling: Sampling | None = None
        self._operations: tuple[dict[str, Any], ...] = ()

    # --- properties -----------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The folder, as an absolute path; of a dataset in object storage, that of its copy."""
        return self._path

    @property
    def url(self) -> str | None:
        """The URL of a dataset in object storage; None for one on this machine's disks."""
        return None if self._bucket is None else self._bucket.url

    @property
    def _place(self) -> str:
        """The path or URL by which the dataset was opened, and can be opened again."""
        return str(self._path) if self._bucket is None else self._bucket.url

    @cached_property
    def num_rows(self) -> int:
        """The number of rows in all shards."""
        return sum(self._shard_rows())

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: Any) -> Any:
        """Raise TypeError, because a torch ``DataLoader`` and others would read row by row."""
        raise TypeError(
            "a cerebro.Dataset is read in batches, not by row: iterate over "
            "data.batches(batch_size) instead of a DataLoader, or use data.shard(i)['x'][row]"
        )

    @property
    def num_shards(self) -> int:
        """The number of shards of the dataset; in a view, some of them may have no rows."""
        return len(self._rows)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns by name, in order."""
        return {column.name: column for column in self._manifest.columns}

    @cached_property
    def _copied(self) -> dict[str, int]:
        """The number of copies of each column that is stored augmented."""
        arguments = self._manifest.arguments
        return copied_columns(self._path / FILE_NAME, arguments, self.columns)

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
        """32 hexadecimal digits that differ if the data differs.

        XXH3-128 over the columns and the hashes of all files. The checksum of a view covers its
        rows, transforms and sampling as well: different views of one dataset have different
        checksums, and the same view made twice has the same.
        """
        if not self._transforms and self._sampling is None and self._is_whole():
            return self._manifest.checksum
        return checksum_of([self._manifest.checksum, self._view_json()])

    def __repr__(self) -> str:
        lines = [f"Dataset({self._place!r}): {self._summary()}"]
        columns = self._describe()
        width = max(map(len, columns))
        lines += [f"  {name:<{width}}  {text}" for name, text in columns.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>"
            for name, text in self._describe().items()
        )
        title = html.escape(self._place)
        return (
            f"<div><b>{title}</b><br>{html.escape(self._summary())}"
            f"<table><thead><tr><th>column</th><th>type</th></tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )

    # --- data -----------------------------------------------------------------------------------

    def shard(self, index: int) -> dict[str, Any]:
        """Return the rows of one shard by column.

        Arrays are read-only, of shape ``(rows, *shape)``, and not copied unless the view selects
        single rows. Categories are codes, bfloat16 values are their bits as uint16, and transforms
        are not applied. A ragged column is a `RaggedRows`: a list of arrays with ``.values`` and
        ``.offsets``.
        """
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.num_shards:
            raise InputError(f"no shard {index!r}: there are shards 0 to {self.num_shards - 1}")
        values: dict[str, Any] = {}
        for name, column in self.columns.items():
            read = self._ragged_rows if column.ragged else self._plain_rows
            values[name] = read(name, int(index), self._rows[index])
        return values

    def batches(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shard: int | None = None,
        shuffle: bool | Literal["rows", "shards"] | None = True,
        drop_last: bool = False,
        framework: str = "torch",
        device: Any = "cpu",
        start: int = 0,
        threads: int | None = None,
        residence: str = "auto",
        columns: Collection[str] | None = None,
        trial: int | None = 0,
    ) -> Batches:
        """Return an iterable of batches, each a dict of tensors by column.

        These are the batches that a trial of `cerebro.search` trains on: one new permutation of all
        rows in each epoch. Batches have even sizes: ``round(rows / batch_size)`` of them, at least
        one, which differ by at most one row. Within a batch, rows are in the order of their shards.
        Iterating again yields the next epoch. In a view from `with_sampling`, rows are drawn with
        replacement instead.

        Parameters
        ----------
        batch_size
            Rows per batch, at least 1; a batch has up to one and a half times as many.
        seed
            Keys the row order and random transforms, together with the epoch.
        epoch
            The epoch of the first pass.
        shard
            Only this shard; None: all.
        shuffle
            ``"rows"`` draws a new order of all rows in each epoch, as a PyTorch ``DataLoader`` with
            ``shuffle=True`` does. ``"shards"`` reads one group of four shards after another, in
            random order, and shuffles the rows within each group, for data larger than memory. True
            or None: "rows" for data up to 4 GB, else "shards". False: each row once, in order.
        drop_last
            Whether all batches have exactly `batch_size` rows. The rows that are left over, fewer
            than `batch_size`, are left out in this epoch; with "shards", of each group.
        framework
            ``"torch"``, ``"numpy"``, ``"jax"`` or ``"dlpack"``. With ``"numpy"``, which lacks
            bfloat16, such a column is its bits, as uint16; ``Cast("float32")`` makes it numbers.
        device
            The device of the tensors: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. On a GPU, the tensors
            are ready for use on the stream that is the framework's current one when the batch is
            taken; the guide describes their use on other streams.
        start
            Batches to skip at the beginning of the first pass.
        threads
            Threads that gather batches ahead of time; 0: each batch is gathered when it is
            requested; None: one per core beyond the first, at most 2 (4 for a GPU).
        residence
            On a GPU: ``"auto"`` keeps shards in GPU memory, up to half of it, and makes batches
            there; ``"resident"`` keeps as many shards as fit; ``"streamed"`` keeps none: batches
            are gathered on the CPU and copied while earlier ones are computed on.
        columns
            Names of the columns to gather; None: all. The files of other columns are not read.
        trial
            With ``shuffle="shards"``: the trial whose order of the groups to take; trials begin at
            different groups. None: that of all trials of a search with ``stagger=False``.

        Returns
        -------
        Batches
            Iterating yields ``dict[str, tensor]``; ``len()`` is an epoch's number of batches. A
            column whose rows have shape ``s`` gives a tensor of shape ``(rows, *s)``. A ragged
            column ``c`` gives three: ``c``, padded, ``(rows, length, ...)``; ``c_mask``, bool
            ``(rows, length)``; and ``c_length``, int64 ``(rows,)``.

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
            columns=columns,
            trial=trial,
        )

    def in_order(
        self, batch_size: int, framework: str, columns: Collection[str] | None = None
    ) -> Batches:
        """Return batches of all rows in order, without random transforms, for evaluation."""
        from cerebro.data.batches import Batches

        view = self.without_bfloat16() if framework == "numpy" else self
        return Batches(
            view, batch_size, shuffle=False, framework=framework, augment=False, columns=columns
        )

    def without_bfloat16(self) -> Dataset:
        """Return a view for models that compute with NumPy: bfloat16 columns become float32.

        Otherwise their values would be the bits, as uint16, because NumPy lacks the type.
        """
        from cerebro.transforms import Cast

        chains = {}
        for name, column in self.columns.items():
            steps = tuple(self._transforms.get(name, ()))
            dtypes = [column.dtype, *(step.dtype for step in steps if isinstance(step, Cast))]
            if dtypes[-1] == "bfloat16":
                chains[name] = (*steps, Cast("float32"))
        return self.with_transforms(chains) if chains else self

    def stats(self, column: str, axis: int | None = None) -> Stats:
        """Return mean, standard deviation, minimum, maximum and class counts of a column.

        Parameters
        ----------
        column
            The column's name. Transforms are not applied.
        axis
            The axis of a row to keep, such as -1 for the channels of ``(height, width, channels)``
            images; None: one number for all values.

        Returns
        -------
        Stats
            Statistics computed in float64: floats, or arrays of length ``shape[axis]`` if `axis` is
            given.
        """
        meta = self._column(column)
        runs = (run for shard in range(self.num_shards) for run in self._value_runs(meta, shard))
        return column_stats(meta, runs, self.num_rows, axis)

    def num_classes(self, column: str = "y") -> int:
        """Return the number of classes of a label column, for the outputs of a classifier.

        This is the number of names of a category column, 2 for booleans, and the largest label plus
        1 for integers. A view counts all rows of its dataset: each fold then builds the same
        network, which has an output even for labels that occur only in validation rows.

        Raises
        ------
        InputError
            The column's rows are not single labels, or labels are negative or too large.
        """
        meta = self._column(column)
        if meta.dtype.startswith(("float", "bfloat", "complex")):
            raise InputError(
                f"column {column!r} is {meta.dtype}, not class labels: name the column of labels, "
                f"or write it as integers with shard(..., dtypes={{{column!r}: 'int64'}})"
            )
        if meta.classes is not None:
            return len(meta.classes)
        whole = self._view([(0, entry.rows) for entry in self._shards], {})
        shards = [labels for labels in whole._labels(column) if len(labels)]
        if meta.dtype == "bool":
            return 2
        low, high = min(int(s.min()) for s in shards), max(int(s.max()) for s in shards)
        if low < 0 or high >= MOST_COUNTS:
            raise InputError(
                f"column {column!r} has labels from {low} to {high}: number the classes from 0"
            )
        return high + 1

    def verify(self) -> None:
        """Read every file and compare its hash with the manifest.

        Raises CorruptDataError for the first file that is missing or differs; the message names it.
        """
        read_manifest(self._path)
        self.fetch()
        for shard in range(self.num_shards):
            self._verify_shard(shard)

    def fetch(self) -> None:
        """Copy a dataset in object storage to this machine's cache, unless it is already there.

        Reading rows does the same. A dataset on this machine's disks is not changed.

        Raises
        ------
        CorruptDataError
            An object is missing, truncated or modified; the message has its URL.
        OSError
            The storage refuses or is not reached, or the disk is full.
        """
        self._pull(range(self.num_shards))

    # --- views ----------------------------------------------------------------------------------

    def split(
        self,
        *fractions: float,
        stratify: str | None = None,
        groups: str | None = None,
        seed: int = 0,
    ) -> tuple[Dataset, ...]:
        """Return views of disjoint parts of the rows, one for each fraction.

        A part has a contiguous range of rows of every shard. Rows were shuffled when the dataset
        was written; one written with ``shuffle=False`` is split in its original order. With
        `stratify` or `groups`, rows are chosen by label instead.

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
            Or this view repeats rows, which could be in several parts; with `groups` they cannot.
        """
        from cerebro.arguments import check_whole_number

        bounds = splitting.check_fractions(fractions)
        seed = check_whole_number("seed", seed, 0, 2**64 - 1)
        if stratify is not None and groups is not None:
            raise InputError("split takes stratify or groups, not both: choose one")
        if groups is None and len(bounds) > 1 and any(map(splitting.repeats, self._rows)):
            raise InputError(
                "split: this view repeats rows, and the same row could be in several parts: split "
                "first, then repeat rows of the training part, or give groups="
            )
        if stratify is not None:
            positions = splitting.split_by_class(self._labels(stratify), bounds, seed)
        elif groups is not None:
            positions = splitting.split_by_group(self._labels(groups), bounds, seed)
        else:
            positions = None
        views = self._cut_rows(bounds) if positions is None else self._take_rows(positions)
        operation: dict[str, Any] = {"fractions": [float(fraction) for fraction in fractions]}
        if positions is not None:
            operation |= {"stratify": stratify, "groups": groups, "seed": seed}
        for part, rows in enumerate(views):
            if sum(map(part_rows, rows)) == 0:
                raise InputError(
                    f"split: part {part + 1} (fraction {fractions[part]:g}) gets none of "
                    f"{self.num_rows} rows: use larger fractions or fewer parts"
                )
        return tuple(
            self._view(rows, {"split": operation | {"part": part}})
            for part, rows in enumerate(views)
        )

    def select(self, rows: Selection) -> Dataset:
        """Return a view of some rows; each row stays in its shard.

        Parameters
        ----------
        rows
            A slice, a boolean mask with one value for each row, or row numbers from 0 to
            ``len(self) - 1``, counted across shards. Within a shard, rows have the order of these
            numbers; a repeated number repeats the row.
        """
        parts = select_rows(self._rows, rows)
        return self._view(parts, {"select": {"rows": sum(map(part_rows, parts))}})

    def with_transforms(self, transforms: Mapping[str, Transform | Sequence[Transform]]) -> Dataset:
        """Return a view whose batches are transformed, such as ``{"x": [Scale(1 / 255)]}``.

        The new transforms replace those of the columns named here; other columns keep theirs. They
        are applied in the given order while batches are gathered. Raises InputError, naming the
        column, if a chain does not fit its column.
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

    def derive(
        self,
        path: str | os.PathLike[str],
        function: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        *,
        reads: Collection[str] | None = None,
        keep: Collection[str] | None = None,
        key: Any = None,
        batch_size: int = 256,
        framework: str = "numpy",
        copies: int | None = None,
        seed: int = 0,
        dtypes: Mapping[str, Any] | None = None,
        progress: str | bool = "auto",
        executor: MakesShards | None = None,
    ) -> Dataset:
        """Compute new columns once, write them as a dataset with the same rows, and return it.

        The derived dataset has the shards and rows of this dataset or view, in the same order:
        the same `split` of both selects the same rows, and trials see them in the same order. An
        interrupted call leaves nothing at `path`; repeating the call continues with the missing
        shards. If the derived dataset already exists, it is returned if all arguments are equal.

        Parameters
        ----------
        path
            The folder to make.
        function
            ``function(batch) -> {name: array}``, with one row for each row of the batch. In the
            batch, transforms are applied and ragged columns padded. The function must return the
            same bits for the same rows. It is called with exactly `batch_size` rows; the last batch
            of a shard is filled up with other rows of the shard, whose results are dropped.
        reads
            The columns that the function reads from its batches; None: all.
        keep
            Columns to copy in their stored form; None: those that the function does not read. The
            returned dataset has their transforms; if it is opened by its path, it has none.
        key
            A string or another JSON value that identifies the function and what it depends on.
            None: the function's name and source, without the code that it calls. The function's
            results for the first rows are compared as well.
        batch_size
            Rows per call; fewer if no shard has that many. Changing it may change the last bits of
            results.
        framework
            The framework of the batches: ``"numpy"``, ``"torch"``, ``"jax"`` or ``"dlpack"``.
        copies
            With random transforms: the number of augmented copies to store. Training reads copy
            ``epoch % copies``; evaluation reads another copy, without augmentation, which is always
            stored. 0: store only the copy without augmentation.
        seed
            Keys the random transforms. With a search's seed, the copies equal the augmentation of
            that search's first epochs.
        dtypes
            Types in which to store new columns, by name, such as ``{"embedding": "float16"}``.
        progress
            As for `cerebro.shard`.
        executor
            The executor of a cluster, such as ``cerebro.cluster.Executor(workers=4)``: each shard
            is computed by a worker of a node that holds it, with one compute thread, and its files
            are sent here. They are those that this process would write. The function is sent to
            the workers; what it prints is not shown. Its batches are in host memory. If the
            workers have GPUs (``gpus=1``, or ``resources={"GPU": 1}`` on Ray), all of one kind, it
            may compute on its worker's, as cuda:0. None: this process computes all shards.

        Raises
        ------
        InputError
            An argument is invalid, the function's results do not fit, or `path` already holds
            something else; the message says what differs. With an executor, also: the function
            cannot be sent to the workers; it raises an exception there (the message has the shard,
            the node and the line, the error's cause has the traceback); or it computes other
            values there than here.
        CorruptDataError
            A file of this dataset is damaged.
        WorkerError
            With an executor: no worker is left, or a shard has ended several.
        """
        from cerebro.data import derive
        from cerebro.data.derivation import make_derivation
        from cerebro.data.shard_work import check_executor

        target = path_of("path", path)  # as given, before the function is called
        check_executor(executor, "derive(executor=...)")
        work = make_derivation(
            self,
            function,
            reads=reads,
            batch_size=batch_size,
            framework=framework,
            copies=copies,
            seed=seed,
            dtypes=dtypes,
        )
        recipe = derive.make_recipe(work, derive.key_of(function, key), keep=keep)
        derived = Dataset(derive.write(recipe, target, progress, executor))
        derived._take_transforms(self, recipe.kept)
        return derived

    def like(self, view: Dataset) -> Dataset:
        """Return a view of this derived dataset with the rows of `view`, a view of its source.

        Use it for views made by `select`, or by `split` with columns that were not kept. Transforms
        and sampling of the view are not copied.

        Raises
        ------
        InputError
            This dataset was not derived from all rows of the view's dataset.
        """
        from cerebro.data.derive import rows_of_source

        return self._view(rows_of_source(self._manifest, view), {"like": view.checksum})

    def with_sampling(self, weights: str | None = None, *, balance: str | None = None) -> Dataset:
        """Return a view whose rows are drawn by weight, with replacement, for shuffled batches.

        An epoch draws as many rows as the view has, from all of them: row i of n is drawn ``n *
        w[i] / sum(w)`` times on average, as by torch's ``WeightedRandomSampler``. The draw depends
        only on the seed, the epoch and the weights. With ``shuffle="shards"``, each shard is drawn
        within itself, as often as it has rows, by the weights or the classes in it. Evaluation
        takes each row once, in order.

        Parameters
        ----------
        weights
            A column with one number for each row, at least 0; a row with 0 is never drawn.
        balance
            An integer, boolean or category column: all classes get equal shares of the rows.

        Raises
        ------
        InputError
            Both are given, the column is unsuitable, a weight is invalid, or all weights are 0. The
            column is read once, to check it.

        Notes
        -----
        Without arguments, the returned view has no sampling: it takes each row once. A row that is
        drawn twice in an epoch gets the same random transforms both times; ``augment=`` of
        `cerebro.torch.Model` differs each time. Sampling takes 8 bytes of memory for each row of
        the view, in every worker.
        """
        sampling = make_sampling(weights, balance)
        if sampling is not None:
            sampling.check(self._column(sampling.column))
            sampling.check_values(self._scalars(sampling.column))
        sampling_json = None if sampling is None else sampling.to_json()
        view = self._view(self._rows, {"sampling": sampling_json})
        view._sampling = sampling
        return view

    # --- serialization --------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """Return a JSON value from which `from_spec` makes the same view.

        It contains ``path``, ``checksum``, the rows, transforms and sampling of the view, and
        ``operations``, a readable history of how the view was made.
        """
        return {
            "path": self._place,
            "checksum": self.checksum,
            **({} if self._bucket is None else {"set": self._manifest.checksum}),
            **self._view_json(),
            "operations": list(self._operations),
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, check: bool = True) -> Dataset:
        """Open the dataset and make the view that `spec` describes.

        Raises InputError if the dataset has changed since `spec` was made; without `check`, only
        if its number of shards has changed.
        """
        if is_url(spec["path"]):
            data = Dataset.__new__(Dataset)
            data._open_bucket(BucketData.find(spec["path"], spec.get("set")))
        else:
            data = cls(spec["path"])
        if len(spec["rows"]) != data.num_shards:
            raise InputError(
                f"'{data._place}' has changed: its shards differ from the recorded ones; restore it"
            )
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
        data._sampling = Sampling.from_json(spec.get("sampling"))
        if data._sampling is not None:
            data._sampling.check(data._column(data._sampling.column))
        data._operations = tuple(spec["operations"])
        if check and data.checksum != spec["checksum"]:
            raise InputError(
                f"'{data._place}' has changed: its checksum differs from the recorded one; "
                "restore it"
            )
        return data

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], Dataset], tuple[dict[str, Any]]]:
        return Dataset.from_spec, (self.spec(),)

    # --- for the rest of the library -------------------------------------------------------------

    def _parts(self) -> list[tuple[_core.ShardReader, Part]]:
        """Return each shard's reader and the view's rows in it: a range or uint32 row numbers."""
        return list(zip(self._readers, self._rows, strict=True))

    def _weight_sums(self, *, across: bool) -> list[tuple[NDArray[np.uint64] | None, int]] | None:
        """Return each shard's running sums of weights, and the sum before its first row.

        With `across`, the sums run through all shards. None if each row is taken once. The sums are
        cached for all loaders of the view; see `cerebro.data.sampling`.
        """
        sampling = self._sampling
        if sampling is None:
            return None
        if across:
            ends = list(accumulate(self._shard_rows()))
            whole = self._all_sums
            starts = [0, *ends][:-1]
            return [
                (whole[start:end], 0 if start == 0 else int(whole[start - 1]))
                for start, end in zip(starts, ends, strict=True)
            ]
        parts = self._parts()
        for shard, (reader, part) in enumerate(parts):
            if shard not in self._sums:
                values = reader.column(sampling.column)[part_index(part)]
                sums = sampling.sum_weights(values, shard)
                if sums is None:
                    continue
                self._sums[shard] = sums
        return [(self._sums.get(shard), 0) for shard in range(len(parts))]

    @cached_property
    def _sums(self) -> dict[int, NDArray[np.uint64]]:
        return {}

    @cached_property
    def _all_sums(self) -> NDArray[np.uint64]:
        assert self._sampling is not None
        sums = self._sampling.sum_weights(
            np.concatenate(self._scalars(self._sampling.column)), None
        )
        return np.zeros(0, np.uint64) if sums is None else sums

    @property
    def _generation(self) -> int:
        """A number that changes if `_parts` changes; see `cerebro.data.placed`."""
        return self._readers.generation if isinstance(self._readers, PulledShards) else 0

    def _holds(self, view: Dataset) -> bool:
        """Return whether `view`, of the same shards, has only rows of this view.

        Transforms and sampling must be equal too, unless this view has none.
        """
        alike = not self._transforms or self._transforms == view._transforms
        alike = alike and self._sampling in (None, view._sampling)
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
        """Return a view with these rows of each shard, which need not be rows of this view."""
        return self._view(rows, operation)

    def _first_rows(self) -> list[int]:
        """Return the number of each shard's first row in the whole dataset."""
        return [0, *accumulate(entry.rows for entry in self._shards)][:-1]

    def _source_rows(self, rows: Array) -> Array:
        """Return the numbers in the source of rows of the whole dataset, for messages.

        They stay as they are if the dataset is not known to be shuffled, or is very large.
        """
        arguments, count = self._manifest.arguments, self._manifest.rows
        if not arguments.get("shuffle") or count > _MOST_NUMBERED:
            return rows
        order: Array = _core.permutation(count, arguments["seed"], "write")
        return order[rows]

    def _stored_bytes(self) -> int:
        """Return the size of the view's rows, in proportion to that of the files of all rows.

        The manifest alone gives it, so that it is the same on every machine.
        """
        files: int = sum(file.bytes for entry in self._shards for file in entry.files.values())
        return files * self.num_rows // max(1, self._manifest.rows)

    def _stored_rows(self) -> list[int]:
        """Return the number of rows of each shard of the whole dataset."""
        return [entry.rows for entry in self._shards]

    def _shard_rows(self) -> list[int]:
        """Return the number of the view's rows in each shard."""
        return [part_rows(part) for part in self._rows]

    def _is_whole(self) -> bool:
        return all(
            isinstance(part, tuple) and part == (0, entry.rows)
            for part, entry in zip(self._rows, self._shards, strict=True)
        )

    def _verify_shard(self, shard: int) -> None:
        """Compare a shard's files with their hashes; raise CorruptDataError if one differs."""
        self._pull([shard])
        try:
            verify_shard(self._path, self._manifest, shard)
        except CorruptDataError:
            if not isinstance(self._readers, PulledShards):
                raise
            self._readers.renew(shard)

    def _check_sizes(self, shard: int) -> None:
        """Raise an error if a file was truncated or removed since it was opened."""
        # Reading the mapping of a truncated file would kill the process.
        self._pull([shard])
        folder = f"{self._path}/{shard_folder(shard)}/"  # strings are fast: every unit comes here
        for name, entry in self._shards[shard].files.items():
            try:
                whole = os.lstat(folder + name).st_size == entry.bytes
            except OSError:
                whole = False
            if not whole and self._bucket is not None:
                self._verify_shard(shard)
            elif not whole:
                self._open_shard(shard)  # raises an error that names the fault

    # --- internal -------------------------------------------------------------------------------

    @property
    def _shards(self) -> Sequence[Any]:
        return self._manifest.shards

    def _pull(self, shards: Collection[int]) -> None:
        """Copy shards of a dataset in object storage to this machine, unless they are here."""
        if self._bucket is not None:
            self._bucket.pull(shards)

    def _is_here(self, shard: int) -> bool:
        """Return whether reading a shard copies nothing from object storage."""
        return self._bucket is None or self._bucket.has(shard)

    def _open_shard(self, index: int) -> _core.ShardReader:
        return open_shard(self._path, self._manifest, index)

    def _take_transforms(self, view: Dataset, columns: Sequence[Column]) -> None:
        """Take over a view's transforms of columns that were copied in stored form."""
        names = {column.name for column in columns}
        self._transforms = {n: steps for n, steps in view._transforms.items() if n in names}
        if self._transforms:
            self._operations = ({"transforms": _transforms_json(self._transforms)},)

    def _view(self, rows: Sequence[Part], operation: dict[str, Any]) -> Dataset:
        return self._fill_view(object.__new__(Dataset), rows, operation)

    def _fill_view(self, view: Dataset, rows: Sequence[Part], operation: dict[str, Any]) -> Dataset:
        view._path = self._path
        view._bucket = self._bucket
        view._manifest = self._manifest
        view._readers = self._readers
        view._rows = list(rows)
        view._transforms = dict(self._transforms)
        view._sampling = self._sampling
        view._operations = (*self._operations, operation)
        return view

    def _view_json(self) -> dict[str, Any]:
        view: dict[str, Any] = {
            "rows": [part_to_json(part) for part in self._rows],
            "transforms": _transforms_json(self._transforms),
        }
        if self._sampling is not None:  # older checksums of views without sampling stay valid
            view["sampling"] = self._sampling.to_json()
        return view

    def _cut_rows(self, bounds: Sequence[float]) -> list[list[Part]]:
        rounder = splitting.Rounder(bounds)
        cuts = [rounder.cut(part_rows(part)) for part in self._rows]
        return [
            [
                cut_part(part, at[index], at[index + 1])
                for part, at in zip(self._rows, cuts, strict=True)
            ]
            for index in range(len(bounds))
        ]

    def _take_rows(self, positions: list[list[Array]]) -> list[list[Part]]:
        return [
            [take_rows(part, rows) for part, rows in zip(self._rows, of_part, strict=True)]
            for of_part in positions
        ]

    def _column(self, name: str) -> Column:
        if name not in self.columns:
            raise InputError(f"no column {name!r}: the dataset has {', '.join(self.columns)}")
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
        """Yield the view's values in runs that fit in memory: slices, or copies of single rows."""
        part = self._rows[shard]
        step = part_rows(part) if isinstance(part, tuple) else _PIECE_ROWS
        for start in range(0, part_rows(part), max(1, step)):
            piece = cut_part(part, start, min(start + step, part_rows(part)))
            if column.ragged:
                yield self._ragged_rows(column.name, shard, piece).values
            else:
                yield self._plain_rows(column.name, shard, piece)

    def _part_bytes(self, column: Column, shard: int) -> int:
        part = self._rows[shard]
        if not column.ragged:
            return part_rows(part) * column.item_bytes
        if self._bucket is not None:  # an estimate: a description must not copy all shards here
            entry = self._shards[shard]
            size = sum(entry.files[name].bytes for name in column.file_names)
            return int(size * part_rows(part) // entry.rows)
        _, offsets = self._readers[shard].ragged(column.name)
        rows = np.arange(*part) if isinstance(part, tuple) else part.astype(np.int64)
        total = int((offsets[rows + 1] - offsets[rows]).sum())
        return total * column.item_bytes + (len(rows) + 1) * offsets.itemsize

    def _summary(self) -> str:
        view = "" if not self._operations else f" (a view of {self._manifest.rows:,})"
        drawn = "" if self._sampling is None else f", {self._sampling}"
        size = fmt.size(self.nbytes)
        return f"{self.num_rows:,} rows{view}, {self.num_shards} shards, {size}{drawn}"

    def _describe(self) -> dict[str, str]:
        """Return a readable line for each column, but no more lines than fit on a screen."""
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
