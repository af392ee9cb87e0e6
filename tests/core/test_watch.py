"""`FolderWatch`: wakes whoever waits when a file arrives in a folder."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from cerebro import _core


def readable(watch: _core.FolderWatch) -> bool:
    return bool(select.select([watch], [], [], 0)[0])


def put(folder: Path, name: str) -> None:
    (folder / f".{name}").write_text("{}")
    (folder / f".{name}").rename(folder / name)


def test_a_renamed_file_wakes_until_drained(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    watch = _core.FolderWatch(tmp_path)
    assert not readable(watch) and watch.drain() is False
    put(tmp_path, "one")
    put(tmp_path, "two")
    assert readable(watch) and watch.drain() is True
    assert not readable(watch) and watch.drain() is False


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        _core.FolderWatch(str(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        _core.FolderWatch(tmp_path / "file")
    with pytest.raises(TypeError):
        _core.FolderWatch(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="null"):
        _core.FolderWatch("a\0b")


def test_a_closed_watch_says_so(tmp_path: Path) -> None:
    watch = _core.FolderWatch(tmp_path)
    number = watch.fileno()
    watch.close()
    watch.close()
    with pytest.raises(OSError):
        os.fstat(number)
    for method in (watch.fileno, watch.drain):
        with pytest.raises(ValueError, match="closed"):
            method()


def test_a_dropped_watch_is_closed(tmp_path: Path) -> None:
    watch = _core.FolderWatch(os.fsencode(tmp_path))  # type: ignore[arg-type]
    number = watch.fileno()
    del watch
    with pytest.raises(OSError):
        os.fstat(number)
