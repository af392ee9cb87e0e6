"""A copy of a run in object storage, from which it can be resumed on another machine.

    run.json                            names the store and the process that wrote it: the commit
    store/HASH.sqlite                   a snapshot of the store
    states/3-epoch-7.HASH.safetensors   a kept state that the snapshot names
    trials/3.log                        what a trial printed
    data/..., validation/...            rows that were given to the search

The states that a snapshot names get a second name at once, because a live run soon removes them.
First the states are uploaded, then the snapshot, then ``run.json``: an interrupted upload leaves a
complete run. Names contain hashes, so repeating an upload changes nothing. Slots are not copied: a
run that is resumed from a copy has lost the epochs that were in progress.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.data.given_rows import FOLDERS
from cerebro.data.manifest import read_manifest
from cerebro.data.shards import verify_shard
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine import durable
from cerebro.machine.files import is_plain_name, load_json, read_bytes
from cerebro.machine.imports import explain_other_version
from cerebro.machine.local import LOCAL
from cerebro.machine.objects import MissingObjectError, Objects
from cerebro.run.states import HELD
from cerebro.run.store import FILE, PARTS, OtherVersionError, encode, read_meta, reader
from cerebro.run.store.reading import check_rows, check_state_file
from cerebro.run.store.writing import copy_store

POINTER = "run.json"
FORMAT = "cerebro-run"
VERSION = 1
TRIES = 20
"""How often to begin a copy again if a live run has overtaken it."""

_LOG = re.compile(r"\d+\.log", re.ASCII)


@dataclass(frozen=True)
class Pointer:
    """The content of ``run.json``."""

    run: str  # its id
    writer: str  # the id of the process that wrote this
    store: str  # the name of the snapshot's object
    store_hash: str  # the snapshot's XXH3-128
    epochs: int  # the number of finished epochs in the snapshot, over all trials

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, "version": VERSION, **vars(self)}, indent=1).encode()


def read_pointer(objects: Objects) -> Pointer | None:
    """Read ``run.json``; None if there is no copy of a run; raise CorruptDataError if damaged."""
    url = objects.url_of(POINTER)
    try:
        content = load_json(objects.read(POINTER), url)
    except MissingObjectError:
        return None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CorruptDataError(f"{url} is not the copy of a run")
    version = content.get("version")
    if isinstance(version, int) and version != VERSION:
        again = "repeat the search in a new folder"
        raise CorruptDataError(explain_other_version(url, "mirror", version, VERSION, again))
    kinds = {"run": str, "writer": str, "store": str, "store_hash": str, "epochs": int}
    parts: dict[str, Any] = {name: content.get(name) for name in kinds}
    is_complete = all(isinstance(parts[name], kind) for name, kind in kinds.items())
    if version != VERSION or not is_complete:
        raise CorruptDataError(f"{url} is damaged: a field is missing")
    return Pointer(**parts)


def state_object(file: str, state_hash: str) -> str:
    return f"states/{file.removesuffix('.safetensors')}.{state_hash}.safetensors"


class _Overtaken(Exception):
    """The run has removed a state that the snapshot names: its file, hash, and what is wrong."""


class Uploader:
    """Copies a run to object storage at each `upload`; `resumed` is the copy that it came from."""

    def __init__(self, objects: Objects, folder: Path, resumed: Pointer | None = None) -> None:
        self.objects = objects
        self._folder = folder
        self._writer = uuid.uuid4().hex
        self._before = resumed
        self._is_first = True
        self._there: set[str] = set()
        self._logs: dict[str, tuple[int, int]] = {}  # size and time of those uploaded
        self._done: tuple[Any, ...] | None = None

    def upload(self, *, whole: bool = False) -> bool:
        """Bring the copy up to date; return False if only units were added.

        With `whole`, copy these too. Raise StorageError, with the copy as it was, if the storage
        refuses or cannot be reached; InputError if the place holds a different run, or another
        process has continued this one; and CorruptDataError if the store or a state is damaged.
        """
        before: tuple[str, ...] = ()
        with self._make_room() as room:
            is_own = room.is_relative_to(self._folder)
            for _ in range(TRIES):
                try:
                    # A copy takes as much room as the states, so it is made only if it must be.
                    return self._upload(room, whole, copies=bool(before) and is_own)
                except _Overtaken as overtaken:
                    if overtaken.args == before:  # a snapshot never names what the run removed
                        file, _, what = before
                        raise CorruptDataError(
                            f"{self._folder / 'states' / file}, which the store names, {what}"
                        ) from None
                    before = overtaken.args
        raise OSError(
            f"{self._folder}: its states are replaced faster than they can be copied: put the run "
            "on a file system that has hard links"
        )

    @contextlib.contextmanager
    def _make_room(self) -> Iterator[Path]:
        """Make a temporary folder beside the states, so that it can have links to them."""
        options: dict[str, Any] = {"prefix": HELD, "ignore_cleanup_errors": True}
        try:
            temporary = tempfile.TemporaryDirectory(dir=self._folder / "states", **options)
        except OSError:  # another user's run, perhaps
            temporary = tempfile.TemporaryDirectory(**options)
        with temporary as room:
            yield Path(room)

    def _upload(self, room: Path, whole: bool, *, copies: bool) -> bool:
        if self._is_first:
            self._claim()
        snapshot = room / FILE
        snapshot.unlink(missing_ok=True)
        with reader(self._folder) as connection:
            done = _measure_progress(connection)
            if done == self._done and not whole:
                return False
            run = str(read_meta(connection)["id"])
            needed = {state_object(*state): state for state in _read_states(connection).items()}
            for name in sorted(needed.keys() - self._there):
                self._hold_state(*needed[name], room, copies=copies)
            copy_store(connection, snapshot, LOCAL.disk)
        for name in sorted(needed.keys() - self._there):
            self._put_state(name, *needed[name], room)
        rows = set(self._put_rows())
        self._put_logs()
        content = snapshot.read_bytes()
        pointer = Pointer(run, self._writer, "", _core.xxh3_128(content), done[0])
        store = f"store/{pointer.store_hash}.sqlite"
        if store not in self._there:
            self._put(store, content)
        self._check_writer()
        self.objects.write(POINTER, replace(pointer, store=store).to_bytes())
        self._done = done
        old = {name for name in self._there if name.startswith(("states/", "store/"))}
        old -= {*needed, *rows, store}
        self.objects.remove(sorted(old))
        self._there -= old
        return True

    def _claim(self) -> None:
        """Check that the place is free or has this run; note what it already has."""
        with reader(self._folder) as connection:
            run, epochs = read_meta(connection)["id"], _measure_progress(connection)[0]
        pointer = read_pointer(self.objects)
        url = self.objects.url
        if pointer is not None and pointer.run != run:
            raise InputError(f"{url} holds a different run: choose another URL")
        if pointer is not None and pointer.epochs > epochs:
            raise InputError(
                f"{url} has {pointer.epochs} finished epochs of this run, and {self._folder} has "
                f"{epochs}: continue it with cerebro.resume({url!r}), or choose another URL"
            )
        if self._before is not None and pointer != self._before:
            raise self._takeover_error()
        self._there = self.objects.names()
        self._before, self._is_first = pointer, False

    def _check_writer(self) -> None:
        """Raise InputError if another process has since written the copy."""
        pointer = read_pointer(self.objects)
        # A write that failed may have succeeded.
        if pointer != self._before and (pointer is None or pointer.writer != self._writer):
            raise self._takeover_error()

    def _takeover_error(self) -> InputError:
        return InputError(
            f"another process has resumed the run from {self.objects.url}: this one is no longer "
            "copied there"
        )

    def _hold_state(self, file: str, state_hash: str, room: Path, *, copies: bool) -> None:
        """Keep a state until it is uploaded; without hard links, only if it `copies` states."""
        path, held = self._folder / "states" / file, room / f"{state_hash}-{file}"
        if held.exists():  # since the last attempt
            return
        try:
            try:
                os.link(path, held, follow_symlinks=False)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                if copies:
                    held.write_bytes(read_bytes(path))
        except FileNotFoundError:
            raise _Overtaken(file, state_hash, "is missing") from None

    def _put_state(self, name: str, file: str, state_hash: str, room: Path) -> None:
        held = room / f"{state_hash}-{file}"
        try:
            packed = read_bytes(held if held.exists() else self._folder / "states" / file)
        except FileNotFoundError:
            raise _Overtaken(file, state_hash, "is missing") from None
        held.unlink(missing_ok=True)
        if _core.hash_state(packed) != state_hash:
            # Perhaps it was trained again, and the snapshot was taken before its row was written.
            raise _Overtaken(file, state_hash, "is damaged: its checksum differs")
        self._put(name, packed)

    def _put(self, name: str, content: bytes) -> None:
        self.objects.write(name, content)
        self._there.add(name)

    def _put_rows(self) -> Iterator[str]:
        """Upload rows that were given to the search; return the names of their objects."""
        for folder in FOLDERS:
            for file in sorted((self._folder / folder).rglob("*")):
                if file.is_file() and not file.is_symlink():
                    name = file.relative_to(self._folder).as_posix()
                    if name not in self._there:
                        self.objects.put(file, name)
                        self._there.add(name)
                    yield name

    def _put_logs(self) -> None:
        for entry in os.scandir(self._folder / "trials"):
            with contextlib.suppress(FileNotFoundError):  # removed: it was empty
                if _LOG.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat()
                    now = status.st_size, status.st_mtime_ns
                    if self._logs.get(entry.name) != now and status.st_size:
                        name = f"trials/{entry.name}"
                        self._put(name, read_bytes(Path(entry.path)))
                        self._logs[entry.name] = now


def _measure_progress(connection: sqlite3.Connection) -> tuple[Any, ...]:
    """Return what changes with every durable addition: epochs, decisions, statuses."""
    (epochs,) = connection.execute("SELECT count(*) FROM epochs").fetchone()
    (decisions,) = connection.execute("SELECT count(*) FROM decisions").fetchone()
    statuses = connection.execute("SELECT status, count(*) FROM trials GROUP BY status").fetchall()
    return int(epochs), decisions, *map(tuple, statuses)


def _read_states(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the files of the kept states that rows name, with their hashes."""
    check_rows(connection, "epochs")
    sql = "SELECT state_file, state_hash FROM epochs WHERE state_file IS NOT NULL"
    return {str(check_state_file(file)): str(hash) for file, hash in connection.execute(sql)}


def download(objects: Objects, folder: Path) -> Pointer:
    """Make a run's folder, which must not exist, from its copy; completely or not at all.

    Raise InputError if there is no copy of a run; CorruptDataError with the URL of an object that
    is missing, truncated or modified; and StorageError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for tries_left in reversed(range(TRIES)):
        pointer = read_pointer(objects)
        if pointer is None:
            raise InputError(
                f"no copy of a run at '{objects.url}': cerebro.callbacks.Mirror makes one"
            )
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        try:
            draft.chmod(0o755)
            _fill_folder(objects, pointer, draft)
            draft.rename(folder)
            durable.sync_folder(folder.parent)
            return pointer
        except MissingObjectError as error:
            # A live run removes what its next copy does not need.
            if not tries_left or read_pointer(objects) == pointer:
                raise CorruptDataError(f"{error}: the copy of the run is damaged") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    raise AssertionError("unreachable")


def _fill_folder(objects: Objects, pointer: Pointer, folder: Path) -> None:
    for part in PARTS:
        (folder / part).mkdir()
    content = objects.read(pointer.store)
    if _core.xxh3_128(content) != pointer.store_hash:
        raise CorruptDataError(f"{objects.url_of(pointer.store)} is cut or altered")
    (folder / FILE).write_bytes(content)
    try:
        with reader(folder) as connection:
            states = _read_states(connection)
            has_own_rows = read_meta(connection).get("own_rows") is True
    except OtherVersionError as error:
        local, url = os.fspath(folder / FILE), objects.url_of(pointer.store)
        raise OtherVersionError(str(error).replace(local, url)) from None
    for file, state_hash in states.items():
        name = state_object(file, state_hash)
        packed = objects.read(name)
        if _core.hash_state(packed) != state_hash:
            raise CorruptDataError(f"{objects.url_of(name)} is cut or altered")
        (folder / "states" / file).write_bytes(packed)
    names = sorted(objects.names())
    for name in names:
        part, _, file = name.partition("/")
        if part == "trials" and _LOG.fullmatch(file):
            objects.get(name, folder / name)
        elif part in FOLDERS and has_own_rows and all(map(is_plain_name, name.split("/"))):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            objects.get(name, folder / name)
    for rows in (folder / part for part in FOLDERS if (folder / part).exists()):
        try:
            manifest = read_manifest(rows)
            for shard in range(len(manifest.shards)):
                verify_shard(rows, manifest, shard)
        except CorruptDataError as error:
            text = str(error).replace(os.fspath(rows), objects.url_of(rows.name))
            raise CorruptDataError(text) from error
    # Its slots are in its own folder from now on: a separate one is on another machine.
    with contextlib.closing(sqlite3.connect(folder / FILE)) as store, store:
        store.execute("UPDATE meta SET value = ? WHERE key = 'state_dir'", (encode(None),))
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    durable.publish([(path, path) for path in files])
