"""Open the files of one shard, and compare them with the manifest."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import cerebro._core as _core
from cerebro.data.manifest import Manifest, MissingFileError, shard_folder
from cerebro.errors import CorruptDataError


def open_shard(folder: Path, manifest: Manifest, index: int) -> _core.ShardReader:
    """Map the files of shard `index` of the dataset in `folder`.

    Raises CorruptDataError if a file is missing, cut, or has a wrong header.
    """
    entry = manifest.shards[index]
    columns = [
        (
            column.name,
            column.dtype,
            column.shape,
            column.ragged,
            {name: entry.files[name].bytes for name in column.file_names},
        )
        for column in manifest.columns
    ]
    try:
        return _core.ShardReader(os.fspath(folder / shard_folder(index)), entry.rows, columns)
    except FileNotFoundError as error:
        raise MissingFileError(f"{error.strerror or error}: the dataset is damaged") from None
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise OSError(
            errno.ENOMEM,
            f"{error.strerror}: this process has as many mappings as Linux allows "
            "(vm.max_map_count, 65,530 unless it is raised): stack columns, or write fewer shards; "
            "or its address space is limited (ulimit -v)",
        ) from None


def verify_shard(folder: Path, manifest: Manifest, index: int) -> None:
    """Compare a shard's files with their hashes; raise CorruptDataError if one differs.

    The files are reopened, which detects a truncated one by its size; touching an old mapping would
    kill the process.
    """
    for name, digest in open_shard(folder, manifest, index).hashes().items():
        if digest != manifest.shards[index].files[name].xxh3_64:
            path = folder / shard_folder(index) / name
            raise CorruptDataError(
                f"{path} is damaged: its checksum differs from the manifest's; write the dataset "
                "again"
            )
