"""Files that are durable under their names: order, failures, and what is left behind."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cerebro.machine import durable
from cerebro.machine.files import LinkError


class Disk:
    """What was asked of the disk: f a file and d a folder synced, r a file renamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = ""
        self.fail: dict[str, tuple[int, int]] = {}
        """The number of the call, from 1, and its errno, by kind: "sync" or "rename"."""
        self._seen = {"sync": 0, "rename": 0}
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(durable.os, "fsync", self.fsync)
        monkeypatch.setattr(durable.os, "replace", self.replace)

    def fsync(self, fd: int) -> None:
        self.calls += "d" if stat.S_ISDIR(os.fstat(fd).st_mode) else "f"
        self._may_fail("sync")
        self._fsync(fd)

    def replace(self, source: str, target: str) -> None:
        self.calls += "r"
        self._may_fail("rename")
        self._replace(source, target)

    def _may_fail(self, kind: str) -> None:
        self._seen[kind] += 1
        number, code = self.fail.get(kind, (0, 0))
        if self._seen[kind] == number:
            raise OSError(code, os.strerror(code))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- publishing -------------------------------------------------------------------


def make(folder: Path, n: int) -> list[tuple[Path, Path]]:
    """Write files of different contents: their temporary and final paths."""
    pairs = [(folder / f"{i}.new", folder / str(i)) for i in range(n)]
    for i, (temporary, _) in enumerate(pairs):
        temporary.write_bytes(b"%d" % i)
    return pairs


def test_all_are_synced_then_renamed_then_their_folder_is_synced(
    tmp_path: Path, disk: Disk
) -> None:
    pairs = make(tmp_path, 150)
    before = descriptors()
    durable.publish(pairs)
    assert disk.calls == 150 * "f" + 150 * "r" + "d"
    assert descriptors() == before
    for i, (temporary, final) in enumerate(pairs):
        assert not temporary.exists() and final.read_bytes() == b"%d" % i


def test_publishing_no_files_does_nothing(disk: Disk) -> None:
    durable.publish([])
    assert disk.calls == ""


def test_every_folder_is_synced_once(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "folder").mkdir()
    pairs = make(tmp_path, 3)
    pairs[1] = (pairs[1][0], tmp_path / "folder" / "name")
    durable.publish(pairs)
    assert disk.calls == "fffrrrdd"
    assert (tmp_path / "folder" / "name").read_bytes() == b"1"


def test_a_bare_name_is_in_the_working_directory(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    durable.publish([("0.new", "0")])
    assert disk.calls == "frd" and names(Path()) == ["0"]


def test_a_file_that_cannot_be_synced_leaves_all_unpublished(tmp_path: Path, disk: Disk) -> None:
    pairs = make(tmp_path, 100)
    disk.fail["sync"] = (70, errno.EIO)
    before = descriptors()
    with pytest.raises(OSError, match=r"cannot sync .*/69\.new to disk") as caught:
        durable.publish(pairs)
    assert caught.value.errno == errno.EIO
    assert disk.calls == 70 * "f"  # what failed is not tried again
    assert all(temporary.exists() and not final.exists() for temporary, final in pairs)
    assert descriptors() == before


def test_the_error_names_a_missing_file(tmp_path: Path, disk: Disk) -> None:
    pairs = make(tmp_path, 3)
    pairs[1][0].unlink()
    with pytest.raises(FileNotFoundError, match=r"cannot open .*/1\.new"):
        durable.publish(pairs)
    assert disk.calls == ""


def test_a_link_is_not_followed(tmp_path: Path, disk: Disk) -> None:
    pairs = make(tmp_path, 1)
    pairs[0][0].rename(tmp_path / "elsewhere")
    pairs[0][0].symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LinkError, match="symbolic link"):
        durable.publish(pairs)
    assert disk.calls == ""


def test_the_error_names_a_failed_rename(tmp_path: Path, disk: Disk) -> None:
    pairs = make(tmp_path, 3)
    disk.fail["rename"] = (2, errno.EROFS)
    with pytest.raises(OSError, match=r"cannot rename .*/1\.new to .*/1: ") as caught:
        durable.publish(pairs)
    assert caught.value.errno == errno.EROFS and disk.calls == "fffrr"


def test_a_folder_that_cannot_be_synced_is_an_error(tmp_path: Path, disk: Disk) -> None:
    disk.fail["sync"] = (4, errno.EIO)
    with pytest.raises(OSError, match=rf"cannot sync folder {tmp_path}: ") as caught:
        durable.publish(make(tmp_path, 3))
    assert caught.value.errno == errno.EIO


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    """A commit of 40 states where the process may have 32 files open."""
    program = """
import resource, sys
from pathlib import Path
from cerebro.run.records import EpochRecord, TrialRecord
from cerebro.run.store import Store
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
store = Store.create(folder, {})
with store.group():
    store.add_trial(TrialRecord(0, {}, "running", 40))
    for epoch in range(40):
        files = folder / f"{epoch}.new", folder / f"{epoch}.state"
        files[0].write_bytes(b"x")
        store.add_epoch(0, EpochRecord(epoch, {"loss": 0.5}, 1.0, "hash", files[1].name), files)
store.close()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*.state"))) == 40 and not list(tmp_path.glob("*.new"))


# --- replacing --------------------------------------------------------------------


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let files grow to `size` bytes: in the place of a disk that fills."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


def test_replace_file_creates_and_replaces_files(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "note"
    before = descriptors()
    for content in (b"one", b"three", b""):
        disk.calls = ""
        durable.replace_file(path, content)
        assert path.read_bytes() == content and disk.calls == "frd"
    durable.replace_file(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert names(tmp_path) == ["note"]
    assert descriptors() == before
    with pytest.raises(TypeError):
        durable.replace_file(path, "text")  # type: ignore[arg-type]
    assert names(tmp_path) == ["note"]


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [("sync", errno.EIO, "cannot write"), ("rename", errno.EROFS, "cannot replace")],
)
def test_a_failed_replacement_leaves_the_old_file(
    tmp_path: Path, disk: Disk, kind: str, code: int, message: str
) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old bytes")
    disk.fail[kind] = (1, code)
    before = descriptors()
    with pytest.raises(OSError, match=f"{message} {path}: ") as caught:
        durable.replace_file(path, b"new bytes")
    assert caught.value.errno == code
    assert path.read_bytes() == b"old bytes" and names(tmp_path) == ["old"]
    assert descriptors() == before


@pytest.mark.parametrize("size", [4, 100_000])
def test_a_disk_that_fills_leaves_the_old_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    before = descriptors()
    with largest_file(size), pytest.raises(OSError, match=f"cannot write {path}: ") as caught:
        durable.replace_file(path, bytes(200_000))
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old" and names(tmp_path) == ["old"]
    assert descriptors() == before


def test_the_error_names_a_file_that_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"cannot replace .*/folder"):
        durable.replace_file(tmp_path / "folder", b"x")
    with pytest.raises(FileNotFoundError, match=r"cannot write .*/none/note"):
        durable.replace_file(tmp_path / "none" / "note", b"x")
    assert names(tmp_path) == ["folder"]


def test_a_failed_folder_sync_raises_after_the_file_is_replaced(tmp_path: Path, disk: Disk) -> None:
    disk.fail["sync"] = (2, errno.EIO)
    with pytest.raises(OSError, match="cannot sync folder"):
        durable.replace_file(tmp_path / "note", b"late")
    assert (tmp_path / "note").read_bytes() == b"late"


def test_files_of_other_processes_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", bytes)
    other = tmp_path / f"note.tmp-{'00' * 8}"
    other.write_bytes(b"being written by another process")
    with pytest.raises(FileExistsError, match="cannot write"):
        durable.replace_file(tmp_path / "note", b"new")
    assert other.read_bytes() == b"being written by another process"
    assert not (tmp_path / "note").exists()


def test_replacing_a_link_leaves_its_target(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / "link").symlink_to("target")
    durable.replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_bytes() == b"kept"
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_bytes() == b"new"


def test_readers_see_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "note"
    contents = [bytes([65 + i]) * 5000 for i in range(20)]
    durable.replace_file(path, contents[0])
    done = threading.Event()
    seen = set()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for content in contents:
        durable.replace_file(path, content)
    done.set()
    reader.join()
    assert seen <= set(contents)


# --- folders ----------------------------------------------------------------------


def test_sync_folder(tmp_path: Path, disk: Disk) -> None:
    durable.sync_folder(tmp_path)
    assert disk.calls == "d"
    with pytest.raises(FileNotFoundError, match=r"cannot sync folder .*none"):
        durable.sync_folder(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        durable.sync_folder(tmp_path / "file")


def test_a_file_system_without_folder_sync_is_tolerated(tmp_path: Path, disk: Disk) -> None:
    disk.fail["sync"] = (1, errno.EINVAL)
    durable.sync_folder(tmp_path)
