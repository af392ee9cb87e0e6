"""A node's cache folder: shards that came to it, kept for later runs; and scratch files.

    data/CHECKSUM/manifest.json, shard-00003/...    a dataset, or some of its shards
    data/CHECKSUM/.pulling                          locked while shards are pulled from a bucket
    data/CHECKSUM.used                              locked during use; its time is the last use
    scratch/*                                       one folder for each running process: incoming
                                                    shards, slots, rows to be sent
    place                                           the folder's identity

A shard gets its name when all of its files have arrived with the checksums of the manifest, and
are on the disk. It is checked again at its first use in every run, like all data.

To make room for a shard, whole datasets that no process uses are deleted, the least recently
used first.

A dataset in object storage is read from its copy in the cache; reading batches from the storage
would be many times slower. Opening reads the manifest, and shards are copied when they are first
read, each object once for all processes of this machine and for later runs. An upload writes the
manifest last. Without it there is no dataset, so an interrupted upload leaves only objects that the
next upload to the same URL removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO

import cerebro._core as _core
from cerebro.data.manifest import (
    FILE_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    parse_manifest,
    read_manifest,
    shard_folder,
)
from cerebro.data.rows import Part
from cerebro.data.shards import Shards, verify_shard
from cerebro.data.unfinished import LOCK, remove_abandoned
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine import durable
from cerebro.machine.files import expand_path
from cerebro.machine.objects import MissingObjectError, Objects, StorageError

VARIABLE = "CEREBRO_CACHE"  # the environment variable with the folder of a node's cache
LIMIT = "CEREBRO_CACHE_LIMIT"  # its variable with the maximum size, such as ``200GB``
SPARE_BYTES = 256 << 20  # to leave free on the disk, if deleting unused datasets can make room
PULLING = ".pulling"
PULLS = 4  # shards that are pulled from a bucket at a time
PUTS = 8  # files that are uploaded at a time
TURN_SECONDS = 0.1  # between checks whether another process still pulls the same dataset
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def cache_folder() -> Path:
    """Return this node's cache folder: ``$CEREBRO_CACHE``, or one in the user's own cache."""
    folder = os.environ.get(VARIABLE)
    if folder:
        return Path(expand_path(folder)).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(expand_path(base)).absolute() / "cerebro"


def cache_limit() -> int | None:
    """Return the limit of this node's cache in bytes; None: the size of the disk."""
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text, re.IGNORECASE)
    if match is None:
        raise InputError(f"{LIMIT}={text!r} is not a size: give bytes, or a size such as 200GB")
    return int(float(match[1]) * UNITS[match[2].upper()])


class Cache:
    """A node's cache folder, created if it does not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_closing = False
        self._changing = threading.Condition()  # guards the next two
        self._scratch: tuple[Path, int, int] | None = None  # with its lock and its process
        self._pulling: list[threading.Thread] = []
        self._arriving: dict[tuple[str, int], Path] = {}  # each has one folder, the shard's
        self._used: dict[str, int] = {}  # locked descriptors, by dataset
        self._limit = cache_limit()
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "scratch").mkdir(exist_ok=True)

    @property
    def place(self) -> str:
        """Return the identity of this folder, the same in all processes that use it."""
        file = self.folder / "place"
        with contextlib.suppress(FileNotFoundError):
            return file.read_text()
        new = self.folder / f".place-{uuid.uuid4().hex}"
        new.write_text(uuid.uuid4().hex)
        with contextlib.suppress(FileExistsError):
            os.link(new, file)  # the first process decides
        new.unlink()
        return file.read_text()

    # --- data --------------------------------------------------------------

    def data(self, checksum: str) -> Path:
        return self.folder / "data" / checksum

    def begin(self, manifest: bytes) -> list[int]:
        """Store a dataset's manifest; return the shards that are here already."""
        checksum = parse_manifest(manifest, "the manifest that was sent").checksum
        self.use(checksum)
        folder = self.data(checksum)
        folder.mkdir(exist_ok=True)
        durable.replace_file(folder / FILE_NAME, manifest)
        return self.shards(checksum)

    def shards(self, checksum: str) -> list[int]:
        folders = self.data(checksum).glob("shard-*[0-9]")
        return sorted(int(folder.name.removeprefix("shard-")) for folder in folders)

    def find_manifest(self, checksum: str) -> Manifest | None:
        """Return the manifest of a dataset that is here, and keep it; None if it is not."""
        if not (self.data(checksum) / FILE_NAME).exists():
            return None
        self.use(checksum)
        try:
            manifest = self._manifest(checksum)
        except (OSError, CorruptDataError):  # removed meanwhile, or damaged: get it again
            return None
        return manifest if manifest.checksum == checksum else None

    def receive(self, checksum: str, shard: int, name: str, offset: int, piece: bytes) -> None:
        entry = self._manifest(checksum).shards[shard]
        arrived = self._arriving.get((checksum, shard))
        if arrived is None:
            self.make_room(entry.nbytes)
            arrived = self._arriving[checksum, shard] = self._arrival(shard)
        if name not in entry.files:
            raise CorruptDataError(f"shard {shard} has no file {name!r}")
        path = arrived / shard_folder(shard) / name
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            file.seek(offset)
            file.write(piece)

    def finish(self, checksum: str, shard: int) -> None:
        """Give a shard its name, once its files have arrived and if they match the manifest."""
        arrived = self._arriving.pop((checksum, shard))
        try:
            self._place(arrived, self._manifest(checksum), shard)
        finally:
            shutil.rmtree(arrived, ignore_errors=True)

    def _arrival(self, shard: int) -> Path:
        """Make a folder in scratch with an empty folder for a shard's files."""
        arrived = Path(tempfile.mkdtemp(prefix="arriving-", dir=self.scratch()))
        (arrived / shard_folder(shard)).mkdir()
        return arrived

    def _place(self, arrived: Path, manifest: Manifest, shard: int) -> None:
        """Move a shard's folder from `arrived` to its name, if its files match the manifest.

        They are compared and synced first, so that a shard is whole as soon as it has its name:
        other processes look without a lock, and a kill or a power failure may follow.
        """
        new = arrived / shard_folder(shard)
        whole = self.data(manifest.checksum) / shard_folder(shard)
        try:
            verify_shard(arrived, manifest, shard)
        except CorruptDataError as error:  # name the file by the shard, not by its place in scratch
            raise type(error)(str(error).replace(os.fspath(new), os.fspath(whole))) from None
        # The files have their names already, so this only syncs them and their folder.
        durable.publish((new / name, new / name) for name in manifest.shards[shard].files)
        try:
            new.rename(whole)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if not self._is_whole(manifest, shard):  # else a different worker here was faster
                shutil.rmtree(whole, ignore_errors=True)
                new.rename(whole)
        durable.sync_folder(whole.parent)

    def _is_whole(self, manifest: Manifest, shard: int) -> bool:
        try:
            verify_shard(self.data(manifest.checksum), manifest, shard)
        except CorruptDataError:
            return False
        return True

    def pull(self, objects: Objects, checksum: str, shards: Sequence[int]) -> int:
        """Copy shards of a dataset here from object storage; return the number of bytes.

        Call `begin` or `find_manifest` first. Each object is read once, even if several processes
        need it: they take turns, and find what another has pulled. Raises StorageError if the cache
        is closed meanwhile.
        """
        with self._changing:
            self._check_open()
            self._pulling.append(threading.current_thread())
        try:
            return self._pull_missing(objects, checksum, shards)
        finally:
            with self._changing:
                self._pulling.remove(threading.current_thread())
                self._changing.notify_all()

    def _pull_missing(self, objects: Objects, checksum: str, shards: Sequence[int]) -> int:
        with _open_lock(self.data(checksum) / PULLING) as lock:
            while True:  # until no other process pulls the dataset, or the cache is closed
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._check_open()
                    time.sleep(TURN_SECONDS)
            missing = sorted({*shards} - {*self.shards(checksum)})
            if not missing:
                return 0
            manifest = self._manifest(checksum)
            self.make_room(sum(manifest.shards[shard].nbytes for shard in missing))
            self.scratch()
            with ThreadPoolExecutor(PULLS, "cerebro-pull") as threads:
                # After an error, `map` begins no further pull.
                return sum(threads.map(partial(self._pull, objects, manifest), missing))

    def _pull(self, objects: Objects, manifest: Manifest, shard: int) -> int:
        entry = manifest.shards[shard]
        arrived = self._arrival(shard)
        try:
            for name, file in entry.files.items():
                name_there = f"{shard_folder(shard)}/{name}"
                self._check_open()
                try:
                    objects.get(name_there, arrived / name_there)
                except MissingObjectError as error:
                    raise CorruptDataError(
                        f"{objects.url_of(name_there)} is missing: upload the dataset again"
                    ) from error
                size = (arrived / name_there).stat().st_size
                if size != file.bytes:
                    raise CorruptDataError(
                        f"{objects.url_of(name_there)} is cut or altered: it has {size} bytes, not "
                        f"{file.bytes}; upload the dataset again"
                    )
            self._place(arrived, manifest, shard)
        except CorruptDataError as error:
            here = os.fspath(self.data(manifest.checksum))
            raise CorruptDataError(str(error).replace(here, objects.url)) from error
        finally:
            shutil.rmtree(arrived, ignore_errors=True)
        return entry.nbytes

    def adopt(self, folder: Path, manifest: bytes, shards: Sequence[int] | None = None) -> None:
        """Move a dataset here from `scratch`: all of its shards, or some."""
        parsed = parse_manifest(manifest, os.fspath(folder / FILE_NAME))
        have = self.begin(manifest)
        moved = range(len(parsed.shards)) if shards is None else shards
        self.make_room(sum(parsed.shards[shard].nbytes for shard in moved))
        for shard in moved:
            if shard not in have:
                self._place(folder, parsed, shard)

    def forget_damaged(self, checksum: str, shards: Sequence[int]) -> None:
        manifest = self._manifest(checksum)
        for shard in shards:
            if not self._is_whole(manifest, shard):
                shutil.rmtree(self.data(checksum) / shard_folder(shard), ignore_errors=True)

    def _manifest(self, checksum: str) -> Manifest:
        path = self.data(checksum) / FILE_NAME
        return parse_manifest(path.read_bytes(), str(path))

    # --- use ---------------------------------------------------------------

    def use(self, checksum: str) -> None:
        """Keep a dataset until `close` or the end of this process."""
        if checksum in self._used:
            return
        mark = self._mark(checksum)
        while True:
            fd = os.open(mark, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(fd, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), mark.stat()):
                    break
            os.close(fd)  # a different process has just removed the dataset and its mark
        os.utime(fd)
        self._used[checksum] = fd

    def make_room(self, need: int) -> None:
        """Remove unused datasets until `need` more bytes fit or none is left."""
        sizes: dict[str, int] = {}
        if self._limit is not None or not self._disk_has(need):
            folders = [entry for entry in (self.folder / "data").iterdir() if entry.is_dir()]
            folders.sort(key=lambda folder: (self._last_use(folder.name), folder.name))
            sizes = {folder.name: _bytes_below(folder) for folder in folders}
        for checksum in list(sizes):
            over = self._limit is not None and sum(sizes.values()) + need > self._limit
            if not over and self._disk_has(need):
                return
            if self._remove_unused(checksum):
                del sizes[checksum]

    def _mark(self, checksum: str) -> Path:
        return self.folder / "data" / f"{checksum}.used"

    def _disk_has(self, need: int) -> bool:
        return shutil.disk_usage(self.folder).free >= need + SPARE_BYTES

    def _last_use(self, checksum: str) -> float:
        for path in (self._mark(checksum), self.data(checksum)):
            with contextlib.suppress(OSError):
                return path.stat().st_mtime
        return 0.0

    def _remove_unused(self, checksum: str) -> bool:
        """Remove a dataset; return False if a process uses it."""
        mark = self._mark(checksum)
        with _open_lock(mark) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self.data(checksum), ignore_errors=True)
                mark.unlink(missing_ok=True)
            except OSError:
                return False
        return True

    # --- scratch -----------------------------------------------------------

    def scratch(self) -> Path:
        """Return a folder for this process's files; remove those of dead processes."""
        with self._changing:
            self._check_open()
            if self._scratch is None:
                self._scratch = self._new_scratch()
            return self._scratch[0]

    def _new_scratch(self) -> tuple[Path, int, int]:
        for folder in (self.folder / "scratch").iterdir():
            if folder.name.startswith("worker-"):
                remove_abandoned(folder)
        new_folder = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder / "scratch"))
        fd = os.open(new_folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        folder = new_folder.with_name("worker-" + new_folder.name.removeprefix(".new-"))
        new_folder.rename(folder)  # with its lock, so that it does not look abandoned
        return folder, fd, os.getpid()

    def stop(self) -> None:
        """Have `pull` fail in other threads, once the objects in progress have been read."""
        self._is_closing = True

    def close(self) -> None:
        """Remove this process's scratch, and release its datasets."""
        self.stop()
        with self._changing:  # a pull in progress would make the folder anew
            # In a forked child, the threads of its parent are not alive.
            self._changing.wait_for(lambda: not any(t.is_alive() for t in self._pulling))
        self.drop_scratch()
        while self._used:
            _, fd = self._used.popitem()
            with contextlib.suppress(OSError):
                os.utime(fd)
            os.close(fd)

    def drop_scratch(self) -> None:
        """Remove this process's scratch, but not, in a forked child, that of its parent."""
        with self._changing:
            scratch, self._scratch = self._scratch, None
        if scratch is not None:
            folder, fd, process = scratch
            if os.getpid() == process:
                shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)

    def _check_open(self) -> None:
        if self._is_closing:
            raise StorageError("the cache of this node is being closed")


def _open_lock(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "rb")


def _bytes_below(folder: Path) -> int:
    """Return the bytes of a folder's files, ignoring those that disappear meanwhile."""
    total = 0
    for file in folder.glob("*/*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


# --- datasets in object storage -----------------------------------------------------------------


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
        return cls(objects.url, manifest, cache)

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
            try:
                self._cache.pull(Objects(self.url), checksum, missing)
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


_OF_A_SHARD = re.compile(r"shard-\d{5,}/[^/]+", re.ASCII)


class Upload:
    """The upload of one dataset; `close` removes its local files."""

    def __init__(self, url: str) -> None:
        self._objects = Objects(url)
        self._cache = Cache(cache_folder())
        self.url = self._objects.url
        self.target: Path = self._cache.scratch() / "set"  # the folder to make the dataset in

    def close(self) -> None:
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
        try:
            with ThreadPoolExecutor(PUTS, "cerebro-upload") as threads:
                paths = [self.target / name for name in files]
                list(threads.map(self._objects.put, paths, files))  # ends at the first error
        except BaseException:
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
