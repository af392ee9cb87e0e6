"""`cerebro.ray.trainable` under Tune's own Tuner, on one small cluster."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tune_models import build, build_or_fail, build_settings, line_data

import cerebro
from cerebro.errors import InputError

pytest.importorskip("ray.tune")
pytest.importorskip("pandas")
import ray
from ray import tune
from ray.tune import schedulers

from cerebro.ray import trainable

OPTIONS: dict[str, Any] = {"validation": 0.25, "batch_size": 16, "workers": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.Dataset:
    return line_data(tmp_path_factory.mktemp("line") / "data", rows=96, shards=3)


def run_config(folder: Path, iterations: int, **more: Any) -> Any:
    stop = {"training_iteration": iterations}
    return tune.RunConfig(storage_path=str(folder), name="exp", stop=stop, verbose=0, **more)


class Watch(tune.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.results: list[tuple[str, int]] = []

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: Any, **_: Any
    ) -> None:
        self.results.append((trial.trial_id, result["training_iteration"]))


class KillEngine(tune.Callback):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self.name = name
        self.killed = False

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: Any, **_: Any
    ) -> None:
        if result["training_iteration"] == 2 and not self.killed:
            self.killed = True
            ray.kill(ray.get_actor(self.name), no_restart=False)


def test_a_tuner_trains_what_a_search_trains(
    cluster: str, data: cerebro.Dataset, tmp_path: Path
) -> None:
    watch = Watch()
    results = tune.Tuner(
        trainable(build_or_fail, data, **OPTIONS),
        param_space={"lr": tune.grid_search([0.01, 0.3, 0.1])},
        run_config=run_config(tmp_path, 3, callbacks=[watch]),
    ).fit()
    assert len(results) == 3 and results.num_errors == 1
    assert "failed: ValueError: too fast" in str(results.errors[0])
    good = [result for result in results if result.error is None]
    assert sorted(t for _, t in watch.results) == [1, 1, 2, 2, 3, 3]
    by_number = {result.metrics["cerebro_trial"]: result for result in good}
    run = cerebro.open(tmp_path / "exp" / "cerebro", build=build_or_fail)
    for number, result in by_number.items():
        metrics, trial = result.metrics, run.trials[number]
        assert trial.config == result.config
        assert metrics["loss"] == metrics["val_loss"] == trial.history[-1]["metrics"]["loss"]
        assert metrics["train_loss"] == trial.history[-1]["metrics"]["train_loss"]
        assert metrics["state_hash"] == trial.history[-1]["state_hash"]
        assert list(result.metrics_dataframe["loss"]) == [
            epoch["metrics"]["loss"] for epoch in trial.history
        ]
        files = sorted(Path(result.checkpoint.path).iterdir())
        assert [file.name for file in files] == ["cerebro.json"]
        assert json.loads(files[0].read_text())["point"] == {
            "trial": number, "epoch": 2, "state_hash": trial.history[-1]["state_hash"],
        }  # fmt: skip
    best = results.get_best_result("loss", "min")
    assert best.config == {"lr": 0.1}
    assert run.trials[best.metrics["cerebro_trial"]].load().w.shape == (3,)
    searched = cerebro.search(
        build_or_fail, {"lr": [trial.config["lr"] for trial in run.trials]}, data, searcher="grid",
        epochs=3, validation=0.25, batch_size=16, workers=1, progress=False, run=tmp_path / "own",
    )  # fmt: skip
    # Not workers=0: Ray's threads in this process may draw from its generators, which are part of
    # a trial's state.
    assert [t.state_hash for t in run.trials] == [t.state_hash for t in searched.trials]


def test_workers_have_the_settings_of_the_script(
    cluster: str, data: cerebro.Dataset, tmp_path: Path
) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    torch.set_default_dtype(torch.float64)
    jax.config.update("jax_enable_x64", True)
    try:
        work = trainable(build_settings, data, **OPTIONS)
    finally:
        torch.set_default_dtype(torch.float32)
        jax.config.update("jax_enable_x64", False)
    results = tune.Tuner(work, param_space={"lr": 0.1}, run_config=run_config(tmp_path, 1)).fit()
    assert results.num_errors == 0
    metrics = results[0].metrics
    assert (metrics["doubles"], metrics["x64"]) == (1.0, 1.0)
    environment = cerebro.open(tmp_path / "exp" / "cerebro").environment
    assert environment["torch"]["default_dtype"] == "float64"
    assert environment["jax"]["enable_x64"] is True


def test_an_engine_that_dies_costs_nothing(
    cluster: str, data: cerebro.Dataset, tmp_path: Path
) -> None:
    work = trainable(build, data, **OPTIONS)
    kill = KillEngine(work.spec.name)
    results = tune.Tuner(
        work,
        param_space={"lr": tune.grid_search([0.01, 0.1])},
        run_config=run_config(tmp_path, 5, callbacks=[kill]),
    ).fit()
    assert kill.killed and results.num_errors == 0
    assert [result.metrics["training_iteration"] for result in results] == [5, 5]
    run = cerebro.open(tmp_path / "exp" / "cerebro", build=build)
    assert [len(trial.history) for trial in run.trials] == [5, 5]
    for result in results:
        trial = run.trials[result.metrics["cerebro_trial"]]
        assert list(result.metrics_dataframe["state_hash"]) == [
            epoch["state_hash"] for epoch in trial.history
        ]
        assert cerebro.replay(run, trial.number, build).identical


def test_hyperband_pauses_trials_by_their_tokens(
    cluster: str, data: cerebro.Dataset, tmp_path: Path
) -> None:
    """With actors that stand for one trial after another, and resources of the user's."""
    results = tune.Tuner(
        tune.with_resources(trainable(build, data, **OPTIONS), {"cpu": 0, "memory": 1e8}),
        param_space={"lr": tune.grid_search([0.001, 0.01, 0.02, 0.03, 0.05, 0.1]), "net": (8, 8)},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            scheduler=schedulers.HyperBandScheduler(max_t=4, reduction_factor=2),
            reuse_actors=True,
        ),
        run_config=run_config(tmp_path, 4),
    ).fit()
    assert results.num_errors == 0 and len(results) == 6
    run = cerebro.open(tmp_path / "exp" / "cerebro", build=build)
    assert len(run.trials) == 6 and all(trial.parent is None for trial in run.trials)
    # A bracket of 3 trains to the end at once; of one of 3 that pause at 2 epochs 2 go on.
    assert sorted(len(trial.history) for trial in run.trials) == [2, 4, 4, 4, 4, 4]
    for result in results:
        trial = run.trials[result.metrics["cerebro_trial"]]
        assert trial.config == result.config and trial.config["net"] == (8, 8)
        assert result.metrics["state_hash"] == trial.history[-1]["state_hash"]


def test_unsupported_arguments_are_refused(
    cluster: str, data: cerebro.Dataset, tmp_path: Path
) -> None:
    for arguments, message in (
        ({"n_trials": 3}, "n_trials= is not an argument of cerebro.ray.trainable"),
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"executor": "auto"}, "executor must be a cerebro.ray.Executor, not 'auto'"),
        ({"executor": cerebro.ray.Executor()}, "give either workers= or executor="),
        ({"epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"validation": cerebro.KFold(3)}, "a trial of Tune has one model, but folds need several"),
        ({"validation": 2.0}, "validation must be a"),
    ):
        with pytest.raises(InputError, match=message):
            trainable(build, data, **{**OPTIONS, **arguments})
    with pytest.raises(InputError, match="build must be a function"):
        trainable("build", data)
    lock = threading.Lock()
    with pytest.raises(InputError, match="build cannot be sent to worker processes"):
        trainable(lambda config: lock, data)
    tuner = tune.Tuner(
        trainable(build, data, **{**OPTIONS, "workers": 5}),
        param_space={"lr": 0.1},
        run_config=run_config(tmp_path, 1),
    )
    with pytest.raises(Exception, match="need 5 CPUs, but Ray has 2 on this node: give workers=2"):
        tuner.fit()
