"""Runs that lie: a store that is cut, flipped or made up, and links planted in a run's folder.

`open` either reads a run or raises `CorruptDataError`, naming the file; nothing outside of the
folder is read in place of the run's own, written to or removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
import cerebro._core as _core
import cerebro.cli as cli
from cerebro.coordinator.user import Inbox
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.files import StorageError
from cerebro.machine.local import LOCAL
from cerebro.run.owner import Owner, owner_of
from cerebro.run.store import Store
from cerebro.worker.log import append_text, redirect_descriptors, redirect_streams
from cerebro.worker.trial_state import EpochProgress


class Model:
    framework = "numpy"

    def __init__(self, config):
        self.w = np.zeros(2)

    def train_batch(self, batch):
        print("training")
        self.w = self.w + 1
        return {"loss": float(self.w.sum())}

    def eval_batch(self, batch):
        return {"loss": float(self.w.sum())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("hostile")
    x = np.arange(40.0).reshape(20, 2)
    data = cerebro.shard({"x": x, "y": x[:, 0]}, base / "data", shards=2)
    settings: dict[str, Any] = {"epochs": 2, "n_trials": 3, "batch_size": 5, "validation": 0.5}
    cerebro.search(
        Model, {"a": [1, 2.5], "b": [(1, 2)]}, data, workers=0, run=base / "run", progress=False,
        **settings,
    )  # fmt: skip
    return base / "run"


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def read_all(run: Path) -> None:
    """All that reads a run without training or code of the user's."""
    result = cerebro.open(run)
    repr(result), result.summary(), result.status, result.error, result.settings
    for trial in result.trials:
        repr(trial), trial.config, trial.metrics, trial.history, trial.best_epoch, trial.log
    result.top(3)
    result.saved.units()
    result._repr_html_()


def change(run: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


# --- the store, damaged -----------------------------------------------------------


def outcome(run: Path) -> str:
    """``"read"`` or ``"refused"``; anything else is an error of the test."""
    try:
        read_all(run)
    except CorruptDataError as error:
        assert "run.sqlite" in str(error), error
        assert str(error).isprintable()
        return "refused"
    return "read"


def test_a_store_cut_anywhere_is_refused(run: Path) -> None:
    file = run / "run.sqlite"
    content = file.read_bytes()
    read_all(run)
    sizes = {*range(130), *range(0, len(content), 509), *range(4096, len(content), 4096)}
    for size in sorted(sizes):
        file.write_bytes(content[:size])
        assert outcome(run) == "refused", size
    file.write_bytes(content)
    read_all(run)


def test_a_flipped_store_is_refused_or_read(run: Path) -> None:
    """SQLite has no checksums: a number may be another one. But nothing else ever happens."""
    file = run / "run.sqlite"
    content = file.read_bytes()
    outcomes = {"read": 0, "refused": 0}
    for place in [*range(108), *range(108, len(content), 211)]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        file.write_bytes(flipped)
        outcomes[outcome(run)] += 1
        for name in ("run.sqlite-wal", "run.sqlite-shm", "run.sqlite-journal"):
            (run / name).unlink(missing_ok=True)
    assert outcomes["refused"] > 20
    assert outcomes["read"] > 20


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\x80\x04N.", b"SQLite format 3\0" + bytes(84), bytes(8192)]
)
def test_files_that_are_no_store(run: Path, content: bytes) -> None:
    (run / "run.sqlite").write_bytes(content)
    assert outcome(run) == "refused"
    assert cli.main(["show", str(run)]) == 1
    with pytest.raises(CorruptDataError, match=r"run\.sqlite"):
        Store.open(run)


def test_a_kept_state_that_is_cut_or_altered_is_refused(run: Path) -> None:
    result = cerebro.open(run)
    trial = result.best
    file = trial.state_path()
    content = file.read_bytes()
    damaged = [content[:size] for size in range(0, len(content), 29)]
    damaged += [content + b"\0", b"", bytes(len(content)), b"\x80\x04N."]
    for place in range(0, len(content), 31):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        damaged.append(bytes(flipped))
    record = next(e for e in trial.record.epochs if e.state_file == file.name)
    for bad in damaged:
        file.write_bytes(bad)
        with pytest.raises(CorruptDataError, match=f"{file.name} is not the state of trial"):
            result.saved.read_state(trial.number, record)
    with pytest.raises(CorruptDataError, match=file.name):
        trial.load(build=Model)
    file.write_bytes(content)
    assert trial.load(build=Model).w.sum() > 0


# --- the store, made up -----------------------------------------------------------

DEEP = "[" * 5000 + "]" * 5000
ROWS = [
    "UPDATE trials SET config = '[1]'",
    "UPDATE trials SET config = 'nonsense'",
    "UPDATE trials SET config = x'ff'",
    f"UPDATE trials SET config = '{DEEP}'",
    'UPDATE trials SET config = \'{"a": ' + "9" * 6000 + "}'",
    'UPDATE trials SET config = \'{"a": {"$float": "never"}}\'',
    'UPDATE trials SET config = \'{"a": {"$tuple": 3}}\'',
    "UPDATE trials SET status = 'owned'",
    "UPDATE trials SET epochs = 'many'",
    "UPDATE trials SET epochs = -1",
    "UPDATE trials SET parent = '../..'",
    "UPDATE trials SET error = x'00'",
    "UPDATE trials SET error = CAST(x'ff' AS TEXT)",
    "UPDATE epochs SET trial = trial + 99",
    "UPDATE epochs SET epoch = 'first' WHERE epoch = 0",
    "UPDATE epochs SET seconds = 'long'",
    "UPDATE epochs SET state_hash = x'aa'",
    "UPDATE epochs SET state_file = x'aa'",
    "UPDATE epochs SET state_file = '../../victim'",
    "UPDATE epochs SET state_file = '/etc/passwd'",
    "UPDATE epochs SET state_file = '..'",
    "UPDATE epochs SET state_file = ''",
    "UPDATE epochs SET state_file = 'a' || char(0)",
    "UPDATE epochs SET state_file = '" + "x" * 300 + "'",
    "UPDATE metrics SET value = 'good'",
    "UPDATE metrics SET value = x'00'",
    "UPDATE metrics SET name = CAST(name AS BLOB)",
    "UPDATE units SET step = 'one'",
    "UPDATE units SET started = 'noon'",
    "UPDATE units SET worker = -2",
    "UPDATE meta SET value = '3' WHERE key = 'settings'",
    "UPDATE meta SET value = '{}' WHERE key = 'settings'",
    f"UPDATE meta SET value = '{DEEP}' WHERE key = 'environment'",
    "UPDATE meta SET value = 'null' WHERE key = 'data'",
    "UPDATE meta SET value = '{}' WHERE key = 'data'",
    "UPDATE meta SET value = '[]' WHERE key = 'validation'",
    "UPDATE meta SET value = '\"two\"' WHERE key = 'parts'",
    "UPDATE meta SET value = 'true' WHERE key = 'parts'",
    "UPDATE meta SET value = '7' WHERE key = 'status'",
    "UPDATE meta SET value = '{}' WHERE key = 'build'",
    "UPDATE meta SET value = x'00' WHERE key = 'status'",
    "DELETE FROM meta WHERE key = 'status'",
    "DELETE FROM trials WHERE number = 1",
    "DROP TABLE epochs",
    "DROP TABLE units",
    "ALTER TABLE trials RENAME COLUMN config TO other",
    "UPDATE trials SET raised = 7",
    "UPDATE trials SET raised = '{}'",
    "UPDATE trials SET raised = '[]'",
    """UPDATE trials SET raised = '{"bases":"Mine","place":""}'""",
    """UPDATE trials SET raised = '{"bases":["Mine"],"place":3}'""",
    "PRAGMA user_version = 0",
    "PRAGMA user_version = -1",
    "PRAGMA user_version = 1000000",
]


@pytest.mark.parametrize("statement", ROWS, ids=[s[:50] for s in ROWS])
def test_invalid_rows_are_refused(run: Path, statement: str) -> None:
    change(run, statement)
    with pytest.raises(CorruptDataError, match=r"run\.sqlite") as caught:
        read_all(run)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1500


ENDLESS = (
    "WITH RECURSIVE n(number) AS (SELECT 0 UNION ALL SELECT number + 1 FROM n) "
    "SELECT number, '{}' AS config, 'finished' AS status, 1 AS epochs, NULL AS parent, "
    "NULL AS error, NULL AS traceback, 0 AS resumable, NULL AS parent_epoch FROM n"
)
PROGRAMS = [
    ("a view", ["ALTER TABLE trials RENAME TO t", f"CREATE VIEW trials AS {ENDLESS}"]),
    ("a trigger", ["CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM trials; END"]),
    ("a virtual table", ["CREATE VIRTUAL TABLE v USING fts5(x)"]),
    (
        "a generated column",
        ["ALTER TABLE units ADD COLUMN g TEXT AS (replace(hex(zeroblob(1000000)), '0', 'aa'))"],
    ),
]


@pytest.mark.parametrize(("name", "statements"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_programs_in_a_store_are_not_run(run: Path, name: str, statements: list[str]) -> None:
    try:
        change(run, *statements)
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite makes none: {error}")
    with pytest.raises(CorruptDataError, match=r"run\.sqlite is damaged: it"):
        read_all(run)


ESCAPES = "\x1b]0;owned\x07\x1b[31m\x9b2J"


def test_terminal_escapes_in_a_run_are_not_printed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"a" + ESCAPES: ESCAPES, "b": 1})
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as connection:
        connection.execute(
            "UPDATE trials SET config = ?, error = ?, traceback = ?, status = 'failed'",
            (config, ESCAPES, ESCAPES),
        )
        connection.execute(
            "UPDATE metrics SET name = name || ? WHERE name = 'val_loss'", (ESCAPES,)
        )
        connection.commit()
    for command in (["show", str(run)], ["show", str(run), "--trial", "0"]):
        assert cli.main(command) == 0
        shown = capsys.readouterr().out
        assert "owned" in shown
        assert all(c.isprintable() or c == "\n" for c in shown)
    change(run, "UPDATE meta SET value = '\"x\\u001b[31m\"' WHERE key = 'status'")
    assert cli.main(["show", str(run)]) == 1
    assert capsys.readouterr().err.strip().isprintable()


def test_html_in_a_run_is_escaped(run: Path) -> None:
    config = json.dumps({"<script>alert(1)</script>": "<img src=x onerror=alert(2)>"})
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as connection:
        connection.execute("UPDATE trials SET config = ?, error = '<script>'", (config,))
        connection.commit()
    page = cerebro.open(run)._repr_html_()
    assert "&lt;script&gt;" in page
    assert "<script" not in page and "<img" not in page


def test_reading_does_not_write(run: Path) -> None:
    from cerebro.run.store import reader

    with reader(run) as connection, pytest.raises(sqlite3.OperationalError):
        connection.execute("DELETE FROM trials")
    assert len(cerebro.open(run).trials) == 3


# --- links ------------------------------------------------------------------------


def plant(path: Path, outside: Path) -> None:
    """Put a link into the place of `path`, and what was there, if anything, to where it points."""
    if path.exists():
        path.rename(outside)
    path.symlink_to(outside)


@pytest.mark.parametrize(
    "name",
    [
        *("states", "trials", "control", "run.sqlite", "run.sqlite-wal", "run.sqlite-shm"),
        *("run.sqlite-journal", "owner.lock"),
    ],
)
def test_links_in_a_run_are_refused(run: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    plant(run / name, victim)
    existed = victim.exists()
    for read in (lambda: read_all(run), lambda: Store.open(run)):
        with pytest.raises(CorruptDataError, match="symbolic link") as caught:
            read()
        assert str(run / name) in str(caught.value)
    assert victim.exists() == existed


def test_a_run_may_be_reached_by_links(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    result = cerebro.open(tmp_path / "link")
    assert result.best.load(build=Model).w.sum() > 0
    result.saved.read_state(0, result.trials[0].record.epochs[-1])


def test_states_and_logs_are_not_read_through_links(run: Path, tmp_path: Path) -> None:
    result = cerebro.open(run)
    file = result.best.state_path()
    plant(file, tmp_path / "state")
    with pytest.raises(CorruptDataError, match=f"{file.name} is a symbolic link"):
        result.best.load(build=Model)
    log = run / "trials" / "0.log"
    assert result.trials[0].log.startswith("training")
    plant(log, tmp_path / "secret")
    with pytest.raises(CorruptDataError, match=r"0\.log is a symbolic link"):
        _ = result.trials[0].log


def test_a_named_pipe_in_place_of_a_state_is_refused(run: Path) -> None:
    result = cerebro.open(run)
    file = result.best.state_path()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CorruptDataError, match=f"{file.name} is not a regular file"):
        result.best.load(build=Model)


def test_logs_are_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    link = tmp_path / "0.log"
    link.symlink_to(tmp_path / "victim")
    for redirected in (redirect_descriptors, redirect_streams):
        with pytest.raises(StorageError, match=r"0\.log is a symbolic link"), redirected(link):
            print("training")
    append_text(link, "more")  # of a trial that died: nobody waits for it
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_linked_inbox_is_not_emptied(tmp_path: Path) -> None:
    """What lies in a run's control folder is removed when it begins: only there."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    (tmp_path / "control").symlink_to(tmp_path / "mine")
    with pytest.raises(CorruptDataError, match="control is a symbolic link"):
        Inbox(tmp_path / "control", LOCAL)
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize("name", ["states", "trials", "owner.lock", "run.sqlite-wal"])
def test_a_linked_run_is_not_trained_further(run: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    plant(run / name, victim)
    before = sorted(path.name for path in victim.iterdir()) if victim.is_dir() else None
    with pytest.raises(CorruptDataError, match=f"{name} is a symbolic link"):
        cerebro.resume(run, Model, epochs=3, workers=0, progress=False)
    if before is None:
        assert not victim.exists() or victim.read_bytes() in (b"", b"mine")
    else:
        assert sorted(path.name for path in victim.iterdir()) == before


@pytest.mark.parametrize("name", ["states/0.slots", "states/1.a", "states/2.b", "trials/1.log"])
def test_training_further_writes_nothing_through_links(
    run: Path, tmp_path: Path, name: str
) -> None:
    """A link in the place of a file is refused, or removed where the file would have been."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine" * 2000)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    with contextlib.suppress(CorruptDataError, OSError, cerebro.RunError):
        cerebro.resume(run, Model, epochs=3, workers=0, progress=False)
    assert victim.read_bytes() == b"mine" * 2000


PROGRESS: list[Any] = [
    None,
    {},
    {"epoch": "0", "step": 0, "training": {}, "validation": None},
    {"epoch": -1, "step": 0, "training": {}, "validation": None},
    {"epoch": 0, "step": True, "training": {}, "validation": None},
    {"epoch": 0, "step": 0, "training": [], "validation": None},
    {"epoch": 0, "step": 0, "training": {"loss": 3}, "validation": None},
    {"epoch": 0, "step": 0, "training": {"loss": ["a", "b"]}, "validation": None},
    {"epoch": 0, "step": 0, "training": {}, "validation": {"loss": "low"}},
    {"epoch": 0, "step": 0, "training": {}, "validation": 3},
]


@pytest.mark.parametrize("progress", PROGRESS, ids=range(len(PROGRESS)))
def test_a_state_with_invalid_progress_is_refused(progress: Any) -> None:
    with pytest.raises(CorruptDataError, match="not the state of a trial"):
        EpochProgress.from_packed(_core.pack_state({"progress": progress}))


def test_progress_of_a_truncated_state_is_refused() -> None:
    good = {"epoch": 1, "step": 2, "training": {"loss": [1.5, 2.0]}, "validation": {"loss": 0.5}}
    packed = bytes(_core.pack_state({"model": {"w": np.ones(3)}, "progress": good}))
    assert EpochProgress.from_packed(packed).to_state() == good
    for size in range(len(packed)):
        with pytest.raises(CorruptDataError):
            EpochProgress.from_packed(packed[:size])
    for header in (b"[" * 5000, b'{"a": 1e999}', b"\xff", b'{"__metadata__": 3}', b"{}", b"null"):
        with pytest.raises(CorruptDataError):
            EpochProgress.from_packed(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptDataError):
        EpochProgress.from_packed(b"\xff" * 8 + packed[8:])


def test_plots_are_not_drawn_through_links(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "victim").write_text("mine")
    (run / "curves.png").symlink_to(tmp_path / "victim")
    assert cli.main(["plot", str(run)]) == 1
    assert "curves.png is a symbolic link" in capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "mine"
    out = tmp_path / "out.png"
    out.symlink_to(tmp_path / "victim.png")  # the user's own choice
    assert cli.main(["plot", str(run), "--out", str(out)]) == 0
    assert (tmp_path / "victim.png").stat().st_size > 1000


# --- whose run it is ----------------------------------------------------------------


def test_an_owner_file_through_a_link_is_not_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (run / "owner.lock").unlink(missing_ok=True)
    (run / "owner.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(CorruptDataError, match=r"owner\.lock is a symbolic link"):
        Owner.take(run)
    assert owner_of(run) is None
    assert (tmp_path / "victim").read_text() == "mine"


CLAIMS: list[Callable[[], str]] = [
    lambda: "[" * 4000,
    lambda: json.dumps({"pid": 0, "host": os.uname().nodename}),
    lambda: json.dumps({"pid": -1, "host": os.uname().nodename}),
    lambda: json.dumps({"pid": 2**70, "host": os.uname().nodename}),
    lambda: json.dumps({"pid": "1e999", "host": 3}),
    lambda: '{"pid": 1e999, "host": "a"}',
    lambda: "\0" * 5000,
]


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_of_a_dead_owner_do_no_harm(run: Path, claim: Callable[[], str]) -> None:
    (run / "owner.lock").write_text(claim())
    assert owner_of(run) is None
    with Owner.take(run) as owner:
        assert owner_of(run) == owner.process
        with pytest.raises(InputError, match="being trained by this process"):
            Owner.take(run)
