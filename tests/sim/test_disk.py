"""The simulated disk: what its calls do, and what is left after a power failure."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from disk import MountedDisk, MountedFolder, SimulatedDisk
from faults import ProcessDied
from medium import File
from scripted import ScriptedProcess, make_disk

import cerebro._core as _core
from cerebro.errors import CorruptDataError
from cerebro.machine import durable
from cerebro.machine.disk import Disk, OpenFolder

SEEDS = 500


def after_power_losses(
    real: Path, write: Callable[[MountedDisk], None], files: tuple[str, ...] = ("/run/file",)
) -> set[tuple[bytes | None, ...]]:
    """Return what the files may hold if power is lost after `write`; None: they do not exist."""
    found = set()
    for seed in range(SEEDS):
        disk = make_disk(seed, real)
        write(disk.mount(ScriptedProcess()))
        disk.lose_power()
        mounted = disk.mount(ScriptedProcess())
        found.add(tuple(mounted.read(f) if mounted.exists(f) else None for f in files))
        disk.close()
    return found


# --- what survives -----------------------------------------------------------


def test_a_file_survives_that_is_synced_renamed_and_has_its_folder_synced(real: Path) -> None:
    def write(disk: MountedDisk) -> None:
        disk.write_new("/run/file.new", b"content")
        disk.sync("/run/file.new")
        disk.rename("/run/file.new", "/run/file")
        disk.sync_folder("/run")

    kept = after_power_losses(real, write, ("/run/file", "/run/file.new"))
    assert kept == {(b"content", None)}


def test_a_file_that_is_not_synced_may_be_empty_or_hold_zeros(real: Path) -> None:
    def write(disk: MountedDisk) -> None:
        disk.write_new("/run/file.new", b"content")
        disk.rename("/run/file.new", "/run/file")
        disk.sync_folder("/run")

    assert after_power_losses(real, write) == {(b"content",), (b"",), (bytes(7),)}


def test_a_name_in_a_folder_that_is_not_synced_may_be_lost_or_still_be_the_old_one(
    real: Path,
) -> None:
    def write(disk: MountedDisk) -> None:
        disk.write_new("/run/file.new", b"content")
        disk.sync("/run/file.new")
        disk.rename("/run/file.new", "/run/file")

    kept = after_power_losses(real, write, ("/run/file", "/run/file.new"))
    assert kept == {(None, None), (None, b"content"), (b"content", None)}


def test_a_replaced_file_has_either_its_old_content_or_the_new_one(real: Path) -> None:
    def write(disk: MountedDisk) -> None:
        durable.replace_file("/run/file", b"old", disk)
        disk.write_new("/run/file.new", b"new")
        disk.sync("/run/file.new")
        disk.rename("/run/file.new", "/run/file")

    assert after_power_losses(real, write) == {(b"old",), (b"new",)}


def test_a_removed_file_may_come_back_until_its_folder_is_synced(real: Path) -> None:
    def write(disk: MountedDisk) -> None:
        durable.replace_file("/run/file", b"content", disk)
        disk.remove("/run/file")

    def write_and_sync(disk: MountedDisk) -> None:
        write(disk)
        disk.sync_folder("/run")

    assert after_power_losses(real, write) == {(b"content",), (None,)}
    assert after_power_losses(real, write_and_sync) == {(None,)}


def test_renames_may_survive_in_any_order_but_those_of_one_name_in_theirs(real: Path) -> None:
    def write(disk: MountedDisk) -> None:
        for name in "ab":
            durable.replace_file(f"/run/{name}.new", name.encode(), disk)
        for name in "ab":
            disk.rename(f"/run/{name}.new", f"/run/{name}")
        disk.rename("/run/a", "/run/c")

    kept = after_power_losses(real, write, ("/run/a", "/run/b", "/run/c"))
    of_a = {(b"a", None), (None, b"a"), (None, None)}  # a, then c; or still a.new
    assert kept == {(a, b, c) for a, c in of_a for b in (b"b", None)}


def test_a_file_never_has_two_names_nor_does_it_vanish_by_being_renamed(real: Path) -> None:
    def write(disk: MountedDisk) -> None:
        disk.make_folder("/run/other")
        durable.replace_file("/run/x", b"x", disk)
        disk.rename("/run/x", "/run/other/x")
        disk.rename("/run/other/x", "/run/y")
        disk.write_new("/run/x", b"")
        disk.rename("/run/y", "/run/other/z")
        disk.write_new("/run/other/x", b"")

    names = ("/run/x", "/run/y", "/run/other/x", "/run/other/z")
    for kept in after_power_losses(real, write, names):
        assert kept.count(b"x") == 1


def test_a_folder_is_lost_with_all_in_it_unless_its_own_name_is_durable(real: Path) -> None:
    def write(disk: MountedDisk) -> None:
        disk.make_folder("/run/states")
        durable.replace_file("/run/states/file", b"content", disk)

    def write_and_sync(disk: MountedDisk) -> None:
        write(disk)
        disk.sync_folder("/run")

    assert after_power_losses(real, write, ("/run/states/file",)) == {(None,), (b"content",)}
    assert after_power_losses(real, write_and_sync, ("/run/states/file",)) == {(b"content",)}


def test_pages_of_a_file_survive_each_on_its_own_and_sometimes_torn_at_a_sector(
    real: Path,
) -> None:
    def write(disk: MountedDisk) -> None:
        disk.write_new("/run/file", b"x" * 8192)
        disk.sync_folder("/run")

    first, torn = set(), 0
    for (content,) in after_power_losses(real, write):
        assert content is not None
        pages = [content[:4096], content[4096:]]
        first.add(tuple(bool(page.strip(b"\0")) for page in pages))
        sectors = [content[at : at + 512] for at in range(0, len(content), 512)]
        assert set(sectors) <= {b"x" * 512, bytes(512)}
        torn += any(len({page[at : at + 512] for at in range(0, 4096, 512)}) > 1 for page in pages)
    assert first == {(False, False), (False, True), (True, False), (True, True)}
    assert torn


def test_a_file_that_was_cut_and_written_again_never_shows_what_was_cut_off() -> None:
    found = set()
    for seed in range(SEEDS):
        file = File(1)
        file.write(0, b"old" * 2000)
        file.sync()
        file.write(0, b"more" * 1500)
        file.truncate(2)
        file.write(4, b"new")
        file.lose_power(Random(seed))
        content = file.content()
        found.add(content[:10] if len(content) == 6000 else content)
    cut = {b"ol", b"mo"}
    longer = {b"mo\0\0new", b"mo" + bytes(5), b"ol" + bytes(5)}
    assert found == {b"oldoldoldo", b"moremoremo"} | cut | longer


def test_syncing_one_folder_of_a_rename_moves_the_file_for_good(real: Path) -> None:
    def write(disk: MountedDisk) -> None:
        for folder in ("/run/a", "/run/b"):
            disk.make_folder(folder)
        disk.sync_folder("/run")
        disk.write_new("/run/a/x", b"content")
        disk.sync("/run/a/x")
        disk.rename("/run/a/x", "/run/b/x")
        disk.sync_folder("/run/b")

    assert after_power_losses(real, write, ("/run/a/x", "/run/b/x")) == {(None, b"content")}


def test_a_failed_sync_loses_the_content_even_if_a_later_one_succeeds(real: Path) -> None:
    def write(disk: MountedDisk) -> None:
        disk.write_new("/run/file", b"content")
        disk.sync_folder("/run")
        disk._process.fail_next(OSError(errno.EIO, "the disk fails"))
        with pytest.raises(OSError, match="the disk fails"):
            disk.sync("/run/file")
        disk.sync("/run/file")
        assert disk.read("/run/file") == b"content"

    assert after_power_losses(real, write) == {(b"",)}


def test_one_seed_decides_everything(real: Path) -> None:
    def run(seed: int) -> list[object]:
        disk = make_disk(seed, real)
        mounted = disk.mount(ScriptedProcess())
        for number in range(20):
            mounted.write_new(f"/run/{number}.new", bytes([number]) * 5000)
            if number % 3:
                mounted.rename(f"/run/{number}.new", f"/run/{number}")
            if number % 7 == 0:
                durable.replace_file(f"/run/{number + 100}", b"content", mounted)
        disk.lose_power()
        kept = [disk.random.random(), sorted(disk.names("/run"))]
        kept += [len(disk.content(f"/run/{name}")) for name in sorted(disk.names("/run"))]
        disk.close()
        # A temporary name is random, and may be among those left.
        return [str(item).split(".tmp-")[0] for item in kept]

    assert [run(seed) for seed in range(50)] == [run(seed) for seed in range(50)]


# --- faults ------------------------------------------------------------------


def test_a_failed_write_leaves_a_part_of_the_file(real: Path) -> None:
    lengths = set()
    for seed in range(200):
        disk = make_disk(seed, real)
        process = ScriptedProcess(1, OSError(errno.ENOSPC, "no space"))
        mounted = disk.mount(process)
        with pytest.raises(OSError, match="no space"):
            mounted.write_new("/run/file", b"content")
        content = mounted.read("/run/file")
        assert b"content".startswith(content)
        lengths.add(len(content))
        disk.close()
    assert lengths == set(range(8))


def test_a_dead_process_can_do_nothing_and_others_see_what_it_did(disk: SimulatedDisk) -> None:
    process = ScriptedProcess()
    mounted, other = disk.mount(process), disk.mount(ScriptedProcess())
    mounted.write_new("/run/file", b"content")
    process.fail_next(ProcessDied())
    with pytest.raises(ProcessDied):
        mounted.rename("/run/file", "/run/new")
    calls: list[Callable[[], object]] = [
        lambda: mounted.exists("/run/file"),
        lambda: mounted.remove("/run/file"),
        lambda: mounted.write_new("/run/other", b""),
        lambda: mounted.sync("/run/file"),
        lambda: mounted.connect("/run/store", "mode=rwc", 1),
        lambda: mounted.open_slots("/run/1", create=True),
    ]
    for call in calls:
        with pytest.raises(ProcessDied):
            call()
    assert other.read("/run/file") == b"content"
    assert disk.names("/run") == ["file"]


def test_every_process_is_dead_after_a_power_failure(disk: SimulatedDisk) -> None:
    mounted = disk.mount(ScriptedProcess())
    disk.lose_power()
    with pytest.raises(ProcessDied):
        mounted.list("/run")


def test_power_may_be_lost_within_a_call_which_then_does_nothing(real: Path) -> None:
    class Unlucky(ScriptedProcess):
        def call(self, kind: str, path: str) -> None:
            super().call(kind, path)
            if kind in ("write", "slots put", "sync"):
                disk.lose_power()
                raise ProcessDied

    def write(disk: MountedDisk) -> None:
        disk.write_new("/run/file", b"content")

    def pack(disk: MountedDisk) -> None:
        slots = disk.open_slots("/run/7", create=True)
        disk.sync_folder("/run")
        slots.put(_core.pack_state({"x": 1}), attempt=1)

    def commit(disk: MountedDisk) -> None:
        connection = disk.connect("/run/store", "mode=rwc", 1)
        with connection:
            connection.execute("CREATE TABLE rows (number)")

    for seed in range(30):
        for act in (write, pack, commit):
            disk = make_disk(seed, real)
            with pytest.raises((ProcessDied, sqlite3.OperationalError)):
                act(disk.mount(Unlucky()))
            for name in disk.names("/run"):
                assert disk.content(f"/run/{name}").strip(b"\0") in (b"", b"CERSLOTS\2")
            disk.close()


# --- calls ---------------------------------------------------------------------


def use(disk: Disk, root: str) -> list[object]:
    """Use each call in usual and unusual ways; return what came of it, with types of errors."""
    results: list[object] = []

    def add(call: Callable[..., object], *values: object) -> None:
        try:
            results.append(call(*values))
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            results.append((type(error), number))

    add(disk.make_folder, f"{root}/a/b")
    add(disk.make_folder, f"{root}/a")
    add(disk.write_new, f"{root}/a/file", b"content")
    add(disk.write_new, f"{root}/a/file", b"other")
    add(disk.write_new, f"{root}/missing/file", b"")
    add(disk.write_new, f"{root}/a/file/file", b"")
    add(disk.make_folder, f"{root}/a/file")
    add(disk.make_folder, f"{root}/a/file/folder")
    for path in ("a", "a/file", "a/none", "none/none", "a/file/none"):
        for call in (disk.exists, disk.read, disk.check_folder, disk.check_no_link):
            add(call, f"{root}/{path}")
        add(lambda path: disk.identify(path) is None, f"{root}/{path}")
        add(lambda path: sorted(disk.list(path)), f"{root}/{path}")
        for call in (disk.begin_writing, disk.sync, disk.sync_folder):
            if path not in ("a",) or call == disk.sync_folder:
                add(call, f"{root}/{path}")
    add(disk.size, f"{root}/a/file")
    add(disk.size, f"{root}/a/none")
    add(disk.read, f"{root}/a/file", 7)
    add(disk.read, f"{root}/a/file", 6)
    before = disk.identify(f"{root}/a/file")
    add(disk.rename, f"{root}/a/file", f"{root}/a/b/file")
    add(lambda: before == disk.identify(f"{root}/a/b/file"))
    add(disk.rename, f"{root}/a/file", f"{root}/a/b/file")
    add(disk.rename, f"{root}/a/b/file", f"{root}/a/b/file")
    add(disk.rename, f"{root}/a/b/file", f"{root}/none/file")
    add(disk.make_folder, f"{root}/a/empty")
    add(disk.rename, f"{root}/a/b/file", f"{root}/a/empty")
    add(disk.rename, f"{root}/a/empty", f"{root}/a/b/file")
    add(disk.remove_empty_folder, f"{root}/a")
    add(disk.remove_empty_folder, f"{root}/a/b/file")
    add(disk.remove_empty_folder, f"{root}/a/empty")
    add(disk.remove_empty_folder, f"{root}/a/empty")
    add(disk.make_folder, f"{root}/a/empty")
    add(disk.remove_folder, f"{root}/a/empty")
    add(disk.write_new, f"{root}/a/b/new", memoryview(b"new"))
    add(disk.rename, f"{root}/a/b/new", f"{root}/a/b/file")
    add(disk.read, f"{root}/a/b/file")
    add(disk.remove, f"{root}/a/b/file")
    add(disk.remove, f"{root}/a/b/file")
    add(disk.remove, f"{root}/a/b")
    add(disk.remove, f"{root}/none/file")
    add(disk.open_folder, f"{root}/none")
    folder = disk.open_folder(f"{root}/a")
    add(disk.write_new, f"{root}/a/b/file", b"content")
    add(lambda: folder.list())
    add(disk.rename, f"{root}/a", f"{root}/c")
    add(disk.write_new, f"{root}/c/file", b"content")
    add(lambda: sorted(folder.list()))
    add(folder.read, "file", 7)
    add(folder.read, "file", 6)
    add(folder.read, "none", 6)
    add(folder.read, "b", 5000)
    add(folder.remove, "b")
    add(folder.remove, "none")
    add(lambda: (folder.list(), folder.is_open, folder.close(), folder.is_open))
    add(disk.remove_folder, f"{root}/none")
    add(disk.remove_folder, f"{root}/c/file")
    add(disk.remove_folder, f"{root}/c")
    add(lambda: (disk.list(root), disk.may_write(root), disk.may_write(f"{root}/none")))
    return results


def test_calls_return_and_raise_what_those_of_a_real_disk_do(
    disk: SimulatedDisk, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    real = use(Disk(), str(tmp_path / "disk"))
    disk.make_folder("/disk")
    simulated = use(disk.mount(ScriptedProcess()), "/disk")
    assert simulated == real
    assert (CorruptDataError, None) in real


def test_a_process_is_told_of_each_call_before_it_happens(disk: SimulatedDisk) -> None:
    process = ScriptedProcess()
    mounted = disk.mount(process)
    mounted.make_folder("/run/states")
    durable.publish([], mounted)
    mounted.write_new("/run/file.new", b"content")
    durable.publish([("/run/file.new", "/run/file")], mounted)
    mounted.remove_folder("/run/states")
    assert process.calls == [
        ("make_folder", "/run/states"),
        ("create", "/run/file.new"),
        ("write", "/run/file.new"),
        ("sync", "/run/file.new"),
        ("rename", "/run/file.new"),
        ("sync_folder", "/run"),
        ("remove", "/run/states"),
    ]


def test_a_disk_may_be_remote_or_full(disk: SimulatedDisk) -> None:
    mounted = disk.mount(ScriptedProcess())
    assert not mounted.is_remote("/run") and not mounted.is_memory("/run")
    assert mounted.free_bytes("/run") == 1 << 40
    disk.is_remote, disk.free_bytes = True, 0
    assert mounted.is_remote("/run")
    assert mounted.free_bytes("/run") == 0


def test_no_call_of_a_mounted_disk_reaches_the_real_one() -> None:
    for simulated, real in ((MountedDisk, Disk), (MountedFolder, OpenFolder)):
        assert {name for name in vars(real) if not name.startswith("_")} <= set(vars(simulated))
