"""The making of a dataset: its unfinished folder, shards that are done, and a bar of progress.

The folder is locked while its process lives, so that abandoned ones can be removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cerebro.data.manifest import Column, FileEntry, ShardEntry
from cerebro.data.shards import open_columns
from cerebro.errors import CerebroError, InputError
from cerebro.machine.files import is_mount_point, load_json, open_plain, read_bytes
from cerebro.report.progress import is_terminal

LOCK = ".lock"
_NOTE_BYTES = 16 << 20
_QUIET_BYTES = 128_000_000  # takes about a second


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


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside the target; remove it at the end, but not in a fork or if renamed."""
    process = os.getpid()
    folder = _make_beside(target, "tmp", secrets.token_hex(8))
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
    folder = _make_beside(target, "part", fingerprint[:16])
    with _explain_failure(target):
        lock = os.fdopen(open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT), "rb")
    with lock:
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


def _make_beside(target: Path, kind: str, number: str) -> Path:
    """Make a folder beside the target unless it exists; remove abandoned ones of this kind."""
    prefix = f".{target.name}.{kind}-"
    folder = target.with_name(prefix + number)
    with _explain_failure(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for other in target.parent.iterdir():
            if other.name.startswith(prefix) and other != folder:
                remove_abandoned(other)
        folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def _explain_failure(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"cannot make {target}: {error.strerror or error}: choose another path"
        raise OSError(error.errno, reason) from error


def remove_abandoned(folder: Path) -> None:
    """Remove a folder if the process that made it is dead, that is, its lock is free."""
    path = folder / LOCK
    # An error: the folder is being made right now, is of another user, or is in use.
    with contextlib.suppress(OSError), os.fdopen(open_plain(path, os.O_RDWR), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


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


class ByteProgress:
    """A bar of bytes; with ``"auto"`` only for many, and if standard error is a terminal."""

    def __init__(self, progress: str | bool) -> None:
        if progress not in ("auto", True, False):
            raise InputError(f"progress must be 'auto', True or False, not {progress!r}")
        is_open = not getattr(sys.stderr, "closed", False)
        self._shows = is_terminal(sys.stderr) if progress == "auto" else bool(progress) and is_open
        self._quiet = _QUIET_BYTES if progress == "auto" else 0
        self._label = ""
        self._total: int | None = None
        self._done = 0
        self._bar: Any = None
        self._task: Any = None

    def begin(self, label: str, total: int | None = None) -> None:
        """Begin a stage of `total` bytes (None: unknown)."""
        self._label, self._total, self._done = label, total, 0
        if self._bar is not None:
            self._bar.update(self._task, description=label, total=total, completed=0)

    def advance(self, count: int) -> None:
        self._done += count
        if not self._shows:
            return
        if self._bar is None and max(self._done, self._total or 0) >= self._quiet:
            self._show()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._label, total=self._total)
        self._bar.start()
