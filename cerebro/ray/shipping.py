"""Sends shards from the coordinator to nodes, in pieces, each shard once to a place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cerebro.data import Dataset
from cerebro.data.manifest import FILE_NAME, shard_folder
from cerebro.plain_files import read_bytes

PIECE_BYTES = 8 << 20
WINDOW = 4
"""Pieces on their way at a time: more would only fill the object store."""


@dataclass(frozen=True)
class Source:
    """A data set on the coordinator's disk, or of a view's rows."""

    data: Dataset

    @property
    def checksum(self) -> str:
        return self.data.manifest.checksum

    @property
    def folder(self) -> Path:
        return self.data.path

    def spec_at(self, folder: str) -> Mapping[str, Any]:
        """What opens the view where a node has the data."""
        return {**self.data.spec(), "path": folder}

    @property
    def shards(self) -> range:
        return range(len(self.data.manifest.shards))


def begin(ray: Any, actor: Any, source: Source, timeout: float) -> list[int]:
    """Tell a node about a data set; return the shards that it has already."""
    manifest = read_bytes(source.folder / FILE_NAME)
    here = actor.begin_data.options(concurrency_group="control").remote(manifest)
    return list(ray.get(here, timeout=timeout))


def send(ray: Any, actor: Any, source: Source, shards: Iterable[int]) -> int:
    """Send shards to a node, which checks them; return the number of bytes.

    Raises
    ------
    CorruptDataError
        If a file here is not what the manifest says.
    RayError
        If the node is gone.
    OSError
        If a file here cannot be read.
    """
    receive = actor.receive.options(concurrency_group="control")
    finish = actor.finish.options(concurrency_group="control")
    sent = 0
    for shard in shards:
        source.data.check_sizes(shard)
        waiting: list[Any] = []
        for name in source.data.manifest.shards[shard].files:
            path = source.folder / shard_folder(shard) / name
            with path.open("rb") as file:
                offset = 0
                while piece := file.read(PIECE_BYTES):
                    waiting.append(receive.remote(source.checksum, shard, name, offset, piece))
                    offset += len(piece)
                    if len(waiting) == WINDOW:
                        ray.get(waiting.pop(0))
                sent += offset
        ray.get(waiting)
        ray.get(finish.remote(source.checksum, shard))
    return sent
