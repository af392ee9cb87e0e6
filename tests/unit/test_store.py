"""The run store: encoding, durability order, errors."""

from __future__ import annotations

import math
import sqlite3

import numpy as np
import pytest

from cerebro.errors import CorruptDataError, InputError
from cerebro.store import FILE, Store, decode, encode, read_meta, reader


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
    with pytest.raises(InputError, match="is no run"), reader(tmp_path):
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
