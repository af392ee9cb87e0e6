"""The run store: encoding, durability order, errors."""

from __future__ import annotations

import math
import shutil
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest
from stored_run import read_run

from cerebro.errors import CorruptDataError, InputError
from cerebro.run.records import NOTHING_RAISED, Raised
from cerebro.run.store import (
    FILE,
    SCHEMA_VERSION,
    Store,
    decode,
    encode,
    read_meta,
    reader,
    schema,
    writing,
)


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [1.5, None, True, "x"]},
        {"layers": (64, (32, 16))},
        {"low": -math.inf, "high": math.inf},
        {},
    ],
)
def test_values_come_back_as_they_were(value):
    assert decode(encode(value)) == value


def test_nan_comes_back_as_nan():
    assert math.isnan(decode(encode({"loss": math.nan}))["loss"])


def test_numpy_scalars_become_numbers():
    assert decode(encode({"lr": np.float32(0.5), "n": np.int64(3)})) == {"lr": 0.5, "n": 3}


def test_what_is_no_json_is_refused():
    with pytest.raises(InputError, match="cannot record"):
        encode({"x": object()})


def test_rows_can_be_read_after_a_flush_and_while_writing(tmp_path):
    store = Store.create(tmp_path, {"status": "running"})
    for number in range(1000):
        store.add_trial(number, {"lr": number}, "waiting", 3, None)
    store.flush()
    with reader(tmp_path) as connection:
        assert connection.execute("SELECT count(*) FROM trials").fetchone()[0] == 1000
        assert read_meta(connection) == {"status": "running"}
        store.set_meta("status", "finished")
        store.close()
        # Whoever reads several tables finds them as they were at one moment.
        assert read_meta(connection) == {"status": "running"}
    with reader(tmp_path) as connection:
        assert read_meta(connection) == {"status": "finished"}


def test_a_state_is_published_before_its_row(tmp_path):
    store = Store.create(tmp_path, {})
    temporary, final = tmp_path / "state.new", tmp_path / "state"
    temporary.write_bytes(b"x")
    store.add_epoch(0, 0, {"loss": 1.0}, 0.5, "hash", "state", (temporary, final))
    store.close()
    assert final.read_bytes() == b"x"
    assert not temporary.exists()


def test_a_state_that_cannot_be_published_leaves_no_row(tmp_path):
    store = Store.create(tmp_path, {})
    missing = (tmp_path / "never-written", tmp_path / "state")
    store.add_epoch(0, 0, {"loss": 1.0}, 0.5, "hash", "state", missing)
    with pytest.raises(OSError, match="cannot write"):
        store.flush()
    with pytest.raises(OSError, match="cannot write"):
        store.close()
    with reader(tmp_path) as connection:
        assert connection.execute("SELECT count(*) FROM epochs").fetchone()[0] == 0


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"it has no run\.sqlite"), reader(tmp_path):
        pass
    with pytest.raises(InputError, match="there is no such folder"), reader(tmp_path / "none"):
        pass


def test_a_file_that_is_no_store_is_refused_by_name(tmp_path):
    (tmp_path / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(CorruptDataError, match=FILE), reader(tmp_path):
        pass


def test_a_store_of_a_later_version_is_refused(tmp_path):
    Store.create(tmp_path, {}).close()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("PRAGMA user_version = 99")
    connection.commit()
    connection.close()
    with pytest.raises(CorruptDataError, match="version 99"), reader(tmp_path):
        pass


def test_a_state_retired_before_it_was_published_leaves_nothing(tmp_path):
    store = Store.create(tmp_path, {})
    for epoch in range(50):
        temporary, final = tmp_path / f"{epoch}.new", tmp_path / f"{epoch}.state"
        temporary.write_bytes(b"x")
        store.add_epoch(0, epoch, {}, 0.5, "hash", final.name, (temporary, final))
        if epoch:
            store.retire_state(0, epoch - 1, tmp_path / f"{epoch - 1}.state")
    store.close()
    assert [f.name for f in tmp_path.iterdir() if FILE not in f.name] == ["49.state"]
    with reader(tmp_path) as connection:
        kept = connection.execute("SELECT epoch FROM epochs WHERE state_file NOT NULL").fetchall()
    assert [row["epoch"] for row in kept] == [49]


# --- groups and going on -----------------------------------------------------


def test_a_group_is_committed_together_or_not_at_all(tmp_path):
    store = Store.create(tmp_path, {})
    with store.group():
        store.add_trial(0, {}, "waiting", 1, None)
        with store.group():
            store.set_meta("searcher", {"asked": 1})
        store.add_trial(1, {}, "waiting", 1, 0, 3)
    with pytest.raises(KeyError), store.group():
        store.add_trial(2, {}, "waiting", 1, None)
        raise KeyError
    store.close()
    run = read_run(tmp_path)
    assert [(t.number, t.parent, t.parent_epoch) for t in run.trials] == [
        (0, None, None),
        (1, 0, 3),
    ]
    assert run.meta == {"searcher": {"asked": 1}}


UNIT = {"trial": 0, "epoch": 0, "part": 0, "worker": 0, "attempt": 0, "started": 0.0}
UNIT |= {"seconds": 1.0, "rows": 1, "batches": 1, "hopped": False, "state_bytes": 0}


@pytest.mark.parametrize("urgent", ["other row", "group", "flush", "close"])
def test_rows_of_units_wait_for_what_cannot_wait(tmp_path, monkeypatch, urgent):
    monkeypatch.setattr(writing, "UNIT_SECONDS", 1000.0)
    store = Store.create(tmp_path, {})
    store.add_event(0.0, "first", "text")
    store.flush()
    store._is_urgent.clear()  # may be left of what has been written
    committed = threading.Semaphore(0)
    store.listeners = [committed.release]
    for step in range(3):
        store.add_unit(**UNIT, step=step)
    if urgent == "other row":
        store.add_event(0.0, "second", "text")
    elif urgent == "group":
        with store.group():
            store.add_unit(**UNIT, step=3)
            store.add_event(0.0, "second", "text")
    elif urgent == "flush":
        store.flush()
    else:
        store.close()
    assert committed.acquire(timeout=60)
    assert not committed.acquire(blocking=False)
    with reader(tmp_path) as connection:
        (units,) = connection.execute("SELECT count(*) FROM units").fetchone()
    assert units == (4 if urgent == "group" else 3)
    store.close()


def test_rows_of_units_are_committed_without_others(tmp_path):
    store = Store.create(tmp_path, {})
    committed = threading.Semaphore(0)
    store.listeners = [committed.release]
    store.add_unit(**UNIT, step=0)
    assert committed.acquire(timeout=60)
    store.close()


def test_a_group_whose_last_row_is_refused_leaves_nothing(tmp_path):
    store = Store.create(tmp_path, {})
    with pytest.raises(OSError, match="cannot write"):
        with store.group():
            store.add_trial(0, {}, "waiting", 1, None)
            store.add_epoch(0, 0, {}, 1.0, None, None, None)  # a hash is needed
        store.flush()
    with pytest.raises(OSError, match="cannot write"):
        store.close()
    assert read_run(tmp_path).trials == []


def test_a_store_is_opened_again_and_goes_on(tmp_path):
    store = Store.create(tmp_path, {"status": "running"})
    store.add_trial(0, {"lr": 0.5}, "running", 2, None)
    store.add_epoch(0, 0, {"loss": math.nan, "accuracy": 0.5}, 1.0, "aa", None, None)
    store.set_status(0, "stopped", resumable=True)
    store.close()
    store = Store.open(tmp_path)
    store.set_epochs(0, 4)
    # After a loss of power an epoch may be trained again.
    store.add_epoch(0, 0, {"loss": 1.0, "accuracy": 0.5}, 2.0, "aa", None, None)
    store.add_epoch(0, 1, {"loss": 2.0}, 1.0, "bb", None, None)
    store.add_trial(1, {}, "waiting", 2, None)
    store.close()
    first, second = read_run(tmp_path).trials
    assert (first.status, first.resumable, first.target_epochs) == ("stopped", True, 4)
    assert [(e.epoch, e.metrics, e.seconds) for e in first.epochs] == [
        (0, {"loss": 1.0, "accuracy": 0.5}, 2.0),
        (1, {"loss": 2.0}, 1.0),
    ]
    assert (second.status, second.resumable) == ("waiting", False)


def test_only_a_run_can_be_opened(tmp_path):
    with pytest.raises(InputError, match="is not a run"):
        Store.open(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(CorruptDataError, match=FILE):
        Store.open(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM epochs",
        "DELETE FROM trials",
        "UPDATE trials SET config = '{'",
        "ALTER TABLE trials RENAME COLUMN resumable TO other",
    ],
)
def test_a_store_with_rows_that_do_not_fit_is_damaged(tmp_path, damage):
    store = Store.create(tmp_path, {})
    store.add_trial(0, {"lr": 0.5}, "running", 2, None)
    store.add_epoch(0, 0, {"loss": 1.0}, 1.0, "aa", None, None)
    store.close()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute(damage)
    connection.commit()
    connection.close()
    with pytest.raises(CorruptDataError, match=FILE):
        read_run(tmp_path)


# --- versions ----------------------------------------------------------------

VERSION_2 = Path(__file__).parents[2] / "golden" / "store-v2.sqlite"
"""Of a Cerebro whose trials visited shards, not parts of a shuffled epoch."""


def version(folder):
    with sqlite3.connect(folder / FILE) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


def columns(file):
    connection = sqlite3.connect(file)
    tables = [n for (n,) in connection.execute("SELECT name FROM sqlite_master ORDER BY name")]
    return {name: list(connection.execute(f"PRAGMA table_info({name})")) for name in tables}


def add_table(connection):
    connection.execute("CREATE TABLE added (number INTEGER)")


NEXT = SCHEMA_VERSION + 1


@pytest.fixture
def older_run(tmp_path, monkeypatch):
    """A run of a Cerebro one version older than this one."""
    store = Store.create(tmp_path, {"status": "stopped"})
    store.add_trial(0, {"lr": 0.5}, "finished", 2, None)
    store.add_epoch(0, 0, {"loss": 1.0}, 1.0, "aa", None, None)
    store.add_unit(**UNIT, step=0)
    store.add_trial(1, {"lr": 0.1}, "waiting", 2, None)
    store.close()
    monkeypatch.setattr(schema, "SCHEMA_VERSION", NEXT)
    monkeypatch.setitem(schema.MIGRATIONS, NEXT, add_table)
    return tmp_path


def test_every_version_is_reached_from_the_one_before():
    assert sorted(schema.MIGRATIONS) == list(range(schema.OLDEST_READABLE + 1, NEXT))


def test_readers_take_an_older_version_as_it_is(older_run):
    before = (older_run / FILE).read_bytes()
    run = read_run(older_run)
    assert [(t.config, t.status, len(t.epochs)) for t in run.trials] == [
        ({"lr": 0.5}, "finished", 1),
        ({"lr": 0.1}, "waiting", 0),
    ]
    assert (run.meta, run.units) == ({"status": "stopped"}, 1)
    assert (older_run / FILE).read_bytes() == before


def test_an_older_version_is_brought_forward_by_the_first_writer(older_run):
    before = read_run(older_run)
    tables = columns(older_run / FILE)
    store = Store.open(older_run)
    store.add_trial(2, {}, "waiting", 2, 0, 1)
    store.close()
    assert version(older_run) == NEXT
    after = read_run(older_run)
    assert (after.meta, after.units) == (before.meta, before.units)
    assert after.trials[:2] == before.trials
    found = columns(older_run / FILE)
    assert found.pop("added") and found == tables


def test_a_migration_that_fails_leaves_the_old_version(older_run, monkeypatch):
    def broken(connection):
        add_table(connection)
        connection.execute("INSERT INTO nowhere VALUES (1)")

    monkeypatch.setitem(schema.MIGRATIONS, NEXT, broken)
    before = columns(older_run / FILE)
    with pytest.raises(OSError, match="nowhere"):
        Store.open(older_run)
    assert version(older_run) == SCHEMA_VERSION
    assert columns(older_run / FILE) == before
    assert len(read_run(older_run).trials) == 2


def test_what_a_trial_raised_comes_back(tmp_path):
    raised = Raised(("a.Mine", "builtins.ValueError"), "train.py:3 in build")
    store = Store.create(tmp_path, {})
    for number in range(3):
        store.add_trial(number, {}, "waiting", 2, None)
    store.set_status(0, "failed", "Mine: bad", raised=raised)
    store.flush()
    store.set_status(1, "failed", "Mine: bad", raised=raised)
    store.close()
    assert [t.raised for t in read_run(tmp_path).trials] == [raised, raised, NOTHING_RAISED]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_versions_with_another_order_of_rows_are_refused(tmp_path, number):
    shutil.copy(VERSION_2, tmp_path / FILE)
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(f"PRAGMA user_version = {number}")
    connection.close()
    for take in (read_run, Store.open):
        with pytest.raises(CorruptDataError, match=rf"version {number}, of a .* repeat the search"):
            take(tmp_path)


def test_a_store_of_a_later_version_is_never_written(tmp_path):
    Store.create(tmp_path, {}).close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(CorruptDataError, match=r"of a newer Cerebro.*update it"):
        Store.open(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
