"""The folder in which a dataset is made: lock it, remove abandoned ones, reuse intact shards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cerebro.data.manifest import Column, FileEntry, ShardEntry
from cerebro.data.shards import open_columns
from cerebro.errors import CerebroError, InputError
from cerebro.machine.files import is_mount_point, load_json, open_plain, read_bytes


def real_target(path: Path) -> Path:
    """Return the folder that a path leads to through symbolic links; it need not exist.

    A dataset is made in a folder beside its target, and renamed at the end. A rename replaces an
    empty folder, but neither a link to one nor a mount point. So the folder must be beside the
    target itself, which is also on the disk that the user chose.
    """
    target = Path(os.path.realpath(path))
    if path.is_symlink() and not target.exists():
        raise InputError(
            f"'{path}' is a link to '{target}', which does not exist: make that folder, or choose "
            "another path"
        )
    if is_empty_folder(target) and is_mount_point(target):
        raise InputError(
            f"'{path}' is a mount point, which a dataset cannot replace: give a folder in it, "
            f"such as '{path / 'data'}'"
        )
    return target


def is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


LOCK = ".lock"
_NOTE_BYTES = 16 << 20


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside the target; remove it at the end unless it was renamed.

    A process that the source has forked leaves the folder alone.
    """
    process, prefix = os.getpid(), f".{target.name}.tmp-"
    folder = target.with_name(f"{prefix}{secrets.token_hex(8)}")
    with _explain_failure(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for other in target.parent.iterdir():
            if other.name.startswith(prefix):
                remove_abandoned(other)
        folder.mkdir()
    try:
        with (folder / LOCK).open("wb") as lock:
            with contextlib.suppress(OSError):  # the file system has no locks: never cleaned up
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        if folder.exists() and os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def part_folder(target: Path, fingerprint: str) -> Iterator[Path]:
    """Yield the locked folder of unfinished work, made if missing; keep it for the next call."""
    prefix = f".{target.name}.part-"
    folder = target.with_name(prefix + fingerprint[:16])
    with _explain_failure(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for other in target.parent.iterdir():
            if other.name.startswith(prefix) and other != folder:
                remove_abandoned(other)
        folder.mkdir(exist_ok=True)
        lock = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        taken = False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = True
        except OSError:  # the file system has no locks
            pass
        if taken or not (folder / LOCK).exists():  # renamed by the process that held the lock
            raise InputError(
                f"'{target}' is being made by another process: wait until it has finished, and "
                "call again"
            )
        yield folder
    finally:
        os.close(lock)


@contextlib.contextmanager
def _explain_failure(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"cannot make {target}: {error.strerror or error}: choose another path"
        raise OSError(error.errno, reason) from error


def remove_abandoned(folder: Path, lock: str = LOCK) -> None:
    """Remove a folder if the process that made it is dead, that is, its lock is free."""
    with contextlib.suppress(OSError):  # being created right now, of another user, or in use
        fd = open_plain(folder / lock, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def read_finished_shard(
    place: Path, note: Path, rows: int, columns: Sequence[Column], fingerprint: str
) -> ShardEntry | None:
    """Return the entry of a shard that an earlier call wrote; None if its files are not intact."""
    try:
        content = load_json(read_bytes(note, _NOTE_BYTES), str(note))
        if content["fingerprint"] != fingerprint:
            return None
        files = {name: FileEntry(int(size), str(h)) for name, (size, h) in content["files"].items()}
    except (OSError, CerebroError, LookupError, TypeError, ValueError):
        return None
    return check_intact_shard(place, files, rows, columns)


def check_intact_shard(
    place: Path, files: Mapping[str, FileEntry], rows: int, columns: Sequence[Column]
) -> ShardEntry | None:
    """Return the entry of a shard; None unless it has these files, with these sizes and hashes."""
    if list(files) != [name for column in columns for name in column.file_names]:
        return None
    try:
        hashes = open_columns(place, rows, columns, files).hashes()
    except (OSError, CerebroError, LookupError, TypeError, ValueError):
        return None
    whole = all(hashes[name] == entry.xxh3_64 for name, entry in files.items())
    return ShardEntry(rows, dict(files)) if whole else None
