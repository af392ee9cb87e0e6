"""A dataset in object storage: its copy in this machine's cache folder, and its upload.

Opening reads the manifest. Shards are copied when they are first read, each object once for all
processes of this machine and for later runs. Training reads the copies: reading batches from the
storage would be many times slower.

An upload writes the manifest last. Without it there is no dataset, so an interrupted upload leaves
only objects that the next upload to the same URL removes.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cerebro._core as _core
from cerebro.data.cache import Cache, cache_folder
from cerebro.data.manifest import (
    FILE_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    parse_manifest,
    read_manifest,
    shard_folder,
)
from cerebro.data.rows import Part
from cerebro.data.shards import Shards
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.objects import MissingObjectError, Objects


class BucketShards(Shards):
    """The shards of a dataset in object storage; the cache keeps the copies while this exists."""

    url: str

    def __init__(self, url: str, manifest: Manifest, cache: Cache) -> None:
        self.url = url
        self.manifest = manifest
        self.folder = cache.data(manifest.checksum)
        self._readers = {}
        self._cache = cache
        self._here: set[int] = set()
        self._objects: Objects | None = None
        weakref.finalize(self, cache.close)

    @classmethod
    def find(cls, url: str, checksum: str | None = None) -> BucketShards:
        """Find a dataset; one whose `checksum` the cache has is not looked for in the storage."""
        cache = Cache(cache_folder())
        cached = None if checksum is None else cache.find_manifest(checksum)
        if cached is not None:
            return cls(url.rstrip("/"), cached, cache)
        objects = Objects(url)
        content, manifest = read_manifest_at(objects)
        if manifest is None:
            cache.close()
            raise InputError(
                f"no dataset at '{objects.url}': make one with cerebro.shard(source, url)"
            )
        cache.begin(content)
        shards = cls(objects.url, manifest, cache)
        shards._objects = objects
        return shards

    def are_here(self) -> bool:
        return {*range(len(self.manifest.shards))} <= {*self._cache.shards(self.manifest.checksum)}

    def is_here(self, shard: int) -> bool:
        return shard in self._here or shard in self._cache.shards(self.manifest.checksum)

    def pull(self, shards: Collection[int]) -> None:
        if self._here.issuperset(shards):
            return
        checksum = self.manifest.checksum
        self._here.update(self._cache.shards(checksum))
        missing = [shard for shard in shards if shard not in self._here]
        if missing:
            if self._objects is None:
                self._objects = Objects(self.url)
            try:
                self._cache.pull(self._objects, checksum, missing)
            finally:
                self._cache.drop_scratch()
            self._here.update(missing)

    def reader(self, shard: int) -> _core.ShardReader:
        if shard not in self._readers:
            self.pull([shard])
            try:
                self._readers[shard] = self._open(shard)
            except CorruptDataError:
                self._renew(shard)
        return self._readers[shard]

    def map_parts(self, parts: Sequence[Part]) -> list[tuple[_core.ShardReader, Part]]:
        self.pull(range(len(parts)))  # several at a time
        return super().map_parts(parts)

    def verify(self, shard: int) -> None:
        self._check(shard, super().verify)

    def check_sizes(self, shard: int) -> None:
        self._check(shard, super().check_sizes)

    def _check(self, shard: int, check: Callable[[int], None]) -> None:
        self.pull([shard])
        try:
            check(shard)
        except CorruptDataError:
            self._renew(shard)

    def _renew(self, shard: int) -> None:
        """Copy a damaged shard here again, and open it."""
        self._cache.forget_damaged(self.manifest.checksum, [shard])
        self._here.discard(shard)
        self.pull([shard])
        self._readers[shard] = self._open(shard)
        self.generation += 1


def read_manifest_at(objects: Objects) -> tuple[bytes, Manifest | None]:
    """Read the manifest of a dataset in object storage; None if it is missing."""
    try:
        content = objects.read(FILE_NAME)
    except MissingObjectError:
        return b"", None
    if len(content) > MAX_MANIFEST_BYTES:
        raise CorruptDataError(
            f"{objects.url_of(FILE_NAME)} is too large: more than {MAX_MANIFEST_BYTES} bytes"
        )
    return content, parse_manifest(content, objects.url_of(FILE_NAME))


PUTS = 8  # files that are uploaded at a time
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
        """Upload the dataset, and keep it in the cache; an error leaves no dataset at the URL."""
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
