"""Partial datasets: some of the shards, or only the rows of a view.

On a cluster, a node holds some shards of the training data. `PlacedDataset` opens these shards, and
others when they arrive. Evaluation needs all rows of the validation data, which is often a view
with a slice of every shard. `write_view` writes these rows as a separate dataset, so that no node
needs the shards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.data.copies import stored_copies
from cerebro.data.dataset import Dataset
from cerebro.data.manifest import (
    FILE_NAME,
    FileEntry,
    Manifest,
    ShardEntry,
    read_manifest,
    shard_folder,
)
from cerebro.data.rows import Part
from cerebro.data.shard_work import write_column
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine import durable
from cerebro.machine.environment import version


class PlacedDataset(Dataset):
    """A view of a dataset; its folder holds only some of the shards, each complete.

    It has the rows and shards of the whole view; only reading a missing shard raises an error. A
    shard is opened when it is first checked. Created by `from_spec`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._manifest = read_manifest(self._path)
        self._open = _Open()
        self._readers = self._open  # type: ignore[assignment]
        self._rows: list[Part] = [(0, shard.rows) for shard in self._manifest.shards]
        self._transforms = {}
        self._sampling = None
        self._operations = ()
        for shard in range(self.num_shards):
            if (self._path / shard_folder(shard)).is_dir():
                with contextlib.suppress(CorruptDataError):  # raised when the shard is read
                    self._open.readers[shard] = self._open_shard(shard)

    @property
    def _generation(self) -> int:
        return self._open.generation

    def _parts(self) -> list[tuple[_core.ShardReader, Part]]:
        """Return each shard's reader and rows; a missing shard has no rows.

        A missing shard keeps its position, because a shard's number keys its row order.
        """
        here = self._open.readers
        if not here:
            raise InputError(f"no shard of the dataset is in {self._path}")
        other = next(iter(here.values()))
        return [
            (here[shard], part) if shard in here else (other, (0, 0))
            for shard, part in enumerate(self._rows)
        ]

    def _with_rows(self, rows: Sequence[Part], operation: dict[str, Any]) -> Dataset:
        """Return a view, such as a fold, that includes shards that arrive later."""
        view: PlacedDataset = object.__new__(PlacedDataset)
        view._open = self._open
        return self._fill_view(view, rows, operation)

    def _verify_shard(self, shard: int) -> None:
        try:
            super()._verify_shard(shard)
        except CorruptDataError:
            self._forget(shard)
            raise
        if shard not in self._open.readers:
            self._open.readers[shard] = self._open_shard(shard)
            self._open.generation += 1

    def _check_sizes(self, shard: int) -> None:
        try:
            super()._check_sizes(shard)
        except CorruptDataError:
            self._forget(shard)
            raise
        if shard not in self._open.readers:
            self._verify_shard(shard)

    def _forget(self, shard: int) -> None:
        """Close a damaged shard, because its replacement will be in new files."""
        self._open.readers.pop(shard, None)
        self._open.generation += 1

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], Dataset], tuple[dict[str, Any]]]:
        return PlacedDataset.from_spec, (self.spec(),)

    def _view(self, rows: Any, operation: dict[str, Any]) -> Dataset:
        raise InputError(
            "the data of a search on a cluster is spread over its nodes: make views of them "
            "before the search"
        )


class _Open:
    """The readers of the open shards, indexed like the list of a dataset's readers."""

    def __init__(self) -> None:
        self.readers: dict[int, _core.ShardReader] = {}
        self.generation = 0

    def __getitem__(self, shard: int) -> _core.ShardReader:
        reader = self.readers.get(shard)
        if reader is None:
            raise InputError(
                f"shard {shard} of the data is on another node: compute what needs all rows "
                "before the search, or give every node all shards (shared_path= or replicas=)"
            )
        return reader


# --- the rows of a view -----------------------------------------------------------


def write_view(view: Dataset, folder: Path) -> Dataset:
    """Write the rows of a view as a separate dataset; return it with the view's transforms.

    `folder` must be empty. Rows stay in their shards, so batches equal the view's; shards without
    rows are left out.
    """
    stored = stored_copies(view)  # augmented copies, which evaluation does not read
    columns = tuple(column for name, column in view.columns.items() if name not in stored)
    shards: list[ShardEntry] = []
    for rows, index in ((rows, i) for i, rows in enumerate(view._shard_rows()) if rows):
        place = folder / shard_folder(len(shards))
        place.mkdir()
        files: dict[str, FileEntry] = {}
        values = view.shard(index)
        for column in columns:
            files.update(write_column(column, values[column.name], place))
        shards.append(ShardEntry(rows, files))
    manifest = Manifest(
        columns=columns,
        shards=tuple(shards),
        arguments={},
        source={"kind": "view", "fingerprint": view.checksum},
        library=version(),
    )
    durable.replace_file(folder / FILE_NAME, manifest.to_bytes())
    return Dataset(folder).with_transforms(view.transforms)
