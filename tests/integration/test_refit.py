"""After a search with folds: predictions out of fold, and the best configuration on all rows."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from resumable import hashes

import cerebro
from cerebro.errors import InputError


class Model:
    """Least squares, with noise of the trial's generator."""

    framework = "numpy"

    def __init__(self, config, info):
        self.lr = config["lr"]
        self.w = np.zeros(2)
        self.out = config.get("out", "values")

    def train_batch(self, batch):
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.lr * batch["x"].T @ error / len(error)
        self.w += 1e-3 * np.random.normal(size=2)
        return {"loss": float(np.mean(error**2))}

    def eval_batch(self, batch):
        return {"loss": float(np.mean((batch["x"] @ self.w - batch["y"]) ** 2))}

    def predict_batch(self, batch):
        values = batch["x"] @ self.w
        return values > 0 if self.out == "classes" else values

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


def build(config, info):
    return Model(config, info)


class Reporting(Model):
    """Reports what its configuration says; its training loss is best in epoch 1."""

    losses = (3.0, 1.0, 2.0, 4.0)

    def __init__(self, config, info):
        super().__init__(config, info)
        self.training, self.validation = config["training"], config["validation"]
        self.epoch = 0

    def begin_epoch(self, epoch):
        self.epoch = epoch

    def train_batch(self, batch):
        return {**dict.fromkeys(self.training, self.losses[self.epoch]), "odd": math.nan}

    def eval_batch(self, batch):
        return {**dict.fromkeys(self.validation, float(self.epoch)), "odd": 1.0}

    def state_dict(self):
        return {"w": self.w, "epoch": self.epoch}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch = state["epoch"]


def build_reporting(config, info):
    return Reporting(config, info)


def reporting(data, folder, training, validation, **settings):
    names = {"training": cerebro.choice([training]), "validation": cerebro.choice([validation])}
    return cerebro.search(
        build_reporting, {"lr": 0.1, **names}, data, n_trials=1, validation=cerebro.KFold(2),
        batch_size=8, workers=0, run=folder, progress=False, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(53, 2)).astype("float32")
    rows = {"x": x, "y": x @ [1.0, -2.0], "row": np.arange(53)}
    folder = tmp_path_factory.mktemp("data") / "set"
    whole = cerebro.shard(rows, folder, shards=3, progress=False)
    return whole.select(np.random.default_rng(1).permutation(53)[:47])  # with lists of rows


def searched(data, folder, validation, **settings):
    config = {"lr": [0.3, 0.01], **settings.pop("space", {})}
    given = {"epochs": 3, "searcher": "grid", "batch_size": 8, "workers": 0, **settings}
    return cerebro.search(
        *(build, config, data), validation=validation, run=folder, progress=False, **given
    )


def test_every_row_is_predicted_by_the_model_that_has_not_seen_it(data, tmp_path):
    kfold = cerebro.KFold(4, seed=3)
    best = searched(data, tmp_path / "run", kfold).best
    predicted = best.out_of_fold()
    assert predicted.shape == (47,)
    x = np.concatenate([data.shard(index)["x"] for index in range(3)])
    number = np.concatenate([data.shard(index)["row"] for index in range(3)])
    seen = []
    for fold, (_, held_out) in enumerate(kfold.split(data)):
        rows = np.concatenate([held_out.shard(index)["row"] for index in range(3)])
        at = [int(np.flatnonzero(number == row)[0]) for row in rows]
        np.testing.assert_array_equal(predicted[at], x[at] @ best.load(fold=fold).w)
        seen += at
    assert sorted(seen) == list(range(47))


def test_rows_that_no_fold_holds_out_are_nan(data, tmp_path):
    splitter = pytest.importorskip("sklearn.model_selection").TimeSeriesSplit(3)
    best = searched(data, tmp_path / "run", splitter).best
    missing = np.isnan(best.out_of_fold())
    assert missing.sum() == 47 - 3 * 11 and missing[: missing.sum()].all()
    classes = searched(data, tmp_path / "classes", splitter, space={"out": "classes"}).best
    with pytest.raises(InputError, match="14 rows are held out by no fold, and predictions of"):
        classes.out_of_fold()
    twice = pytest.importorskip("sklearn.model_selection").RepeatedKFold(n_splits=2, n_repeats=2)
    with pytest.raises(InputError, match="row 0 is held out by 2 folds"):
        searched(data, tmp_path / "twice", twice).best.out_of_fold()


def test_without_folds_there_is_nothing_out_of_fold(data, tmp_path):
    result = searched(data, tmp_path / "run", 0.2)
    with pytest.raises(InputError, match="trial 0 has no folds: out_of_fold needs"):
        result.trials[0].out_of_fold()
    with pytest.raises(InputError, match=r"without folds, the run's rows .*give data="):
        cerebro.refit(result)
    again = cerebro.refit(result, 1, epochs=2, data=data, progress=False)
    assert again.best.config == {"lr": 0.01} and again.best.epoch == 2
    assert again.path.name == "run-refit"


def test_refit_trains_the_best_configuration_on_all_rows(data, tmp_path):
    result = searched(data, tmp_path / "run", cerebro.KFold(3), space={"shape": [[2, 1]]})
    assert result.best.folds[0].status == "finished"
    refitted = cerebro.refit(result, progress=False)
    assert refitted.path == tmp_path / "run-refit"
    assert refitted.best.config == result.best.config == {"lr": 0.3, "shape": [2, 1]}
    assert refitted.best.epoch == result.best.best_epoch + 1
    assert sum(unit["rows"] for unit in refitted.units() if unit["epoch"] == 0) == 47
    assert cerebro.replay(refitted, 0, build).identical
    plain = cerebro.search(
        build, {"lr": 0.3, "shape": cerebro.choice([[2, 1]])}, data,
        epochs=refitted.best.epoch, n_trials=1, select="last", keep="last", batch_size=8,
        workers=0, run=tmp_path / "plain", progress=False, validation=None,
    )  # fmt: skip
    assert hashes(plain) == hashes(refitted)
    with pytest.raises(InputError, match="run-refit exists already"):
        cerebro.refit(result, progress=False)
    assert cerebro.refit(result, if_exists="new", progress=False).path.name == "run-refit-2"
    with pytest.raises(InputError, match="has no trial 7: it has 0 to 1"):
        cerebro.refit(result, 7)
    with pytest.raises(InputError, match="not one of its folds"):
        cerebro.refit(result, result.best.folds[0])


def test_the_refitted_model_is_that_of_the_last_epoch(data, tmp_path):
    result = reporting(data, tmp_path / "run", ["loss"], ["loss"], epochs=4)
    best = cerebro.refit(result, epochs=4, workers=0, progress=False).best
    assert [epoch["metrics"]["loss"] for epoch in best.history] == [3.0, 1.0, 2.0, 4.0]
    assert best.metrics["loss"] == 4.0
    assert best.load().epoch == 3
    assert best.evaluate(data) == {"loss": 3.0, "odd": 1.0}
    np.testing.assert_array_equal(best.predict(data), np.zeros(47))
    about = json.loads((best.save(tmp_path / "saved") / "model.json").read_text())
    assert (about["epoch"], about["state_hash"]) == (3, best.state_hash)


@pytest.mark.parametrize(
    ("training", "validation", "searched_by", "ranked_by"),
    [
        (["mse"], ["mse"], ("mse", None), ("mse", "min")),
        (["gain", "loss"], ["gain", "loss"], ("val_gain", "max"), ("gain", "max")),
        (["gain", "loss"], ["gain", "loss"], ("train_gain", "max"), ("gain", "max")),
        (["gain", "loss"], ["gain", "loss"], ("gain", "max"), ("gain", "max")),
        (["loss", "cost"], ["auroc"], ("auroc", None), ("loss", "min")),
        (["size", "gain"], ["auroc"], ("auroc", None), ("gain", "max")),
        (["mse"], ["mse"], ("odd", "max"), ("mse", "min")),
    ],
    ids=["its own", "val", "train", "own mode", "loss", "any", "finite"],
)
def test_refit_ranks_by_a_metric_of_training(
    data, tmp_path, training, validation, searched_by, ranked_by
):
    metric, mode = searched_by
    result = reporting(
        data, tmp_path / "run", training, validation, epochs=1, metric=metric, mode=mode
    )
    refitted = cerebro.refit(result, workers=0, progress=False)
    assert (refitted.metric, refitted.mode) == ranked_by
    assert refitted.best.status == "finished"
    assert refitted.best.metrics[refitted.metric] == 3.0


class Interrupting:
    def on_unit_end(self, trial, metrics):
        raise KeyboardInterrupt


def test_refit_of_a_trial_without_an_epoch_keeps_the_searchs_metric(data, tmp_path):
    """Its metrics are not known, but the search's is one that the model should report."""
    with pytest.raises(KeyboardInterrupt):
        reporting(
            data, tmp_path / "run", ["mse"], ["mse"], epochs=1, metric="val_mse",
            callbacks=[Interrupting()],
        )  # fmt: skip
    given = {"trial": 0, "build": build_reporting, "workers": 0, "progress": False}
    with pytest.raises(InputError, match="trial 0 has finished no epoch: give epochs="):
        cerebro.refit(tmp_path / "run", **given)
    refitted = cerebro.refit(tmp_path / "run", epochs=1, **given)
    assert (refitted.metric, refitted.mode) == ("mse", "min")
    assert refitted.best.status == "finished"
