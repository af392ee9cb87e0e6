"""The epoch that ranks a trial is the one that its metrics, its hash and its model are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
import cerebro.cli as cli
from cerebro.errors import InputError

LOSSES = (3.0, 1.0, 2.0, 4.0)
"""The validation losses of the epochs: the best is epoch 1."""


class Worsening:
    """A model whose state is the number of its last epoch, and of its fold."""

    framework = "numpy"

    def __init__(self, fold: int = 0) -> None:
        self.epoch, self.fold = 0, fold

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def train_batch(self, batch: Any) -> dict[str, float]:
        return {"loss": 0.5}

    def eval_batch(self, batch: Any) -> dict[str, float]:
        return {"loss": LOSSES[self.epoch] + 8 * self.fold}

    def predict_batch(self, batch: Any) -> Any:
        return np.full(len(batch["x"]), 10 * self.fold + self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": np.array([self.epoch])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = int(state["epoch"][0])


def build(config: dict[str, Any], info: Any) -> Worsening:
    return Worsening(info.fold or 0)


def build_of_study(trial: Any) -> Worsening:
    trial.suggest_float("lr", 0.1, 0.2)
    return Worsening()


def build_some_diverge(config: dict[str, Any]) -> Any:
    class Diverging(Worsening):
        def train_batch(self, batch: Any) -> dict[str, float]:
            return {"loss": np.nan if self.epoch == 2 else 0.5}

        def eval_batch(self, batch: Any) -> dict[str, float]:
            return {"loss": LOSSES[self.epoch] - 0.5}

    return Diverging() if config["diverges"] else Worsening()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.Dataset:
    rows = {"x": np.arange(24, dtype=np.float32), "y": np.zeros(24, np.float32)}
    return cerebro.shard(rows, tmp_path_factory.mktemp("data") / "set", shards=2, progress=False)


def search(data: cerebro.Dataset, folder: Path, **settings: Any) -> Any:
    given = {"epochs": 4, "validation": 0.25, "batch_size": 4, "workers": 0, **settings}
    return cerebro.search(build, {"lr": 0.1}, data, n_trials=1, run=folder, progress=False, **given)


@pytest.mark.parametrize(
    ("select", "keep", "epoch"),
    [("last", "best", 3), ("last", "last", 3), ("last", "all", 3), ("best", "best", 1)],
)
def test_the_loaded_model_matches_the_reported_metrics(data, tmp_path, select, keep, epoch):
    best = search(data, tmp_path / "run", select=select, keep=keep).best
    assert best.best_epoch == 1
    assert best.metrics["val_loss"] == LOSSES[epoch]
    assert best.state_hash == best.history[epoch]["state_hash"]
    assert best.load().epoch == best.load("best").epoch == epoch
    assert best.evaluate() == {"loss": best.metrics["val_loss"]}
    assert best.predict(data).tolist() == [epoch] * 24
    assert best.state_path().name == f"0-epoch-{epoch}.safetensors"
    best.save(tmp_path / "saved")
    about = json.loads((tmp_path / "saved" / "model.json").read_text())
    assert (about["epoch"], about["state_hash"]) == (epoch, best.state_hash)
    assert about["metrics"] == best.metrics
    exported = best.export(tmp_path / "default.safetensors").read_bytes()
    same = best.export(tmp_path / "numbered.safetensors", epoch=epoch).read_bytes()
    assert exported == same


def test_best_epoch_loads_the_epoch_with_the_best_metric_if_kept(data, tmp_path):
    kept = search(data, tmp_path / "kept", select="last").best
    assert kept.load(kept.best_epoch).epoch == 1
    assert kept.load("last").epoch == 3
    gone = search(data, tmp_path / "gone", select="last", keep="last").best
    with pytest.raises(InputError, match="trial 0 has no state of epoch 1; kept are 3"):
        gone.load(gone.best_epoch)


@pytest.mark.parametrize(("select", "epoch"), [("last", 3), ("best", 1)])
def test_folds_use_the_selected_epoch_of_their_configuration(data, tmp_path, select, epoch):
    folds = cerebro.KFold(3, seed=1)
    best = search(data, tmp_path / "run", select=select, validation=folds).best
    assert best.metrics["val_loss"] == LOSSES[epoch] + 8
    for fold in best.folds:
        assert fold.load().epoch == best.load(fold=fold.fold).epoch == epoch
        assert fold.evaluate() == {"loss": fold.metrics["val_loss"]}
        assert fold.state_path().name == f"{fold.number}-epoch-{epoch}.safetensors"
    expected = np.empty(24)
    x = np.concatenate([data.shard(index)["x"] for index in range(2)])
    for fold, (_, held_out) in enumerate(folds.split(data)):
        rows = np.concatenate([held_out.shard(index)["x"] for index in range(2)])
        expected[np.isin(x, rows)] = 10 * fold + epoch
    np.testing.assert_array_equal(best.out_of_fold(), expected)


def test_the_best_model_of_a_study_matches_its_best_value(data, tmp_path):
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    best = cerebro.optuna.optimize(
        study, build_of_study, data, epochs=4, n_trials=1, validation=0.25, batch_size=4,
        workers=0, run=tmp_path / "run", progress=False,
    ).best  # fmt: skip
    assert study.best_value == best.metrics["loss"] == best.evaluate()["loss"] == 4.0
    assert best.load().epoch == 3 and best.load(best.best_epoch).epoch == 1


def test_compare_names_the_epoch_of_the_value(data, tmp_path, capsys):
    for select in ("best", "last"):
        search(data, tmp_path / select, select=select)
    assert cli.main(["compare", str(tmp_path / "best"), str(tmp_path / "last"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert found["best value"] == [1.0, 4.0]
    assert found["best epoch"] == [2, 4]


def test_a_trial_that_diverges_later_is_ranked_by_its_finished_epochs(
    data: Any, tmp_path: Path
) -> None:
    result = cerebro.search(
        build_some_diverge, {"diverges": [False, True]}, data, epochs=4, validation=data,
        batch_size=8, searcher="grid", run=tmp_path / "run", workers=0, progress=False,
    )  # fmt: skip
    best = result.best
    assert (best.number, best.status, best.epoch, best.best_epoch) == (1, "diverged", 2, 1)
    assert [trial.number for trial in result.top(2)] == [1, 0]
    assert best.metrics["loss"] == best.evaluate(data)["loss"] == 0.5
    assert best.load().epoch == 1
