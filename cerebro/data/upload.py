"""Upload a dataset to object storage: its files, and the manifest last.

Without its manifest there is no dataset, so an interrupted upload leaves only objects that the
next upload to the same URL removes.
"""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cerebro.data.bucket import read_manifest_at
from cerebro.data.cache import Cache, cache_folder
from cerebro.data.manifest import FILE_NAME, Manifest, read_manifest, shard_folder
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.objects import Objects

PUTS = 8
"""The number of files that are uploaded at a time."""

_OF_A_SHARD = re.compile(r"shard-\d{5,}/[^/]+", re.ASCII)


class Upload:
    """The upload of one dataset; a context manager that removes its local files."""

    def __init__(self, url: str) -> None:
        self._objects = Objects(url)
        self._cache = Cache(cache_folder())
        self.url = self._objects.url
        self.target: Path = self._cache.scratch() / "set"
        """The folder to make the dataset in."""

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *error: object) -> None:
        self._cache.close()

    def is_there(self) -> bool:
        """Whether there is something at the URL that is not left from an interrupted upload."""
        names = self._objects.names()
        return FILE_NAME in names or any(not _OF_A_SHARD.fullmatch(name) for name in names)

    def manifest(self) -> Manifest:
        """Return the manifest of the dataset that is there; raise CorruptDataError if none is."""
        manifest = read_manifest_at(self._objects)[1]
        if manifest is None:
            raise CorruptDataError(f"{self.url} has objects, but is not a dataset")
        return manifest

    def finish(self) -> None:
        """Upload the dataset, and keep it in this machine's cache.

        Raises InputError if a different process has made a dataset there meanwhile, and
        StorageError if the storage refuses. There is no dataset then.
        """
        manifest = read_manifest(self.target)
        files = [
            f"{shard_folder(shard)}/{name}"
            for shard, entry in enumerate(manifest.shards)
            for name in entry.files
        ]
        self._objects.remove(self._objects.names() - {*files} - {FILE_NAME})
        with ThreadPoolExecutor(PUTS, "cerebro-upload") as threads:
            jobs = [threads.submit(self._objects.put, self.target / name, name) for name in files]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                with contextlib.suppress(OSError):
                    self._objects.remove(files)
                raise
        if read_manifest_at(self._objects)[1] is not None:
            raise InputError(
                f"'{self.url}' was made by another process in the meantime: upload the dataset "
                "to a different URL, and check the other one with verify()"
            )
        content = (self.target / FILE_NAME).read_bytes()
        self._objects.write(FILE_NAME, content)
        self._cache.adopt(self.target, content)
