"""Searches with folds: real runs, compared with each other bit for bit."""

from __future__ import annotations

import importlib.util
import math
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resumable
from adaptive_searchers import Halving, Population, Recorded
from resumable import hashes, struck

import cerebro
from cerebro import DONE, Decision, KFold, Suggestion
from cerebro.errors import CorruptDataError, InputError, RunError
from cerebro.report.summary import render_trial

SHARDS, FOLDS, EPOCHS, TRIALS = 3, 3, 3, 3
SPACE = {"lr": cerebro.loguniform(1e-2, 1e-1)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(130, 3))
    columns = {"x": x, "y": x @ [1.0, -1.0, 0.5], "group": np.repeat(np.arange(13), 10)}
    return cerebro.shard(columns, tmp_path_factory.mktemp("data") / "set", shards=SHARDS)


def search(folder, data, **settings):
    settings = {"validation": KFold(FOLDS, seed=2), "n_trials": TRIALS, **settings}
    return resumable.search(folder, data.path, **settings)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The run that nobody disturbs, inline."""
    return search(tmp_path_factory.mktemp("runs") / "whole", data, keep="all")


def fold_hashes(result):
    return [[[e["state_hash"] for e in f.history] for f in t.folds] for t in result.trials]


def assert_same(result, other):
    assert [t.status for t in result.trials] == [t.status for t in other.trials]
    assert fold_hashes(result) == fold_hashes(other)
    assert hashes(result) == hashes(other)
    assert [[e["metrics"] for e in t.history] for t in result.trials] == [
        [e["metrics"] for e in t.history] for t in other.trials
    ]
    assert result.best.number == other.best.number
    assert result.verify(), str(result.verify())


# --- what users see ----------------------------------------------------------


def test_each_trial_is_a_configuration_averaged_over_its_folds(whole):
    assert whole.status == "finished"
    assert [trial.number for trial in whole.trials] == [0, 1, 2]
    for trial in whole.trials:
        assert (trial.status, trial.epoch, trial.fold) == ("finished", EPOCHS, None)
        assert [fold.number for fold in trial.folds] == [3 * trial.number + f for f in range(3)]
        assert [fold.fold for fold in trial.folds] == [0, 1, 2]
        assert all(fold.config == trial.config and fold.folds == [] for fold in trial.folds)
        for name in ("loss", "val_loss", "train_loss"):
            values = [fold.metrics[name] for fold in trial.folds]
            assert trial.metrics[name] == math.fsum(values) / FOLDS
            assert trial.metrics[f"{name}_std"] == pytest.approx(np.std(values), rel=1e-12)
    assert whole.best.metrics["loss"] == min(t.metrics["loss"] for t in whole.trials)
    assert len({hash for trial in fold_hashes(whole) for fold in trial for hash in fold}) == 27
    assert "loss_std" not in whole.trials[0].folds[0].metrics
    assert whole.top(2)[0].number == whole.best.number


def test_a_fold_is_trained_on_what_it_does_not_hold_out(whole, data):
    """Each fold is a plain search over the two views, but for its number."""
    train, held_out = KFold(FOLDS, seed=2).split(data)[1]
    fold = whole.trials[0].folds[1]
    model = fold.load("last", resumable.build)
    expected = [model.eval_batch({n: data_of(held_out, n) for n in "xy"})["loss"]]
    assert fold.history[-1]["metrics"]["val_loss"] == pytest.approx(expected[0], rel=1e-12)
    units = [u for u in whole.units() if (u["trial"], u["fold"], u["epoch"]) == (0, 1, 0)]
    rows = {u["part"]: u["rows"] for u in units if u["kind"] == "train"}
    assert sorted(rows) == list(range(SHARDS))
    assert sum(rows.values()) == len(train)
    assert [u["rows"] for u in units if u["kind"] == "eval"] == [len(held_out)]


def data_of(view, name):
    return np.concatenate([np.array(view.shard(i)[name]) for i in range(view.num_shards)])


def test_seeds_depend_on_the_fold_number(data, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()

    def build(config, info):
        (seen / f"{info.trial}-{info.fold}-{info.seed}").touch()
        assert info.data.num_rows in (86, 87)
        return resumable.Model(config, info)

    search(tmp_path / "run", data, build=build, n_trials=2, epochs=1)
    expected = {f"{t}-{t % 3}-{cerebro.trial_seed(3, t)}" for t in range(6)}
    assert {path.name for path in seen.iterdir()} == expected


def test_evaluate_returns_the_recorded_metric(whole):
    for fold in whole.best.folds:
        assert fold.evaluate(build=resumable.build)["loss"] == fold.metrics["val_loss"]


def test_models_are_loaded_per_fold(whole, tmp_path):
    trial = whole.best
    model = trial.load("last", resumable.build, fold=2)
    np.testing.assert_array_equal(model.w, trial.folds[2].load("last", resumable.build).w)
    assert trial.folds[2].state_path(0).exists()
    calls = [trial.load, trial.evaluate, trial.state_path, lambda: trial.export(tmp_path / "x")]
    for call in calls:
        with pytest.raises(InputError, match=r"has 3 folds, each with its own model: use one"):
            call()
    with pytest.raises(InputError, match="has no fold 3: it has 0 to 2"):
        trial.load(fold=3)
    with pytest.raises(InputError, match=r"has no folds: leave out fold="):
        trial.folds[0].load(fold=0)
    assert trial.log == ""


def test_summaries_show_configurations_with_deviations(whole):
    text = whole.summary()
    assert "±" in text
    assert text.partition("best:")[0].count("\n") < 8  # configurations, not folds
    shown = render_trial(whole.trials[1])
    assert "fold  number  status" in shown
    assert whole.trials[1].folds[2].state_hash in shown
    assert "3 folds" in repr(whole.trials[1])
    frame = pytest.importorskip("pandas") and whole.to_dataframe()
    assert len(frame) == TRIALS
    assert "metrics.loss_std" in frame.columns


def test_logs_separate_the_output_of_each_fold(data, tmp_path):
    def build(config, info):
        print("I am", info.fold)
        return resumable.Model(config, info)

    result = search(tmp_path / "run", data, build=build, n_trials=1, epochs=1)
    assert result.trials[0].log == "".join(f"--- fold {f}\nI am {f}\n" for f in range(3))
    assert (result.path / "trials" / "2.log").read_text() == "I am 2\n"


class Heard:
    def __init__(self):
        self.calls = []

    def on_trial_start(self, trial):
        self.calls.append(("start", trial.number, len(trial.folds)))

    def on_unit_end(self, trial, metrics):
        self.calls.append(("unit", trial.number, trial.fold))

    def on_epoch_end(self, trial, metrics):
        assert metrics["loss_std"] >= 0
        assert trial.history[-1]["metrics"] == metrics
        self.calls.append(("epoch", trial.number, trial.epoch))

    def on_trial_end(self, trial):
        assert [fold.status for fold in trial.folds] == ["finished"] * FOLDS
        self.calls.append(("end", trial.number, trial.status))


def test_callbacks_receive_configurations_and_fold_units(data, tmp_path):
    heard = Heard()
    search(tmp_path / "run", data, callbacks=[heard])
    count = {kind: [c for c in heard.calls if c[0] == kind] for kind in ("start", "epoch", "end")}
    assert count["start"] == [("start", n, FOLDS) for n in range(TRIALS)]
    assert sorted(count["epoch"]) == [("epoch", n, e) for n in range(3) for e in (1, 2, 3)]
    assert count["end"] == [("end", n, "finished") for n in range(TRIALS)]
    units = [c for c in heard.calls if c[0] == "unit"]
    assert len(units) == TRIALS * FOLDS * EPOCHS * (SHARDS + 1)
    assert {(number, fold) for _, number, fold in units} == {(t, t % 3) for t in range(9)}
    # The means of an epoch are told when its last fold is done, and none begins the next before.
    first = [c for c in heard.calls if (c[0] == "unit" and c[1] < 3) or c[:2] == ("epoch", 0)]
    per_epoch = FOLDS * (SHARDS + 1)
    assert [first.index(("epoch", 0, e)) for e in (1, 2)] == [per_epoch, 2 * per_epoch + 1]


# --- the same bits -------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_same_with_any_number_of_workers(data, whole, tmp_path, workers):
    assert_same(search(tmp_path / "run", data, workers=workers, keep="all"), whole)


@pytest.mark.parametrize(("at", "workers"), [(2, 0), (30, 3), (106, 2)])
def test_a_killed_run_resumes(data, whole, tmp_path, at, workers):
    program = struck_search(tmp_path, data, at=at)
    assert program.returncode == -signal.SIGKILL, program.stderr
    left = cerebro.open(tmp_path / "run")
    assert left.status == "interrupted"
    assert all(len(trial.folds) == FOLDS for trial in left.trials)
    result = cerebro.resume(tmp_path / "run", workers=workers, progress=False)
    assert result.status == "finished"
    assert_same(result, whole)


def struck_search(tmp_path, data, *, at, **more):
    return struck(
        tmp_path / "run",
        data.path,
        at=at,
        workers=2,
        folds=FOLDS,
        folds_seed=2,
        n_trials=TRIALS,
        keep="all",
        **more,
    )


def test_resume_requires_the_same_folds(data, whole, tmp_path):
    assert struck_search(tmp_path, data, at=40).returncode == -signal.SIGKILL
    for validation in (KFold(FOLDS, seed=3), KFold(2), 0.2, None):
        with pytest.raises(
            InputError, match=r"validation (has different folds|is a different dataset)"
        ):
            search(tmp_path / "run", data, validation=validation, keep="all", if_exists="resume")
    result = search(tmp_path / "run", data, keep="all", workers=1, if_exists="resume")
    assert_same(result, whole)


def test_resume_and_replay_accept_moved_data(data, tmp_path):
    import shutil

    shutil.copytree(data.path, tmp_path / "here")
    result = search(tmp_path / "run", cerebro.Dataset(tmp_path / "here"), n_trials=1, epochs=1)
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(InputError, match="give their new path with data="):
        cerebro.resume(result.path, epochs=2, progress=False)
    again = cerebro.resume(result.path, data=tmp_path / "there", epochs=2, progress=False)
    assert again.trials[0].epoch == 2
    replayed = cerebro.replay(again, 0, resumable.build, data=tmp_path / "there")
    assert replayed.identical


def test_resume_trains_one_or_all_trials_further(data, tmp_path):
    result = search(tmp_path / "run", data, epochs=1)
    assert {trial.epoch for trial in result.trials} == {1}
    one = cerebro.resume(result.path, epochs=2, trials=[1], workers=0, progress=False)
    assert [[fold.epoch for fold in trial.folds] for trial in one.trials] == [
        [1, 1, 1],
        [2, 2, 2],
        [1, 1, 1],
    ]
    with pytest.raises(InputError, match="there is no trial 3: the run has 0 to 2"):
        cerebro.resume(result.path, epochs=2, trials=[3])
    full = cerebro.resume(result.path, epochs=EPOCHS, workers=2, progress=False)
    reference = search(tmp_path / "reference", data)
    assert_same(full, reference)


def test_replay_covers_all_folds_or_one(whole):
    both = cerebro.replay(whole, 1, resumable.build, epochs=2)
    assert both.identical
    assert both.first_difference is None
    assert [fold.trial for fold in both.folds] == [3, 4, 5]
    assert [epoch.recorded for epoch in both.epochs] == hashes(whole)[1][:2]
    assert str(both) == "trial 1: 2 epochs trained again, every state identical in 3 folds"
    one = cerebro.replay(whole, whole.trials[1].folds[2], resumable.build, epochs=1)
    assert (one.trial, one.identical, one.folds) == (5, True, [])
    assert [epoch.recorded for epoch in one.epochs] == fold_hashes(whole)[1][2][:1]


def test_replay_reports_the_first_difference(data, tmp_path):
    result = search(tmp_path / "run", data, n_trials=1)
    with sqlite3.connect(result.path / "run.sqlite") as connection:
        connection.execute(
            "UPDATE epochs SET state_hash = ? WHERE trial = 2 AND epoch = 1", ("0" * 32,)
        )
    replayed = cerebro.replay(result.path, 0, resumable.build)
    assert not replayed
    assert replayed.first_difference == 1
    assert [fold.identical for fold in replayed.folds] == [True, True, False]


# --- what is kept ----------------------------------------------------------------


def build_up_and_down(config, info):
    return UpAndDown(info.fold)


class UpAndDown:
    """Each fold has its best epoch elsewhere; that of their mean is epoch 1."""

    framework = "numpy"
    losses = ((1.0, 4.0, 6.0, 9.0), (9.0, 1.0, 6.0, 8.0), (7.0, 2.0, 0.0, 9.0))

    def __init__(self, fold):
        self.fold, self.epoch = fold, 0

    def begin_epoch(self, epoch):
        self.epoch = epoch

    def train_batch(self, batch):
        return {"loss": 0.0}

    def eval_batch(self, batch):
        return {"loss": self.losses[self.fold][self.epoch % 4]}

    def state_dict(self):
        return {"fold": self.fold, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.fold, self.epoch = state["fold"], state["epoch"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_best_epoch_is_chosen_by_the_mean(data, tmp_path, workers):
    result = search(
        tmp_path / "run", data, build=build_up_and_down, n_trials=2, epochs=4, workers=workers
    )
    for trial in result.trials:
        assert trial.best_epoch == 1
        assert trial.metrics["loss"] == 7 / 3
        assert [fold.best_epoch for fold in trial.folds] == [1, 1, 1]
        assert [fold.metrics["loss"] for fold in trial.folds] == [4.0, 1.0, 2.0]
        kept = [[e.epoch for e in f.record.epochs if e.state_file] for f in trial.folds]
        assert kept == [[1, 3]] * 3
        assert [trial.load(fold=f).epoch for f in range(3)] == [1, 1, 1]
    assert result.verify(), str(result.verify())


class CloneOfAnEnded(Recorded):
    """Trains four configurations to their end, then clones the last of them."""

    kept = ("begun", "ended")

    def __init__(self):
        super().__init__()
        self.begun = self.ended = 0

    def next_suggestion(self):
        if self.begun < 4:
            self.begun += 1
            return Suggestion(self.space.sample(self.seed, self.begun), epochs=4)
        if self.ended < 4:
            return None
        self.begun += 1
        config = self.space.sample(self.seed, 3)
        return Suggestion(config, parent=3, epochs=6) if self.begun == 5 else DONE

    def decide(self, trial, epoch, loss):
        self.ended += epoch == 3
        return Decision.CONTINUE


def test_best_states_are_kept_until_all_folds_of_a_clone_start(data, tmp_path):
    result = search(
        *(tmp_path / "run", data),
        build=build_up_and_down,
        searcher=CloneOfAnEnded(),
        n_trials=4,
        epochs=4,
        workers=0,
        keep="best",
    )
    assert [fold.parent for fold in result.trials[4].folds] == [9, 10, 11]
    for trial in result.trials[:4]:
        kept = [[e.epoch for e in f.record.epochs if e.state_file] for f in trial.folds]
        assert kept == [[1, 3]] * 3


def test_keep_last_keeps_one_state_per_fold(data, tmp_path):
    result = search(
        tmp_path / "run", data, build=build_up_and_down, n_trials=1, epochs=4, keep="last",
        select="last",
    )  # fmt: skip
    assert result.best.metrics["loss"] == 26 / 3
    assert len(list((result.path / "states").glob("*.safetensors"))) == 3


# --- searchers --------------------------------------------------------------------


MAKERS = {
    "halving": lambda: Halving(),
    "population": lambda: Population(),
    "hyperband": lambda: cerebro.Hyperband(min_epochs=1, reduction_factor=2),
    "asha": lambda: cerebro.ASHA(min_epochs=1, reduction_factor=2),
    "median": lambda: cerebro.MedianStopping(),
    "random": lambda: cerebro.RandomSearch(),
}


@pytest.mark.parametrize("name", MAKERS)
def test_searchers_receive_one_report_per_configuration(data, tmp_path, name):
    """One report per configuration and epoch, the mean, whatever the number of workers."""
    runs = []
    for workers in (0, 3):
        searcher = MAKERS[name]()
        runs.append(
            search(
                tmp_path / f"{workers}", data, searcher=searcher, n_trials=4, epochs=4,
                width=3, workers=workers,
            )
        )  # fmt: skip
        if name in ("halving", "population"):
            told = [call for call in searcher.calls if call[0] == "report"]
            by_epoch = {(number, epoch): value for _, number, epoch, value, _ in told}
            assert len(by_epoch) == len(told)
            for trial in runs[-1].trials:
                for entry in trial.history:
                    told_value = by_epoch[trial.number, entry["epoch"]]
                    assert told_value == entry["metrics"]["loss"]
    assert_same(*runs)
    assert any(trial.epoch == 4 for trial in runs[0].trials)
    for trial in runs[0].trials:
        assert {fold.epoch for fold in trial.folds} == {trial.epoch}
    decided = [decisions(run.path) for run in runs]
    assert decided[0] == decided[1]
    if name != "random":
        assert {trial for _, trial, *_ in decided[0]} == {t.number for t in runs[0].trials}


def decisions(path):
    with sqlite3.connect(path / "run.sqlite") as connection:
        columns = "round, trial, epoch, decision, epochs"
        return connection.execute(f"SELECT {columns} FROM decisions ORDER BY id").fetchall()


@pytest.mark.parametrize(("name", "at"), [("hyperband", 17), ("asha", 44), ("hyperband", 70)])
def test_a_killed_adaptive_search_resumes(data, tmp_path, name, at):
    settings = {"searcher": name, "n_trials": 5, "epochs": 4, "width": 3}
    reference = search(tmp_path / "reference", data, **settings)
    struck_at = struck(
        tmp_path / "run", data.path, at=at, workers=2, folds=FOLDS, folds_seed=2, **settings
    )
    assert struck_at.returncode == -signal.SIGKILL, struck_at.stderr
    result = cerebro.resume(tmp_path / "run", resumable.build, workers=1, progress=False)
    assert_same(result, reference)
    assert decisions(result.path) == decisions(reference.path)


def test_clones_are_of_the_same_fold(data, tmp_path):
    result = search(tmp_path / "run", data, searcher=Population(), n_trials=5, epochs=6, workers=2)
    clones = [trial for trial in result.trials if trial.parent is not None]
    assert clones
    for clone in clones:
        parent = result.trials[clone.parent]
        assert [fold.parent for fold in clone.folds] == [fold.number for fold in parent.folds]
        assert {fold.parent_epoch for fold in clone.folds} == {clone.parent_epoch}
        assert clone.history[0]["epoch"] == clone.parent_epoch + 1
        assert cerebro.replay(result, clone, resumable.build).identical


def test_early_stopping_goes_by_the_mean(data, tmp_path):
    runs = [
        search(
            tmp_path / f"{workers}", data, build=build_up_and_down, n_trials=2, epochs=4,
            stop=cerebro.EarlyStopping("loss", patience=1), workers=workers,
        )
        for workers in (0, 2)
    ]  # fmt: skip
    for run in runs:
        for trial in run.trials:
            assert (trial.status, trial.epoch) == ("stopped", 3)
            assert [fold.epoch for fold in trial.folds] == [3, 3, 3]
    assert_same(*runs)


# --- what goes wrong ---------------------------------------------------------------


def failing(number, epoch, fold, error=ValueError):
    """A build whose model fails in one fold of one configuration."""

    def build(config, info):
        model = resumable.Model(config, info)
        train = model.train_batch

        def train_batch(batch):
            if info.trial == number * FOLDS + fold and model.epoch == epoch:
                raise error("this fold is bad")
            return train(batch)

        model.begin_epoch = lambda at: setattr(model, "epoch", at)
        model.epoch, model.train_batch = 0, train_batch
        return model

    return build


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fold", [0, 2])
def test_a_fold_that_fails_fails_its_configuration(data, tmp_path, workers, fold):
    heard = Heard()
    heard.on_trial_end = lambda trial: heard.calls.append(("end", trial.number, trial.status))
    result = search(
        tmp_path / "run", data, build=failing(1, 1, fold), workers=workers, callbacks=[heard]
    )
    assert result.status == "finished"
    assert [trial.status for trial in result.trials] == ["finished", "failed", "finished"]
    trial = result.trials[1]
    assert trial.error.startswith("ValueError: this fold is bad")
    assert trial.error.endswith(f"; in fold {fold}")
    assert "this fold is bad" in trial.traceback
    assert trial.epoch == 1
    # The others finish the epoch, because they might fail in it as well.
    expected = [("stopped", 2)] * 3
    expected[fold] = ("failed", 1)
    assert [(each.status, each.epoch) for each in trial.folds] == expected
    assert result.verify(), str(result.verify())
    ends = [call for call in heard.calls if call[0] == "end"]
    assert sorted(ends) == [("end", 0, "finished"), ("end", 1, "failed"), ("end", 2, "finished")]
    assert "in fold" in result.summary()


def test_a_failed_configuration_is_tried_again(data, tmp_path):
    result = search(tmp_path / "run", data, build=failing(1, 1, 0))
    with pytest.warns(UserWarning, match="build"):
        again = cerebro.resume(result.path, resumable.build, trials=1, workers=0, progress=False)
    assert [(fold.status, fold.epoch) for fold in again.trials[1].folds] == [("finished", 3)] * 3
    assert_same(again, search(tmp_path / "reference", data))


def test_a_failed_configuration_is_reported_once(data, tmp_path):
    decided = []
    for workers in (0, 3):
        searcher = Halving()
        path = tmp_path / f"{workers}"
        search(path, data, build=failing(2, 0, 1), searcher=searcher, n_trials=4, workers=workers)
        told = [call[1:4] for call in searcher.calls if call[:2] == ("report", 2)]
        assert told == [(2, 0, math.inf)]
        decided.append(decisions(path))
    assert decided[0] == decided[1]


def test_a_killed_run_with_a_failed_fold_ends_its_configuration(data, tmp_path):
    """The process dies after a fold has failed and before the others have come to that point."""

    class Die(Exception):
        pass

    class Killer:
        def on_unit_end(self, trial, metrics):
            if trial.number == 1 and failed:
                raise Die

    failed = []
    build = failing(0, 0, 0)

    def noting(config, info):
        failed.append(True)
        return build(config, info)

    with pytest.raises(Die):
        search(tmp_path / "run", data, build=noting, callbacks=[Killer()], n_trials=2)
    left = cerebro.open(tmp_path / "run")
    assert [fold.status for fold in left.trials[0].folds] == ["failed", "stopped", "stopped"]
    with pytest.warns(UserWarning, match="build"):
        result = cerebro.resume(left.path, build, workers=0, progress=False)
    assert [trial.status for trial in result.trials] == ["failed", "finished"]
    assert [fold.epoch for fold in result.trials[0].folds] == [0, 1, 1]
    assert result.verify(), str(result.verify())


def test_identical_failures_end_the_run(data, tmp_path):
    def build(config, info):
        raise ValueError("never")

    with pytest.raises(
        RunError, match="the first 3 trials failed in the same way: ValueError: never"
    ):
        search(tmp_path / "run", data, build=build, n_trials=5)


def test_one_failed_configuration_does_not_end_the_run(data, tmp_path):
    def build(config, info):
        if info.trial < FOLDS:
            raise ValueError("the first configuration")
        return resumable.Model(config, info)

    result = search(tmp_path / "run", data, build=build)
    assert [trial.status for trial in result.trials] == ["failed", "finished", "finished"]
    assert result.trials[0].error.endswith("in fold 0")


def test_a_fold_that_diverges(data, tmp_path):
    def build(config, info):
        model = resumable.Model(config, info)
        if info.trial == 4:
            model.train_batch = lambda batch: {"loss": math.nan}
        return model

    result = search(tmp_path / "run", data, build=build)
    trial = result.trials[1]
    assert trial.status == "diverged"
    assert "the training loss became nan in epoch 0" in trial.error
    assert trial.error.endswith("in fold 1")


def test_a_metric_named_as_a_deviation_is_refused(data, tmp_path):
    class Model(resumable.Model):
        def eval_batch(self, batch):
            return {"loss": 1.0, "loss_std": 0.5}

    with pytest.raises(RunError, match="give the metric 'loss_std' a different name"):
        search(tmp_path / "run", data, build=Model)


def test_bad_folds_are_found_before_anything_is_made(data, tmp_path):
    for validation, message in (
        (KFold(131), "needs a row for each fold"),
        (KFold(14, groups="group"), "13 groups, fewer than the 14 folds"),
        (KFold(3, stratify="y"), "cannot define classes or groups"),
    ):
        with pytest.raises(InputError, match=message):
            search(tmp_path / "run", data, validation=validation)
        with pytest.raises(InputError, match=message):
            cerebro.plan(SPACE, data, epochs=1, n_trials=1, validation=validation)
    assert not (tmp_path / "run").exists()


def test_folds_without_rows_in_a_shard(tmp_path):
    """Groups that fill a shard leave folds nothing to train on there."""
    x = np.random.default_rng(0).normal(size=(60, 3))
    columns = {"x": x, "y": x.sum(1), "group": np.repeat([0, 1, 2], 20)}
    data = cerebro.shard(columns, tmp_path / "set", shards=3, shuffle=False)
    train, _ = KFold(3, groups="group").split(data)[0]
    assert 0 in train.view.shard_rows
    settings = {"validation": KFold(3, groups="group"), "n_trials": 2}
    runs = [search(tmp_path / f"{w}", data, workers=w, **settings) for w in (0, 2)]
    assert_same(*runs)
    assert runs[0].trials[0].status == "finished"


# --- commands -----------------------------------------------------------------------


def test_a_configuration_is_stopped_with_all_its_folds(data, tmp_path):
    class Stop:
        def on_epoch_end(self, trial, metrics):
            if trial.number == 0 and trial.epoch == 1:
                cerebro.control.stop(tmp_path / "run", 0)

    result = search(tmp_path / "run", data, callbacks=[Stop()])
    assert [trial.status for trial in result.trials] == ["stopped", "finished", "finished"]
    assert {fold.status for fold in result.trials[0].folds} == {"stopped"}
    assert result.trials[0].epoch < EPOCHS
    assert result.status == "finished"
    assert result.verify(), str(result.verify())


def test_a_configuration_is_paused_with_all_its_folds(data, whole, tmp_path):
    class Pause:
        def __init__(self):
            self.seen = set()

        def on_epoch_end(self, trial, metrics):
            if trial.number == 0 and trial.epoch == 1:
                cerebro.control.pause(tmp_path / "run", 0)
            if trial.number == 2 and trial.epoch == EPOCHS:
                now = cerebro.open(tmp_path / "run").trials[0]
                self.seen.add((now.status, now.epoch))
                cerebro.control.unpause(tmp_path / "run", 0)

    pause = Pause()
    result = search(tmp_path / "run", data, callbacks=[pause], keep="all")
    assert pause.seen == {("paused", 1)}
    assert_same(result, whole)


# --- around it ------------------------------------------------------------------------


def test_a_plan_counts_the_folds(data, whole):
    plan = cerebro.plan(
        SPACE, data, epochs=EPOCHS, n_trials=TRIALS, validation=KFold(FOLDS, seed=2), workers=2
    )
    units = whole.units()
    assert (plan.trials, plan.folds, plan.epochs) == (TRIALS, FOLDS, TRIALS * EPOCHS)
    assert plan.units == len(units)
    assert plan.rows == sum(unit["rows"] for unit in units)
    assert plan.bytes_on_disk == data.nbytes
    assert "in 3 folds each" in str(plan)


def test_a_check_takes_the_first_fold(data):
    check = cerebro.check(resumable.build, SPACE, data, validation=KFold(FOLDS), batch_size=8)
    assert check
    assert "val_loss" in check.metrics


def test_an_optuna_study_optimizes_fold_means(data, tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def build(trial, info):
        return resumable.Model({"lr": trial.suggest_float("lr", 1e-2, 1e-1, log=True)}, info)

    def run(workers):
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
        result = cerebro.optuna.optimize(
            study, build, data, n_trials=4, epochs=2, validation=KFold(FOLDS), batch_size=16,
            width=2, workers=workers, run=tmp_path / f"{workers}", progress=False,
        )  # fmt: skip
        return study, result

    (study, result), (_, other) = run(0), run(2)
    assert_same(result, other)
    for trial, frozen in zip(result.trials, study.trials, strict=True):
        assert frozen.value == trial.history[-1]["metrics"]["loss"]
        assert frozen.params == trial.config
        fold = trial.folds[1]
        assert fold.evaluate(build=build)["loss"] == fold.metrics["val_loss"]


def test_events_give_their_configuration_and_fold(data, tmp_path):
    result = search(tmp_path / "run", data, n_trials=2, epochs=1)
    with sqlite3.connect(result.path / "run.sqlite") as connection:
        rows = [(1.0, "a", 5, "b"), (2.0, "c", None, "")]
        connection.executemany("INSERT INTO events VALUES (NULL, ?, ?, ?, ?)", rows)
    assert cerebro.open(result.path).events() == [
        {"time": 1.0, "kind": "a", "trial": 1, "fold": 2, "text": "b"},
        {"time": 2.0, "kind": "c", "trial": None, "fold": None, "text": ""},
    ]


def test_verify_reports_a_fold_missing_from_the_store(data, tmp_path):
    result = search(tmp_path / "run", data, n_trials=2, epochs=1)
    with sqlite3.connect(result.path / "run.sqlite") as connection:
        for table, column in (("trials", "number"), ("epochs", "trial"), ("metrics", "trial")):
            connection.execute(f"DELETE FROM {table} WHERE {column} = 5")
        connection.execute("DELETE FROM units WHERE trial = 5")
    left = cerebro.open(result.path)
    assert [trial.number for trial in left.trials] == [0]
    assert "1 folds of its configuration have no row" in str(left.verify())


@pytest.mark.parametrize(
    "folds", [{}, {"name": "x", "folds": []}, {"name": "x", "folds": [3]}, [], "KFold"]
)
def test_a_store_with_invalid_folds_is_refused(data, tmp_path, folds: Any):
    from cerebro.run.store import encode

    result = search(tmp_path / "run", data, n_trials=1, epochs=1)
    with sqlite3.connect(result.path / "run.sqlite") as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'folds'", (encode(folds),))
    with pytest.raises(CorruptDataError, match="is damaged"):
        cerebro.open(result.path)


def test_command_line_settings_accept_folds(tmp_path: Path, data) -> None:
    """The settings of the command line take folds as they are."""
    file = tmp_path / "job.py"
    here = str(Path(__file__).parent)
    file.write_text(
        f"import sys; sys.path.insert(0, {here!r})\n"
        "import cerebro\n"
        "from resumable import build\n"
        "space = {'lr': cerebro.loguniform(1e-2, 1e-1)}\n"
        f"data = cerebro.Dataset({str(data.path)!r})\n"
        "settings = dict(epochs=1, n_trials=2, batch_size=8, validation=cerebro.KFold(2))\n"
    )
    spec = importlib.util.spec_from_file_location("job", file)
    assert spec is not None
    from cerebro.cli import main

    code = main(["run", str(file), "--run", str(tmp_path / "run"), "--progress", "none"])
    assert code == 0
    assert [len(t.folds) for t in cerebro.open(tmp_path / "run").trials] == [2, 2]
    assert main(["show", str(tmp_path / "run"), "--trial", "1"]) == 0
    assert main(["replay", str(tmp_path / "run"), "--trial", "1"]) == 0
    sys.modules.pop("job", None)
