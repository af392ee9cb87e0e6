"""A node's cache folder: shards that were sent to it, kept for the next run; and scratch.

    data/CHECKSUM/manifest.json, shard-00003/...    a data set, or some of its shards
    scratch/*                                       one folder for each process that runs: shards on
                                                    their way, slots, rows that are to be sent
    place                                           which folder this is

A shard gets its name when all of its files have come and have the checksums that the
manifest says. It is checked again at its first use in every run, like any data.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from pathlib import Path

from cerebro import _core
from cerebro.data.manifest import FILE_NAME, Manifest, parse_manifest, shard_folder
from cerebro.data.placed import PlacedDataset
from cerebro.errors import CorruptDataError

VARIABLE = "CEREBRO_CACHE"
"""Environment variable of a node that says where its cache is."""


def cache_folder() -> Path:
    """Return this node's cache folder: ``$CEREBRO_CACHE``, or one in the user's own cache."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "cerebro"


class Cache:
    """A node's cache folder.

    Parameters
    ----------
    folder
        Made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._scratch: tuple[Path, int] | None = None
        self._arriving: dict[tuple[str, int], Path] = {}
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "scratch").mkdir(exist_ok=True)

    @property
    def place(self) -> str:
        """The same for all processes that use this folder, and for no other."""
        file = self.folder / "place"
        with contextlib.suppress(FileNotFoundError):
            return file.read_text()
        new = self.folder / f".place-{uuid.uuid4().hex}"
        new.write_text(uuid.uuid4().hex)
        with contextlib.suppress(FileExistsError):
            os.link(new, file)  # whoever is first says it
        new.unlink()
        return file.read_text()

    # --- data --------------------------------------------------------------

    def data(self, checksum: str) -> Path:
        """The folder of the data set with a checksum."""
        return self.folder / "data" / checksum

    def begin(self, manifest: bytes) -> list[int]:
        """Take in a data set's manifest; return the shards that are here already."""
        checksum = parse_manifest(manifest, "the manifest that was sent").checksum
        folder = self.data(checksum)
        folder.mkdir(exist_ok=True)
        _core.replace_file(folder / FILE_NAME, manifest)
        return sorted(
            int(entry.name.removeprefix("shard-")) for entry in folder.glob("shard-*[0-9]")
        )

    def receive(self, checksum: str, shard: int, name: str, offset: int, piece: bytes) -> None:
        """Write a piece of one of a shard's files."""
        folder = self._arriving.get((checksum, shard))
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="arriving-", dir=self.scratch()))
            self._arriving[checksum, shard] = folder
        if name not in self._manifest(checksum).shards[shard].files:
            raise CorruptDataError(f"shard {shard} has no file {name!r}")
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644)
        with open(fd, "wb") as file:  # noqa: PTH123
            file.seek(offset)
            file.write(piece)

    def finish(self, checksum: str, shard: int) -> None:
        """Give a shard its name, now that its files have come.

        Raises
        ------
        CorruptDataError
            If one is not what the manifest says.
        """
        arrived = self._arriving.pop((checksum, shard))
        whole = self.data(checksum) / shard_folder(shard)
        shutil.rmtree(whole, ignore_errors=True)
        with contextlib.suppress(OSError):  # another worker on this node was quicker
            arrived.rename(whole)
        shutil.rmtree(arrived, ignore_errors=True)
        try:
            PlacedDataset(self.data(checksum)).verify_shard(shard)
        except CorruptDataError:
            shutil.rmtree(whole, ignore_errors=True)
            raise

    def forget(self, checksum: str, shard: int) -> None:
        """Delete a shard that is damaged."""
        shutil.rmtree(self.data(checksum) / shard_folder(shard), ignore_errors=True)

    def _manifest(self, checksum: str) -> Manifest:
        path = self.data(checksum) / FILE_NAME
        return parse_manifest(path.read_bytes(), str(path))

    # --- scratch -----------------------------------------------------------

    def scratch(self) -> Path:
        """A folder for this process's own files; those of processes that are gone go."""
        if self._scratch is None:
            for folder in (self.folder / "scratch").iterdir():
                if folder.name.startswith("worker-"):
                    _remove_if_left(folder)
            made = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder / "scratch"))
            fd = os.open(made / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            folder = made.with_name("worker-" + made.name.removeprefix(".new-"))
            made.rename(folder)  # with its lock: nobody takes it for one that was left
            self._scratch = folder, fd
        return self._scratch[0]

    def close(self) -> None:
        """Remove this process's scratch."""
        if self._scratch is not None:
            folder, fd = self._scratch
            self._scratch = None
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)


def _remove_if_left(folder: Path) -> None:
    """Remove the scratch of a process that is gone: nobody holds its lock."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / "lock", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)
