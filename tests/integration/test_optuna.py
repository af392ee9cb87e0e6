"""Optuna in front: any study, trained by Cerebro."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro.errors import InputError, RunError

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

EPOCHS = 4


class LeastSquares:
    framework = "numpy"

    def __init__(self, lr, decay=0.0):
        self.w = np.zeros(3)
        self.lr = lr
        self.decay = decay

    def train_batch(self, batch):
        x, y = batch["x"], batch["y"]
        error = x @ self.w - y
        step = x.T @ error / len(y) + self.decay * self.w + 0.05 * np.random.normal(size=3)
        self.w = self.w - self.lr * step
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


def build(trial):
    lr = trial.suggest_float("lr", 0.003, 0.5, log=True)
    if trial.suggest_categorical("regularised", [False, True]):
        return LeastSquares(lr, trial.suggest_float("decay", 0.0, 0.1))
    return LeastSquares(lr)


def build_some_fail(trial):
    model = build(trial)
    if model.lr > 0.1:
        raise ValueError("too fast")
    return model


def build_with_info(trial, info):
    return LeastSquares(trial.suggest_float("lr", 0.003, 0.5, log=True) / info.epochs)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=240)
    return cerebro.shard({"x": x, "y": y}, tmp_path_factory.mktemp("data") / "set", shards=3)


def new_study(pruner=None, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=1, n_startup_trials=4, multivariate=True)
    return optuna.create_study(
        study_name="test", sampler=sampler, pruner=pruner or optuna.pruners.NopPruner(), **kwargs
    )


def optimize(study, data, the_build=build, **settings):
    options = {
        "epochs": EPOCHS, "n_trials": 8, "validation": 0.25, "batch_size": 10, "workers": 0,
        "width": 3, "progress": False,
    }  # fmt: skip
    return cerebro.optuna.optimize(study, the_build, data, **{**options, **settings})


def content(study):
    return [
        (t.number, t.params, t.state.name, t.value, t.intermediate_values) for t in study.trials
    ]


def test_the_study_is_the_same_with_any_number_of_workers(data, tmp_path):
    found = []
    for workers in (0, 1, 3):
        study = new_study(optuna.pruners.PercentilePruner(30.0, n_startup_trials=2))
        optimize(study, data, workers=workers, n_trials=14, run=tmp_path / f"run-{workers}")
        found.append(content(study))
    assert found[0] == found[1] == found[2]
    assert {state for _, _, state, _, _ in found[0]} == {"COMPLETE", "PRUNED"}


def test_rows_are_taken_in_place_of_a_dataset(data, tmp_path, monkeypatch):
    rows = {name: np.concatenate([data.shard(n)[name] for n in range(3)]) for name in ("x", "y")}
    found = []
    for number, given in enumerate([rows, cerebro.shard(rows, tmp_path / "set", progress=False)]):
        study = new_study()
        run = tmp_path / f"run{number}"
        result = optimize(study, data=given, n_trials=3, run=run, seed=3)
        found.append((len(result), [t.params for t in study.trials], [t.epoch for t in result]))
        assert study.trials[0].system_attrs["cerebro"]["run"] == str(run)
    assert found[0] == found[1]
    monkeypatch.chdir(tmp_path)
    again = optimize(new_study(), rows, n_trials=2)  # in a folder of its own
    assert (again.path / "data").is_dir() and len(again) == 2


def test_study_and_result_agree(data, tmp_path):
    study = new_study()
    result = optimize(study, data, run=tmp_path / "run")
    assert study.best_trial.params == result.best.config
    assert study.best_value == result.best.metrics["loss"]
    for trial in study.trials:
        mine = result.trials[trial.system_attrs["cerebro"]["trial"]]
        losses = [epoch["metrics"]["loss"] for epoch in mine.history]
        assert list(trial.intermediate_values.values()) == losses
        assert list(trial.intermediate_values) == list(range(EPOCHS))
    assert result.best.load().w.shape == (3,)


def test_an_optuna_run_can_be_reopened_and_replayed(data, tmp_path):
    run = optimize(new_study(), data, n_trials=2, run=tmp_path / "run").path
    for given in (None, build):  # imported again, or handed over: both are called with a trial
        best = cerebro.open(run, build=given).best
        assert best.load().w.tolist() == best.load(build=given).w.tolist()
        assert best.evaluate()["loss"] == best.metrics["val_loss"]
        assert cerebro.replay(run, best.number, given).identical


class Interrupting:
    def on_epoch_end(self, trial, metrics):
        if trial.number == 1:
            raise KeyboardInterrupt


def test_an_interrupt_message_explains_how_to_resume(data, tmp_path):
    run, again = tmp_path / "run", r"cerebro\.optuna\.optimize\(\.\.\.\) as before, with run="
    study = new_study()
    with pytest.raises(KeyboardInterrupt, match=again):
        optimize(study, data, n_trials=4, run=run, run_callbacks=[Interrupting()])
    with pytest.raises(InputError, match=again):
        cerebro.resume(run, build)
    assert optimize(study, data, n_trials=4, run=run).status == "finished"


@pytest.mark.parametrize("maximise", [False, True])
def test_the_direction_comes_from_the_study(data, tmp_path, maximise):
    study = new_study(direction="maximize" if maximise else "minimize")
    result = optimize(study, data, run=tmp_path / "run")
    values = [trial.value for trial in study.trials]
    assert study.best_value == (max(values) if maximise else min(values))
    assert result.best.metrics["loss"] == study.best_value


def test_callbacks_stop_studies_of_all_samplers_and_pruners(data, tmp_path):
    seen = []

    def callback(study, trial):
        seen.append(trial.number)
        if len(seen) == 5:
            study.stop()

    for number, (sampler, pruner) in enumerate(
        [
            (optuna.samplers.RandomSampler(seed=2), optuna.pruners.PercentilePruner(30.0, 2)),
            (optuna.samplers.QMCSampler(seed=2), optuna.pruners.SuccessiveHalvingPruner()),
            (optuna.samplers.TPESampler(seed=2), optuna.pruners.HyperbandPruner(1, EPOCHS)),
        ]
    ):
        seen.clear()
        study = optuna.create_study(sampler=sampler, pruner=pruner)
        optimize(study, data, run=tmp_path / f"run-{number}", n_trials=None, callbacks=[callback])
        assert len(seen) == len(study.trials)
        assert 5 <= len(seen) <= 5 + 2  # those in flight are finished
        assert all(trial.state.is_finished() for trial in study.trials)


def test_max_trials_callback_ends_the_study(data, tmp_path):
    study = new_study()
    stop = optuna.study.MaxTrialsCallback(4)
    optimize(study, data, n_trials=None, callbacks=[stop], width=1, run=tmp_path / "run")
    assert len(study.trials) == 4


def test_enqueued_trials_come_first(data, tmp_path):
    study = new_study()
    study.enqueue_trial({"lr": 0.0625, "regularised": False})
    result = optimize(study, data, n_trials=2, run=tmp_path / "run")
    assert result.trials[0].config == {"lr": 0.0625, "regularised": False}


def test_build_may_take_info_and_define_avoids_building_models(data, tmp_path):
    study = new_study()
    optimize(study, data, build_with_info, n_trials=3, run=tmp_path / "info")
    built = []

    def build_once(trial):
        built.append(os.getpid())
        return build(trial)

    def define(trial):
        trial.suggest_float("lr", 0.003, 0.5, log=True)
        trial.suggest_categorical("regularised", [False])

    study = new_study()
    optimize(study, data, build_once, define=define, n_trials=3, workers=1, run=tmp_path / "define")
    assert built == []  # here: workers have copies of their own
    assert [set(trial.params) for trial in study.trials] == [{"lr", "regularised"}] * 3


def test_failures_are_caught_or_end_the_study(data, tmp_path):
    study = new_study()
    with pytest.raises(ValueError, match="too fast"):
        optimize(study, data, build_some_fail, run=tmp_path / "raised")
    assert study.trials[-1].state.name == "FAIL"
    assert all(trial.state.is_finished() for trial in study.trials)
    study = new_study()
    optimize(study, data, build_some_fail, catch=ValueError, run=tmp_path / "caught")
    states = [trial.state.name for trial in study.trials]
    assert len(states) == 8 and set(states) == {"FAIL", "COMPLETE"}


def test_a_time_limit_stops_the_search(data, tmp_path):
    study = new_study()
    result = optimize(study, data, run=tmp_path / "run", time_limit=0.001)
    assert result.status == "stopped"
    assert all(trial.status != "finished" for trial in result.trials)


def test_optimize_fails_if_every_trial_is_pruned_in_build(data, tmp_path):
    def pruned(trial):
        raise optuna.TrialPruned

    for ends in ({"n_trials": 3}, {"n_trials": None, "timeout": 0.1}):
        study = new_study()
        with pytest.raises(InputError, match="suggests no trial"):
            optimize(study, data, pruned, run=tmp_path / str(len(ends)), **ends)
        assert {trial.state.name for trial in study.trials} == {"PRUNED"}
        assert ends["n_trials"] in (None, len(study.trials))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"the_build": None}, "build must be a function that makes a model.*not NoneType"),
        ({"define": 5}, "define must be a function, not 5"),
        ({"callbacks": 5}, "callbacks must be a list of functions, not 5"),
        ({"catch": ["ValueError"]}, "catch must be a list of exceptions' classes, not"),
        ({"timeout": 0}, "timeout must be above 0, not 0"),
        ({"n_trials": 0}, "n_trials must be a whole number of at least 1, not 0"),
    ],
)
def test_wrong_arguments_are_named_before_the_study_is_asked(data, tmp_path, wrong, message):
    study = new_study()
    with pytest.raises(InputError, match=message):
        optimize(study, data, run=tmp_path / "run", **wrong)
    assert not study.trials and not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=r"study must be an optuna\.Study, not 'test'"):
        optimize("test", data)


class Explodes(LeastSquares):
    def train_batch(self, batch):
        if self.lr > 0.05:
            raise ValueError("exploded")
        return super().train_batch(batch)


def build_explosive(trial):
    return Explodes(trial.suggest_float("lr", 0.003, 0.5, log=True))


def test_failures_while_training_are_caught_or_end_the_study(data, tmp_path):
    study = new_study()
    with pytest.raises(RunError, match=r"ValueError: exploded"):
        optimize(study, data, build_explosive, run=tmp_path / "raised")
    assert all(trial.state.is_finished() for trial in study.trials)
    study = new_study()
    optimize(study, data, build_explosive, catch=(ValueError,), run=tmp_path / "caught")
    assert {trial.state.name for trial in study.trials} == {"FAIL", "COMPLETE"}


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import cerebro, test_optuna

class Kill:
    def on_epoch_end(self, trial, metrics):
        if trial.number == 3 and trial.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

study = test_optuna.new_study(storage={storage!r}, load_if_exists=True)
test_optuna.optimize(study, cerebro.Dataset({data!r}), run={run!r}, workers=2,
                     run_callbacks=[Kill()] if sys.argv[1] == "kill" else [])
"""


def test_a_killed_study_resumes_and_leaves_no_trial_running(data, tmp_path):
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.format(
            tests=str(Path(__file__).parent),
            storage=storage,
            data=str(data.path),
            run=str(tmp_path / "run"),
        )
    )
    killed = subprocess.run([sys.executable, str(script), "kill"], check=False)
    assert killed.returncode == -9
    study = optuna.load_study(study_name="test", storage=storage)
    assert any(not trial.state.is_finished() for trial in study.trials)
    subprocess.run([sys.executable, str(script), "go on"], check=True)
    undisturbed = new_study()
    optimize(undisturbed, data, run=tmp_path / "undisturbed")
    study = optuna.load_study(study_name="test", storage=storage)
    done = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    assert all(trial.state.is_finished() for trial in study.trials)
    assert len(done) == 8
    assert {t.number for t in done} == {t.number for t in study.trials}
    result = cerebro.open(tmp_path / "run")
    for trial in done[:3]:  # begun before the kill: the sampler had the same past
        twin = undisturbed.trials[trial.number]
        assert (trial.params, trial.value) == (twin.params, twin.value)
    assert result.status == "finished"


def test_an_interrupted_study_has_no_trial_left_running(data, tmp_path):
    class Interrupt:
        def on_epoch_end(self, trial, metrics):
            if trial.number == 2 and trial.epoch == 2:
                raise KeyboardInterrupt

    study = new_study()
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        optimize(study, data, run=run, run_callbacks=[Interrupt()])
    assert all(trial.state.is_finished() for trial in study.trials)
    optimize(study, data, run=run)
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    assert len(complete) == 8
    assert all(list(trial.intermediate_values) == list(range(EPOCHS)) for trial in complete)


# --- the same run with another n_trials --------------------------------------------


def test_a_larger_n_trials_adds_the_difference(data, tmp_path):
    """After the run's end, the study is that of one call; also after an interruption."""

    class Interrupt:
        def on_epoch_end(self, trial, metrics):
            if trial.number == 2 and trial.epoch == 2:
                raise KeyboardInterrupt

    whole = new_study()
    optimize(whole, data, n_trials=9, run=tmp_path / "whole")
    study, cut = new_study(), new_study()
    optimize(study, data, n_trials=3, run=tmp_path / "run")
    assert len(study.trials) == 3
    with pytest.raises(KeyboardInterrupt):
        optimize(cut, data, n_trials=3, run=tmp_path / "cut", run_callbacks=[Interrupt()])
    for each, folder in ((study, tmp_path / "run"), (cut, tmp_path / "cut")):
        result = optimize(each, data, n_trials=9, run=folder)
        assert result.status == "finished" and len(result.trials) == 9
        done = [trial for trial in each.trials if trial.state.name == "COMPLETE"]
        assert sorted(trial.system_attrs["cerebro"]["trial"] for trial in done) == list(range(9))
        units = len(result.units())
        assert len(optimize(each, data, n_trials=9, run=folder).units()) == units
    assert content(study) == content(whole)


def build_every_third_is_pruned(trial):
    model = build(trial)
    if trial.number % 3 == 2:
        raise optuna.TrialPruned
    return model


def test_trials_pruned_in_build_count_toward_n_trials(data, tmp_path):
    study = new_study()
    options = {"the_build": build_every_third_is_pruned, "run": tmp_path / "run"}
    assert len(optimize(study, data, n_trials=6, **options).trials) == 4
    assert len(optimize(study, data, n_trials=6, **options).trials) == 4
    with pytest.warns(UserWarning, match="n_trials=5, but the run .* has added 6 trials"):
        optimize(study, data, n_trials=5, **options)
    assert len(optimize(study, data, n_trials=9, **options).trials) == 6
    assert [t.state.name for t in study.trials] == ["COMPLETE", "COMPLETE", "PRUNED"] * 3


def test_n_trials_below_the_existing_number_warns(data, tmp_path):
    study = new_study()
    optimize(study, data, n_trials=3, run=tmp_path / "run")
    with pytest.warns(UserWarning, match=r"n_trials=2, but the run .* has added 3 .*another run="):
        optimize(study, data, n_trials=2, run=tmp_path / "run")
    assert len(study.trials) == 3


def test_a_study_that_stopped_itself_resumes_only_with_a_different_n_trials(data, tmp_path):
    def stop(study, trial):
        study.stop()

    study, options = new_study(), {"width": 1, "run": tmp_path / "run"}
    optimize(study, data, n_trials=5, callbacks=[stop], **options)
    optimize(study, data, n_trials=5, **options)
    assert len(study.trials) == 1
    optimize(study, data, n_trials=None, callbacks=[stop], **options)
    optimize(study, data, n_trials=None, **options)
    assert len(study.trials) == 2
    optimize(study, data, n_trials=4, **options)
    assert len(study.trials) == 4


def test_trials_are_not_added_to_another_study(data, tmp_path):
    optimize(new_study(), data, n_trials=3, run=tmp_path / "run")
    other = new_study()
    with pytest.raises(InputError, match=r"does not have trial 0 of the run .*: give the run's"):
        optimize(other, data, n_trials=4, run=tmp_path / "run")
    assert other.trials == []


def test_an_unsupported_study_is_refused(data, tmp_path):
    study = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(InputError, match=r"must be an optuna.Study, not 'study': .*create_study"):
        optimize("study", data)
    with pytest.raises(InputError, match=r"several objectives.*direction= instead of directions="):
        optimize(study, data, run=tmp_path / "run")
