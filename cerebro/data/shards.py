"""The files of a dataset: open them, read rows from them, and compare them with the manifest.

`Dataset.verify` stops at the first damaged file. `find_damage` checks each file separately, even if
the dataset can no longer be opened.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cerebro._core as _core
from cerebro.data.dtypes import Array
from cerebro.data.manifest import (
    FILE_NAME,
    Column,
    FileEntry,
    Manifest,
    MissingFileError,
    read_manifest,
    shard_folder,
)
from cerebro.data.rows import Part, part_index
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.files import LinkError, open_plain

MAX_COPIES = 1000
_MOST_NUMBERED = 20_000_000  # rows of a shuffled dataset whose numbers in the source are computed


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


class Shards:
    """The files of a dataset, shared by all of its views.

    These are in a folder of this machine: opening them checks the presence, size and header of each
    and reads no data. Subclasses copy them from object storage, or have only some of them.
    """

    url: str | None = None  # of a dataset in object storage
    generation = 0  # changes if a shard is opened again, at another address

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._readers = {shard: self._open(shard) for shard in range(len(self.manifest.shards))}

    @property
    def place(self) -> str:
        """The path or URL by which the dataset was opened, and can be opened again."""
        return self.url or str(self.folder)

    @cached_property
    def columns(self) -> dict[str, Column]:
        return {column.name: column for column in self.manifest.columns}

    @property
    def stored_rows(self) -> list[int]:
        """The number of rows of each shard."""
        return [entry.rows for entry in self.manifest.shards]

    @property
    def first_rows(self) -> list[int]:
        """The number of each shard's first row in the dataset."""
        return [0, *accumulate(self.stored_rows)][:-1]

    def number_in_source(self, rows: Array) -> Array:
        """Return the numbers in the source of rows of the dataset, if known, for messages."""
        arguments, count = self.manifest.arguments, self.manifest.rows
        if not arguments.get("shuffle") or count > _MOST_NUMBERED:
            return rows
        order: Array = _core.permutation(count, arguments["seed"], "write")
        return order[rows]

    # --- augmented columns ----------------------------------------------------------------------

    @cached_property
    def copied(self) -> dict[str, int]:
        """The number of copies of each column that is stored augmented.

        `Dataset.derive(copies=k)` writes a derived column ``c`` k + 1 times: without augmentation
        as ``c``, and as ``c@0`` to ``c@{k - 1}``, each with different random crops and flips.
        Batches have one column ``c``: copy ``epoch % k`` in training, the column without
        augmentation in evaluation. The manifest's ``arguments`` list the columns that have copies.
        """
        path, arguments = self.folder / FILE_NAME, self.manifest.arguments
        number = arguments.get("copies") if arguments.get("derived") else None
        if not number:
            return {}
        names = arguments.get("outputs")
        whole = isinstance(number, int) and 0 < number <= MAX_COPIES
        if not whole or not isinstance(names, list):
            raise CorruptDataError(f"{path}: field 'arguments.copies' is not a number of copies")
        for name in map(str, names):
            for copy in range(number):
                both = (self.columns.get(name), self.columns.get(copy_name(name, copy)))
                kinds = [None if c is None else (c.dtype, c.shape, c.ragged) for c in both]
                if None in kinds or kinds[0] != kinds[1]:
                    raise CorruptDataError(
                        f"{path}: field 'arguments.copies': there is no column "
                        f"{copy_name(name, copy)!r} like {name!r}"
                    )
        return dict.fromkeys(map(str, names), number)

    @property
    def copies(self) -> int:
        """The number of copies that training reads in turn, one per epoch; at least 1."""
        return max(self.copied.values(), default=1)

    @property
    def copy_names(self) -> set[str]:
        """The names of the columns that are copies; batches do not have them."""
        return {copy_name(name, copy) for name, n in self.copied.items() for copy in range(n)}

    # --- files ----------------------------------------------------------------------------------

    def pull(self, shards: Collection[int]) -> None:
        """Copy shards of a dataset in object storage to this machine, unless they are here."""

    def are_here(self) -> bool:
        """Return whether reading all shards copies nothing from object storage."""
        return True

    def is_here(self, shard: int) -> bool:
        """Return whether reading a shard copies nothing from object storage."""
        return True

    def verify(self, shard: int) -> None:
        """Compare a shard's files with their hashes; raise CorruptDataError if one differs."""
        verify_shard(self.folder, self.manifest, shard)

    def check_sizes(self, shard: int) -> None:
        """Raise an error if a file was truncated or removed since it was opened."""
        # Reading the mapping of a truncated file would kill the process.
        folder = f"{self.folder}/{shard_folder(shard)}/"  # strings are fast: every unit comes here
        for name, entry in self.manifest.shards[shard].files.items():
            try:
                whole = os.lstat(folder + name).st_size == entry.bytes
            except OSError:
                whole = False
            if not whole:
                self._open(shard)  # raises an error that names the fault

    def _open(self, shard: int) -> _core.ShardReader:
        return open_shard(self.folder, self.manifest, shard)

    # --- rows -----------------------------------------------------------------------------------

    def reader(self, shard: int) -> _core.ShardReader:
        return self._readers[shard]

    def map_parts(self, parts: Sequence[Part]) -> list[tuple[_core.ShardReader, Part]]:
        """Return each shard's reader and part; a shard that is elsewhere has no rows."""
        return [(self.reader(shard), part) for shard, part in enumerate(parts)]

    def read(self, name: str, shard: int, part: Part) -> Any:
        """Return rows of a column: a read-only array or, if it is ragged, `RaggedRows`."""
        if self.columns[name].ragged:
            return self._read_ragged(name, shard, part)
        array = self.reader(shard).column(name)[part_index(part)]
        array.setflags(write=False)
        return array

    def _read_ragged(self, name: str, shard: int, part: Part) -> RaggedRows:
        values, offsets = self.reader(shard).ragged(name)
        if isinstance(part, range):
            values = values[offsets[part.start] : offsets[part.stop]]
            cuts = offsets[part.start : part.stop + 1] - offsets[part.start]
        else:
            rows = part.astype(np.int64)
            lengths = offsets[rows + 1] - offsets[rows]
            cuts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            index = np.repeat(offsets[rows] - cuts[:-1], lengths) + np.arange(int(cuts[-1]))
            values = values[index]
        values.setflags(write=False)
        cuts.setflags(write=False)
        return RaggedRows(values, cuts)


def copy_name(column: str, copy: int) -> str:
    return f"{column}@{copy}"


def open_shard(folder: Path, manifest: Manifest, index: int) -> _core.ShardReader:
    """Map the files of a shard of the dataset in `folder`."""
    entry = manifest.shards[index]
    place = folder / shard_folder(index)
    try:
        return open_columns(place, entry.rows, manifest.columns, entry.files)
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


def open_columns(
    place: Path, rows: int, columns: Sequence[Column], files: Mapping[str, FileEntry]
) -> _core.ShardReader:
    """Map the files of a shard; raise an error if one is missing or has a wrong size or header."""
    specs = [
        (c.name, c.dtype, c.shape, c.ragged, {name: files[name].bytes for name in c.file_names})
        for c in columns
    ]
    return _core.ShardReader(os.fspath(place), rows, specs)


def verify_shard(folder: Path, manifest: Manifest, index: int) -> None:
    """Compare a shard's files with their hashes; raise CorruptDataError if one differs."""
    # The files are reopened: touching the mapping of a truncated one would kill the process.
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
    """Hash a file without reading it into memory at once; raise ValueError if it is empty."""
    fd = open_plain(path, os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
            return hash_buffer(content)
    finally:
        os.close(fd)
