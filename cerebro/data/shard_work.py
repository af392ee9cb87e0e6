"""Make the files of one shard of a derived dataset, here or in a worker of a cluster.

`Dataset.derive` makes its shards itself, or orders them from the workers of an executor. Both call
`ShardWork.write`, so the files are the same. The protocols below are what the dataset needs from
an executor; `cerebro.cluster` implements them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import cerebro._core as _core
from cerebro.data.derivation import Derivation
from cerebro.data.dtypes import Array
from cerebro.data.manifest import Column, FileEntry
from cerebro.data.shards import copy_name
from cerebro.errors import InputError
from cerebro.machine.devices import CPU, are_gpus, is_gpu
from cerebro.machine.guard import refuse


def write_column(column: Column, values: Any, folder: Path) -> dict[str, FileEntry]:
    """Write rows to a shard's folder; return file entries in the order of `column.file_names`.

    `values` are an array of storage values or, if the column is ragged, an object with ``values``
    and ``offsets``, such as `cerebro.data.RaggedRows`.
    """
    if not column.ragged:
        (name,) = column.file_names
        return {name: _write_file(folder / name, column.dtype, column.shape, values)}
    values_name, offsets_name = column.file_names
    return {
        values_name: _write_file(
            folder / values_name, column.dtype, column.shape, np.asarray(values.values)
        ),
        offsets_name: _write_file(folder / offsets_name, "int64", (), values.offsets),
    }


def _write_file(path: Path, dtype: str, shape: tuple[int, ...], values: Array) -> FileEntry:
    writer = _core.NpyWriter(os.fspath(path), dtype, shape, len(values))
    try:
        writer.write(np.ascontiguousarray(values))
        return FileEntry(*writer.close())
    except BaseException:
        writer.abort()
        raise


ARRIVING = "arriving-"
"""The prefix of folders with the files of a shard that is being received."""


@dataclass(frozen=True)
class ShardWork:
    """What determines the files of each shard of a derived dataset."""

    derivation: Derivation  # has no view on its way to a worker: `with_view` sets it
    kept: tuple[Column, ...]  # the columns to copy from the view
    columns: tuple[Column, ...]  # all columns of the derived dataset

    def with_view(self, view: Any) -> ShardWork:
        """Return the same work on a view of the same rows."""
        return replace(self, derivation=replace(self.derivation, data=view))

    def write(
        self, shard: int, place: Path, advance: Callable[[int], None] = lambda count: None
    ) -> dict[str, FileEntry]:
        """Write a shard's files to `place`, an empty folder; return them in the order of columns.

        Calls `advance` with the number of bytes written since the last call. Raises InputError if
        the function's results do not fit the columns.
        """
        view = self.derivation.data.view
        files: dict[str, FileEntry] = {}
        for column in self.kept:
            files.update(write_column(column, view.read(column.name, shard), place))
            advance(view.shard_rows[shard] * column.item_bytes)
        for copy in (None, *range(self.derivation.copies)):
            files.update(self._write_pass(shard, copy, place, advance))
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
    nbytes: Sequence[int]  # the approximate size of each shard
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
    """Raise InputError unless the workers of `executor`, if it is given, can make shards.

    `call` is the user's call, for messages. `device` is the device on which the function computes
    in this process; None: unknown.
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
