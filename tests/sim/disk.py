"""A disk in memory for the processes of a simulated machine, which may fail or stop at any call.

`medium` says what survives a power failure, `vfs` is SQLite's way to the disk, and `slots_files`
that of slots. One seed decides everything.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import sqlite3
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Protocol

import vfs
from faults import ProcessDied
from medium import Entry, File, Folder, Names, Place, error
from slots_files import SUFFIXES, SimulatedSlots, SlotsFile, run_core

import cerebro._core as _core
from cerebro.errors import CorruptDataError
from cerebro.machine.disk import AnyPath, Disk, OpenFolder

DEVICE = 1
NEVER_OLD = 1e18  # when each entry was changed
_mount_numbers = itertools.count(1)


class Process(Protocol):
    """The process that uses a disk. It may also have ``sleep(seconds)``, for SQLite's waits."""

    is_dead: bool

    def call(self, kind: str, path: str) -> None:
        """Return, raise OSError if the call that follows is to fail, or raise ProcessDied.

        A write that fails has written a part, and a sync that fails has lost what was pending.
        """


class SimulatedDisk:
    """The files of a simulated machine. `real` is a folder in memory for the files of slots."""

    def __init__(self, random: Random, real: Path) -> None:
        self.random = random
        self.is_remote = False
        self.free_bytes = 1 << 40
        self._real = os.fspath(real)
        self._numbers = itertools.count(1)
        self._root = Folder(0)
        self.pending = Names()
        self._mounts: dict[int, MountedDisk] = {}
        os.makedirs(self._real, exist_ok=True)  # noqa: PTH103

    def mount(self, process: Process) -> MountedDisk:
        for dead in [mounted for mounted in self._mounts.values() if mounted.is_dead]:
            self._unmount(dead)
        number = next(_mount_numbers)
        mounted = self._mounts[number] = MountedDisk(self, process, number)
        vfs.MOUNTS[number] = mounted
        return mounted

    def lose_power(self) -> None:
        """End all processes; keep what is durable, and some of what is pending."""
        self._unmount_all()
        self.pending.lose_power(self.random)
        shutil.rmtree(self._real)
        os.makedirs(self._real)  # noqa: PTH103
        self._restart(self._root)

    def _restart(self, folder: Folder) -> None:
        folder.names = dict(folder.durable)
        for name, entry in folder.names.items():
            if isinstance(entry, Folder):
                self._restart(entry)
            elif isinstance(entry, File):
                entry.lose_power(self.random)
                if isinstance(entry, SlotsFile):
                    entry.put_back(self.real_stem((folder, name)))

    def close(self) -> None:
        self._unmount_all()
        shutil.rmtree(self._real, ignore_errors=True)

    def _unmount_all(self) -> None:
        for mounted in list(self._mounts.values()):
            self._unmount(mounted)
        self._close_slots(self._root)

    def _unmount(self, mounted: MountedDisk) -> None:
        mounted.die()
        mounted.is_mounted = False
        for slots in mounted.slots:
            slots.close_real()
        mounted.slots.clear()
        del self._mounts[mounted.number], vfs.MOUNTS[mounted.number]

    def _close_slots(self, folder: Folder) -> None:
        for entry in folder.names.values():
            if isinstance(entry, Folder):
                self._close_slots(entry)
            elif isinstance(entry, SlotsFile):
                entry.close()

    # --- for checks, and before the first process ----------------------------

    def make_folder(self, path: AnyPath) -> None:
        """Make a durable folder, and those above it, unless they exist."""
        folder = self._root
        for name in _split(os.fspath(path)):
            if name not in folder.names:
                made = self.make_entry((folder, name), Folder)
                self.pending.sync(folder)
            else:
                made = folder.names[name]
            folder = _as_folder(made, os.fspath(path))

    def names(self, folder: AnyPath) -> list[str]:
        return list(self.find_folder(os.fspath(folder)).names)

    def content(self, path: AnyPath) -> bytes:
        return self.find_file(os.fspath(path)).content()

    # --- entries -------------------------------------------------------------

    def find(self, path: AnyPath) -> tuple[Place, Any]:
        """Find a path's folder and name, and its entry or None; raise OSError without a folder."""
        text = os.fspath(path)
        folder, parts = self._root, _split(text)
        if not parts:
            raise error(errno.EISDIR, text)
        for name in parts[:-1]:
            entry = folder.names.get(name)
            if entry is None:
                raise error(errno.ENOENT, text)
            folder = _as_folder(entry, text)
        return (folder, parts[-1]), folder.names.get(parts[-1])

    def find_entry(self, path: str) -> tuple[Place, Any]:
        place, entry = self.find(path)
        if entry is None:
            raise error(errno.ENOENT, path)
        return place, entry

    def find_folder(self, path: str) -> Folder:
        return _as_folder(self.find_entry(path)[1] if _split(path) else self._root, path)

    def find_file(self, path: str) -> File:
        file = self.find_entry(path)[1]
        if not isinstance(file, File):
            raise error(errno.EISDIR, path)
        return file

    def make_entry(self, place: Place, kind: type[Entry]) -> Any:
        entry = kind(next(self._numbers))
        self.pending.set(place, entry)
        return entry

    def remove(self, place: Place) -> None:
        self._unlink_real(place)
        self.pending.remove(place)

    def move(self, old: Place, new: Place) -> None:
        self._unlink_real(new)
        if isinstance(old[0].names[old[1]], SlotsFile):
            os.rename(self.real_path(old), self.real_stem(new))  # noqa: PTH104
        self.pending.move(old, new)

    # --- slots -----------------------------------------------------------------

    def real_path(self, place: Place) -> str:
        return f"{self._real}/{place[0].number}/{place[1]}"

    def real_stem(self, place: Place) -> str:
        """Return a real path, or stem, in a folder that exists."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{self._real}/{place[0].number}")  # noqa: PTH102
        return self.real_path(place)

    def _unlink_real(self, place: Place) -> None:
        file = place[0].names.get(place[1])
        if isinstance(file, SlotsFile):
            file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.real_path(place))  # noqa: PTH108

    def enter_slots(self, folder: Folder, name: str, suffixes: Iterable[str]) -> None:
        """Give the files of slots that C has created or replaced their simulated names."""
        for suffix in suffixes:
            place = folder, name + suffix
            known = folder.names.get(place[1])
            try:
                real_number = os.stat(self.real_path(place)).st_ino  # noqa: PTH116
            except FileNotFoundError:
                if isinstance(known, SlotsFile):
                    known.close()
                    self.pending.remove(place)
                continue
            if not isinstance(known, SlotsFile) or known.real_number != real_number:
                if isinstance(known, SlotsFile):
                    known.close()
                made = SlotsFile(next(self._numbers), self.real_path(place))
                self.pending.set(place, made)


class MountedDisk(Disk):
    """The disk of one simulated process."""

    def __init__(self, disk: SimulatedDisk, process: Process, number: int) -> None:
        self.number = number
        self.random = disk.random
        self.is_mounted = True  # until the machine loses power, which may be within a call
        self.handles: dict[int, vfs.Handle] = {}
        self.slots: dict[SimulatedSlots, None] = {}
        self.failure: BaseException | None = None
        self._disk = disk
        self._process = process
        self._has_died = False

    @property
    def is_dead(self) -> bool:
        return self._has_died or self._process.is_dead

    def die(self) -> None:
        """Release the locks of the process. It can do nothing any more."""
        self._has_died = True
        for handle in self.handles.values():
            handle.abandon()
        self.handles.clear()

    def call(self, kind: str, path: AnyPath) -> None:
        """Tell the process of a call; it may raise OSError or ProcessDied."""
        if self.failure is not None:
            raise self.failure
        if self._has_died or self._process.is_dead:
            raise ProcessDied
        try:
            self._process.call(kind, os.fspath(path))
        except ProcessDied:
            self.die()
            raise

    # --- names -------------------------------------------------------------

    def exists(self, path: AnyPath) -> bool:
        self.call("exists", path)
        try:
            return self._look(path) is not None
        except (FileNotFoundError, NotADirectoryError):
            return False

    def identify(self, path: AnyPath) -> tuple[int, int] | None:
        self.call("identify", path)
        entry = self._look(path)
        return None if entry is None else (DEVICE, entry.number)

    def size(self, path: AnyPath) -> int:
        self.call("size", path)
        entry = self._disk.find_entry(os.fspath(path))[1]
        return 4096 if isinstance(entry, Folder) else entry.size()

    def modified(self, path: AnyPath) -> float:
        self.call("modified", path)
        self._disk.find_entry(os.fspath(path))
        return NEVER_OLD

    def list(self, folder: AnyPath) -> list[str]:
        self.call("list", folder)
        try:
            return self._disk.names(folder)
        except FileNotFoundError:
            return []

    def check_folder(self, path: AnyPath) -> None:
        self.call("check_folder", path)
        entry = self._look(path)
        if entry is not None and not isinstance(entry, Folder):
            raise CorruptDataError(f"{os.fspath(path)} is not a folder")

    def check_no_link(self, path: AnyPath) -> None:
        self.call("check_no_link", path)

    def make_folder(self, path: AnyPath) -> None:
        text = os.fspath(path)
        parts = _split(text)
        for count in range(1, len(parts) + 1):
            above = "/" + "/".join(parts[:count])
            place, entry = self._disk.find(above)
            if entry is None:
                self.call("make_folder", above)
                place, entry = self._disk.find(above)  # another process may have made it
                if entry is None:
                    self._disk.make_entry(place, Folder)
            elif not isinstance(entry, Folder):
                raise error(errno.EEXIST if count == len(parts) else errno.ENOTDIR, text)

    def rename(self, path: AnyPath, new: AnyPath) -> None:
        self.call("rename", path)
        old_place, entry = self._disk.find_entry(os.fspath(path))
        new_place, replaced = self._disk.find(new)
        if entry is replaced:
            return
        if isinstance(replaced, Folder):
            raise error(errno.EISDIR, os.fspath(new))
        if replaced is not None and isinstance(entry, Folder):
            raise error(errno.ENOTDIR, os.fspath(new))
        self._disk.move(old_place, new_place)

    def remove(self, path: AnyPath) -> None:
        self.call("remove", path)
        try:
            place, entry = self._disk.find_entry(os.fspath(path))
        except FileNotFoundError:
            return
        if isinstance(entry, Folder):
            raise error(errno.EISDIR, os.fspath(path))
        self._disk.remove(place)

    def remove_folder(self, path: AnyPath) -> None:
        with contextlib.suppress(OSError):
            place, entry = self._disk.find_entry(os.fspath(path))
            if isinstance(entry, Folder):
                remove_tree(self, place, entry, os.fspath(path))

    def remove_empty_folder(self, path: AnyPath) -> None:
        self.call("remove", path)
        place, entry = self._disk.find_entry(os.fspath(path))
        if _as_folder(entry, os.fspath(path)).names:
            raise error(errno.ENOTEMPTY, os.fspath(path))
        self._disk.remove(place)

    def open_folder(self, path: AnyPath) -> OpenFolder:
        self.call("open", path)
        return MountedFolder(self, self._disk.find_folder(os.fspath(path)), os.fspath(path))

    def _look(self, path: AnyPath) -> Any:
        """Return the entry; None if it does not exist."""
        if not _split(os.fspath(path)):
            return self._disk.find_folder("/")
        try:
            return self._disk.find(path)[1]
        except FileNotFoundError:
            return None

    # --- contents ------------------------------------------------------------

    def read(self, path: AnyPath, limit: int | None = None) -> bytes:
        self.call("read", path)
        file = self._disk.find_file(os.fspath(path))
        if limit is not None and file.size() > limit:
            raise CorruptDataError(f"{os.fspath(path)} is too large: more than {limit} bytes")
        return file.content()

    def write_new(self, path: AnyPath, content: Any, mode: int = 0) -> None:
        self.call("create", path)
        place, entry = self._disk.find(path)
        if entry is not None:
            raise error(errno.EEXIST, os.fspath(path))
        self._write(path, self.create(place), bytes(content))

    def write_over(self, path: AnyPath, content: Any, mode: int = 0) -> None:
        self.call("create", path)
        place, entry = self._disk.find(path)
        if isinstance(entry, Folder):
            raise error(errno.EISDIR, os.fspath(path))
        file = entry or self.create(place)
        before, whole = file.size(), bytes(content)
        self._write(path, file, whole)
        if before > len(whole):
            file.truncate(len(whole))

    def _write(self, path: AnyPath, file: File, whole: bytes) -> None:
        try:
            self.call("write", path)
        except (OSError, ProcessDied):
            file.write(0, self.choose_part(whole))
            raise
        file.write(0, whole)

    def begin_writing(self, path: AnyPath) -> None:
        self.call("begin_writing", path)
        self._disk.find_file(os.fspath(path))

    def sync(self, path: AnyPath) -> None:
        file = self._disk.find_file(os.fspath(path)) if not self.is_dead else None
        try:
            self.call("sync", path)
        except OSError:
            if file is not None:
                file.drop_pending()
            raise
        if file is not None:
            file.sync()

    def sync_folder(self, path: AnyPath) -> None:
        self.call("sync_folder", path)
        self.sync_names(self._disk.find_folder(os.fspath(path)))

    # --- formats that are read and written in place ----------------------------

    def connect(self, file: AnyPath, access: str, seconds: float) -> sqlite3.Connection:
        self.call("connect", file)
        try:
            return vfs.connect(self.number, os.fspath(file), access, seconds)
        except sqlite3.Error:
            self._check_alive()
            raise

    def open_slots(self, stem: AnyPath, *, create: bool) -> Any:
        self.call("slots open", stem)
        text = os.fspath(stem)
        place = self._disk.find(text)[0]
        real = self._disk.real_stem(place)
        try:
            slots = run_core(real, text, _core.Slots, real, create)
        finally:
            self._disk.enter_slots(*place, SUFFIXES)
        opened = SimulatedSlots(self, place, text, slots, real)
        self.slots[opened] = None
        return opened

    def check_slots(self, stem: AnyPath) -> tuple[str, str, bool] | None:
        self.call("slots check", stem)
        text = os.fspath(stem)
        try:
            real = self._disk.real_stem(self._disk.find(text)[0])
        except FileNotFoundError:
            return None
        damage: tuple[str, str, bool] | None = run_core(real, text, _core.check_slots, real)
        if damage is None:
            return None
        suffix, what, in_use = damage
        return suffix, what.replace(real, text), in_use

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.is_dead:
            raise ProcessDied

    # --- the disk itself -------------------------------------------------------

    def may_write(self, folder: AnyPath) -> bool:
        self.call("may_write", folder)
        return self._look(folder) is not None

    def is_remote(self, path: AnyPath) -> bool:
        return self._disk.is_remote

    def free_bytes(self, folder: AnyPath) -> int:
        self.call("free_bytes", folder)
        self._disk.find_folder(os.fspath(folder))
        return self._disk.free_bytes

    def device(self, folder: AnyPath) -> int:
        self.call("device", folder)
        return DEVICE

    def is_memory(self, folder: AnyPath) -> bool:
        return False

    # --- for SQLite, slots and open folders --------------------------------------

    def find(self, path: str) -> tuple[Place, Any]:
        return self._disk.find(path)

    def create(self, place: Place) -> File:
        made: File = self._disk.make_entry(place, File)
        return made

    def unlink(self, place: Place) -> None:
        self._disk.remove(place)

    def sync_names(self, folder: Folder) -> None:
        self._disk.pending.sync(folder)

    def enter_slots(self, folder: Folder, name: str, suffixes: Iterable[str]) -> None:
        self._disk.enter_slots(folder, name, suffixes)

    def choose_part(self, content: bytes) -> bytes:
        """Return how much of a failed write reaches the file."""
        return content[: self.random.randint(0, len(content))] if self.is_mounted else b""

    def sleep(self, seconds: float) -> None:
        sleep = getattr(self._process, "sleep", None)
        if sleep is not None:
            sleep(seconds)


class MountedFolder(OpenFolder):
    """An open folder of a simulated disk."""

    def __init__(self, disk: MountedDisk, folder: Folder, path: str) -> None:
        self._disk = disk
        self._folder = folder
        self._path = path
        self._is_open = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    def list(self) -> list[str]:
        self._disk.call("list", self._path)
        return list(self._folder.names)

    def read(self, name: str, limit: int) -> bytes:
        self._disk.call("read", f"{self._path}/{name}")
        entry = self._entry(name)
        if not isinstance(entry, File):
            raise ValueError("it is not a regular file")
        if entry.size() > limit:
            raise ValueError(f"it has more than {limit} bytes")
        return entry.content()

    def remove(self, name: str) -> None:
        path = f"{self._path}/{name}"
        entry = self._folder.names.get(name)
        if isinstance(entry, Folder):
            remove_tree(self._disk, (self._folder, name), entry, path)
            return
        self._disk.call("remove", path)
        if entry is not None:
            self._disk.unlink((self._folder, name))

    def _entry(self, name: str) -> Entry:
        entry = self._folder.names.get(name)
        if entry is None:
            raise error(errno.ENOENT, f"{self._path}/{name}")
        return entry

    def close(self) -> None:
        self._is_open = False

    def __del__(self) -> None:
        pass


def remove_tree(disk: MountedDisk, place: Place, folder: Folder, path: str) -> None:
    for name, entry in list(folder.names.items()):
        if isinstance(entry, Folder):
            remove_tree(disk, (folder, name), entry, f"{path}/{name}")
        else:
            disk.call("remove", f"{path}/{name}")
            disk.unlink((folder, name))
    disk.call("remove", path)
    disk.unlink(place)


@lru_cache(maxsize=1024)
def _split(path: str) -> tuple[str, ...]:
    return tuple(name for name in path.split("/") if name not in ("", "."))


def _as_folder(entry: Entry, path: str) -> Folder:
    if not isinstance(entry, Folder):
        raise error(errno.ENOTDIR, path)
    return entry
