"""SQLite on the simulated disk: what it has committed survives all that the disk does to it."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from pathlib import Path

import pytest
import vfs
from disk import MountedDisk, SimulatedDisk
from faults import ProcessDied
from scripted import ScriptedProcess, make_disk

pytestmark = pytest.mark.skipif(not vfs.register(), reason="this Python's SQLite takes no VFS")

STORE = "/run/run.sqlite"
WAYS = ["WAL", "DELETE"]
SEEDS = 4


def create(disk: MountedDisk, mode: str = "WAL") -> None:
    """Create a store as a run does: complete before it gets its name."""
    with contextlib.closing(disk.connect(STORE + ".new", "mode=rwc", 1)) as connection:
        connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, text TEXT)")
        connection.execute("CREATE INDEX by_text ON rows (text)")
    disk.rename(STORE + ".new", STORE)
    disk.sync_folder("/run")
    with contextlib.closing(disk.connect(STORE, "mode=rw", 1)) as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")


def open_new(disk: MountedDisk) -> sqlite3.Connection:
    create(disk)
    return disk.connect(STORE, "mode=rw", 1)


def add_rows(disk: MountedDisk, committed: list[int], mode: str = "WAL") -> None:
    """Commit rows of a quarter of a page up to three pages, with checkpoints of the log."""
    with contextlib.closing(disk.connect(STORE, "mode=rw", 1)) as connection:
        # SQLite may forget that it has deleted a rollback journal unless EXTRA is asked for.
        connection.execute(f"PRAGMA synchronous = {'FULL' if mode == 'WAL' else 'EXTRA'}")
        connection.execute("PRAGMA wal_autocheckpoint = 12")
        for number in range(10):
            text = f"{number}" * 1000 * (1 + number * 5 % 12)
            with connection:
                connection.execute("INSERT INTO rows VALUES (?, ?)", (number, text))
                if number > 4:
                    connection.execute("DELETE FROM rows WHERE number = ?", (number - 5,))
            committed.append(number)
            if number == 7 and mode == "WAL":
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def check_rows(disk: SimulatedDisk, committed: list[int], case: object) -> None:
    """Check that the store is intact, with the committed rows or also those of the last call."""
    mounted = disk.mount(ScriptedProcess())
    with contextlib.closing(mounted.connect(STORE, "mode=rw", 1)) as connection:
        rows = [row[0] for row in connection.execute("SELECT number FROM rows ORDER BY number")]
        last = len(committed) - 1
        assert rows in (kept_after(last), kept_after(last + 1)), case
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)], case


def kept_after(last: int) -> list[int]:
    return list(range(max(0, last - 4), last + 1))


def list_calls(real: Path, mode: str) -> list[str]:
    disk = make_disk(0, real)
    create(disk.mount(ScriptedProcess()), mode)
    process = ScriptedProcess()
    add_rows(disk.mount(process), [], mode)
    disk.close()
    return [kind for kind, _ in process.calls]


def run_until(
    real: Path, mode: str, at: int, seed: int, fault: BaseException
) -> tuple[SimulatedDisk, list[int]]:
    """Add rows until call `at` fails; return the disk and which were committed before."""
    disk = make_disk(seed, real)
    create(disk.mount(ScriptedProcess()), mode)
    committed: list[int] = []
    mounted = disk.mount(ScriptedProcess(at, fault))
    with contextlib.suppress(sqlite3.OperationalError, ProcessDied, OSError):
        add_rows(mounted, committed, mode)
    return disk, committed


@pytest.mark.parametrize("mode", WAYS)
def test_committed_rows_survive_the_death_of_their_process_at_any_call(
    real: Path, mode: str
) -> None:
    for at in range(len(list_calls(real, mode))):
        disk, committed = run_until(real, mode, at, at, ProcessDied())
        check_rows(disk, committed, at)
        disk.close()


@pytest.mark.parametrize("mode", WAYS)
def test_committed_rows_survive_a_power_failure_at_any_call(real: Path, mode: str) -> None:
    for at in range(len(list_calls(real, mode))):
        for seed in range(SEEDS):
            disk, committed = run_until(real, mode, at, seed, ProcessDied())
            disk.lose_power()
            check_rows(disk, committed, (at, seed))
            disk.lose_power()
            check_rows(disk, committed, (at, seed, "again"))
            disk.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_committed_rows_survive_a_failed_call_and_then_a_power_failure(
    real: Path, number: int
) -> None:
    for at, kind in enumerate(list_calls(real, "WAL")):
        if kind == "sync_folder":  # see the next test
            continue
        disk, committed = run_until(real, "WAL", at, at, OSError(number, "it fails"))
        check_rows(disk, committed, at)
        disk.lose_power()
        check_rows(disk, committed, (at, "power"))
        disk.close()


def test_sqlite_does_not_notice_that_the_name_of_a_new_log_could_not_be_synced(
    real: Path,
) -> None:
    kept = set()
    for seed in range(40):
        disk = make_disk(seed, real)
        process = ScriptedProcess()
        connection = open_new(disk.mount(process))
        connection.execute("PRAGMA synchronous = FULL")
        process.fail_kind("sync_folder", OSError(errno.EIO, "the disk fails"))
        with connection:
            connection.execute("INSERT INTO rows VALUES (1, 'text')")
        disk.lose_power()
        kept.add("run.sqlite-wal" in disk.names("/run"))
        disk.close()
    assert kept == {True, False}


def test_rows_that_are_not_synced_may_be_lost(real: Path) -> None:
    kept = set()
    for seed in range(100):
        disk = make_disk(seed, real)
        connection = open_new(disk.mount(ScriptedProcess()))
        connection.execute("PRAGMA synchronous = OFF")
        with connection:
            connection.execute("INSERT INTO rows VALUES (1, 'text')")
        disk.lose_power()
        after = disk.mount(ScriptedProcess())
        with contextlib.closing(after.connect(STORE, "mode=rw", 1)) as other:
            kept.add(other.execute("SELECT count(*) FROM rows").fetchone())
        disk.close()
    assert kept == {(0,), (1,)}


# --- two processes --------------------------------------------------------------


@pytest.fixture
def two(disk: SimulatedDisk) -> tuple[MountedDisk, MountedDisk]:
    first = disk.mount(ScriptedProcess())
    create(first)
    return first, disk.mount(ScriptedProcess())


def count_rows(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT count(*) FROM rows").fetchone()[0]


def test_a_reader_keeps_its_snapshot_while_another_process_commits(
    two: tuple[MountedDisk, MountedDisk],
) -> None:
    writer, reader = two[0].connect(STORE, "mode=rw", 1), two[1].connect(STORE, "mode=ro", 1)
    reader.execute("BEGIN")
    assert count_rows(reader) == 0
    with writer:
        writer.execute("INSERT INTO rows VALUES (1, 'text')")
    assert count_rows(reader) == 0
    reader.rollback()
    assert count_rows(reader) == 1
    # A reader of the log keeps it from being cut.
    reader.execute("BEGIN")
    assert count_rows(reader) == 1
    assert writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 1
    reader.rollback()
    assert writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("DELETE FROM rows")
    reader.close()
    writer.close()


@pytest.mark.parametrize("mode", WAYS)
def test_a_second_writer_waits_in_simulated_time_and_is_refused(
    disk: SimulatedDisk, mode: str
) -> None:
    waiting = ScriptedProcess()
    first, second = disk.mount(ScriptedProcess()), disk.mount(waiting)
    create(first, mode)
    writer, other = first.connect(STORE, "mode=rw", 60), second.connect(STORE, "mode=rw", 60)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="database is locked"):
        other.execute("BEGIN IMMEDIATE")
    assert waiting.slept == pytest.approx(60)
    writer.rollback()
    other.execute("BEGIN IMMEDIATE")
    other.rollback()


def test_without_a_log_a_reader_and_a_commit_exclude_each_other(disk: SimulatedDisk) -> None:
    first, second = disk.mount(ScriptedProcess()), disk.mount(ScriptedProcess())
    create(first, "DELETE")
    writer, reader = first.connect(STORE, "mode=rw", 1), second.connect(STORE, "mode=ro", 1)
    reader.execute("BEGIN")
    assert count_rows(reader) == 0
    writer.execute("INSERT INTO rows VALUES (1, 'text')")
    with pytest.raises(sqlite3.OperationalError, match="database is locked"):
        writer.commit()
    reader.rollback()
    writer.commit()
    assert count_rows(reader) == 1


@pytest.mark.parametrize("mode", WAYS)
def test_the_locks_of_a_dead_process_are_released(disk: SimulatedDisk, mode: str) -> None:
    process = ScriptedProcess()
    first, second = disk.mount(process), disk.mount(ScriptedProcess())
    create(first, mode)
    writer, other = first.connect(STORE, "mode=rw", 1), second.connect(STORE, "mode=rw", 1)
    writer.execute("INSERT INTO rows VALUES (1, 'text')")
    with pytest.raises(sqlite3.OperationalError, match="database is locked"):
        other.execute("INSERT INTO rows VALUES (2, 'text')")
    process.fail_next(ProcessDied())
    with pytest.raises(ProcessDied):
        first.exists(STORE)
    with other:
        other.execute("INSERT INTO rows VALUES (2, 'text')")
    assert count_rows(other) == 1


def test_a_process_that_dies_in_a_commit_does_nothing_later(disk: SimulatedDisk) -> None:
    process = ScriptedProcess()
    mounted = disk.mount(process)
    writer = open_new(mounted)
    writer.execute("INSERT INTO rows VALUES (1, 'text')")
    process.fail_next(ProcessDied())
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        writer.commit()
    with pytest.raises(ProcessDied):
        mounted.exists(STORE)
    before = {name: disk.content(f"/run/{name}") for name in disk.names("/run")}
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        writer.execute("INSERT INTO rows VALUES (2, 'text')")
    writer.close()
    assert {name: disk.content(f"/run/{name}") for name in disk.names("/run")} == before


def test_a_write_to_the_log_may_be_cut_by_a_death(real: Path) -> None:
    sizes = set()
    for seed in range(40):
        disk = make_disk(seed, real)
        process = ScriptedProcess()
        connection = open_new(disk.mount(process))
        connection.execute("INSERT INTO rows VALUES (1, 'text')")
        process.fail_next(ProcessDied())
        with pytest.raises(sqlite3.OperationalError):
            connection.commit()
        assert process.calls[-1] == ("write", STORE + "-wal")
        sizes.add(len(disk.content(STORE + "-wal")))
        disk.close()
    assert len(sizes) > 20  # of up to 32 bytes


def test_a_commit_whose_sync_failed_cannot_become_durable_later(real: Path) -> None:
    for seed in range(20):
        disk = make_disk(seed, real)
        process = ScriptedProcess()
        mounted = disk.mount(process)
        connection = open_new(mounted)
        connection.execute("PRAGMA synchronous = FULL")
        with connection:
            connection.execute("INSERT INTO rows VALUES (1, 'text')")
        process.fail_kind("sync", OSError(errno.EIO, "the disk fails"))
        with pytest.raises(sqlite3.OperationalError, match="disk I/O error"), connection:
            connection.execute("INSERT INTO rows VALUES (2, 'text')")
        mounted.sync(STORE + "-wal")
        disk.lose_power()
        after = disk.mount(ScriptedProcess())
        with contextlib.closing(after.connect(STORE, "mode=rw", 1)) as other:
            assert other.execute("SELECT number FROM rows").fetchall() == [(1,)]
        disk.close()


# --- files ---------------------------------------------------------------------


@pytest.mark.parametrize("access", ["mode=rw", "mode=ro", "mode=ro&immutable=1"])
def test_a_missing_store_cannot_be_opened(disk: SimulatedDisk, access: str) -> None:
    mounted = disk.mount(ScriptedProcess())
    for path in (STORE, "/none/run.sqlite"):
        with pytest.raises(sqlite3.OperationalError, match="unable to open database file"):
            mounted.connect(path, access, 1)
    assert disk.names("/run") == []


def test_a_closed_store_has_one_file_and_an_open_one_three(
    disk: SimulatedDisk, two: tuple[MountedDisk, MountedDisk]
) -> None:
    assert disk.names("/run") == ["run.sqlite"]
    connection = two[0].connect(STORE, "mode=rw", 1)
    count_rows(connection)
    assert sorted(disk.names("/run")) == ["run.sqlite", "run.sqlite-shm", "run.sqlite-wal"]
    connection.close()
    assert disk.names("/run") == ["run.sqlite"]
    with contextlib.closing(two[1].connect(STORE, "mode=ro&immutable=1", 1)) as reader:
        assert count_rows(reader) == 0
    assert disk.names("/run") == ["run.sqlite"]


def test_an_open_store_keeps_its_rows_after_it_was_removed_or_replaced(
    two: tuple[MountedDisk, MountedDisk],
) -> None:
    old = two[0].connect(STORE, "mode=rw", 1)
    with old:
        old.execute("INSERT INTO rows VALUES (1, 'text')")
    for end in ("", "-wal", "-shm"):
        two[1].remove(STORE + end)
    assert count_rows(old) == 1
    with contextlib.closing(two[0].connect(STORE + ".new", "mode=rwc", 1)) as copy:
        old.backup(copy)
        assert copy.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    two[0].rename(STORE + ".new", STORE)
    new = two[1].connect(STORE, "mode=rw", 1)
    new.execute("PRAGMA journal_mode = WAL")
    with new:
        new.execute("INSERT INTO rows VALUES (2, 'text')")
    assert (count_rows(old), count_rows(new)) == (1, 2)
    identity = two[0].identify(STORE + "-wal")
    old.close()
    assert two[0].identify(STORE + "-wal") == identity is not None
    new.close()


def test_the_index_of_a_log_is_not_trusted_if_no_living_process_uses_it(
    two: tuple[MountedDisk, MountedDisk],
) -> None:
    connection = two[0].connect(STORE, "mode=rw", 1)
    with connection:
        connection.execute("INSERT INTO rows VALUES (1, 'text')")
    two[0].die()
    two[1].remove(STORE + "-wal")
    with contextlib.closing(two[1].connect(STORE, "mode=rw", 1)) as other:
        assert count_rows(other) == 0


def test_an_error_of_the_simulation_itself_is_raised_by_the_next_call(
    two: tuple[MountedDisk, MountedDisk],
) -> None:
    connection = two[0].connect(STORE, "mode=rw", 1)
    count_rows(connection)
    two[0]._process.fail_next(ZeroDivisionError())
    with pytest.raises(sqlite3.OperationalError), connection:
        connection.execute("INSERT INTO rows VALUES (1, 'text')")
    with pytest.raises(ZeroDivisionError):
        two[0].exists(STORE)


def test_a_connection_that_outlives_its_disk_does_nothing(real: Path) -> None:
    disk = make_disk(0, real)
    connection = open_new(disk.mount(ScriptedProcess()))
    connection.execute("INSERT INTO rows VALUES (1, 'text')")
    disk.close()
    with pytest.raises(sqlite3.OperationalError):
        connection.commit()
    connection.close()
