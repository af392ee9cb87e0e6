"""What a shard of a derived dataset is computed from, here or in a worker of a cluster.

The function of `Dataset.derive` gets exactly `batch_size` rows in each call: the last batch of a
shard is filled up with rows of the shard that were computed before, and their second results are
dropped. The bits of a result therefore do not depend on where a shard ends.

`Dataset.derive` makes its shards itself, or orders them from the workers of an executor. Both call
`ShardWork.write`, so the files are the same. The protocols at the end are what it needs from an
executor; `cerebro.cluster` implements them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import cerebro._core as _core
from cerebro.arguments import check_whole_number
from cerebro.data.batches import FRAMEWORKS, Batches
from cerebro.data.columns import to_storage
from cerebro.data.dtypes import STORAGE, Array, convert, dtype_name, freeze_array
from cerebro.data.manifest import Column, FileEntry, checksum_of
from cerebro.data.rows import Part
from cerebro.data.shards import MAX_COPIES, copy_name
from cerebro.data.writer import write_rows
from cerebro.errors import InputError
from cerebro.machine.devices import CPU, are_gpus, explain_gpu_memory_errors, is_gpu
from cerebro.machine.guard import refuse
from cerebro.transforms import compile as compile_transforms

Function = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Derivation:
    """A function and the batches that it is called with."""

    data: Any  # a `cerebro.Dataset` with the rows and the transforms of the batches
    function: Function
    reads: Sequence[str] | None  # the columns of the function's batches; None: all
    batch_size: int
    framework: str
    device: str
    copies: int  # with random transforms, besides the values without them
    seed: int  # keys the random transforms
    dtypes: Mapping[str, str]  # the types to store, by column; other columns keep their types

    def batches(self, rows: Sequence[Part], shard: int, copy: int | None) -> Batches:
        """Return batches of these rows of a shard, in order; not augmented if `copy` is None."""
        return Batches(
            self.data._with_rows(rows, {}),
            self.batch_size,
            shard=shard,
            shuffle=False,
            seed=self.seed,
            epoch=copy or 0,
            augment=copy is not None,
            framework=self.framework,
            device=self.device,
            residence="streamed",  # a pass reads each row once: the GPU's memory is the function's
            columns=self.reads,
        )

    def results(self, shard: int, copy: int | None) -> Iterator[dict[str, tuple[Array, str]]]:
        """Yield storage values and types by column, for each batch, without the filled-up rows."""
        filled = list(self.data.view.parts)
        rows = len(filled[shard])
        size = -(-rows // self.batch_size) * self.batch_size
        # Its rows are repeated from the start.
        filled[shard] = freeze_array(np.resize(np.asarray(filled[shard]), size).astype(np.uint32))
        with explain_gpu_memory_errors(self.device, self.batch_size):
            for batch in self.batches(filled, shard, copy):
                columns = self.call(batch)
                count = min(rows, self.batch_size)
                yield {name: (values[:count], dtype) for name, (values, dtype) in columns.items()}
                rows -= count

    def call(self, batch: Mapping[str, Any]) -> dict[str, tuple[Array, str]]:
        """Call the function; return storage values and types by column."""
        columns = self.function(batch)
        if not isinstance(columns, Mapping) or not columns:
            raise InputError(
                "derive: the function must return a mapping of column names to arrays, not "
                f"{type(columns).__name__}"
            )
        rows = len(next(iter(batch.values())))
        converted = {}
        for name, value in columns.items():
            if not isinstance(name, str):
                raise InputError(
                    f"derive: the function must use strings as column names, not {name!r}"
                )
            array, dtype = to_storage(name, value)
            if dtype not in STORAGE or array.ndim == 0 or len(array) != rows:
                raise InputError(
                    f"derive: column {name!r} has the shape {tuple(array.shape)} and the type "
                    f"{dtype} for a batch of {rows} rows: make one row of numbers for each row"
                )
            if name in self.dtypes:
                array, dtype = convert(array, dtype, self.dtypes[name], name), self.dtypes[name]
            converted[name] = (np.ascontiguousarray(array), dtype)
        return converted

    def probe(self) -> tuple[tuple[Column, ...], str]:
        """Compute the first rows twice; return their columns and the hash of the bits, if equal."""
        digests: list[list[str]] = []
        columns: tuple[Column, ...] = ()
        for _ in range(2):
            results = next(self.results(0, None))
            arrays = (np.ascontiguousarray(array).reshape(-1) for array, _ in results.values())
            digests.append([_core.xxh3_128(array.view(np.uint8)) for array in arrays])
            columns = tuple(
                Column(str(n), dtype, array.shape[1:]) for n, (array, dtype) in results.items()
            )
        for column, first, second in zip(columns, *digests, strict=True):
            if first != second:
                raise InputError(
                    f"derive: column {column.name!r} differs when it is computed again from the "
                    "same rows: leave out random numbers, dropout and counters"
                )
        return columns, checksum_of([[column.to_json() for column in columns], digests[0]])


def make_derivation(
    data: Any,
    function: Function,
    *,
    reads: Collection[str] | None,
    batch_size: int,
    framework: str,
    device: str = "cpu",
    copies: int | None,
    seed: int,
    dtypes: Mapping[str, Any] | None,
) -> Derivation:
    """Check the arguments of `Dataset.derive` and return them as a `Derivation`."""
    if not callable(function):
        raise InputError(f"derive: function must be callable, not {function!r}")
    if framework not in FRAMEWORKS:
        raise InputError(f"framework must be one of {', '.join(FRAMEWORKS)}, not {framework!r}")
    for shard, rows in enumerate(data.view.shard_rows):
        if rows == 0:
            raise InputError(
                f"derive: the view has no rows of shard {shard}: derive from the whole dataset "
                "and make the view afterwards"
            )
    if data.shards.copied:
        raise InputError("derive: the dataset has augmented copies: derive from its source")
    if isinstance(reads, str):
        raise InputError(f'reads={reads!r}: give a list of columns, such as ["{reads}"]')
    names = list(data.columns if reads is None else reads)
    for name in names:
        data.view.column(name)
    return Derivation(
        data,
        function,
        None if reads is None else names,
        min(check_whole_number("batch_size", batch_size, 1), max(data.view.shard_rows)),
        framework,
        device,
        _check_copies(data, names, copies),
        check_whole_number("seed", seed, 0, 2**64 - 1),
        {name: dtype_name(dtype) for name, dtype in (dtypes or {}).items()},
    )


def _check_copies(data: Any, reads: Sequence[str], copies: int | None) -> int:
    """Return the number of copies; raise InputError unless it suits the view's transforms."""
    number = check_whole_number("copies", copies, 0, MAX_COPIES, optional=True)
    augmented, plain = (
        compile_transforms(data.columns, data.transforms, augment=augment)
        for augment in (True, False)
    )
    pairs = zip(augmented, plain, strict=True)
    random = [a["name"] for a, b in pairs if a != b and a["name"] in reads]
    if random and number is None:
        raise InputError(
            f"derive: the transforms of column {random[0]!r} draw random numbers, but derived "
            "columns are computed once: copies=4 stores four augmented copies, of which epoch e "
            "reads copy e % 4; copies=0 stores the values without augmentation"
        )
    if number and not random:
        raise InputError(
            f"copies={number}: the view has no random transforms, so all copies would be equal: "
            "leave out copies, or add RandomCrop or RandomHorizontalFlip"
        )
    return number or 0


# --- the files of a shard ------------------------------------------------------------

ARRIVING = "arriving-"
"""The prefix of folders with the files of a shard that is being received."""


@dataclass(frozen=True)
class ShardWork:
    """What determines the files of each shard of a derived dataset."""

    derivation: Derivation  # has no view on its way to a worker: `with_view` sets it
    kept: tuple[Column, ...]  # the columns to copy from the view
    columns: tuple[Column, ...]  # all columns of the derived dataset

    def with_view(self, view: Any) -> ShardWork:
        return replace(self, derivation=replace(self.derivation, data=view))

    def write(
        self, shard: int, place: Path, advance: Callable[[int], None] = lambda count: None
    ) -> dict[str, FileEntry]:
        """Write a shard's files to an empty folder; call `advance` with the bytes of each write."""
        view = self.derivation.data.view
        files: dict[str, FileEntry] = {}
        for column in self.kept:
            files |= write_rows(column, view.read(column.name, shard), place)
            advance(view.part_bytes(column, shard))
        for copy in (None, *range(self.derivation.copies)):
            files |= self._write_pass(shard, copy, place, advance)
        return {name: files[name] for column in self.columns for name in column.file_names}

    def _write_pass(
        self, shard: int, copy: int | None, place: Path, advance: Callable[[int], None]
    ) -> dict[str, FileEntry]:
        """Compute the columns of one copy of a shard, and write them batch by batch."""
        columns = {column.name: column for column in self.columns}
        rows = self.derivation.data.view.shard_rows[shard]
        writers: dict[str, _core.NpyWriter] = {}
        try:
            for results in self.derivation.results(shard, copy):
                for name, (array, dtype) in results.items():
                    stored = columns.get(name if copy is None else copy_name(name, copy))
                    if stored is None or (stored.dtype, stored.shape) != (dtype, array.shape[1:]):
                        raise InputError(
                            f"derive: column {name!r} is {dtype} of shape {array.shape[1:]} in "
                            f"shard {shard}, unlike in the first rows: make rows of one type and "
                            "shape"
                        )
                    if stored.name not in writers:
                        path = os.fspath(place / stored.file_names[0])
                        writers[stored.name] = _core.NpyWriter(path, dtype, stored.shape, rows)
                    writers[stored.name].write(array)
                    advance(array.nbytes)
            return {
                columns[name].file_names[0]: FileEntry(*writer.close())
                for name, writer in writers.items()
            }
        except BaseException:
            for writer in writers.values():
                writer.abort()
            raise


# --- by the workers of an executor --------------------------------------------------


@dataclass(frozen=True)
class Order:
    """Shards that the workers of an executor are to make."""

    view: Any  # the view to make shards from
    work: ShardWork
    folder: Path  # the unfinished dataset's; files arrive in folders below it
    nbytes: Sequence[int]  # the size of each shard
    threads: int  # the compute threads of each worker
    device: str = CPU  # the device of each worker, as the worker names it
    gpu: str = ""  # the kind of GPU that each worker must have; empty: the same as the others


@dataclass(frozen=True)
class Arrived:
    """A shard that a worker has made."""

    shard: int
    files: Mapping[str, FileEntry]  # the size and hash of each file, as the worker reports them
    folder: Path  # holds these files, and no others
    worker: int  # the number of the worker
    node: str  # the name of the worker's node, for messages


class ShardMakers(Protocol):
    """The workers of an executor while a dataset is derived."""

    def make(self, shards: Sequence[int]) -> Iterator[Arrived]:
        """Make shards, and yield each when its files have arrived, in any order.

        Raises InputError, naming the shard and the node, if the function fails; CorruptDataError if
        a file of the source is damaged; and WorkerError if no worker is left, or a shard has ended
        several of them.
        """

    def keep(self, manifest: bytes) -> None:
        """Have nodes keep the shards that they have made, under the finished dataset's name."""


class MakesShards(Protocol):
    """An executor whose workers can make shards."""

    @property
    def devices(self) -> tuple[str, ...]:
        """``("cuda",)`` if each worker has a GPU, else ``("cpu",)``."""

    def shard_makers(self, order: Order) -> AbstractContextManager[ShardMakers]:
        """Start the workers; they end with the block."""


def check_executor(executor: Any, call: str, device: str | None = None) -> None:
    """Raise InputError, naming the user's `call`, unless an executor's workers can make shards.

    `device` is that on which the function computes in this process; None: unknown.
    """
    if executor is None:
        return
    if not callable(getattr(executor, "shard_makers", None)):
        raise InputError(
            f"executor={executor!r} cannot derive: give one of cerebro.cluster, cerebro.ray, "
            "cerebro.dask or cerebro.spark, or leave it out"
        )
    on_gpus = are_gpus(executor.devices)
    if device is not None and on_gpus and not is_gpu(device):
        raise InputError(
            f"{call}: the workers of executor= have GPUs, but the network is on {device}: move it "
            "with net.cuda(), or give an executor whose workers have none"
        )
    if device is not None and device != CPU and not on_gpus:
        raise InputError(
            f"{call}: the workers of executor= compute on the CPU, but the network is on "
            f"{device}: move it with net.cpu(), give an executor whose workers have GPUs, or leave "
            "out executor="
        )
    refuse(call)
