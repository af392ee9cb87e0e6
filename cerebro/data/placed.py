"""Partial datasets: some of the shards, or only the rows of a view.

On a cluster, a node holds some shards of the training data. `PlacedShards` opens these shards, and
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
from cerebro.data.dataset import Dataset
from cerebro.data.manifest import FileEntry, Manifest, ShardEntry, read_manifest, shard_folder
from cerebro.data.rows import Part
from cerebro.data.shards import Shards
from cerebro.data.view import View
from cerebro.data.writer import write_rows
from cerebro.errors import CorruptDataError, InputError


class PlacedDataset(Dataset):
    """A view of a dataset, only some shards of which are in its folder; made by `from_spec`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.view = View.of_all(PlacedShards(Path(path).absolute()))

    def _show(self, operation: Mapping[str, Any], **changes: Any) -> Dataset:
        raise InputError(
            "the data of a search on a cluster is spread over its nodes: make views of them "
            "before the search"
        )

    def _with_rows(self, parts: Sequence[Part], operation: Mapping[str, Any]) -> Dataset:
        """Return a view, such as a fold, that includes shards that arrive later."""
        placed: PlacedDataset = object.__new__(PlacedDataset)
        placed.view = self.view.change(operation, parts=parts)
        return placed

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], Dataset], tuple[dict[str, Any]]]:
        return PlacedDataset.from_spec, (self.spec(),)


class PlacedShards(Shards):
    """The shards that are in a folder; others are opened when they arrive and are checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._readers = {}
        for shard in range(len(self.manifest.shards)):
            if (folder / shard_folder(shard)).is_dir():
                with contextlib.suppress(CorruptDataError):  # raised when the shard is read
                    self._readers[shard] = self._open(shard)

    def reader(self, shard: int) -> _core.ShardReader:
        if shard not in self._readers:
            raise InputError(
                f"shard {shard} of the data is on another node: compute what needs all rows "
                "before the search, or give every node all shards (shared_path= or replicas=)"
            )
        return self._readers[shard]

    def map_parts(self, parts: Sequence[Part]) -> list[tuple[_core.ShardReader, Part]]:
        """Give a missing shard no rows; it keeps its number, which keys its row order."""
        here = self._readers
        if not here:
            raise InputError(f"no shard of the dataset is in {self.folder}")
        other = next(iter(here.values()))
        return [
            (here[shard], part) if shard in here else (other, range(0))
            for shard, part in enumerate(parts)
        ]

    def verify(self, shard: int) -> None:
        self._forget_damaged(shard, super().verify)
        if shard not in self._readers:
            self._readers[shard] = self._open(shard)
            self.generation += 1

    def check_sizes(self, shard: int) -> None:
        self._forget_damaged(shard, super().check_sizes)
        if shard not in self._readers:
            self.verify(shard)

    def _forget_damaged(self, shard: int, check: Callable[[int], None]) -> None:
        """Check a shard; if it is damaged, close it, because its replacement has new files."""
        try:
            check(shard)
        except CorruptDataError:
            self._readers.pop(shard, None)
            self.generation += 1
            raise


# --- the rows of a view -----------------------------------------------------------


def write_view(view: Dataset, folder: Path) -> Dataset:
    """Write the rows of a view as a dataset in an empty folder; it has the view's transforms.

    Rows stay in their shards, so batches equal the view's; shards without rows are left out.
    """
    stored = view.shards.copy_names  # augmented, which evaluation does not read
    columns = tuple(column for name, column in view.columns.items() if name not in stored)
    shards: list[ShardEntry] = []
    for index, rows in enumerate(view.view.shard_rows):
        if not rows:
            continue
        place = folder / shard_folder(len(shards))
        place.mkdir()
        files: dict[str, FileEntry] = {}
        for column in columns:
            files |= write_rows(column, view.view.read(column.name, index), place)
        shards.append(ShardEntry(rows, files))
    manifest = Manifest(
        columns=columns,
        shards=tuple(shards),
        arguments={},
        source={"kind": "view", "fingerprint": view.checksum},
        recipe=[made for made in view.shards.manifest.recipe if made["name"] not in stored],
    )
    manifest.write(folder)
    return Dataset(folder).with_transforms(view.transforms)
