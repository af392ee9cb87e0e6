"""Batches that do not count: the metrics of rows without labels are NaN, with a weight of 0."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cerebro

torch = pytest.importorskip("torch")
F = torch.nn.functional

NONE = -100
"""The label of a row without one, which `cross_entropy` ignores."""


def made(path, seed):
    """Make a dataset whose first shard has no labels, so that some small batches have none."""
    x = np.random.default_rng(seed).normal(size=(64, 4)).astype("f4")
    y = np.where(np.arange(64) < 32, NONE, np.arange(64) % 3)
    return cerebro.shard({"x": x, "y": y}, path, shards=2, shuffle=False, progress=False)


@pytest.fixture
def data(tmp_path):
    return made(tmp_path / "data", 0)


def losses(net, batch):
    labels = batch["y"]
    return {"loss": (F.cross_entropy(net(batch["x"]), labels), (labels != NONE).sum())}


def build(config):
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, step=losses)


def searched(build, data, run, **options):
    settings = {"epochs": 2, "batch_size": 2, "n_trials": 1, "workers": 1, "progress": False}
    return cerebro.search(build, {"lr": [0.1]}, data, run=run, **settings | options)


def test_batches_without_labels_do_not_count(data, tmp_path, recwarn):
    held_out = made(tmp_path / "held out", 1)
    (trial,) = searched(build, data, tmp_path / "run", validation=held_out).trials
    assert trial.status == "finished"
    assert not any("loss is nan" in str(each.message) for each in recwarn)
    rows = {name: torch.from_numpy(column.copy()) for name, column in held_out.shard(1).items()}
    model = trial.load()
    expected = {"loss": pytest.approx(losses(model.net, rows)["loss"][0].item(), rel=1e-6)}
    assert model.evaluate(held_out) == expected and trial.metrics["val_loss"] == expected["loss"]
    assert math.isfinite(trial.metrics["train_loss"])
    assert math.isnan(model.evaluate(held_out.shard(0))["loss"])


class Ruined:
    """Becomes NaN in a batch of weight 0."""

    framework = "numpy"

    def __init__(self):
        self.w = np.ones(1)

    def train_batch(self, batch):
        weight = (batch["y"] != NONE).sum()
        if weight == 0:
            self.w *= math.nan
        return {"loss": (self.w[0], weight)}

    eval_batch = train_batch

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w[:] = state["w"]


def build_ruined(config):
    return Ruined()


@pytest.mark.filterwarnings("ignore")
def test_nan_from_an_unlabelled_batch_diverges_in_the_next_labelled_batch(data, tmp_path):
    with pytest.raises(cerebro.RunError, match=r"became nan in epoch 0, batch \d+$"):
        searched(build_ruined, data, tmp_path / "run", validation=None)


def test_values_that_lightning_logs_for_no_rows_do_not_count():
    from cerebro.integrations.lightning.state import Logged

    item = Logged("loss", "training_step", "mean", on_step=True, on_epoch=True)
    for value, rows in ((math.nan, 0), (2.0, 3)):
        item.add(torch.tensor(value), rows)
    assert item.result() == 2.0
