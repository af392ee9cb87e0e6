"""A dataset on disk, and views of it."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cerebro.data.cache import BucketShards
from cerebro.data.manifest import Column, read_manifest
from cerebro.data.order import make_sampling
from cerebro.data.rows import Part, Selection, select_rows
from cerebro.data.shards import Shards
from cerebro.data.stats import MOST_COUNTS, Stats, column_stats
from cerebro.data.view import View, to_json
from cerebro.errors import InputError
from cerebro.machine.files import path_of
from cerebro.machine.objects import is_url
from cerebro.transforms import Cast, Transform
from cerebro.transforms import compile as compile_transforms

if TYPE_CHECKING:
    from cerebro.data.batches import Batches
    from cerebro.data.derivation import MakesShards


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

    # For the rest of the library: what it asks of the rows, and of the files that views share.
    view: View

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if isinstance(path, str) and is_url(path):
            self.view = View.of_all(BucketShards.find(path))
        else:  # absolute, because the working directory may change
            self.view = View.of_all(Shards(path_of("path", path).absolute()))

    @property
    def shards(self) -> Shards:
        return self.view.shards

    # --- properties -----------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The folder, as an absolute path; of a dataset in object storage, that of its copy."""
        return self.shards.folder

    @property
    def url(self) -> str | None:
        """The URL of a dataset in object storage; None for one on this machine's disks."""
        return self.shards.url

    @property
    def num_rows(self) -> int:
        """The number of rows in all shards."""
        return self.view.num_rows

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
        return len(self.view.parts)

    @property
    def columns(self) -> dict[str, Column]:
        """The columns by name, in order."""
        return self.shards.columns

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
        return dict(self.view.transforms)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows on disk, without file headers."""
        return self.view.nbytes

    @property
    def checksum(self) -> str:
        """32 hexadecimal digits that differ if the data differs.

        XXH3-128 over the columns and the hashes of all files. The checksum of a view covers its
        rows, transforms and sampling as well: different views of one dataset have different
        checksums, and the same view made twice has the same.
        """
        return self.view.checksum

    def __repr__(self) -> str:
        lines = [f"Dataset({self.shards.place!r}): {self.view.summary()}"]
        columns = self.view.describe_columns()
        width = max(map(len, columns))
        lines += [f"  {name:<{width}}  {text}" for name, text in columns.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>"
            for name, text in self.view.describe_columns().items()
        )
        title = html.escape(self.shards.place)
        return (
            f"<div><b>{title}</b><br>{html.escape(self.view.summary())}"
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
        return {name: self.view.read(name, int(index)) for name in self.columns}

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
        chains = {}
        for name, column in self.columns.items():
            steps = tuple(self.view.transforms.get(name, ()))
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
        meta = self.view.column(column)
        return column_stats(meta, self.view.runs(meta), self.num_rows, axis)

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
        meta = self.view.column(column)
        if meta.dtype.startswith(("float", "bfloat", "complex")):
            raise InputError(
                f"column {column!r} is {meta.dtype}, not class labels: name the column of labels, "
                f"or write it as integers with shard(..., dtypes={{{column!r}: 'int64'}})"
            )
        if meta.classes is not None:
            return len(meta.classes)
        whole = self._show({}, parts=[range(rows) for rows in self.shards.stored_rows])
        shards = [labels for labels in whole.view.labels(column) if len(labels)]
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
        read_manifest(self.path)
        self.fetch()
        for shard in range(self.num_shards):
            self.shards.verify(shard)

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
        self.shards.pull(range(self.num_shards))

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
        was written; if not (``shuffle=False``), each shard is split in its original order, so that
        only with ``shards=1`` the last part has the last rows. With `stratify` or `groups`, rows
        are chosen by label instead.

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
        views = self.view.split(fractions, stratify, groups, seed)
        return tuple(self._show(operation, parts=parts) for operation, parts in views)

    def select(self, rows: Selection) -> Dataset:
        """Return a view of some rows; each row stays in its shard.

        Parameters
        ----------
        rows
            A slice, a boolean mask with one value for each row, or row numbers from 0 to
            ``len(self) - 1``, counted across shards. Within a shard, rows have the order of these
            numbers; a repeated number repeats the row.
        """
        parts = select_rows(self.view.parts, rows)
        return self._show({"select": {"rows": sum(map(len, parts))}}, parts=parts)

    def with_transforms(self, transforms: Mapping[str, Transform | Sequence[Transform]]) -> Dataset:
        """Return a view whose batches are transformed, such as ``{"x": [Scale(1 / 255)]}``.

        The new transforms replace those of the columns named here; other columns keep theirs. They
        are applied in the given order while batches are gathered. Raises InputError, naming the
        column, if a chain does not fit its column.
        """
        if not isinstance(transforms, Mapping):
            raise InputError(
                f"with_transforms needs a mapping such as {{'x': [Scale(1 / 255)]}}, not "
                f"{transforms!r}"
            )
        combined = self.transforms
        for name, chain in transforms.items():
            self.view.column(name)
            combined[name] = tuple(chain) if isinstance(chain, Sequence) else (chain,)
        compile_transforms(self.columns, combined)
        chains = {name: steps for name, steps in combined.items() if steps}
        return self._show({"transforms": to_json(combined)}, transforms=chains)

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
        from cerebro.data.derivation import check_executor, make_derivation

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
        derived.view = derived.view.keep_transforms(self.view, recipe.work.kept)
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

        return self._show({"like": view.checksum}, parts=rows_of_source(self.shards.manifest, view))

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
            sampling.check(self.view.column(sampling.column))
            sampling.check_values(self.view.scalars(sampling.column))
        sampling_json = None if sampling is None else sampling.to_json()
        return self._show({"sampling": sampling_json}, sampling=sampling)

    # --- serialization --------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """Return a JSON value from which `from_spec` makes the same view.

        It contains ``path``, ``checksum``, the rows, transforms and sampling of the view, and
        ``operations``, a readable history of how the view was made.
        """
        return self.view.spec()

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, check: bool = True) -> Dataset:
        """Open the dataset and make the view that `spec` describes.

        Raises InputError if the dataset has changed since `spec` was made; without `check`, only
        if its number of shards has changed.
        """
        if is_url(spec["path"]):
            data = object.__new__(Dataset)
            shards: Shards = BucketShards.find(spec["path"], spec.get("set"))
        else:
            data = cls(spec["path"])
            shards = data.shards
        data.view = View.open_spec(shards, spec, check=check)
        return data

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], Dataset], tuple[dict[str, Any]]]:
        return Dataset.from_spec, (self.spec(),)

    def _show(self, operation: Mapping[str, Any], **changes: Any) -> Dataset:
        """Return a view of this view, with changed fields."""
        data = object.__new__(Dataset)
        data.view = self.view.change(operation, **changes)
        return data

    def _with_rows(self, parts: Sequence[Part], operation: Mapping[str, Any]) -> Dataset:
        """Return a view with these rows of each shard, which need not be rows of this view."""
        return self._show(operation, parts=parts)
