"""`cerebro.search` from end to end: results, files, callbacks, failures."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro.errors import InputError, RunError, StateError
from cerebro.executors.local import LocalExecutor
from cerebro.machine.local import Clock


class LeastSquares:
    """A NumPy model by the bare protocol."""

    framework = "numpy"

    def __init__(self, config):
        self.config = config
        self.w = np.zeros(3)

    def train_batch(self, batch):
        x, y = batch["x"], batch["y"]
        error = x @ self.w - y
        self.w = self.w - self.config["lr"] * (x.T @ error) / len(y)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        error = batch["x"] @ self.w - batch["y"]
        return {"loss": float((error**2).mean()), "mae": float(np.abs(error).mean())}

    def predict_batch(self, batch):
        return batch["x"] @ self.w

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


def build(config):
    return LeastSquares(config)


def build_some_fail(config, info):
    if info.trial == 1:
        raise ValueError("this one cannot be built")
    return LeastSquares(config)


def build_all_fail(config):
    raise ValueError(f"no model with lr={config['lr']}")


class Diverging(LeastSquares):
    def train_batch(self, batch):
        metrics = super().train_batch(batch)
        return {"loss": float("nan")} if self.config["lr"] > 0.5 else metrics


def build_diverging(config):
    return Diverging(config)


class Printing(LeastSquares):
    def train_batch(self, batch):
        print("hello from", self.config["lr"])
        return super().train_batch(batch)


def build_printing(config):
    return Printing(config)


class Averaged(LeastSquares):
    """Keeps an average of its weights outside state_dict."""

    def __init__(self, config):
        super().__init__(config)
        self.ema = np.zeros(3)

    def train_batch(self, batch):
        metrics = super().train_batch(batch)
        self.ema = 0.9 * self.ema + 0.1 * self.w
        return metrics


def build_averaged(config):
    return Averaged(config)


class NoState:
    def train_batch(self, batch):
        return {"loss": 1.0}

    def eval_batch(self, batch):
        return {"loss": 1.0}


def build_no_state(config):
    return NoState()


class BadState(LeastSquares):
    def state_dict(self):
        return {"w": self.w, "lock": object()}


def build_bad_state(config):
    return BadState(config)


def build_exits(config):
    os._exit(3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(500, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.01 * rng.normal(size=500)
    return cerebro.shard({"x": x, "y": y}, tmp_path_factory.mktemp("data") / "set", shards=4)


def run(data, folder, build=build, workers=0, **settings):
    defaults = {
        "epochs": 2,
        "validation": 0.2,
        "n_trials": 4,
        "batch_size": 16,
        "seed": 1,
        "progress": False,
    }
    defaults.update(settings)
    space = defaults.pop("space", {"lr": cerebro.loguniform(1e-3, 1e-1)})
    return cerebro.search(build, space, data, run=folder, workers=workers, **defaults)


@pytest.fixture(scope="module")
def result(data, tmp_path_factory):
    return run(data, tmp_path_factory.mktemp("runs") / "one", workers=2)


def test_the_best_trial_has_the_lowest_loss(result):
    losses = [trial.metrics["loss"] for trial in result.trials]
    assert result.best.metrics["loss"] == min(losses)
    assert result.top(2)[0].number == result.best.number
    assert len(result.top(9)) == 4
    assert result.status == "finished"
    assert f"finished, 4 finished, best loss={result.best.metrics['loss']:.4f}" in repr(result)


def test_metrics_have_long_and_short_names(result):
    metrics = result.best.metrics
    assert set(metrics) == {"loss", "mae", "train_loss", "val_loss", "val_mae"}
    assert metrics["loss"] == metrics["val_loss"]


def test_history_has_every_epoch(result):
    for trial in result.trials:
        assert [epoch["epoch"] for epoch in trial.history] == [0, 1]
        assert all(len(epoch["state_hash"]) == 32 for epoch in trial.history)
        assert trial.best_epoch == 1
        assert trial.epoch == trial.epochs == 2


def test_every_unit_ran_once_in_order(result):
    units = result.units()
    for trial in range(4):
        mine = [u for u in units if u["trial"] == trial]
        for epoch in range(2):
            parts = [u["part"] for u in mine if u["epoch"] == epoch and u["kind"] == "train"]
            assert parts == [0, 1, 2, 3]
            assert sum(u["epoch"] == epoch and u["kind"] == "eval" for u in mine) == 1


def test_opening_gives_the_same_result(result):
    opened = cerebro.open(result.path)
    assert [t.history for t in opened.trials] == [t.history for t in result.trials]
    assert opened.best.config == result.best.config
    model = opened.best.load()
    assert np.array_equal(model.w, result.best.load().w)


def test_open_finds_the_newest_run(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no run"):
        cerebro.open()
    run(data, None, n_trials=1)
    newest = run(data, "runs/newest", n_trials=1)
    assert cerebro.open().path.resolve() == newest.path.resolve()


def test_evaluate_and_predict_use_the_best_model(result, data):
    valid = data.split(0.8, 0.2)[1]
    assert result.best.evaluate(valid)["loss"] == pytest.approx(result.best.metrics["loss"])
    assert result.best.evaluate() == result.best.evaluate(valid)
    predicted = result.best.predict(valid)
    rows = np.concatenate([valid.shard(i)["x"] for i in range(4)])
    assert np.array_equal(predicted, rows @ result.best.load().w)


def test_the_store_is_plain_sqlite_and_states_are_safetensors(result):
    connection = sqlite3.connect(result.path / "run.sqlite")
    assert connection.execute("SELECT count(*) FROM epochs").fetchone() == (8,)
    settings = json.loads(
        connection.execute("SELECT value FROM meta WHERE key = 'settings'").fetchone()[0]
    )
    connection.close()
    assert settings["epochs"] == 2
    safetensors = pytest.importorskip("safetensors.numpy")
    weights = safetensors.load_file(result.best.state_path())
    assert np.array_equal(weights["/model/w"], result.best.load().w)


def test_keep_decides_which_states_stay(data, tmp_path):
    for keep, kept in (("last", [2]), ("all", [0, 1, 2])):
        result = run(data, tmp_path / keep, epochs=3, n_trials=1, keep=keep)
        files = sorted(f.name for f in (result.path / "states").iterdir())
        assert files == [f"0-epoch-{epoch}.safetensors" for epoch in kept]
    with pytest.raises(InputError, match=r"no state of epoch 0; kept are 2"):
        cerebro.open(tmp_path / "last").trials[0].load(0)


def test_one_failing_trial_fails_alone(data, tmp_path):
    result = run(data, tmp_path / "run", build_some_fail)
    assert [t.status for t in result.trials] == ["finished", "failed", "finished", "finished"]
    assert "this one cannot be built" in result.trials[1].error
    assert "test_search.py" in result.trials[1].traceback
    assert "this one cannot be built" in result.trials[1].log


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_whose_first_trials_fail_alike_stops(data, tmp_path, workers):
    with pytest.raises(
        RunError, match="failed in the same way: ValueError: no model with lr="
    ) as caught:
        run(data, tmp_path / "run", build_all_fail, workers=workers, n_trials=50)
    assert caught.value.result.status == "failed"
    assert len(caught.value.result.trials) == 50


def test_a_trial_that_diverges_is_no_winner(data, tmp_path):
    points = [{"lr": 0.9}, {"lr": 0.01}]
    result = run(data, tmp_path / "run", build_diverging, points=points, n_trials=3)
    assert result.trials[0].status == "diverged"
    assert "became nan in epoch 0, batch 0" in result.trials[0].error
    assert result.best.number != 0


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_trial_prints_goes_to_its_log(data, tmp_path, capfd, workers):
    result = run(data, tmp_path / "run", build_printing, workers=workers, n_trials=2)
    assert "hello" not in capfd.readouterr().out
    for trial in result.trials:
        # The batches, and not those of the check.
        assert len(trial.log.splitlines()) == 2 * round(data.split(0.8, 0.2)[0].num_rows / 16)
        assert set(trial.log.splitlines()) == {f"hello from {trial.config['lr']}"}


def test_a_worker_that_dies_is_replaced_and_its_trial_fails_in_the_end(data, tmp_path):
    with pytest.raises(RunError, match="exited with status 3"):
        run(data, tmp_path / "run", build_exits, workers=1, n_trials=1, max_retries=1)


def test_callbacks_see_everything_in_order(data, tmp_path):
    class Recorder:
        def __init__(self):
            self.calls = []

        def on_run_start(self, run):
            self.calls.append(("run", run.status))

        def on_trial_start(self, trial):
            self.calls.append(("start", trial.number))

        def on_unit_end(self, trial, metrics):
            self.calls.append(("unit", trial.number))

        def on_epoch_end(self, trial, metrics):
            self.calls.append(("epoch", trial.number, trial.epoch, metrics["loss"] >= 0))

        def on_trial_end(self, trial):
            self.calls.append(("end", trial.number, trial.status))

        def on_run_end(self, result):
            self.calls.append(("done", result.status))

    recorder = Recorder()
    run(data, tmp_path / "run", n_trials=1, callbacks=[recorder])
    units = [("unit", 0)] * 5
    assert recorder.calls == [
        ("run", "running"),
        ("start", 0),
        *units,
        ("epoch", 0, 1, True),
        *units,
        ("epoch", 0, 2, True),
        ("end", 0, "finished"),
        ("done", "finished"),
    ]


def test_an_exception_in_a_callback_ends_the_run_cleanly(data, tmp_path):
    class Broken:
        def on_epoch_end(self, trial, metrics):
            raise LookupError("not again")

    with pytest.raises(LookupError, match="not again"):
        run(data, tmp_path / "run", workers=1, callbacks=[Broken()])
    opened = cerebro.open(tmp_path / "run")
    assert opened.status == "failed"
    assert {trial.status for trial in opened.trials} == {"stopped"}


def test_early_stopping_ends_a_trial(data, tmp_path):
    stop = cerebro.EarlyStopping("loss", patience=1, min_delta=1e9)
    result = run(data, tmp_path / "run", epochs=5, n_trials=1, stop=stop)
    assert result.trials[0].status == "stopped"
    assert result.trials[0].epoch == 2


def test_a_time_limit_ends_the_run(data, tmp_path, monkeypatch):
    real, passed = time.perf_counter, 0.0
    monkeypatch.setattr(Clock, "perf_counter", lambda self: real() + passed)

    class HourLater:
        def on_trial_end(self, trial):
            nonlocal passed
            passed = 3600.0

    settings = {"n_trials": None, "time_limit": 3600.0, "epochs": 1, "callbacks": [HourLater()]}
    result = run(data, tmp_path / "run", **settings)
    assert result.status == "stopped"
    assert {trial.status for trial in result.trials} == {"finished", "stopped"}


@pytest.mark.parametrize("limit", [1e12, float("inf")])
def test_a_time_limit_may_exceed_the_longest_system_wait(data, tmp_path, limit):
    result = run(data, tmp_path / "run", n_trials=1, epochs=1, time_limit=limit, workers=1)
    assert result.status == "finished"


def test_open_passes_over_a_damaged_run(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = run(data, "runs/whole", n_trials=1, epochs=1)
    Path("runs/damaged").mkdir()
    Path("runs/damaged/run.sqlite").write_bytes(b"no database" * 100)
    assert cerebro.open().path.resolve() == whole.path.resolve()


def test_without_validation_there_is_one_warning(data, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(data, tmp_path / "run", validation=None, n_trials=1)
    assert [str(w.message) for w in caught if "ranked by" in str(w.message)] == [
        "no validation data: trials are ranked by training metrics (give validation=)"
    ]
    assert set(result.best.metrics) == {"loss", "train_loss"}


def test_state_outside_state_dict_is_found_by_name(data, tmp_path):
    found = cerebro.check(build_averaged, {"lr": [0.1]}, data)
    assert not found
    assert found.problems == ["model.ema is lost by a hop: it is not in state_dict()"]
    with pytest.raises(StateError, match=r"model\.ema"):
        run(data, tmp_path / "run", build_averaged)
    assert cerebro.check(build, {"lr": [0.1]}, data).ok


def test_replay_names_the_first_epoch_that_differs(data, tmp_path):
    result = run(data, tmp_path / "run", workers=1, epochs=3)
    assert cerebro.replay(result, 3).identical
    with pytest.warns(UserWarning, match="source of build"):
        other = cerebro.replay(result.path, 0, build_diverging)
    assert other.identical  # another source, the same bits
    assert any("source of build" in text for text in other.differences)
    connection = sqlite3.connect(result.path / "run.sqlite")
    connection.execute("UPDATE epochs SET state_hash = 'x' WHERE trial = 0 AND epoch = 1")
    connection.commit()
    connection.close()
    changed = cerebro.replay(result.path, 0)
    assert not changed
    assert changed.first_difference == 1


BAD = [
    ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
    ({"n_trials": None}, "give n_trials"),
    ({"batch_size": None}, "batch_size is missing"),
    ({"batch_size": 2.5}, "batch_size must be a whole number"),
    ({"space": {"lr": [0.1], "batch_size": [8]}}, "batch_size is given twice"),
    (
        {"space": {"lr": cerebro.choice([0.1]), "batch_size": 16.5}, "batch_size": None},
        "batch_size",
    ),
    ({"metric": "quality"}, "quality"),
    ({"validation": 1.5}, "validation must be"),
    ({"searcher": "magic"}, "magic"),
    ({"workers": -1}, "workers must be a whole number from 0 to"),
    ({"keep": "some"}, "keep must be one of"),
    ({"time_limit": -1}, "time_limit must be above 0"),
    ({"if_exists": "maybe"}, "if_exists must be one of"),
    ({"stop": 3}, "stop must be a cerebro.EarlyStopping, not 3"),
    ({"callbacks": print}, "callbacks must be a list"),
    ({"callbacks": ["on_epoch_end"]}, "has none of the methods on_run_start"),
    ({"executor": 5}, "executor=5 is not an executor"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[m[:25] for _, m in BAD])
def test_bad_arguments_are_refused_before_anything_is_written(data, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        run(data, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (build_no_state, "state_dict"),
        (build_bad_state, "lock"),
    ],
)
def test_models_that_cannot_move_between_workers_are_refused(data, tmp_path, build, message):
    with pytest.raises(RunError, match=message):
        run(data, tmp_path / "run", build)


def test_a_state_dir_in_use_is_refused(data, tmp_path):
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots" / "0.slots").touch()
    with pytest.raises(InputError, match="holds the states of another run"):
        run(data, tmp_path / "run", state_dir=tmp_path / "slots")


def test_an_existing_run_is_not_touched(data, tmp_path):
    first = run(data, tmp_path / "run", n_trials=1)
    with pytest.raises(
        InputError, match=r"exists already.*a new one beside it with if_exists='new'"
    ):
        run(data, tmp_path / "run", n_trials=1)
    assert cerebro.open(first.path).trials[0].history == first.trials[0].history


def test_if_exists_new_creates_a_run_beside_the_existing_one(data, tmp_path):
    names = [run(data, tmp_path / "run", n_trials=1, if_exists="new").path.name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]
    (tmp_path / "empty").mkdir()
    assert run(data, tmp_path / "empty", n_trials=1, if_exists="new").path.name == "empty"
    assert [cerebro.open(tmp_path / name).status for name in names] == ["finished"] * 3


def test_a_lambda_must_be_passed_again_after_a_restart(data, tmp_path):
    result = run(data, tmp_path / "run", lambda config: LeastSquares(config), workers=1)
    assert result.best.load() is not None
    opened = cerebro.open(tmp_path / "run")
    with pytest.raises(InputError, match="pass it as build="):
        opened.best.load()
    with pytest.warns(UserWarning, match="source of build"):
        model = opened.best.load(build=build)
    assert np.array_equal(model.w, result.best.load().w)


def test_a_script_needs_no_main_guard(data, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import numpy as np, cerebro

            class Model:
                framework = "numpy"
                def __init__(self, lr): self.w, self.lr = np.zeros(3), lr
                def train_batch(self, b):
                    e = b["x"] @ self.w - b["y"]
                    self.w = self.w - self.lr * b["x"].T @ e / len(e)
                    return {{"loss": float((e ** 2).mean())}}
                def eval_batch(self, b):
                    return {{"loss": float(((b["x"] @ self.w - b["y"]) ** 2).mean())}}
                def state_dict(self): return {{"w": self.w}}
                def load_state_dict(self, s): self.w = s["w"]

            def build(config):
                return Model(config["lr"])

            result = cerebro.search(
                build, {{"lr": [0.1, 0.01]}}, {str(data.path)!r}, epochs=1, validation=0.2,
                searcher="grid", batch_size=16, workers=2, run="run", progress=False,
            )
            print("best", result.best.config["lr"], result.best.load().w.shape)
            """
        )
    )
    package = str(Path(cerebro.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "best 0.1 (3,)\n"


class Endless:
    """A searcher of a user: never done, and bent on whatever `decision` says."""

    adaptive = False

    def __init__(self, decision=cerebro.Decision.CONTINUE, **suggestion):
        self.decision = decision
        self.suggestion = suggestion
        self.reports = []
        self.asked = 0

    def setup(self, space, **settings):
        self.settings = settings

    def suggest(self):
        self.asked += 1
        return cerebro.Suggestion({"lr": 0.01}, **self.suggestion)

    def report(self, trial, epoch, metrics):
        self.reports.append((trial, epoch))
        return self.decision

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_searcher_of_ones_own_ends_at_n_trials(data, tmp_path):
    searcher = Endless()
    result = run(data, tmp_path / "run", searcher=searcher, n_trials=3)
    assert [t.status for t in result.trials] == ["finished"] * 3
    assert sorted(searcher.reports) == [(t, e) for t in range(3) for e in range(2)]
    assert searcher.asked == 3


def test_a_searcher_stops_trials(data, tmp_path):
    searcher = Endless(cerebro.Decision.STOP)
    result = run(data, tmp_path / "run", searcher=searcher, n_trials=2)
    assert [(t.status, t.epoch) for t in result.trials] == [("stopped", 1)] * 2


@pytest.mark.parametrize(
    ("searcher", "message"),
    [
        (
            Endless(parent=0),
            "begins with .*parent=0.*: there is no trial yet to resume or clone",
        ),
        (
            Endless(trial=0),
            "begins with .*trial=0.*: there is no trial yet to resume or clone",
        ),
        (Endless(epochs=0), "suggests epochs=0: it must be a whole number of at least 1"),
        (Endless("continue"), r"answered 'continue' to the report of trial \d, epoch 0"),
    ],
)
def test_invalid_suggestions_of_a_searcher_are_refused(data, tmp_path, searcher, message):
    with pytest.raises(InputError, match=f"the searcher Endless {message}"):
        run(data, tmp_path / "run", searcher=searcher, n_trials=2)


MODULE = """
import numpy as np

class Model:
    framework = "numpy"

    def __init__(self):
        self.w = np.zeros(1)

    def train_batch(self, batch):
        return {"loss": LOSS}

    eval_batch = train_batch

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = state["w"]

def build(config):
    return Model()
"""


def test_warm_workers_do_not_train_with_outdated_code(data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "edited_between_runs.py"
    losses, workers = [], []
    for number, loss in enumerate(["1.0", "1.0", "22.0"]):
        if number != 1:
            file.write_text(MODULE.replace("LOSS", loss))
            os.utime(file, ns=(number, number))  # clocks of file systems may be coarse
        importlib.invalidate_caches()
        module = importlib.import_module("edited_between_runs")
        if number == 2:
            module = importlib.reload(module)
        executor = LocalExecutor(1, threads=3)  # of no other test
        started = executor.start
        executor.start = lambda context, e=executor, s=started: (
            s(context),
            workers.append(e.processes()[0]),
        )[0]
        result = run(data, tmp_path / f"{number}", module.build, n_trials=1, executor=executor)
        losses.append(result.best.metrics["loss"])
    assert losses == [1.0, 1.0, 22.0]
    assert workers[0] == workers[1] != workers[2]
