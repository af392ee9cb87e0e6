"""Searches in a process of their own: what they train, how they end, and what outlives what."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro.errors import InputError, RunError, StateError
from cerebro.machine.resources import start_of
from cerebro.run.owner import owner_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SECONDS = 60  # far more than anything takes

X = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
DATA = {"x": X, "y": X @ np.array([1.0, -2.0, 3.0], "f4")}


class Line:
    """A line that learns; each batch takes `wait` seconds."""

    framework = "numpy"

    def __init__(self, config):
        self.config, self.w = config, np.zeros(3)
        if config.get("bad"):
            raise ValueError("bad <one>")

    def train_batch(self, batch):
        time.sleep(self.config.get("wait", 0))
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.config["lr"] * batch["x"].T @ error / len(error)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {} if self.config.get("forgets") else {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state.get("w", np.zeros(3)))


def build(config):
    return Line(config)


SLOW = {"space": {"lr": [0.1, 0.2], "wait": 0.02}, "epochs": 100_000}


def search(folder, space=None, build=build, **more):
    options = {
        "epochs": 3, "validation": 0.25, "searcher": "grid", "batch_size": 16, "workers": 1,
        "progress": False, "run": folder,
    }  # fmt: skip
    space = {"lr": [0.1, 0.2, 0.3]} if space is None else space
    return cerebro.search(build, space, DATA, **{**options, **more})


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result]


def wait_until(holds):
    give_up = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def has_epoch(run, number=0):
    def holds():
        trials = cerebro.open(run.folder).trials
        return len(trials) > number and trials[number].epoch > 0

    return holds


@contextlib.contextmanager
def slow_run(folder, **more):
    run = search(folder, background=True, **{**SLOW, **more})
    try:
        yield run
    finally:
        owner = owner_of(run.folder)
        if owner is not None:
            os.kill(owner.pid, signal.SIGKILL)
            wait_until(lambda: not run.is_running)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_states_and_the_record_are_those_of_the_foreground(tmp_path, workers, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = search("a", workers=workers)
    assert cerebro.last.path == before.path
    run = search("b", workers=workers, background=True)
    assert isinstance(run, cerebro.Run) and run.folder == tmp_path / "b"
    result = run.result(SECONDS)
    assert hashes(result) == hashes(before) and result.status == "finished"
    assert not run.is_running and cerebro.last is result
    assert result.best.load().w.tolist() == before.best.load().w.tolist()
    own = {"id", "owner", "started", "ended", "data", "validation", "searcher_said", "environment"}
    now, then = result.saved.meta, before.saved.meta
    assert {k: v for k, v in now.items() if k not in own} == {
        k: v for k, v in then.items() if k not in own
    }
    assert "3 finished" in repr(run) and repr(run).startswith("Run(")
    assert ">finished<" in run._repr_html_()
    assert "3 finished after" in (run.folder / "background.log").read_text()
    assert result.verify()
    assert cerebro.Run("b").result().path == result.path  # in any process


class Misses:
    def on_epoch_end(self, trial, metrics):
        raise KeyError("missing")


class Locked:
    def __init__(self):
        self.lock = threading.Lock()

    def on_epoch_end(self, trial, metrics):
        pass


MISTAKES = {
    "metric": ({"metric": "acuracy"}, InputError),
    "argument": ({"epochs": 0}, InputError),
    "word": ({"n_epochs": 3}, InputError),
    "unknown word": ({"epoch": 3}, InputError),
    "no number": ({"workers": "two"}, InputError),
    "state": ({"space": {"lr": [0.1], "forgets": [True]}}, StateError),
    "build": ({"build": 3}, InputError),
    "data": ({"validation": 7}, InputError),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_as_they_do_in_the_foreground(tmp_path, name):
    options, kind = MISTAKES[name]
    told = []
    for background in (False, True):
        folder = tmp_path / "run"
        with pytest.raises(kind) as caught:
            search(folder, background=background, **options)
        left = sorted(p.name for p in folder.iterdir()) if folder.exists() else None
        told.append((type(caught.value), str(caught.value), left and "run.sqlite" in left))
        assert caught.value.__cause__ is None
        if folder.exists():
            cerebro.open(folder)  # a run, which the next search replaces
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("callbacks", [Locked()]), ("searcher", threading.Lock()), ("space", {"a": [Locked()]})],
)
def test_what_cannot_be_sent_is_named(tmp_path, name, value):
    if name == "searcher":
        value = cerebro.searchers.RandomSearch()
        value.lock = threading.Lock()
    with pytest.raises(InputError, match=f"^{name} cannot be sent to the process of a background"):
        search(tmp_path / "run", background=True, **{name: value})
    lock = threading.Lock()
    with pytest.raises(InputError, match=r"^build cannot be sent"):
        search(tmp_path / "run", background=True, build=lambda config: (lock, Line(config)))
    assert not (tmp_path / "run").exists()


def test_an_exception_after_the_start_is_raised_by_result(tmp_path):
    run = search(tmp_path / "run", background=True, callbacks=[Misses()])
    with pytest.raises(KeyError, match="missing") as caught:
        run.result(SECONDS)
    assert "in on_epoch_end" in str(caught.value.__cause__)  # where it was raised
    assert cerebro.last.status == "failed" and "missing" in run._repr_html_()
    with pytest.raises(RunError, match="the callback Misses failed"):
        cerebro.Run(run.folder).result(SECONDS)  # only its text is in the store


def test_when_all_trials_fail_result_raises_what_search_does(tmp_path):
    space = {"lr": [0.1, 0.2], "bad": [True]}
    told = []
    for background in (False, True):  # a run without a finished epoch is replaced
        with pytest.raises(RunError) as caught:
            found = search(tmp_path / "run", space, background=background)
            found.result(SECONDS)
        told.append((str(caught.value), caught.value.result.status))
    assert told[0] == told[1] and told[0][1] == "failed"


def test_a_run_is_steered_and_stopped(tmp_path):
    with slow_run(tmp_path / "run") as run:
        wait_until(has_epoch(run))
        assert run.clone(0, lr=0.05, epochs=50_000) == 2
        assert run.clone(0, {"lr": 0.06}, cold=True) == 3
        assert run.add(lr=0.3, wait=0.01, epochs=7) == 4
        run.extend(1, 200_000)
        run.pause()
        wait_until(lambda: "paused" in repr(run))
        assert ">paused<" in run._repr_html_() and run.is_running
        run.unpause()
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 s"):
            run.result(timeout=0.01)
        run.stop(3)
        run.stop()
        result = run.result(SECONDS)
    assert result.status == "stopped" and result.trials[1].epochs == 200_000
    assert result.trials[2].parent == 0 and result.trials[3].status == "stopped"
    assert result.trials[4].config == {"lr": 0.3, "wait": 0.01} and result.trials[4].epochs == 7
    with pytest.raises(InputError, match="not in progress"):
        run.stop()


def interrupt_soon():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_ctrl_c_stops_waiting_and_not_the_run(tmp_path):
    with slow_run(tmp_path / "run") as run:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt, match="stopped waiting: the search goes on in"):
            run.result()
        assert run.is_running
        run.stop()
        assert run.result(SECONDS).status == "stopped"


def test_ctrl_c_before_training_ends_it_and_leaves_nothing(tmp_path):
    pids = tmp_path / "pids"

    def build(config):
        pids.write_text(str(os.getppid()))
        os.kill(int(os.environ["ASKING"]), signal.SIGINT)
        time.sleep(SECONDS)

    os.environ["ASKING"] = str(os.getpid())
    try:
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path / "runs" / "a", build=build, background=True)
    finally:
        del os.environ["ASKING"]
    coordinator = int(pids.read_text())
    wait_until(lambda: start_of(coordinator) is None)
    assert owner_of(tmp_path / "runs" / "a") is None


def test_a_process_that_dies_is_told_with_its_last_lines(tmp_path):
    with slow_run(tmp_path / "run") as run:
        wait_until(has_epoch(run))
        os.kill(owner_of(run.folder).pid, signal.SIGKILL)
        with pytest.raises(RunError, match="has died; its last lines:") as caught:
            run.result(SECONDS)
    assert "started with 1 worker" in str(caught.value)
    assert f"python -m cerebro resume {run.folder}" in str(caught.value)
    assert caught.value.result.path == run.folder and ", interrupted," in repr(run)
    assert ">interrupted<" in run._repr_html_()


def test_resume_attaches_to_a_live_run_with_the_same_arguments(tmp_path):
    with slow_run(tmp_path / "run") as run:
        other = search(tmp_path / "run", background=True, if_exists="resume", **SLOW)
        assert other.folder == run.folder
        with pytest.raises(InputError, match="started with other settings: batch_size"):
            search(tmp_path / "run", background=True, if_exists="resume", batch_size=8, **SLOW)
        with pytest.raises(InputError, match="is being trained by process"):
            longer = {**SLOW, "epochs": 200_000}
            search(tmp_path / "run", background=True, if_exists="resume", **longer)
        with pytest.raises(InputError, match="exists already"):
            search(tmp_path / "run", background=True, **SLOW)
        assert run.is_running
        other.stop()
        assert hashes(other.result(SECONDS)) == hashes(run.result(SECONDS))
    again = search(tmp_path / "run", background=True, if_exists="resume", **SLOW)
    wait_until(lambda: again.is_running)
    again.stop()
    assert again.result(SECONDS).status == "stopped"


def test_a_finished_run_is_attached_at_once_and_new_goes_beside_it(tmp_path):
    first = search(tmp_path / "run", background=True).result(SECONDS)
    again = search(tmp_path / "run", background=True, if_exists="resume")
    assert hashes(again.result(SECONDS)) == hashes(first)
    beside = search(tmp_path / "run", background=True, if_exists="new")
    assert beside.folder == tmp_path / "run-2"
    assert hashes(beside.result(SECONDS)) == hashes(first)


SCRIPT = """
import sys
from tests.integration.test_background import search
run = search(sys.argv[1], {"lr": [0.1, 0.2, 0.3], "wait": [0.02]}, epochs=20, background=True)
print("started", flush=True)
run.result()
"""


def test_it_outlives_the_program_that_has_started_it(tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "a")],
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    assert program.stdout.readline() == b"started\n"
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    program.stdout.close()
    run = cerebro.Run(tmp_path / "a")
    assert run.is_running
    result = run.result(SECONDS)
    space = {"lr": [0.1, 0.2, 0.3], "wait": [0.0]}
    assert result.status == "finished"
    assert hashes(cerebro.open(run.folder)) == hashes(search(tmp_path / "b", space, epochs=20))


EDITED = """
import sys
from pathlib import Path
sys.path.insert(0, ".")
Path("my_model.py").write_text("from tests.integration.test_background import Line\\nRATE = 1\\n")
import my_model
Path("my_model.py").write_text("RATE = 7\\n")

def build(config):
    return my_model.Line({**config, "lr": config["lr"] * my_model.RATE})

import warnings
warnings.simplefilter("ignore")
from tests.integration.test_background import hashes, search
a = search("a", build=build)
b = search("b", build=build, background=True).result()
print(hashes(a) == hashes(b), a.saved.meta["build"] == b.saved.meta["build"])
"""


def test_it_trains_the_modules_as_they_were_imported(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EDITED],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.splitlines()[-1] == "True True"


SET = """
import numpy as np, torch, cerebro
torch.set_default_dtype(torch.float64)
x = np.random.default_rng(0).normal(size=(64, 3))
data = cerebro.shard({"x": x, "y": x[:, :1]}, "data", dtypes={"x": "float64", "y": "float64"})

def build(config):
    net = torch.nn.Linear(3, 1)
    return cerebro.torch.Model(net, optimizer=torch.optim.SGD(net.parameters(), lr=config["lr"]),
                               loss=torch.nn.functional.mse_loss, inputs="x", target="y")

found = []
for background in (False, True):
    run = cerebro.search(build, {"lr": [0.1]}, data, epochs=1, searcher="grid", batch_size=16,
                         validation=0.25, workers=1, background=background)
    result = run.result() if background else run
    found.append((result[0].state_hash, result.environment["torch"]["default_dtype"],
                  result.saved.meta["build"]))
print(found[0] == found[1], found[1][1], found[1][2]["file"])
"""


def test_it_takes_over_settings_and_the_name_of_build(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SET)
    done = subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.splitlines()[-1] == f"True float64 {script}"


def test_a_study_is_not_searched_in_the_background():
    pytest.importorskip("optuna")
    with pytest.raises(InputError, match="background=: leave it out: the study is in this process"):
        cerebro.optuna.optimize(None, build, DATA, epochs=1, background=True)


def test_its_warnings_before_training_are_shown_here(tmp_path):
    with pytest.warns(UserWarning, match="no validation data: trials are ranked by training"):
        run = search(tmp_path / "run", background=True, validation=None)
    run.result(SECONDS)


def test_the_page_is_served_while_this_process_lives(tmp_path):
    run = search(tmp_path / "run", background=True)
    address = run.watch()
    assert run.watch() == address
    with urllib.request.urlopen(address) as page:
        assert page.status == 200 and b"<!doctype html>" in page.read().lower()
    run.result(SECONDS)
