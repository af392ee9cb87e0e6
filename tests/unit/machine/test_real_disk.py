"""The disk of this machine, as the parts of a run get it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cerebro.machine import durable
from cerebro.machine.disk import Disk

DISK = Disk()


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_those_who_could_read_and_write_a_file_still_can(tmp_path: Path) -> None:
    durable.replace_file(tmp_path / "replaced", b"x")
    DISK.write_over(tmp_path / "fetched", b"x")
    DISK.write_over(tmp_path / "private", b"x", 0o600)
    DISK.write_new(tmp_path / "state", b"x")
    modes = {path.name: oct(mode_of(path)) for path in tmp_path.iterdir()}
    assert modes == {
        "replaced": "0o664",
        "fetched": "0o664",
        "private": "0o600",
        "state": "0o644",
    }


def test_writing_over_a_file_leaves_nothing_of_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    DISK.write_over(file, b"a longer text")
    inode = file.stat().st_ino
    DISK.write_over(file, b"short")
    assert file.read_bytes() == b"short" and file.stat().st_ino == inode


def test_a_disk_that_cannot_tell_is_not_one_without_the_file(tmp_path: Path) -> None:
    assert not DISK.exists(tmp_path / "missing")
    (tmp_path / "file").touch()
    assert DISK.exists(tmp_path / "file") and not DISK.exists(tmp_path / "file" / "below")
    with pytest.raises(OSError, match="too long"):
        DISK.exists(tmp_path / ("x" * 300))


def test_an_open_folder_removes_entries_of_any_kind(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    (outside / "kept").mkdir(parents=True)
    (inside / "folder" / "below").mkdir(parents=True)
    (inside / "folder" / "link").symlink_to(outside)
    (inside / "file").touch()
    folder = DISK.open_folder(inside)
    for name in ("file", "folder", "missing"):
        folder.remove(name)
    assert folder.list() == [] and (outside / "kept").is_dir()
    folder.close()
    assert not folder.is_open
