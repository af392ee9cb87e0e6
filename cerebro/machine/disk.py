"""The disk, as those get it at their start who keep a run: the store, coordinator and workers.

They have no other way to a file, so that a simulation can give them a disk that is full, slow or
cut off at any call (``tests/sim``). Each method is one call of the system, or a few that belong
together; `cerebro.machine.durable` makes several of them safe against a power failure.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import sys
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.machine import files

if sys.platform == "darwin":
    import fcntl

AnyPath = str | os.PathLike[str]


class Disk:
    """The disks of this machine. All methods raise OSError if the system does."""

    # --- names -------------------------------------------------------------

    def exists(self, path: AnyPath) -> bool:
        """Return whether there is such an entry; raise OSError if the disk cannot tell."""
        try:
            os.stat(path)  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def identify(self, path: AnyPath) -> tuple[int, int] | None:
        """Return the device and inode of an entry or link itself; None if it is missing."""
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return None
        return info.st_dev, info.st_ino

    def size(self, path: AnyPath) -> int:
        return os.stat(path).st_size  # noqa: PTH116

    def modified(self, path: AnyPath) -> float:
        """Return when an entry was changed last, as in `time.time`, without following a link."""
        return os.lstat(path).st_mtime

    def list(self, folder: AnyPath) -> list[str]:
        """Return the names in a folder; none if it does not exist."""
        try:
            return os.listdir(folder)  # noqa: PTH208
        except FileNotFoundError:
            return []

    def check_folder(self, path: AnyPath) -> None:
        """Raise CorruptDataError if something other than a folder is there, such as a link."""
        files.check_folder(Path(path))

    def check_no_link(self, path: AnyPath) -> None:
        files.check_no_link(Path(path))

    def make_folder(self, path: AnyPath) -> None:
        """Make a folder, and those above it, unless they exist."""
        os.makedirs(path, exist_ok=True)  # noqa: PTH103

    def rename(self, path: AnyPath, new: AnyPath) -> None:
        """Give a file a new name; a file that has it is replaced."""
        os.replace(path, new)  # noqa: PTH105

    def remove(self, path: AnyPath) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108

    def remove_folder(self, path: AnyPath) -> None:
        """Remove a folder and what is in it, as far as possible."""
        shutil.rmtree(path, ignore_errors=True)

    def remove_empty_folder(self, path: AnyPath) -> None:
        os.rmdir(path)  # noqa: PTH106

    def open_folder(self, path: AnyPath) -> OpenFolder:
        return OpenFolder(path)

    # --- contents ------------------------------------------------------------

    def read(self, path: AnyPath, limit: int | None = None) -> bytes:
        """Read a regular file of up to `limit` bytes; raise CorruptDataError for any other."""
        return files.read_bytes(Path(path), limit)

    def write_new(self, path: AnyPath, content: Any, mode: int = 0o644) -> None:
        """Write a file that does not exist; `mode` is as in `os.open`."""
        fd = files.open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(fd, "wb") as file:  # noqa: PTH123
            file.write(content)

    def write_over(self, path: AnyPath, content: Any, mode: int = 0o666) -> None:
        """Write a file; one that exists keeps its memory pages as far as they are needed.

        A new file gets `mode`, as in `os.open`.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:  # noqa: PTH123
            file.write(content)
            file.truncate()

    def begin_writing(self, path: AnyPath) -> None:
        """Ask the system to write a file to the disk soon; `sync` then has less to wait for.

        On Linux this also drops pages that are already on the disk, which makes later reads a
        little slower. Otherwise, syncing many small files would cost twice as much.
        """
        if sys.platform != "darwin":
            fd = files.open_plain(path, os.O_RDONLY)
            try:
                with contextlib.suppress(OSError):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def sync(self, path: AnyPath) -> None:
        """Make a file's content durable."""
        fd = files.open_plain(path, os.O_RDONLY)
        try:
            sync_descriptor(fd)
        finally:
            os.close(fd)  # NFS writes here, and reports a failure only once

    def sync_folder(self, path: AnyPath) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_descriptor(fd)
        finally:
            os.close(fd)

    # --- formats that are read and written in place ----------------------------

    def connect(self, file: AnyPath, access: str, seconds: float) -> sqlite3.Connection:
        """Open an SQLite database with the `access` of its URI, such as ``mode=ro``.

        Calls wait for other processes for up to `seconds`.
        """
        uri = f"{Path(file).resolve().as_uri()}?{access}"
        return sqlite3.connect(uri, uri=True, timeout=seconds)

    def open_slots(self, stem: AnyPath, *, create: bool) -> _core.Slots:
        return _core.Slots(stem, create)

    def check_slots(self, stem: AnyPath) -> tuple[str, str, bool] | None:
        return _core.check_slots(stem)

    # --- the disk itself -------------------------------------------------------

    def may_write(self, folder: AnyPath) -> bool:
        return os.access(folder, os.W_OK)

    def is_remote(self, path: AnyPath) -> bool:
        """Return whether a path is on a network file system."""
        return files.is_network_file_system(path)

    def free_bytes(self, folder: AnyPath) -> int:
        return files.free_bytes(Path(folder))

    def device(self, folder: AnyPath) -> int:
        """Return the number of the device that holds a folder."""
        return os.stat(folder).st_dev  # noqa: PTH116

    def is_memory(self, folder: AnyPath) -> bool:
        return files.is_memory(Path(folder))


class OpenFolder:
    """A folder that stays the same one, even if a link takes its name later."""

    def __init__(self, path: AnyPath) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def list(self) -> list[str]:
        return os.listdir(self._fd)  # noqa: PTH208

    def read(self, name: str, limit: int) -> bytes:
        """Read a regular file of up to `limit` bytes, or raise ValueError; never wait for it."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(name, flags, dir_fd=self._fd)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise ValueError("it is not a regular file")
            if info.st_size > limit:
                raise ValueError(f"it has more than {limit} bytes")
            return os.read(fd, limit + 1)
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Remove an entry of any kind and what is in it, without following links."""
        with contextlib.suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=self._fd)
            except (IsADirectoryError, PermissionError):  # macOS raises the second
                self._remove_tree(name)

    def _remove_tree(self, name: str) -> None:
        for _, folders, names, fd in os.fwalk(name, topdown=False, dir_fd=self._fd):
            for each in names:
                os.unlink(each, dir_fd=fd)
            for each in folders:
                info = os.stat(each, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    os.rmdir(each, dir_fd=fd)
                else:
                    os.unlink(each, dir_fd=fd)
        os.rmdir(name, dir_fd=self._fd)

    def close(self) -> None:
        if self.is_open:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def sync_descriptor(fd: int) -> None:
    if sys.platform == "darwin":  # fsync does not flush the drive's cache
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)
