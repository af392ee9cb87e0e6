"""Open the files of a shard, compare them with the manifest, and find all that are damaged.

`Dataset.verify` stops at the first damaged file. `find_damage` checks each file separately, even if
the dataset can no longer be opened.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cerebro._core as _core
from cerebro.data.manifest import (
    FILE_NAME,
    FileEntry,
    Manifest,
    MissingFileError,
    read_manifest,
    shard_folder,
)
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.files import LinkError, open_plain


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


@dataclass(frozen=True)
class Damage:
    """A file of a dataset that differs from its manifest, and how."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}: write the dataset again, or restore a copy"


def find_damage(folder: str | os.PathLike[str]) -> list[Damage]:
    """Compare all files of a dataset with its manifest; return the damaged ones."""
    try:
        manifest = read_manifest(folder)
    except (CorruptDataError, InputError, OSError) as error:
        return [Damage(Path(folder, FILE_NAME), f"cannot be used ({error})")]
    return [
        Damage(path, what)
        for index, shard in enumerate(manifest.shards)
        for name, entry in shard.files.items()
        if (what := _find_fault(path := Path(folder, shard_folder(index), name), entry)) is not None
    ]


def _find_fault(path: Path, entry: FileEntry) -> str | None:
    try:
        size = path.lstat().st_size
        if size != entry.bytes and not path.is_symlink():
            return f"has {size} bytes, but {entry.bytes} were written"
        same = hash_of_file(path, _core.xxh3_64) == entry.xxh3_64
    except LinkError:
        return "is a symbolic link, which datasets do not follow"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None if same else "is damaged: its checksum differs from the manifest's"


def hash_of_file(path: Path, hash_buffer: Callable[[mmap.mmap], str]) -> str:
    """Hash a file without reading it into memory at once.

    Raises LinkError if it is a link, OSError if it cannot be read, and ValueError if it is empty.
    """
    fd = open_plain(path, os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
            return hash_buffer(content)
    finally:
        os.close(fd)
