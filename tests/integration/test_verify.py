"""`Result.verify` and ``python -m cerebro verify``: each damage is found and named."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from adaptive_searchers import Halving, Population

import cerebro
import cerebro._core as _core
import cerebro.cli as cli
from cerebro.machine.disk import Disk
from cerebro.results.verify import verify_run


class LeastSquares:
    framework = "numpy"

    def __init__(self, config):
        self.config = config
        self.w = np.zeros(2)

    def train_batch(self, batch):
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.config["lr"] * batch["x"].T @ error / len(error)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        print("evaluated")
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


def build(config):
    return LeastSquares(config)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run with its own dataset: two trials, three epochs, every state kept."""
    folder = tmp_path_factory.mktemp("original")
    x = np.random.default_rng(0).normal(size=(90, 2))
    cerebro.shard({"x": x, "y": x.sum(1)}, folder / "data", shards=3)
    search(folder)
    return folder


def search(folder, **settings):
    arguments = {
        "epochs": 3,
        "validation": 0.25,
        "batch_size": 8,
        "workers": 0,
        "searcher": "grid",
        "keep": "all",
        "run": folder / "run",
        "progress": False,
    }
    data = cerebro.Dataset(folder / "data")
    return cerebro.search(build, {"lr": [0.1, 0.2]}, data, **{**arguments, **settings})


@pytest.fixture
def run(original, tmp_path):
    """A copy to damage; its rows name the copied data."""
    shutil.copytree(original / "run", tmp_path / "run")
    shutil.copytree(original / "data", tmp_path / "data")
    change(
        tmp_path / "run",
        f"UPDATE meta SET value = replace(value, '{original}/data', '{tmp_path}/data')",
    )
    return tmp_path / "run"


def change(run, *statements):
    connection = sqlite3.connect(run / "run.sqlite")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def state_of(run, trial, epoch):
    return next((run / "states").glob(f"{trial}-epoch-{epoch}.safetensors"))


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def verified(run):
    """As ``result.verify()``, also where the run can no longer be opened."""
    return verify_run(run)


def test_an_intact_run_verifies(run, capsys):
    found = cerebro.open(run).verify()
    assert found, str(found)
    assert (found.trials, found.epochs, found.states) == (2, 6, 6)
    assert found.data == [run.parent / "data"]
    assert cli.main(["verify", str(run)]) == 0
    assert "2 trials, 6 epochs, 6 states and 1 dataset," in capsys.readouterr().out


# Damages of files: what is done, and the path and a word that the problem names.
FILES = {
    "a bit of a state": (
        lambda run: flip(state_of(run, 1, 2), -1),
        "run/states/1-epoch-2.safetensors (trial 1, epoch 2)",
        "its checksum differs",
    ),
    "a bit of a state's header": (
        lambda run: flip(state_of(run, 0, 0), 9),
        "run/states/0-epoch-0.safetensors (trial 0, epoch 0)",
        "its checksum differs",
    ),
    "a state that is cut": (
        lambda run: os.truncate(state_of(run, 0, 1), 100),
        "run/states/0-epoch-1.safetensors",
        "is damaged",
    ),
    "an empty state": (
        lambda run: os.truncate(state_of(run, 0, 1), 0),
        "run/states/0-epoch-1.safetensors",
        "is damaged",
    ),
    "a missing state": (
        lambda run: state_of(run, 1, 1).unlink(),
        "run/states/1-epoch-1.safetensors",
        "missing",
    ),
    "the state of another epoch": (
        lambda run: shutil.copy(state_of(run, 1, 0), state_of(run, 1, 1)),
        "run/states/1-epoch-1.safetensors",
        "its checksum differs",
    ),
    "a state that is a link": (
        lambda run: (
            state_of(run, 1, 0).rename(run / "elsewhere"),
            (run / "states" / "1-epoch-0.safetensors").symlink_to(run / "elsewhere"),
        ),
        "run/states/1-epoch-0.safetensors",
        "symbolic link",
    ),
    "a bit of the data": (
        lambda run: flip(run.parent / "data" / "shard-00001" / "x.npy", -5),
        "data/shard-00001/x.npy",
        "its checksum differs",
    ),
    "data that is cut": (
        lambda run: os.truncate(run.parent / "data" / "shard-00002" / "y.npy", 130),
        "data/shard-00002/y.npy",
        "has 130 bytes, but",
    ),
    "missing data": (
        lambda run: (run.parent / "data" / "shard-00000" / "y.npy").unlink(),
        "data/shard-00000/y.npy",
        "missing",
    ),
    "a bit of the manifest": (
        lambda run: flip(run.parent / "data" / "manifest.json", 40),
        "data/manifest.json",
        "cannot be used",
    ),
    "no data": (
        lambda run: shutil.rmtree(run.parent / "data"),
        "data/manifest.json",
        "no dataset",
    ),
    "a state of no trial": (
        lambda run: (run / "states" / "7-epoch-0.safetensors").write_bytes(b"x"),
        "run/states/7-epoch-0.safetensors",
        "nothing in the run names this file: delete it",
    ),
    "a half-written state": (
        lambda run: (run / "states" / "1-epoch-3.safetensors.new").write_bytes(b"x"),
        "run/states/1-epoch-3.safetensors.new",
        "nothing in the run names this file",
    ),
    "a slot of a trial that is over": (
        lambda run: (run / "states" / "0.a").write_bytes(b"x"),
        "run/states/0.a",
        "nothing in the run names this file",
    ),
    "a log of no trial": (
        lambda run: (run / "trials" / "2.log").write_text("x"),
        "run/trials/2.log",
        "nothing in the run names this file",
    ),
    "a file of somebody else": (
        lambda run: (run / "states" / "notes.txt").write_text("x"),
        "run/states/notes.txt",
        "nothing in the run names this file",
    ),
}

# Damages of rows: the statement, and what is said.
ROWS = {
    "an epoch": (
        "DELETE FROM epochs WHERE trial = 1 AND epoch = 1",
        ["trial 1, epoch 1: there are metrics but no row"],
    ),
    "the last epoch": (
        "DELETE FROM epochs WHERE trial = 0 AND epoch = 2; "
        "DELETE FROM metrics WHERE trial = 0 AND epoch = 2",
        ["trial 0: it has finished, but only 2 of 3 epochs are there", "0-epoch-2.safetensors"],
    ),
    "an epoch and its metrics": (
        "DELETE FROM epochs WHERE trial = 1 AND epoch = 1; "
        "DELETE FROM metrics WHERE trial = 1 AND epoch = 1",
        ["trial 1: its epochs are 0, 2", "states/1-epoch-1.safetensors: nothing"],
    ),
    "metrics": (
        "DELETE FROM metrics WHERE trial = 0 AND epoch = 1",
        ["trial 0, epoch 1: the epoch has no metrics"],
    ),
    "a trial": (
        "DELETE FROM trials WHERE number = 1",
        ["trial 1, epoch 0: the epoch's trial has no row", "a unit's trial has no row"],
    ),
    "the first trial and all that is its": (
        "DELETE FROM trials WHERE number = 0; DELETE FROM epochs WHERE trial = 0; "
        "DELETE FROM metrics WHERE trial = 0; DELETE FROM units WHERE trial = 0",
        ["trial 0: it has no row", "run/trials/0.log"],
    ),
    "a unit": (
        "DELETE FROM units WHERE trial = 1 AND epoch = 2 AND step = 1",
        ["trial 1, epoch 2: only 3 of its 4 units are there"],
    ),
    "a unit's part": (
        "UPDATE units SET part = (part + 1) % 3 WHERE trial = 1 AND epoch = 2 AND step = 1",
        ["trial 1, epoch 2: unit 1 was on part", "out of turn"],
    ),
    "a unit's number": (
        "UPDATE units SET step = 9 WHERE trial = 1 AND epoch = 2 AND step = 1",
        ["trial 1, epoch 2: unit 9 of 4"],
    ),
    "a unit too late": (
        "UPDATE units SET epoch = 9 WHERE trial = 0 AND epoch = 2 AND step = 3",
        ["trial 0: units of epoch 9, though only 3 epochs are finished"],
    ),
    "the name of a state": (
        "UPDATE epochs SET state_file = NULL WHERE trial = 1 AND epoch = 2",
        ["trial 1, epoch 2: its state was to be kept", "1-epoch-2.safetensors: nothing"],
    ),
    "a hash": (
        "UPDATE epochs SET state_hash = '00000000000000000000000000000000' WHERE trial = 1 "
        "AND epoch = 0",
        ["1-epoch-0.safetensors (trial 1, epoch 0): it is damaged"],
    ),
    "a status": (
        "UPDATE trials SET status = 'running' WHERE number = 1",
        ["trial 1: the run has finished, but the trial is running"],
    ),
    "the data's checksum": (
        'UPDATE meta SET value = replace(value, \'"checksum":"\', \'"checksum":"0\') '
        "WHERE key = 'data'",
        ["the run's data has changed"],
    ),
}


@pytest.mark.parametrize("damage", FILES)
def test_a_damaged_file_is_found_and_named(run, capsys, damage):
    act, where, what = FILES[damage]
    act(run)
    found = verified(run)
    assert not found
    named = [p for p in found.problems if where in p.where and what in str(p)]
    assert named, str(found)
    assert all(problem.advice for problem in found.problems)
    assert cli.main(["verify", str(run)]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [str(problem) for problem in found.problems]
    assert captured.err.startswith("error: ") and len(captured.err.splitlines()) == 1


def test_data_that_has_moved_is_one_problem(run, monkeypatch, capsys):
    (run.parent / "data").rename(run.parent / "moved")
    (problem,) = verified(run).problems
    assert "give its new path" in problem.advice
    # In a terminal, standard error is enough for one problem.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["verify", str(run)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and str(problem) in captured.err


def test_a_run_of_a_newer_version_is_not_damaged(run, capsys):
    change(run, "PRAGMA user_version = 99")
    assert cli.main(["verify", str(run)]) == 1
    captured = capsys.readouterr()
    assert "newer Cerebro" in captured.err and "recover" not in captured.out + captured.err


@pytest.mark.parametrize("damage", ROWS)
def test_damaged_rows_are_found_and_named(run, damage):
    statements, expected = ROWS[damage]
    change(run, *statements.split("; "))
    text = str(verified(run))
    for line in expected:
        assert line in text


def test_all_problems_are_found_at_once(run):
    flip(state_of(run, 0, 0), -1)
    state_of(run, 1, 1).unlink()
    flip(run.parent / "data" / "shard-00000" / "x.npy", -1)
    flip(run.parent / "data" / "shard-00002" / "x.npy", -1)
    change(run, "DELETE FROM metrics WHERE trial = 0 AND epoch = 1")
    assert len(verified(run).problems) == 5


def test_overwritten_pages_of_the_store_are_found(run, capsys):
    """SQLite's own check finds them, or cannot read on."""
    connection = sqlite3.connect(run / "run.sqlite")
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.close()
    for page in range(1, pages):
        content = (run / "run.sqlite").read_bytes()
        with (run / "run.sqlite").open("r+b") as file:
            file.seek(page * size)
            file.write(os.urandom(64) if page % 2 else b"\xff" * size)
        assert cli.main(["verify", str(run)]) == 1, page
        assert "run.sqlite" in capsys.readouterr().out
        (run / "run.sqlite").write_bytes(content)
    assert cli.main(["verify", str(run)]) == 0


def test_a_store_truncated_at_any_page_is_found(run, capsys):
    content = (run / "run.sqlite").read_bytes()
    for size in range(0, len(content), 4096):
        (run / "run.sqlite").write_bytes(content[:size])
        assert cli.main(["verify", str(run)]) == 1, size
        assert "run.sqlite" in capsys.readouterr().out


def test_a_live_run_verifies_at_any_moment(original, tmp_path):
    """Looked at from callbacks, and from another process while everything goes on."""
    found = []

    class Verifier:
        def on_unit_end(self, trial, metrics):
            found.append(cerebro.open(tmp_path / "run").verify())

        on_epoch_end = on_unit_end

    for keep in ("best", "last", "all"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        search(original, run=tmp_path / "run", keep=keep, workers=1, callbacks=[Verifier()])
        found.append(cerebro.open(tmp_path / "run").verify())
    assert len(found) == 3 * (2 * 3 * 5 + 1)
    assert [str(f) for f in found if not f] == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_run_verifies(original, tmp_path, workers):
    class Cut:
        def on_unit_end(self, trial, metrics):
            if trial.number == 1 and trial.epoch == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(original, run=tmp_path / "run", callbacks=[Cut()], workers=workers)
    found = verified(tmp_path / "run")
    assert found, str(found)


@pytest.mark.parametrize("searcher", [Halving(rungs=(1, 2, 4)), Population()])
def test_paused_and_cloned_trials_verify(original, tmp_path, searcher):
    settings = {"epochs": 4, "n_trials": 6, "width": 6, "workers": 2, "keep": "best"}
    run = tmp_path / "run"
    data = cerebro.Dataset(original / "data")
    space = {"lr": cerebro.loguniform(1e-3, 1e-1)}
    options = {"validation": 0.25, "batch_size": 8, "progress": False, "searcher": searcher}
    result = cerebro.search(build, space, data, run=run, **options, **settings)
    assert len({len(trial.history) for trial in result.trials}) > 1
    found = verified(run)
    assert found, str(found)
    state_of(run, result.best.number, result.best.best_epoch).unlink()
    assert not verified(run)


KILLED = """
import os, sys
sys.path.insert(0, {here!r})
import cerebro
import cerebro._core as _core
from test_verify import search
from pathlib import Path
from types import SimpleNamespace

class Kill:
    seen = 0
    def {hook}(self, trial, metrics):
        self.seen += 1
        if self.seen == {after}:
            os.kill(os.getpid(), 9)

search(Path({folder!r}), run={run!r}, workers=1, keep="best", callbacks=[Kill()])
"""


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("hook", ["on_unit_end", "on_epoch_end"])
def test_a_killed_run_verifies(original, tmp_path, hook, after):
    program = KILLED.format(
        here=str(Path(__file__).parent),
        hook=hook,
        after=after,
        folder=str(original),
        run=str(tmp_path / "run"),
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    found = verified(tmp_path / "run")
    assert found, str(found)


def test_every_damaged_file_of_a_dataset_is_listed(original, tmp_path, capsys):
    shutil.copytree(original / "data", tmp_path / "data")
    flip(tmp_path / "data" / "shard-00000" / "x.npy", -1)
    (tmp_path / "data" / "shard-00001" / "x.npy").unlink()
    os.truncate(tmp_path / "data" / "shard-00002" / "y.npy", 3)
    assert cli.main(["verify", str(tmp_path / "data")]) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split()[0][-17:] for line in lines] == [
        "shard-00000/x.npy",
        "shard-00001/x.npy",
        "shard-00002/y.npy",
    ]
    assert "3 problems, the first" in captured.err


def test_verifying_changes_nothing(run):
    def content():
        return {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}

    before = content()
    assert verified(run)
    assert content() == before


# --- slots -------------------------------------------------------------------------


class Stop:
    def __init__(self, at):
        self.left = at

    def on_unit_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def stopped_runs(tmp_path_factory):
    """Runs that were interrupted in the second epoch of both trials, by where their slots are."""
    folders = {}
    for place in ("in the run's folder", "elsewhere"):
        folder = folders[place] = tmp_path_factory.mktemp("stopped")
        x = np.random.default_rng(0).normal(size=(90, 2))
        cerebro.shard({"x": x, "y": x.sum(1)}, folder / "data", shards=3)
        slots = folder / "elsewhere" if place == "elsewhere" else folder / "run" / "states"
        state_dir = slots if place == "elsewhere" else None
        with pytest.raises(KeyboardInterrupt):
            search(folder, state_dir=state_dir, callbacks=[Stop(13)], live_models=1)
        assert {file.stem for file in slots.glob("*.slots")} == {"0", "1"}
    return folders


@pytest.fixture(params=["in the run's folder", "elsewhere"])
def stopped(request, stopped_runs, tmp_path):
    """A copy of a run that was interrupted; where its slots are."""
    original = stopped_runs[request.param]
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    change(run, f"UPDATE meta SET value = replace(value, '{original}', '{tmp_path}')")
    return run, tmp_path / "elsewhere" if request.param == "elsewhere" else run / "states"


def test_slots_of_a_stopped_run_are_checked(stopped, capsys):
    run, folder = stopped
    before = {file: file.read_bytes() for file in folder.iterdir()}
    found = verified(run)
    assert found, str(found)
    assert found.slots == 2
    assert cli.main(["verify", str(run)]) == 0
    assert "slots of 2 trials" in capsys.readouterr().out
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def newest(folder, trial):
    """The file of the newest slot of a trial, and where its record is in the page."""
    head = int.from_bytes((folder / f"{trial}.slots").read_bytes()[64:72], "little")
    return folder / (f"{trial}.a" if head & 3 == 1 else f"{trial}.b"), 128 + 64 * (head & 3) - 64


SLOTS = {
    "a bit of the newest state": (
        lambda folder, state, record: flip(state, -1), "state", "checksum differs from its seal"),
    "the newest state cut": (
        lambda folder, state, record: os.truncate(state, 100), "state", "it is truncated"),
    "the newest state gone": (
        lambda folder, state, record: state.unlink(), "state", "No such file"),
    "a link in its place": (
        lambda folder, state, record: link_to_copy(state), "state", "symbolic link"),
    "a bit of the older state": (
        lambda folder, state, record: flip(older(state), -1), "older", "checksum differs"),
    "a bit of the newest record": (
        lambda folder, state, record: flip(folder / "1.slots", record), "page", "newest state"),
    "a bit of its seal": (
        lambda folder, state, record: flip(folder / "1.slots", record + 48), "page",
        "newest state"),
    "the page's magic": (
        lambda folder, state, record: flip(folder / "1.slots", 3), "page", "not a commit page"),
    "the page cut": (
        lambda folder, state, record: os.truncate(folder / "1.slots", 200), "page",
        "not a commit page"),
    "the page longer": (
        lambda folder, state, record: os.truncate(folder / "1.slots", 5000), "page", "larger"),
    "the page a link": (
        lambda folder, state, record: link_to_copy(folder / "1.slots"), "page", "symbolic link"),
    "a head that names no slot": (
        lambda folder, state, record: put(folder / "1.slots", 64, b"\3"), "page",
        "not a commit page"),
}  # fmt: skip


def older(state):
    return state.with_suffix(".b" if state.suffix == ".a" else ".a")


def link_to_copy(file):
    copy = file.with_name("x" + file.name)
    file.rename(copy)
    file.symlink_to(copy)


def put(file, position, content):
    whole = bytearray(file.read_bytes())
    whole[position : position + len(content)] = content
    file.write_bytes(whole)


@pytest.mark.parametrize("damage", SLOTS)
def test_damaged_slots_are_named(stopped, damage):
    run, folder = stopped
    do, where, what = SLOTS[damage]
    state, record = newest(folder, 1)
    path = {"state": state, "older": older(state), "page": folder / "1.slots"}[where]
    do(folder, state, record)
    found = verified(run)
    problems = [p for p in found.problems if "nothing in the run names" not in p.what]
    assert [p.where for p in problems] == [f"{path} (trial 1)"]
    assert what in problems[0].what
    assert "resume the run" in problems[0].advice
    if "link" not in damage:  # which going on refuses to follow
        resumed = cerebro.resume(run, build, progress=False)
        assert resumed.status == "finished"
        assert verified(run)


def test_missing_slots_are_not_damage(stopped):
    run, folder = stopped
    for file in folder.glob("1.*"):
        file.unlink()
    found = verified(run)
    assert found
    assert found.slots == 1


@pytest.mark.parametrize("stopped", ["elsewhere"], indirect=True)
def test_slots_of_another_run_are_left_alone(stopped):
    run, folder = stopped
    flip(newest(folder, 1)[0], -1)
    for claim in ("other", None):
        if claim is None:
            (folder / "cerebro-run").unlink()
        else:
            (folder / "cerebro-run").write_text(claim)
        found = verified(run)
        assert found
        assert found.slots == 0


def test_unknown_files_beside_the_slots_are_found(stopped):
    run, folder = stopped
    (folder / "notes.txt").write_text("?")
    (folder / "77.slots").write_bytes(bytes(4096))
    found = verified(run)
    assert {p.where for p in found.problems} == {
        str(folder / "notes.txt"), str(folder / "77.slots"),
    }  # fmt: skip


def test_constantly_changing_slots_are_not_damage(stopped, monkeypatch):
    """As in a run that goes on: no page is ever read twice alike."""
    run, folder = stopped
    state, _ = newest(folder, 1)
    flip(state, -1)
    reads = []

    def changing(disk, stem):
        reads.append(stem)
        damage = _core.check_slots(stem)
        return damage and (*damage[:2], True)

    monkeypatch.setattr(Disk, "check_slots", changing)
    assert verified(run)
    assert len(reads) > 10


def test_slots_of_a_live_run_verify_after_every_unit(tmp_path):
    found = []

    class Look:
        def on_unit_end(self, trial, metrics):
            found.append(verified(tmp_path / "run"))

    x = np.random.default_rng(0).normal(size=(90, 2))
    cerebro.shard({"x": x, "y": x.sum(1)}, tmp_path / "data", shards=3)
    search(tmp_path, callbacks=[Look()])
    assert len(found) == 24
    assert all(found), next(str(f) for f in found if not f)
    assert max(f.slots for f in found) == 2
