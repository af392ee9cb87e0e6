"""Readers of a live run and its writer leave each other alone."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
import threading

import pytest
from stored_run import read_run

from cerebro.run.records import EpochRecord, TrialRecord
from cerebro.run.store import FILE, Store, reader, writing


def add_trials(store, numbers):
    for number in numbers:
        store.add_trial(TrialRecord(number, {"filler": "x" * 500}, "waiting", 1))
    store.flush()


def count(connection):
    return connection.execute("SELECT count(*) FROM trials").fetchone()[0]


def log_bytes(folder):
    log = folder / (FILE + "-wal")
    return log.stat().st_size if log.exists() else 0


def journal(folder):
    with contextlib.closing(sqlite3.connect(folder / FILE)) as connection:
        return connection.execute("PRAGMA journal_mode").fetchone()[0]


@pytest.fixture
def short_log(monkeypatch):
    """A log is long from 64 KiB on, and nobody is waited for."""
    monkeypatch.setattr(writing, "LONG_BYTES", 64 << 10)
    monkeypatch.setattr(writing, "KEPT_BYTES", 16 << 10)
    monkeypatch.setattr(writing, "PATIENCE_SECONDS", 0.0)


def test_a_long_reader_blocks_nobody_and_the_log_is_truncated_later(tmp_path, short_log):
    store = Store.create(tmp_path, {})
    add_trials(store, range(10))
    with reader(tmp_path) as held:
        assert count(held) == 10
        for begin in range(10, 2000, 100):
            add_trials(store, range(begin, begin + 100))
        assert count(held) == 10
        with reader(tmp_path) as other:
            assert count(other) == 2010
        grown = log_bytes(tmp_path)
        assert grown > writing.LONG_BYTES
    # Asked for at the latest when the log has doubled: its limit was set while it was held.
    number = 3000
    while log_bytes(tmp_path) >= grown:
        add_trials(store, range(number, number + 100))
        number += 100
        assert log_bytes(tmp_path) <= 2 * grown + (1 << 20)
    add_trials(store, range(number, number + 100))
    assert log_bytes(tmp_path) <= 2 * writing.LONG_BYTES + (1 << 20)
    store.close()
    assert len(read_run(tmp_path).trials) == number + 100 - 3000 + 2010


def test_readers_without_a_gap_do_not_keep_the_log_growing(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "LONG_BYTES", 64 << 10)
    monkeypatch.setattr(writing, "PATIENCE_SECONDS", 60.0)
    store = Store.create(tmp_path, {})
    add_trials(store, range(10))
    over = threading.Event()

    def read_all_the_time():
        with contextlib.ExitStack() as before:
            while not over.is_set():
                with contextlib.ExitStack() as after:
                    count(after.enter_context(reader(tmp_path)))
                    before.close()  # never before the next one has begun
                    before = after.pop_all()

    readers = [threading.Thread(target=read_all_the_time) for _ in range(2)]
    for thread in readers:
        thread.start()
    longest = 0
    for begin in range(10, 5000, 100):
        add_trials(store, range(begin, begin + 100))
        longest = max(longest, log_bytes(tmp_path))
    over.set()
    for thread in readers:
        thread.join()
    store.close()
    assert len(read_run(tmp_path).trials) == 5010
    # In all some 3 MB were written.
    assert longest < 1 << 20


def test_a_finished_store_is_one_file(tmp_path):
    store = Store.create(tmp_path, {"status": "finished"})
    add_trials(store, range(10))
    assert log_bytes(tmp_path) > 0
    store.close()
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    assert len(read_run(tmp_path).trials) == 10
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_a_reader_does_not_change_files_of_a_dead_run(tmp_path):
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from cerebro.run.records import TrialRecord\n"
        "from cerebro.run.store import Store\n"
        "store = Store.create(Path(sys.argv[1]), {})\n"
        "store.add_trial(TrialRecord(0, {}, 'running', 1))\n"
        "store.flush()\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    log = tmp_path / (FILE + "-wal")
    before = (tmp_path / FILE).read_bytes(), log.read_bytes()
    assert [trial.status for trial in read_run(tmp_path).trials] == ["running"]
    assert ((tmp_path / FILE).read_bytes(), log.read_bytes()) == before
    Store.open(tmp_path).close()
    assert not log.exists()
    assert [trial.status for trial in read_run(tmp_path).trials] == ["running"]


def test_on_a_network_file_system_a_rollback_journal_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "journal_mode", lambda folder, disk: "DELETE")
    store = Store.create(tmp_path, {})
    over = threading.Event()
    seen = []

    def read_all_the_time():
        while not over.is_set():
            with reader(tmp_path) as connection:
                seen.append(count(connection))

    thread = threading.Thread(target=read_all_the_time)
    thread.start()
    for begin in range(0, 1000, 100):
        add_trials(store, range(begin, begin + 100))
        assert not (tmp_path / (FILE + "-wal")).exists()
    over.set()
    thread.join()
    store.close()
    assert seen == sorted(seen)
    assert len(read_run(tmp_path).trials) == 1000


def test_the_file_system_chooses_the_journal(tmp_path, monkeypatch):
    monkeypatch.setattr("cerebro.machine.files.file_system", lambda path: "nfs4")
    store = Store.create(tmp_path, {})
    store.flush()
    assert journal(tmp_path) == "delete"
    store.close()
    monkeypatch.setattr("cerebro.machine.files.file_system", lambda path: "ext4")
    store = Store.open(tmp_path)
    store.flush()
    assert journal(tmp_path) == "wal"
    store.close()


def test_writers_wait_while_too_many_rows_are_pending(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = writing.Transaction.write_rows
    rows = []

    def slow(self, connection):
        assert may_write.wait(60)
        rows.append(len(self._trials))
        write(self, connection)

    monkeypatch.setattr(writing.Transaction, "write_rows", slow)
    monkeypatch.setattr(writing, "MAX_ROWS", 50)
    store = Store.create(tmp_path, {})
    handed = []

    def hand_over():
        for number in range(1000):
            store.add_trial(TrialRecord(number, {}, "waiting", 1))
            handed.append(number)

    thread = threading.Thread(target=hand_over)
    thread.start()
    while len(handed) < 50:
        assert thread.is_alive()
    may_write.set()
    thread.join()
    store.close()
    assert max(rows) <= 51
    assert len(read_run(tmp_path).trials) == 1000


def test_the_number_of_pending_states_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MAX_STATE_BYTES", 1000)
    store = Store.create(tmp_path, {})
    waiting = []
    publish = writing.durable.publish

    def watched(pairs, disk):
        waiting.append(len(list(tmp_path.glob("*.new"))))
        publish(pairs, disk)

    monkeypatch.setattr(writing.durable, "publish", watched)
    for epoch in range(100):
        (tmp_path / f"{epoch}.new").write_bytes(bytes(600))
        paths = (tmp_path / f"{epoch}.new", tmp_path / f"{epoch}.state")
        store.add_epoch(0, EpochRecord(epoch, {}, 1.0, "hash", f"{epoch}.state"), paths)
    store.close()
    assert max(waiting) <= writing.MIN_STATES + 2
    assert len(list(tmp_path.glob("*.state"))) == 100


def test_a_reader_handles_a_journal_left_by_a_power_loss(tmp_path):
    """SQLite has to look into it, which a connection that only reads may not."""
    live, left = tmp_path / "live", tmp_path / "left"
    live.mkdir()
    left.mkdir()
    store = Store.create(live, {})
    add_trials(store, range(3))
    for end in ("", "-wal"):
        shutil.copy(live / (FILE + end), left / (FILE + end))
    store.close()
    shutil.copy(left / FILE, left / (FILE + "-journal"))
    with reader(left) as connection:
        assert count(connection) == 3
    assert not (left / (FILE + "-journal")).exists()
