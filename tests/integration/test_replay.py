"""`cerebro.replay` finds what was changed on purpose, and where it shows first."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

import cerebro
import cerebro.cli as cli

SOURCE = """
import numpy as np

LATE = 0.0

class Model:
    framework = "numpy"

    def __init__(self, lr):
        self.lr = lr
        self.w = np.zeros(3)
        self.epoch = 0

    def begin_epoch(self, epoch):
        self.epoch = epoch

    def train_batch(self, batch):
        error = batch["x"] @ self.w - batch["y"]
        step = self.lr + (LATE if self.epoch >= 1 else 0.0)
        self.w = self.w - step * batch["x"].T @ error / len(error)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.w, self.epoch = state["w"], state["epoch"]

def build(config):
    return Model(config["lr"])
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose model stands in a module of its own, over data of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "model_to_replay.py").write_text(SOURCE)
    importlib.invalidate_caches()
    build = importlib.import_module("model_to_replay").build
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3))
    data = cerebro.shard({"x": x, "y": x.sum(1)}, tmp_path / "data", shards=3)
    result = cerebro.search(
        build,
        {"lr": [0.01, 0.1]},
        data,
        epochs=3,
        validation=0.2,
        searcher="grid",
        batch_size=16,
        workers=1,
        run=tmp_path / "run",
        progress=False,
    )
    yield result
    sys.modules.pop("model_to_replay", None)


def test_an_unchanged_run_replays_identically(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay = cerebro.replay(run.path, 1)
    assert replay.identical
    assert replay.differences == []
    assert "every state identical" in str(replay)


def test_torch_settings_made_by_the_run_are_not_a_difference(tmp_path):
    """``deterministic=True`` changes them while a model is built and trained."""
    torch = pytest.importorskip("torch")

    def build(config):
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.mse_loss)

    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    data = cerebro.shard({"x": x, "y": x.sum(1, keepdims=True)}, tmp_path / "data", shards=2)
    result = cerebro.search(
        build, {"lr": [0.1]}, data, epochs=1, validation=0.2, searcher="grid", batch_size=16,
        deterministic=True, run=tmp_path / "run", progress=False,
    )  # fmt: skip
    assert cerebro.replay(result, 0, build).differences == []


def test_a_changed_shard_shows_in_the_first_epoch_and_is_named(run, tmp_path):
    file = tmp_path / "data" / "shard-00001" / "x.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    replay = cerebro.replay(run.path, 1)
    assert replay.first_difference == 0
    assert any("shard-00001/x.npy" in text for text in replay.differences)


def test_other_data_shows_and_is_named(run, tmp_path):
    shutil.rmtree(tmp_path / "data")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 3))
    other = cerebro.shard({"x": x, "y": x.sum(1)}, tmp_path / "data", shards=3)
    replay = cerebro.replay(run.path, 0, data=other.split(0.8, 0.2)[0])
    assert replay.first_difference == 0
    assert any("not the dataset" in text for text in replay.differences)


def test_a_changed_seed_shows_in_the_first_epoch(run):
    connection = sqlite3.connect(run.path / "run.sqlite")
    settings = json.loads(
        connection.execute("SELECT value FROM meta WHERE key = 'settings'").fetchone()[0]
    )
    settings["seed"] += 1
    connection.execute("UPDATE meta SET value = ? WHERE key = 'settings'", [json.dumps(settings)])
    connection.commit()
    connection.close()
    assert cerebro.replay(run.path, 0).first_difference == 0


def test_a_changed_source_shows_where_it_begins_to_matter(run, tmp_path):
    (tmp_path / "model_to_replay.py").write_text(SOURCE.replace("LATE = 0.0", "LATE = 1e-9"))
    del sys.modules["model_to_replay"]
    importlib.invalidate_caches()
    with pytest.warns(UserWarning, match="has changed since the run"):
        replay = cerebro.replay(run.path, 0)
    assert [epoch.identical for epoch in replay.epochs] == [True, False, False]
    assert replay.first_difference == 1
    assert any("has changed" in text for text in replay.differences)
    assert "differs from epoch 1 on" in str(replay)


def test_a_trial_that_does_not_exist_is_refused(run):
    with pytest.raises(cerebro.InputError, match="has no trial 7: it has 0 to 1"):
        cerebro.replay(run.path, 7)


@pytest.mark.parametrize("epochs", [0, -1, 1.5])
def test_an_invalid_number_of_epochs_is_refused(run, epochs):
    with pytest.raises(cerebro.InputError, match="epochs must be a whole number of at least 1"):
        cerebro.replay(run.path, 0, epochs=epochs)


# --- trials that did not go the straight way ---------------------------------


class Eventful:
    """Least squares by torch's and NumPy's generators; ``config["do"]`` says what happens."""

    framework = "numpy"

    def __init__(self, config, info):
        self.do, self.trial = config["do"], info.trial
        self.w = np.zeros(3)
        self.epoch = 0
        self.batches = 0

    def begin_epoch(self, epoch):
        self.epoch = epoch
        self.batches = 0

    def train_batch(self, batch):
        self.batches += 1
        if self.epoch == 2 and self.batches == 7:
            happen(self.do)
        error = batch["x"] @ self.w - batch["y"] + np.random.normal(size=len(batch["y"]))
        self.w = self.w - 0.05 * batch["x"].T @ error / len(error)
        diverged = self.do == "diverge" and self.epoch == 2
        return {"loss": float("nan") if diverged else float((error**2).mean())}

    def eval_batch(self, batch):
        error = batch["x"] @ self.w - batch["y"]
        return {"loss": float((error**2).mean()), "epoch": float(self.epoch)}

    def state_dict(self):
        return {"w": self.w, "epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state):
        self.w, self.epoch, self.batches = state["w"], state["epoch"], state["batches"]


def build_eventful(config, info):
    return Eventful(config, info)


def happen(what):
    """Fail, or die: if there is a file, which is gone then unless it is to stay."""
    if what == "fail":
        raise ValueError("enough")
    how, _, file = what.partition(" ")
    if how.startswith("die") and Path(file).exists():
        if how == "die-once":
            Path(file).unlink()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def data(tmp_path):
    x = np.random.default_rng(0).normal(size=(200, 3))
    return cerebro.shard({"x": x, "y": x.sum(1)}, tmp_path / "data", shards=3)


def search(data, tmp_path, dos, **settings):
    arguments = {
        "epochs": 4,
        "validation": 0.2,
        "searcher": "grid",
        "batch_size": 16,
        "workers": 2,
        "run": tmp_path / "run",
        "progress": False,
    }
    space = {"do": dos}
    return cerebro.search(build_eventful, space, data, **{**arguments, **settings})


def test_a_trial_that_was_stopped_early_replays(data, tmp_path):
    stop = cerebro.EarlyStopping("epoch", patience=1, mode="min")
    result = search(data, tmp_path, ["nothing", "nothing"], stop=stop)
    assert [t.status for t in result.trials] == ["stopped", "stopped"]
    replay = cerebro.replay(result, 1)
    assert replay.identical and len(replay.epochs) == result.trials[1].epoch == 2


def test_trials_that_failed_or_diverged_later_replay(data, tmp_path):
    result = search(data, tmp_path, ["fail", "diverge", "nothing"])
    assert [t.status for t in result.trials] == ["failed", "diverged", "finished"]
    for trial, epochs in zip(result.trials, (2, 2, 4), strict=True):
        replay = cerebro.replay(result, trial)
        assert replay.identical and len(replay.epochs) == trial.epoch == epochs


def test_a_trial_whose_worker_died_replays(data, tmp_path):
    """Once in the run, and in the replay once more."""
    deadly = tmp_path / "deadly"
    deadly.touch()
    result = search(data, tmp_path, ["nothing", f"die-once {deadly}"])
    assert not deadly.exists()
    assert "SIGKILL" in events(result, "worker lost")[0]
    replay = cerebro.replay(result, 1)
    assert replay.identical and len(replay.epochs) == 4
    deadly.touch()
    assert cerebro.replay(result, 1).identical
    assert not deadly.exists()


def test_a_worker_that_always_dies_in_the_replay_is_reported(data, tmp_path):
    deadly = tmp_path / "deadly"
    result = search(data, tmp_path, [f"die {deadly}"], max_retries=1)
    deadly.touch()
    replay = cerebro.replay(result, 0)
    assert not replay.identical
    assert [epoch.identical for epoch in replay.epochs] == [True, True]
    assert replay.first_difference == 2
    assert "SIGKILL" in replay.error


def events(result, kind):
    connection = sqlite3.connect(result.path / "run.sqlite")
    rows = connection.execute("SELECT text FROM events WHERE kind = ?", [kind]).fetchall()
    connection.close()
    return [text for (text,) in rows]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_interrupted_in_the_middle_of_an_epoch_replays(data, tmp_path, workers):
    class Interrupt:
        def on_unit_end(self, trial, metrics):
            if trial.number == 0 and trial.epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(data, tmp_path, ["nothing"] * 2, workers=workers, callbacks=[Interrupt()])
    result = cerebro.open(tmp_path / "run", build=build_eventful)
    assert (result.trials[0].status, result.trials[0].epoch) == ("stopped", 2)
    replay = cerebro.replay(result, 0)
    assert replay.identical and len(replay.epochs) == 2


def test_replay_of_a_trial_without_an_epoch_gives_the_reason(data, tmp_path):
    result = search(data, tmp_path, ["nothing", "fail"], epochs=1)
    assert result.trials[1].epoch == 1  # what goes wrong comes later
    connection = sqlite3.connect(result.path / "run.sqlite")
    connection.execute("DELETE FROM metrics WHERE trial = 1")
    connection.execute("DELETE FROM epochs WHERE trial = 1")
    connection.execute("UPDATE trials SET error = 'ValueError: enough' WHERE number = 1")
    connection.commit()
    connection.close()
    with pytest.raises(cerebro.InputError, match=r"no epoch \(ValueError: enough\): nothing to"):
        cerebro.replay(tmp_path / "run", 1, build_eventful)


# --- what is known to be different ---------------------------------------------


def test_differences_are_reported_before_training(run, tmp_path, monkeypatch):
    """As errors they end the replay before a batch is seen, which would leave a file."""
    trained = tmp_path / "trained"
    source = SOURCE.replace(
        "    def train_batch(self, batch):\n",
        f"    def train_batch(self, batch):\n        open({str(trained)!r}, 'w').close()\n",
    )
    (tmp_path / "model_to_replay.py").write_text(source)
    del sys.modules["model_to_replay"]
    importlib.invalidate_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*was trained differently.*")
        with pytest.raises(UserWarning, match="model_to_replay"):
            cerebro.replay(run.path, 0)
    assert not trained.exists()
    with pytest.warns(UserWarning, match="was trained differently"):
        assert cerebro.replay(run.path, 0).identical
    assert trained.exists()


VARIABLES = [
    ("ATEN_CPU_CAPABILITY", "default"),
    ("MKL_ENABLE_INSTRUCTIONS", "SSE4_2"),
    ("ONEDNN_MAX_CPU_ISA", "SSE41"),
    ("OMP_SCHEDULE", "dynamic"),
    ("NPY_DISABLE_CPU_FEATURES", "AVX2"),
]


def test_variables_that_change_bits_are_named(run, monkeypatch):
    for name, value in VARIABLES:
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning) as caught:
        replay = cerebro.replay(run.path, 0)
    expected = [f"variables.{name} was absent, is {value}" for name, value in sorted(VARIABLES)]
    assert [line for line in replay.differences if line.startswith("variables")] == expected
    said = [str(warning.message) for warning in caught]
    for line in expected:
        assert any(text.endswith(line) for text in said)


def test_a_variable_set_between_two_searches_reaches_the_workers(data, tmp_path, monkeypatch):
    """Warm workers were started without it: they are not taken."""
    search(data, tmp_path, ["nothing"], epochs=1, workers=1)
    monkeypatch.setenv("OMP_SCHEDULE", "dynamic")
    result = search(data, tmp_path, ["nothing"], epochs=1, workers=1, run=tmp_path / "second")
    assert result.environment["variables"]["OMP_SCHEDULE"] == "dynamic"
    monkeypatch.delenv("OMP_SCHEDULE")
    result = search(data, tmp_path, ["nothing"], epochs=1, workers=1, run=tmp_path / "third")
    assert "OMP_SCHEDULE" not in result.environment["variables"]


def test_differences_of_the_machine_are_reported(run):
    connection = sqlite3.connect(run.path / "run.sqlite")
    (text,) = connection.execute("SELECT value FROM meta WHERE key = 'environment'").fetchone()
    record = json.loads(text)
    record["cpu"]["model"] = "Other CPU"
    record["cpu"]["features"] += " avx1024"
    record["gpu"] = "NVIDIA H100 80GB HBM3 (driver 550.54.15)"
    record["packages"]["numpy"] = "1.0"
    record["blas"] = "other-blas 1.0"
    record["libc"] = "glibc 1.0"
    record["threads"] = 7
    connection.execute("UPDATE meta SET value = ? WHERE key = 'environment'", [json.dumps(record)])
    connection.commit()
    connection.close()
    with pytest.warns(UserWarning):
        replay = cerebro.replay(run.path, 0)
    assert replay.identical
    text = "\n".join(replay.differences)
    for pattern in (
        "cpu.model was Other CPU, is ",
        "cpu.features differ: now without avx1024$",
        "gpu was NVIDIA H100 .*, is (None|.*)$",
        rf"packages.numpy was 1.0, is {re.escape(np.__version__)}",
        "blas was other-blas 1.0, is ",
        "libc was glibc 1.0, is ",
        "threads was 7, is 1",
    ):
        assert re.search(pattern, text, re.MULTILINE), pattern


def test_the_command_reports_differences_first(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["replay", str(run.path), "--trial", "0"]) == 0
    captured = capsys.readouterr()
    assert "was trained differently: variables.OMP_DYNAMIC was absent, is true" in captured.err
    assert "every state identical" in captured.out


def test_a_run_records_the_environment_of_its_workers(tmp_path):
    """Also where PyTorch is imported by workers only."""
    pytest.importorskip("torch")
    program = """
        import json, sys
        import numpy as np
        import cerebro

        def build(config):
            import torch
            net = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.mse_loss)

        x = np.ones((40, 2), "float32")
        data = cerebro.shard({"x": x, "y": x[:, :1]}, "data", shards=2)
        result = cerebro.search(build, {}, data, epochs=1, n_trials=1, batch_size=8, workers=1,
                                validation=0.25, progress=False, run="run")
        assert "torch" not in sys.modules
        record = json.dumps(result.environment)
        assert cerebro.replay("run", 0, build).differences == []
        print(record)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    record = json.loads(out.stdout)
    assert record["torch"]["default_dtype"] == "float32"
    assert record["torch_capability"]
    assert record["torch_libraries"]
    assert record["blas"] and record["libc"] is not None and "gpu" in record
    assert record["cpu"]["features"] and record["threads"] == 1
