"""The run store: encoding, durability order, errors."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import threading

import numpy as np
import pytest
from stored_run import read_run

from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.imports import update_hint
from cerebro.run.records import NOTHING_RAISED, EpochRecord, Raised, TrialRecord
from cerebro.run.store import (
    FILE,
    OtherVersionError,
    Store,
    decode,
    encode,
    read_meta,
    reader,
    writing,
)
from cerebro.run.store.schema import SCHEMA_VERSION


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


def test_values_that_are_not_json_are_refused():
    with pytest.raises(InputError, match="cannot record"):
        encode({"x": object()})


def test_rows_can_be_read_after_a_flush_and_while_writing(tmp_path):
    store = Store.create(tmp_path, {"status": "running"})
    for number in range(1000):
        store.add_trial(TrialRecord(number, {"lr": number}, "waiting", 3))
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
    store.add_epoch(0, EpochRecord(0, {"loss": 1.0}, 0.5, "hash", "state"), (temporary, final))
    store.close()
    assert final.read_bytes() == b"x"
    assert not temporary.exists()


def test_a_state_that_cannot_be_published_leaves_no_row(tmp_path):
    store = Store.create(tmp_path, {})
    missing = (tmp_path / "never-written", tmp_path / "state")
    store.add_epoch(0, EpochRecord(0, {"loss": 1.0}, 0.5, "hash", "state"), missing)
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


def test_the_error_names_a_file_that_is_not_a_store(tmp_path):
    (tmp_path / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(CorruptDataError, match=FILE), reader(tmp_path):
        pass


def test_a_state_retired_before_it_was_published_leaves_nothing(tmp_path):
    store = Store.create(tmp_path, {})
    for epoch in range(50):
        temporary, final = tmp_path / f"{epoch}.new", tmp_path / f"{epoch}.state"
        temporary.write_bytes(b"x")
        store.add_epoch(0, EpochRecord(epoch, {}, 0.5, "hash", final.name), (temporary, final))
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
        store.add_trial(TrialRecord(0, {}, "waiting", 1))
        with store.group():
            store.set_meta("searcher", {"asked": 1})
        store.add_trial(TrialRecord(1, {}, "waiting", 1, 0, 3))
    with pytest.raises(KeyError), store.group():
        store.add_trial(TrialRecord(2, {}, "waiting", 1))
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
def test_unit_rows_are_committed_with_the_next_urgent_row(tmp_path, monkeypatch, urgent):
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


def test_unit_rows_are_committed_without_urgent_rows(tmp_path):
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
            store.add_trial(TrialRecord(0, {}, "waiting", 1))
            store.add_epoch(0, EpochRecord(0, {}, 1.0, None, None), None)  # a hash is needed
        store.flush()
    with pytest.raises(OSError, match="cannot write"):
        store.close()
    assert read_run(tmp_path).trials == []


def test_a_reopened_store_accepts_further_rows(tmp_path):
    store = Store.create(tmp_path, {"status": "running"})
    store.add_trial(TrialRecord(0, {"lr": 0.5}, "running", 2))
    store.add_epoch(0, EpochRecord(0, {"loss": math.nan, "accuracy": 0.5}, 1.0, "aa", None), None)
    store.set_status(TrialRecord(0, {}, "stopped", resumable=True))
    store.close()
    store = Store.open(tmp_path)
    store.set_epochs(0, 4)
    # After a loss of power an epoch may be trained again.
    store.add_epoch(0, EpochRecord(0, {"loss": 1.0, "accuracy": 0.5}, 2.0, "aa", None), None)
    store.add_epoch(0, EpochRecord(1, {"loss": 2.0}, 1.0, "bb", None), None)
    store.add_trial(TrialRecord(1, {}, "waiting", 2))
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
def test_a_store_with_inconsistent_rows_is_damaged(tmp_path, damage):
    store = Store.create(tmp_path, {})
    store.add_trial(TrialRecord(0, {"lr": 0.5}, "running", 2))
    store.add_epoch(0, EpochRecord(0, {"loss": 1.0}, 1.0, "aa", None), None)
    store.close()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute(damage)
    connection.commit()
    connection.close()
    with pytest.raises(CorruptDataError, match=FILE):
        read_run(tmp_path)


# --- versions ----------------------------------------------------------------


def test_the_exception_of_a_trial_is_stored(tmp_path):
    raised = Raised(("a.Mine", "builtins.ValueError"), "train.py:3 in build")
    store = Store.create(tmp_path, {})
    for number in range(3):
        store.add_trial(TrialRecord(number, {}, "waiting", 2))
    store.set_status(TrialRecord(0, {}, "failed", error="Mine: bad", raised=raised))
    store.flush()
    store.set_status(TrialRecord(1, {}, "failed", error="Mine: bad", raised=raised))
    store.close()
    found = read_run(tmp_path).trials
    assert [trial.raised for trial in found] == [raised, raised, NOTHING_RAISED]


@pytest.mark.parametrize("take", [read_run, Store.open], ids=["read", "open"])
@pytest.mark.parametrize("version", [*range(1, SCHEMA_VERSION), SCHEMA_VERSION + 1])
def test_any_other_version_is_refused_and_stays_as_it_is(tmp_path, take, version):
    Store.create(tmp_path, {}).close()
    file = tmp_path / FILE
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = file.read_bytes()
    of, fix = "an earlier", "repeat the search in a new folder"
    if version > SCHEMA_VERSION:
        of, fix = "a newer", f"update Cerebro ({update_hint()})"
    with pytest.raises(OtherVersionError) as caught:
        take(tmp_path)
    assert str(caught.value) == (
        f"{file} has store version {version}, of {of} Cerebro, and this one reads only version "
        f"{SCHEMA_VERSION}: {fix}"
    )
    assert file.read_bytes() == before
