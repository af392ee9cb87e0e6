"""`cerebro.replay` finds what was changed on purpose, and where it shows first."""

from __future__ import annotations

import importlib
import json
import shutil
import sqlite3
import sys

import numpy as np
import pytest

import cerebro

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


def test_nothing_changed(run):
    replay = cerebro.replay(run.path, 1)
    assert replay.identical
    assert replay.differences == []
    assert "every state identical" in str(replay)


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
    assert any("not the data set" in text for text in replay.differences)


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


def test_a_trial_that_does_not_exist(run):
    with pytest.raises(cerebro.InputError, match="has no trial 7: it has 0 to 1"):
        cerebro.replay(run.path, 7)


@pytest.mark.parametrize("epochs", [0, -1, 1.5])
def test_a_number_of_epochs_that_makes_no_sense(run, epochs):
    with pytest.raises(cerebro.InputError, match="epochs must be a whole number of at least 1"):
        cerebro.replay(run.path, 0, epochs=epochs)
