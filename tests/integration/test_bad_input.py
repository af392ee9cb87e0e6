"""Bad input, damaged files, full disks and killed processes, in Python and on the command line.

Whatever goes wrong is told in one line that names the file, the trial or the
argument and says what to do; the command line shows no traceback and exits with
1 (130 on Ctrl-C); no process is left, and nothing half-written looks whole.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import uuid
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest

import cerebro
import cerebro.cli as cli
from cerebro.errors import CorruptDataError, InputError, RunError, StateError
from cerebro.executors.process import fork_servers, warm_workers
from cerebro.run.recipe import import_file

PROGRAM = '''
import os, signal, sys
import numpy as np
import cerebro

class Model:
    framework = "numpy"

    def __init__(self, config):
        self.w, self.lr, self.size = np.zeros(3), config["lr"], config.get("size", 1)

    def train_batch(self, batch):
        before_batch()
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.lr * batch["x"].T @ error / len(error)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w, "pad": np.zeros(self.size)}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])

def before_batch():
    pass

def build(config):
    return Model(config)

space = {"lr": cerebro.loguniform(1e-3, 1e-1)}
data = DATA
settings = dict(epochs=2, n_trials=4, batch_size=16, validation=0.2, seed=1)

class Bad(Model):
    """What a case changes."""

def build_bad(config):
    return Bad(config)
'''

# At the 20th batch of a process `act` is called; 5 batches are a unit and 20 an epoch.
LATER = """
class Bad(Model):
    count = 0

    def train_batch(self, batch):
        Bad.count += 1
        if Bad.count == WHEN:
            act()
        return super().train_batch(batch)

WHEN = 20
build = build_bad
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 3))
    y = x @ np.array([1.0, -2.0, 0.5])
    return cerebro.shard({"x": x, "y": y}, tmp_path_factory.mktemp("data") / "set", shards=4)


@pytest.fixture(autouse=True)
def imports_are_undone():
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("program_"):
            del sys.modules[name]


OTHERS = []  # processes of earlier tests, such as joblib's


@pytest.fixture(scope="module", autouse=True)
def no_worker_outlives_the_tests():
    OTHERS[:] = psutil.Process().children()
    yield
    warm_workers.close()
    assert [child for child in psutil.Process().children() if child not in OTHERS] == []


def program(folder, data, extra=""):
    """Write a program for ``run`` under a module name of its own."""
    file = folder / f"program_{uuid.uuid4().hex}.py"
    where = str(getattr(data, "path", data))
    text = PROGRAM.replace("DATA", repr(where)) + textwrap.dedent(extra)
    file.write_text(text, encoding="utf-8")
    return file


def command(*arguments):
    """Run a command in this process; return its exit status."""
    return cli.main([str(argument) for argument in arguments])


def run_file(file, *options, workers=0):
    run = file.parent / "run"
    return command(
        *("run", file, "--run", run, "--workers", workers, "--progress", "none", *options)
    )


def one_line_error(capfd):
    """The error that a command printed: one line, no traceback."""
    captured = capfd.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert len(lines[0]) < 2100
    return lines[0]


def busy_children():
    """Processes of this one since its tests began, but for idle warm workers and fork servers."""
    idle = {worker.process.pid for worker in warm_workers._idle} | {*fork_servers.processes()}
    idle |= {other.pid for other in OTHERS}
    return [child for child in psutil.Process().children() if child.pid not in idle]


def store_threads():
    return [t for t in threading.enumerate() if t.name == "cerebro-store" and t.is_alive()]


def assert_nothing_lives():
    assert busy_children() == []
    assert store_threads() == []


# --- arguments and models ----------------------------------------------------

# Name, what the program says otherwise, the message, the exception in Python.
SEARCHES = [
    ("batch_size twice", "space['batch_size'] = [8]", "batch_size is given twice", InputError),
    ("batch_size nowhere", "del settings['batch_size']", "batch_size is missing", InputError),
    (
        "batch_size huge",
        "settings['batch_size'] = 2**70",
        "batch_size must be a whole number from 1 to 2147483647",
        InputError,
    ),
    ("reversed bounds", "space['lr'] = cerebro.uniform(2, 1)", "low is above high", InputError),
    ("empty choice", "space['lr'] = cerebro.choice([])", "at least one option", InputError),
    ("empty list", "space['lr'] = []", "lr: .* at least one option", InputError),
    ("objects in the space", "space['lr'] = [object()]", "lr: .* use a name", InputError),
    ("no mapping", "space = 3", "space must be a mapping", InputError),
    (
        "mode missing",
        "settings['metric'] = 'quality'",
        "unknown metric 'quality': .*mode='min'",
        InputError,
    ),
    (
        "seed too large",
        "settings['seed'] = 2**64",
        "seed must be a whole number from 0 to",
        InputError,
    ),
    (
        "epochs too many",
        "settings['epochs'] = 10**12",
        "epochs must be a whole number from 1 to",
        InputError,
    ),
    (
        "threads too many",
        "settings['threads'] = 10**6",
        "threads must be a whole number from 1 to",
        InputError,
    ),
    ("no data", "data = 'nowhere/at/all'", "no dataset at .*nowhere/at/all", InputError),
    ("data of another kind", "data = 3", "data must be a cerebro.Dataset", InputError),
    ("build is no function", "build = 3", "build must be a function", InputError),
    (
        "build is a network",
        "Bad.__call__ = lambda self, x: x; build = Bad({'lr': 0.1})",
        "build must be a function that makes a model.*not Bad",
        InputError,
    ),
    (
        "a library raises",
        "def build(config): np.linalg.inv(np.zeros((2, 3)))",
        r"LinAlgError: .* \(program_.* in build\)",
        RunError,
    ),
    (
        "state_dir cannot be made",
        "settings['state_dir'] = __file__ + '/states'",
        "cannot make state_dir .*: choose another state_dir=",
        OSError,
    ),
    (
        "build takes nothing",
        "def build(): pass",
        r"build must take the configuration: def build\(config\)",
        InputError,
    ),
    (
        "build takes too much",
        "def build(config, info, more): pass",
        r"build takes \(config, info, more\)",
        InputError,
    ),
    (
        "build raises",
        "def build(config): raise ValueError('no such layer')",
        r"failed in the same way: ValueError: no such layer \(program_.* in build\)",
        RunError,
    ),
    (
        "build ends the program",
        "def build(config): sys.exit('enough')",
        "failed in the same way: SystemExit: enough",
        RunError,
    ),
    (
        "build asks for a name",
        "space = {}",
        r"KeyError: 'lr' \(program_.*\); the configuration has nothing",
        RunError,
    ),
    ("build returns None", "def build(config): pass", "build returned None; return a", RunError),
    (
        "no state_dict",
        "Bad.state_dict = None; build = build_bad",
        "has no state_dict method",
        RunError,
    ),
    (
        "a state with unsupported values",
        "Bad.state_dict = lambda self: {'w': self.w, 'lock': object()}; build = build_bad",
        "the value at '/model/lock' is of type object",
        RunError,
    ),
    (
        "a state that cannot be loaded",
        """
        def load_state_dict(self, state): raise KeyError('w')
        Bad.load_state_dict = load_state_dict
        build = build_bad
        """,
        "load_state_dict rejects the result of state_dict: KeyError: 'w'",
        StateError,
    ),
    (
        "no such metric",
        "settings['metric'] = 'accuracy'",
        "reports no metric 'accuracy'; it reports loss, train_loss, val_loss",
        RunError,
    ),
    (
        "no metric at all",
        """
        Bad.train_batch = lambda self, batch: None
        Bad.eval_batch = lambda self, batch: None
        build = build_bad
        """,
        "reports no metric 'loss'; it reports none: return it from train_batch and eval_batch",
        RunError,
    ),
    (
        "no metric in validation",
        "Bad.eval_batch = lambda self, batch: {}; build = build_bad",
        "no metric 'loss' in validation: return it from eval_batch",
        RunError,
    ),
    (
        "a metric that is no number",
        "Bad.train_batch = lambda self, batch: {'loss': 'high'}; build = build_bad",
        "the metric 'loss' must be a number",
        RunError,
    ),
    (
        "metrics that are no dict",
        "Bad.train_batch = lambda self, batch: 3.0; build = build_bad",
        "must return a dict of metrics or None, not float",
        RunError,
    ),
    (
        "a column that is not there",
        "Bad.train_batch = lambda self, batch: {'loss': batch['pixels'].mean()}; build = build_bad",
        r"KeyError: 'pixels' \(program_.*\); a batch has x, y",
        RunError,
    ),
    (
        "a very long error",
        "def build(config): raise ValueError('x' * 10**6)",
        r"ValueError: x+ \.\.\. x+ \(program_",
        RunError,
    ),
    (
        "an error with odd characters",
        r"def build(config): raise ValueError('größe \udce4 \x1b[31m \n end')",
        r"ValueError: größe \\udce4 \\x1b\[31m end",
        RunError,
    ),
    (
        "an error without a text",
        """
        class Mute(Exception):
            def __str__(self): raise TypeError
        def build(config): raise Mute
        """,
        r"Mute: \(its text cannot be shown\)",
        RunError,
    ),
]
NAMES = [name for name, *_ in SEARCHES]


@pytest.mark.parametrize(("name", "extra", "message", "kind"), SEARCHES, ids=NAMES)
def test_an_invalid_search_fails_with_a_one_line_error(
    data, tmp_path, capfd, name, extra, message, kind
):
    file = program(tmp_path, data, extra)
    assert run_file(file, workers=1 if kind is not InputError else 0) == 1
    shown = one_line_error(capfd)
    assert_nothing_lives()
    module = import_file(file)
    settings = {**module.settings, "run": tmp_path / "again", "workers": 0, "progress": False}
    with pytest.raises(kind, match=message) as caught:
        cerebro.search(module.build, module.space, module.data, **settings)
    assert "\n" not in str(caught.value)
    said = str(caught.value)
    assert "result" not in said.partition("its traceback")[2]  # the search has not returned one
    assert shown == f"error: {said}".replace(str(tmp_path / "again"), str(tmp_path / "run"))
    assert_nothing_lives()
    for folder in (tmp_path / "run", tmp_path / "again"):
        assert folder.exists() == (kind not in (InputError, OSError))
        if folder.exists():
            result = cerebro.open(folder)
            assert result.status == "failed"
            assert result.error.replace(str(folder), str(tmp_path / "run")) in shown
            assert all(trial.status in ("failed", "stopped") for trial in result.trials)
            assert not list(folder.glob("states/*.new"))


def test_an_unpicklable_build_leaves_no_run_folder(data, tmp_path, capfd):
    extra = """
    import threading
    def outer(lock):
        def build(config):
            with lock:
                return Model(config)
        return build
    build = outer(threading.Lock())
    """
    file = program(tmp_path, data, extra)
    assert run_file(file, workers=1) == 1
    assert "build cannot be sent to worker processes" in one_line_error(capfd)
    assert not (tmp_path / "run").exists()
    assert run_file(file, workers=0) == 0


def test_one_trial_fails_alone(data, tmp_path, capfd):
    extra = """
    def build(config, info):
        if info.trial == 1: raise ValueError("not this one")
        return Model(config)
    """
    assert run_file(program(tmp_path, data, extra), workers=1) == 0
    result = cerebro.open(tmp_path / "run")
    assert [t.status for t in result.trials] == ["finished", "failed", "finished", "finished"]
    assert "trial 1: ValueError: not this one" in capfd.readouterr().out


def test_a_validation_set_without_the_columns(data, tmp_path, capfd):
    cerebro.shard({"x": np.zeros((4, 3))}, tmp_path / "v", shards=1)
    file = program(tmp_path, data)
    assert run_file(file, "--validation", tmp_path / "v") == 1
    assert f"validation ({tmp_path / 'v'}) lacks the training data's column(s) y" in (
        one_line_error(capfd)
    )


PROGRAMS = [
    ("def f(:", r"SyntaxError: .*program_.*line \d+"),
    ("import nothing_like_this", r"program_.*line \d+: ModuleNotFoundError: .*nothing_like_this"),
    ("1 / 0", r"program_.*line \d+: ZeroDivisionError"),
    ("raise SystemExit", r"program_.*ends the process while it is imported"),
    ("del build, space", "does not define build and space"),
    ("settings = 3", "settings must be a dictionary"),
    ("settings = dict(epoch=3)", "settings has 'epoch'.*did you mean 'epochs'"),
    ("settings = {}", "epochs is missing"),
]


@pytest.mark.parametrize(("extra", "message"), PROGRAMS, ids=[e for e, _ in PROGRAMS])
def test_a_program_that_cannot_be_read(data, tmp_path, capfd, extra, message):
    assert run_file(program(tmp_path, data, extra)) == 1
    assert re.search(message, one_line_error(capfd))
    assert not (tmp_path / "run").exists()


# --- datasets ---------------------------------------------------------------

SOURCES = [
    ("unequal lengths", {"x": np.zeros(3), "y": np.zeros(4)}, {}, "x|y"),
    ("no rows", {"x": np.zeros((0, 2))}, {}, "rows"),
    ("too many shards", {"x": np.zeros(3)}, {"shards": 4}, "4.*3|3.*4"),
    ("an unknown column", {"x": np.zeros(3)}, {"columns": ["z"]}, "z"),
    ("an unknown dtype", {"x": np.zeros(3)}, {"dtypes": {"x": "float7"}}, "float7"),
]


@pytest.mark.parametrize(
    ("name", "arrays", "options", "message"), SOURCES, ids=[name for name, *_ in SOURCES]
)
def test_an_invalid_dataset_is_refused(tmp_path, capfd, name, arrays, options, message):
    with pytest.raises(InputError, match=message) as caught:
        cerebro.shard(arrays, tmp_path / "set", **{"shards": 2, **options})
    assert "\n" not in str(caught.value)
    np.savez(tmp_path / "source.npz", **arrays)
    arguments = ["--shards", str(options.get("shards", 2))]
    arguments += ["--columns", *options["columns"]] if "columns" in options else []
    arguments += ["--dtypes", "x=float7"] if "dtypes" in options else []
    assert command("shard", tmp_path / "source.npz", tmp_path / "set", *arguments) == 1
    assert re.search(message, one_line_error(capfd))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.npz"]


def test_object_dtypes_are_refused(tmp_path, capfd):
    arrays = {"x": np.array([object(), object()], dtype=object), "y": np.zeros(2)}
    with pytest.raises(InputError, match="x"):
        cerebro.shard(arrays, tmp_path / "set", shards=1)
    np.savez(tmp_path / "source.npz", **arrays, allow_pickle=True)
    assert command("shard", tmp_path / "source.npz", tmp_path / "set", "--shards", "1") == 1
    assert "column 'x' has dtype object" in one_line_error(capfd)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.npz"]


def test_a_source_that_cannot_be_read(data, tmp_path, capfd):
    np.savez(tmp_path / "whole.npz", x=np.zeros((100, 10)), y=np.zeros(100))
    content = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n3\n")
    (tmp_path / "text.parquet").write_text("no parquet")
    for name in ("cut.npz", "rows.csv", "text.parquet", "missing.csv", "odd.xyz"):
        assert command("shard", tmp_path / name, tmp_path / "set") == 1
        assert name in one_line_error(capfd)
    assert command("shard", tmp_path / "whole.npz", data.path) == 1
    assert str(data.path) in one_line_error(capfd)
    assert not (tmp_path / "set").exists()
    cerebro.Dataset(data.path).verify()


# --- runs that are there or not ----------------------------------------------


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A finished run of a program, to look at and to damage copies of."""
    folder = tmp_path_factory.mktemp("finished")
    file = program(folder, data)
    assert run_file(file) == 0
    return folder / "run", file


def test_an_existing_run_is_not_touched(finished, capfd):
    folder, file = finished
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    assert run_file(file) == 1
    assert f"run folder {folder} exists already: choose another run=" in one_line_error(capfd)
    assert sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*")) == before


def test_commands_refuse_missing_and_damaged_runs(tmp_path, finished, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    shutil.copy(finished[0] / "run.sqlite", tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "run.sqlite", 5000)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "run.sqlite").write_text("this is no database at all, " * 100)
    shutil.copytree(finished[0], tmp_path / "odd")
    with contextlib.closing(sqlite3.connect(tmp_path / "odd" / "run.sqlite")) as connection:
        connection.execute("UPDATE trials SET config = '{\"lr\": 0.' WHERE number = 1")
        connection.commit()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "run.sqlite").write_bytes(b"")
    for arguments, message in [
        (["show"], "no run below runs"),
        (["show", "missing"], "missing"),
        (["show", "empty"], "empty is not a run"),
        (["show", "cut"], "cut/run.sqlite"),
        (["show", "text"], "text/run.sqlite"),
        (["show", "odd"], "odd/run.sqlite is damaged: a row cannot be read"),
        (["show", "nothing"], "nothing/run.sqlite"),
        (["show", finished[0], "--trial", "9"], "--trial 9: .* has trials 0 to 3"),
        (["replay", "missing", "--trial", "0"], "missing"),
        (["replay", finished[0], "--trial", "9"], "no trial 9"),
        (["verify", "missing"], "missing: there is no such folder"),
        (["verify", "empty"], "empty: neither a data folder"),
        (["verify", "cut"], "cut/run.sqlite"),
        (["run", "missing.py"], "missing.py: there is no such file"),
        (["bad-command"], "bad-command"),
    ]:
        assert command(*arguments) == 1
        assert re.search(message, one_line_error(capfd))


def test_the_error_names_a_damaged_or_missing_state(tmp_path, finished, capfd):
    run = shutil.copytree(finished[0], tmp_path / "run")
    file = cerebro.open(run).best.state_path()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptDataError, match=file.name):
        cerebro.open(run).best.load()
    assert command("verify", run) == 1
    assert file.name in one_line_error(capfd)
    file.unlink()
    with pytest.raises(CorruptDataError, match=f"{file.name} is missing"):
        cerebro.open(run).best.load()
    assert command("verify", run) == 1
    assert file.name in one_line_error(capfd)


def test_a_lambda_build_must_be_passed_again_after_a_restart(data, tmp_path, capfd):
    file = program(tmp_path, data, "build = lambda config: Model(config)")
    assert run_file(file) == 0
    capfd.readouterr()
    for arguments in (["replay", tmp_path / "run", "--trial", "0"],):
        assert command(*arguments) == 1
        assert "pass it as build=" in one_line_error(capfd)
    with pytest.raises(InputError, match="cannot be imported again: pass it as build="):
        cerebro.open(tmp_path / "run").best.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build = import_file(file).build
        assert cerebro.open(tmp_path / "run", build=build).best.load().w.any()
    assert command("replay", tmp_path / "run", "--trial", "0", "--build", file) == 0


# --- places ------------------------------------------------------------------


@contextlib.contextmanager
def mounted(path, options):
    """A file system in memory, where mounting is allowed."""
    path.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("kind", ["a file", "below a file", "a dangling link"])
def test_a_run_folder_that_cannot_be_made(data, tmp_path, capfd, kind):
    run = tmp_path / "run"
    if kind == "a dangling link":
        run.symlink_to(tmp_path / "gone" / "away")
    else:
        run.write_text("mine")
    place = run / "below" if kind == "below a file" else run
    file = program(tmp_path, data)
    assert command("run", file, "--run", place, "--workers", "1") == 1
    shown = one_line_error(capfd)
    assert str(place) in shown and "choose another run=" in shown
    assert run.is_symlink() or run.read_text() == "mine"
    assert_nothing_lives()


def test_a_run_folder_that_is_not_writable(data, tmp_path, capfd):
    file = program(tmp_path, data)
    with mounted(tmp_path / "place", "ro,size=1m") as place:
        assert command("run", file, "--run", place / "run", "--workers", "1") == 1
        shown = one_line_error(capfd)
        assert "Read-only" in shown and "choose another run=" in shown
        assert command("shard", tmp_path / "source.csv", place / "set") == 1
        capfd.readouterr()
    assert_nothing_lives()


def test_data_and_runs_on_a_read_only_disk(data, tmp_path, capfd):
    with mounted(tmp_path / "place", "size=8m") as place:
        shutil.copytree(data.path, place / "set")
        file = program(place, place / "set")
        assert run_file(file) == 0
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert command("show", place / "run") == 0
        assert command("verify", place / "run") == 0
        assert command("verify", place / "set") == 0
        assert command("replay", place / "run", "--trial", "0") == 0
        assert command("run", file, "--run", tmp_path / "run", "--workers", "1") == 0
        assert cerebro.open(place / "run").best.load().w.any()


def test_unicode_names_links_and_changed_directories_work(tmp_path, capfd, monkeypatch):
    place = tmp_path / "größe ✗ and spaces"
    place.mkdir()
    monkeypatch.chdir(place)
    rng = np.random.default_rng(0)
    arrays = {"größe 1": rng.normal(size=(60, 3)), "y": rng.normal(size=60)}
    np.savez("quelle ü.npz", **arrays)
    columns = ["--columns", "x=größe 1", "y=y"]
    assert command("shard", "quelle ü.npz", "daten ü", "--shards", "2", *columns) == 0
    (place / "link").symlink_to(place / "echt")
    (place / "echt").mkdir()
    file = program(place, "daten ü", "def before_batch(): os.chdir('/')")
    arguments = ["--run", "link/lauf ✗", "--progress", "lines"]
    assert command("run", file, *arguments, "--workers", "0") == 0
    assert Path.cwd() == place
    assert command("run", file, "--run", "echt/2", "--workers", "1") == 0
    result = cerebro.open("link/lauf ✗")
    other = cerebro.open("echt/2")
    monkeypatch.chdir("/")
    assert result.best.load().w.any()
    assert [t.history[-1]["state_hash"] for t in result.trials] == [
        t.history[-1]["state_hash"] for t in other.trials
    ]
    assert command("replay", place / "link" / "lauf ✗", "--trial", "1") == 0


def test_the_directory_changes_during_a_search(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = import_file(program(tmp_path, data))

    class Wanders:
        def on_epoch_end(self, trial, metrics):
            os.chdir("/")

    settings = {**module.settings, "run": "run", "callbacks": [Wanders()], "progress": False}
    result = cerebro.search(module.build, module.space, module.data, workers=1, **settings)
    assert Path.cwd() == Path("/")
    assert result.best.load().w.any()
    assert cerebro.open(tmp_path / "run").status == "finished"


# --- data that is damaged while a search runs --------------------------------

DAMAGES = {
    "cut": "os.truncate(file, 100)",
    "missing": "os.unlink(file)",
    # Workers import the program, too: what it writes twice must be the same.
    "changed": "content = bytearray(open(file, 'rb').read()); content[-1] = 1; "
    "open(file, 'r+b').write(content)",
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_data_damaged_during_the_search(data, tmp_path, capfd, damage, workers):
    shutil.copytree(data.path, tmp_path / "set")
    extra = LATER + textwrap.dedent(
        f"""
        def act():
            for shard in range(4):
                file = f"{tmp_path}/set/shard-0000{{shard}}/x.npy"
                {DAMAGES[damage]}
        if {damage == "changed"}:
            build(dict(lr=1)), act()
        """
    )
    file = program(tmp_path, tmp_path / "set", extra)
    assert run_file(file, "--epochs", "9", workers=workers) == 1
    shown = one_line_error(capfd)
    assert str(tmp_path / "set" / "shard-0000") in shown and "x.npy" in shown
    assert_nothing_lives()
    result = cerebro.open(tmp_path / "run")
    assert result.status == "failed"
    assert {trial.status for trial in result.trials} == {"stopped"}
    assert command("verify", tmp_path / "set") == 1
    assert "x.npy" in one_line_error(capfd)


def test_the_error_names_a_truncated_file_that_killed_a_worker(data, tmp_path, capfd):
    shutil.copytree(data.path, tmp_path / "set")
    extra = LATER + textwrap.dedent(
        f"""
        def act():
            os.truncate("{tmp_path}/set/shard-00003/x.npy", 100)
            os.kill(os.getpid(), signal.SIGBUS)
        """
    )
    file = program(tmp_path, tmp_path / "set", extra)
    assert run_file(file, workers=1) == 1
    assert "shard-00003/x.npy" in one_line_error(capfd)
    assert_nothing_lives()


# --- processes ---------------------------------------------------------------


class Process:
    """The command line in a process of its own, and a pipe on which its program talks."""

    def __init__(self, file, *options, code=None, limit=None):
        self.tag = uuid.uuid4().hex
        self.fifo = file.parent / "fifo"
        os.mkfifo(self.fifo)
        self._pipe = os.open(self.fifo, os.O_RDWR)
        package = str(Path(cerebro.__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": package, "TAG": self.tag, "FIFO": str(self.fifo)}
        arguments = ["-m", "cerebro", "run", file, "--run", file.parent / "run", *options]
        if code is not None:
            arguments = ["-c", code, file, *options]
        self.popen = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=file.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )

    def hear(self):
        """Wait for a line of the program, which is the number of a process."""
        ready, _, _ = select.select([self._pipe], [], [], 60)
        assert ready, "the program said nothing"
        return int(os.read(self._pipe, 100).split()[0])

    def end(self):
        out, err = self.popen.communicate(timeout=60)
        os.close(self._pipe)
        assert self.workers() == []
        return self.popen.returncode, out, err

    def workers(self):
        """All worker processes of this command, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # Its own exit is not waited for by anybody once it is an orphan.
                if process.environ().get("TAG") == self.tag and process.pid != self.popen.pid:
                    found.append(process)
        _, alive = psutil.wait_procs(found, timeout=10)
        return alive


SPEAKS = """
import time

def say(text):
    with open(os.environ["FIFO"], "w") as pipe:
        pipe.write(f"{text}\\n")

def stop_here():
    say(os.getpid())
    while True:  # pause() would not hear a signal that comes just before it
        time.sleep(0.5)
"""


def test_a_worker_is_killed_in_the_middle_of_a_unit(data, tmp_path):
    extra = (
        LATER
        + SPEAKS
        + textwrap.dedent(
            f"""
        def act():
            if not os.path.exists("{tmp_path}/hit"):
                open("{tmp_path}/hit", "w").close()
                stop_here()
        """
        )
    )
    file = program(tmp_path, data, extra)
    process = Process(file, "--workers", "2")
    psutil.Process(process.hear()).kill()
    status, _, err = process.end()
    assert (status, err) == (0, "")
    events = rows_of(tmp_path / "run", "SELECT kind, text FROM events")
    assert [kind for kind, _ in events] == ["worker lost"]
    assert "SIGKILL" in events[0][1]
    assert run_file(program(tmp_path, data), "--run", tmp_path / "calm") == 0
    assert hashes(tmp_path / "run") == hashes(tmp_path / "calm")


def hashes(run):
    return [[e["state_hash"] for e in t.history] for t in cerebro.open(run).trials]


def test_a_trial_that_kills_every_worker_fails_alone(data, tmp_path, capfd):
    extra = """
    def build(config, info):
        if info.trial == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return Model(config)
    """
    assert run_file(program(tmp_path, data, extra), "--max-retries", "1", workers=1) == 0
    result = cerebro.open(tmp_path / "run")
    assert [t.status for t in result.trials] == ["finished", "finished", "failed", "finished"]
    assert "ended by SIGKILL in epoch 0" in result.trials[2].error


def test_processes_started_by_a_dead_worker_are_killed(data, tmp_path):
    extra = SPEAKS + textwrap.dedent(
        """
        import subprocess
        def build(config, info):
            if info.trial == 1:
                say(subprocess.Popen(["sleep", "600"]).pid)
                os._exit(7)
            return Model(config)
        """
    )
    process = Process(program(tmp_path, data, extra), "--workers", "1", "--max-retries", "0")
    process.hear()
    status, out, _ = process.end()  # asserts that nothing is left
    assert status == 0
    assert "exited with status 7" in out


def test_a_build_that_exits_the_worker_fails_the_run(data, tmp_path, capfd):
    file = program(tmp_path, data, "def build(config): os._exit(3)")
    assert run_file(file, workers=2) == 1
    assert "failed in the same way: the worker process exited with status 3" in one_line_error(
        capfd
    )
    assert_nothing_lives()


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c(data, tmp_path, workers):
    extra = SPEAKS + textwrap.dedent(
        """
        def begin_epoch(self, epoch):
            if epoch == 2:
                stop_here()

        Model.begin_epoch = begin_epoch
        """
    )
    file = program(tmp_path, data, extra)
    process = Process(file, "--workers", workers, "--epochs", "5")
    process.hear()
    os.kill(process.popen.pid, signal.SIGINT)
    status, out, err = process.end()
    assert status == 130
    assert "Traceback" not in out + err
    assert "interrupted: 4 trials with" in err and "python -m cerebro resume" in err
    assert sorted(p.name for p in (tmp_path / "run").glob("run.sqlite*")) == ["run.sqlite"]
    result = cerebro.open(tmp_path / "run")
    assert result.status == "stopped"
    assert {trial.status for trial in result.trials} == {"stopped"}
    assert max(trial.epoch for trial in result.trials) == 2
    for trial in result.trials:
        if trial.epoch:
            assert trial.load("last", build=import_file(file).build).w.any()
    assert command("verify", tmp_path / "run") == 0


def test_keyboard_interrupt_inline(data, tmp_path):
    module = import_file(program(tmp_path, data, LATER + "def act(): raise KeyboardInterrupt"))
    module.WHEN = 50
    settings = {**module.settings, "run": tmp_path / "run", "progress": False, "workers": 0}
    with pytest.raises(KeyboardInterrupt):
        cerebro.search(module.build, module.space, module.data, **settings)
    assert_nothing_lives()
    result = cerebro.open(tmp_path / "run")
    assert result.status == "stopped"
    assert {trial.status for trial in result.trials} <= {"stopped", "finished"}


def test_the_interrupt_message_asks_for_build_if_it_is_a_lambda(data, tmp_path):
    """Also in a notebook, which finds other functions by their names."""
    module = import_file(program(tmp_path, data, LATER + "def act(): raise KeyboardInterrupt"))
    module.WHEN = 50
    settings = {**module.settings, "run": tmp_path / "run", "progress": False, "workers": 0}
    with pytest.raises(KeyboardInterrupt) as caught:
        cerebro.search(lambda c: module.build(c), module.space, module.data, **settings)
    call = f"cerebro.resume({str(tmp_path / 'run')!r}, build)"
    assert str(caught.value).endswith(call)
    assert vars(caught.value)["_render_traceback_"]()[-1] == f"to resume it:  result = {call}"
    module.act = int
    assert cerebro.resume(tmp_path / "run", module.build, progress=False).status == "finished"


def test_workers_exit_when_the_coordinator_is_killed(data, tmp_path):
    extra = SPEAKS + LATER + "act = stop_here"
    process = Process(program(tmp_path, data, extra), "--workers", "2")
    process.hear()
    process.popen.kill()
    status, _, err = process.end()  # asserts that no worker is left
    assert (status, err) == (-signal.SIGKILL, "")
    assert cerebro.open(tmp_path / "run").status != "finished"
    assert command("show", tmp_path / "run") == 0


def test_workers_exit_even_if_a_fork_of_the_coordinator_lives(data, tmp_path):
    code = """
import os, signal, sys
from cerebro.run.recipe import import_file
module = import_file(sys.argv[1])
import cerebro
cerebro.search(module.build, module.space, module.data, run="run", workers=1, progress=False,
               **module.settings)
from cerebro.executors.process import warm_workers
worker = warm_workers._idle[0].process.pid
child = os.fork()
if child == 0:
    module.say(worker)
    signal.pause()
signal.pause()
"""
    process = Process(program(tmp_path, data, SPEAKS), code=code)
    worker = psutil.Process(process.hear())
    coordinator = psutil.Process(process.popen.pid)
    # Its other children are the worker and a fork server, which are other programs.
    fork = next(c for c in coordinator.children() if c.cmdline() == coordinator.cmdline())
    process.popen.kill()
    psutil.wait_procs([worker], timeout=10)
    assert not worker.is_running()
    assert fork.is_running()
    fork.kill()
    process.end()


# --- full disks --------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_no_disk_is_left_for_states(data, tmp_path, capfd, monkeypatch, workers):
    file = program(tmp_path, data, "space['size'] = 100_000")
    monkeypatch.setattr(  # until it fills up
        "cerebro.machine.disk.Disk.free_bytes", lambda disk, folder: 1 << 40
    )
    with mounted(tmp_path / "small", "size=1m") as place:
        assert command("run", file, "--run", place / "run", "--workers", workers) == 1
        shown = one_line_error(capfd)
        assert "No space left" in shown and f"{place}/run" in shown and "choose another" in shown
        assert_nothing_lives()
        result = cerebro.open(place / "run")
        assert result.status in ("failed", "running")
        assert all(trial.status in ("stopped", "running", "waiting") for trial in result.trials)


def test_a_disk_too_small_for_the_states_is_refused(data, tmp_path, capfd):
    file = program(tmp_path, data, "space['size'] = 100_000")
    with mounted(tmp_path / "small", "size=1m") as place:
        assert command("run", file, "--run", place / "run", "--workers", 1) == 1
        shown = one_line_error(capfd)
        assert re.search(r"needs at least \d\.\d MB for states in .*run/states, and", shown)
        assert "of memory" in shown and "state_dir=" in shown
        assert_nothing_lives()
        assert list((place / "run" / "states").iterdir()) == []


def test_no_disk_is_left_for_the_run(data, tmp_path, capfd):
    file = program(tmp_path, data)
    with mounted(tmp_path / "small", "size=64k") as place:
        (place / "fill").write_bytes(b"x" * 61440)
        assert command("run", file, "--run", place / "run", "--workers", "1") == 1
        assert f"cannot make the run folder {place}/run" in one_line_error(capfd)
        assert_nothing_lives()
        assert [p.name for p in place.iterdir()] == ["fill"]


@pytest.mark.parametrize("workers", [0, 1])
def test_exceeding_the_file_size_limit_fails_the_run(data, tmp_path, workers):
    file = program(tmp_path, data, "space['size'] = 100_000")

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    process = Process(file, "--workers", workers, "--progress", "none", limit=limit)
    status, _, err = process.end()
    assert status == 1
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "states/" in err and "File too large" in err
    assert cerebro.open(tmp_path / "run").status == "failed"


# --- many searches in one process --------------------------------------------


def test_fifty_searches_leave_nothing_open(data, tmp_path):
    module = import_file(program(tmp_path, data))
    process = psutil.Process()
    settings = {**module.settings, "epochs": 1, "n_trials": 1, "progress": False}

    def search(n):
        run = tmp_path / f"run{n}"
        result = cerebro.search(
            module.build, module.space, module.data, run=run, workers=n % 2, **settings
        )
        assert result.best.load().w.any()
        shutil.rmtree(run)

    def open_things():
        gc.collect()
        workers = sorted(worker.process.pid for worker in warm_workers._idle)
        files = [psutil.Process(pid).num_fds() for pid in workers]
        return process.num_fds(), process.num_threads(), workers, files

    for n in range(6):
        search(n)
    before = open_things()
    for n in range(50):
        search(n)
    assert open_things() == before


def test_searches_that_fail_leave_nothing_open(data, tmp_path):
    module = import_file(program(tmp_path, data, "def build_fails(config): raise ValueError('x')"))
    settings = {**module.settings, "epochs": 1, "progress": False}
    counts = []
    for n in range(8):
        with pytest.raises(RunError):
            cerebro.search(
                *(module.build_fails, module.space, module.data),
                **{**settings, "run": tmp_path / f"run{n}", "workers": n % 2},
            )
        assert_nothing_lives()
        gc.collect()
        counts.append(psutil.Process().num_fds())
    assert counts[-1] == counts[2]
    # A worker after a failed run is a new one, and works.
    result = cerebro.search(
        module.build, module.space, module.data, run=tmp_path / "good", workers=1, **settings
    )
    assert result.status == "finished"


def test_a_warm_worker_that_died_is_replaced(data, tmp_path):
    module = import_file(program(tmp_path, data))
    settings = {**module.settings, "epochs": 1, "progress": False, "workers": 1}
    arguments = (module.build, module.space, module.data)
    cerebro.search(*arguments, run=tmp_path / "one", **settings)
    worker = warm_workers._idle[-1].process
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    result = cerebro.search(*arguments, run=tmp_path / "two", **settings)
    assert result.status == "finished"
    assert rows_of(tmp_path / "two", "SELECT kind FROM events") == []


def rows_of(run, sql):
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as connection:
        return connection.execute(sql).fetchall()
