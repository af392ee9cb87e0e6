"""Rows of one commit: only their last word is written, and nothing of it is lost."""

from __future__ import annotations

import sqlite3

import pytest

from cerebro.machine.local import LOCAL
from cerebro.run.store.schema import SCHEMA
from cerebro.run.store.writing import Transaction


@pytest.fixture
def connection():
    with sqlite3.connect(":memory:") as made:
        made.executescript(SCHEMA)
        yield made


def write(connection, *calls):
    rows = Transaction()
    for name, *values in calls:
        getattr(rows, name)(*values)
    rows.publish_states(LOCAL.disk)
    rows.write_rows(connection)
    rows.remove_states(LOCAL.disk)


def rows(connection, what):
    return connection.execute(f"SELECT {what}").fetchall()


def test_a_trial_that_starts_and_ends_in_one_commit_is_one_row(connection):
    write(
        connection,
        ("add_trial", 0, "{}", "waiting", 3, None, None),
        ("set_status", 0, "running", None, None, 0, None),
        ("set_status", 0, "failed", "why", "where", 0, None),
        ("add_trial", 1, "{}", "waiting", 3, 0, 2),
    )
    assert rows(connection, "number, status, error, traceback, resumable, parent FROM trials") == [
        (0, "failed", "why", "where", 0, None),
        (1, "waiting", None, None, 0, 0),
    ]
    write(
        connection,
        ("set_status", 1, "running", None, None, 0, None),
        ("set_status", 1, "stopped", None, None, 1, None),
    )
    assert rows(connection, "status, resumable FROM trials WHERE number = 1") == [("stopped", 1)]


def state(folder, epoch):
    temporary, final = folder / f"{epoch}.new", folder / f"{epoch}.state"
    temporary.write_bytes(b"%d" % epoch)
    return ("add_epoch", 0, epoch, {}, (1.0, "hash", final.name), (str(temporary), str(final)))


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_state_given_up_in_the_same_commit_is_never_published(connection, tmp_path):
    write(
        connection,
        state(tmp_path, 0),
        state(tmp_path, 1),
        ("retire_state", 0, 0, str(tmp_path / "0.state")),
    )
    assert rows(connection, "epoch, state_file FROM epochs") == [(0, None), (1, "1.state")]
    assert files(tmp_path) == ["1.state"]


def test_a_state_given_up_later_is_deleted(connection, tmp_path):
    write(connection, state(tmp_path, 0))
    write(connection, state(tmp_path, 1), ("retire_state", 0, 0, str(tmp_path / "0.state")))
    assert rows(connection, "epoch, state_file FROM epochs") == [(0, None), (1, "1.state")]
    assert files(tmp_path) == ["1.state"]


def test_an_epoch_retrained_in_the_commit_that_retired_it_is_kept(connection, tmp_path):
    write(connection, state(tmp_path, 0))
    write(
        connection,
        ("retire_state", 0, 0, str(tmp_path / "0.state")),
        state(tmp_path, 0),
    )
    assert rows(connection, "epoch, state_file FROM epochs") == [(0, "0.state")]
    assert files(tmp_path) == ["0.state"]


def test_metrics_keep_their_order_and_their_odd_names(connection, tmp_path):
    metrics = {"z": 1.0, "a": float("nan"), "lone \udc80": 2.0}
    write(connection, ("add_epoch", 0, 0, metrics, (1.0, "hash", None), None))
    assert rows(connection, "name, value FROM metrics ORDER BY rowid") == [
        ("z", 1.0),
        ("a", None),
        ("lone \\udc80", 2.0),
    ]


def test_other_statements_come_last_in_their_order(connection):
    write(
        connection,
        ("execute", "UPDATE trials SET epochs = ? WHERE number = ?", (5, 0)),
        ("execute", "UPDATE trials SET epochs = epochs + ? WHERE number = ?", (1, 0)),
        ("add_trial", 0, "{}", "waiting", 3, None, None),
        ("set_meta", "status", "1"),
        ("set_meta", "status", "2"),
    )
    assert rows(connection, "epochs FROM trials") == [(6,)]
    assert rows(connection, "value FROM meta") == [("2",)]


def test_a_failed_transaction_writes_nothing(connection, tmp_path):
    with pytest.raises(sqlite3.IntegrityError):
        write(
            connection,
            state(tmp_path, 0),
            ("add_epoch", 0, 1, {}, (1.0, None, None), None),  # a hash is needed
            ("add_trial", 0, "{}", "waiting", 3, None, None),
        )
    assert rows(connection, "* FROM trials") == []
    assert rows(connection, "* FROM epochs") == []
