"""Every searcher of the library in real searches: the same trials whoever trains them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from adaptive_searchers import decisions_of

import cerebro
from cerebro import replay
from cerebro.errors import InputError
from cerebro.searchers import (
    ASHA,
    PBT,
    TPE,
    GaussianProcess,
    Hyperband,
    MedianStopping,
    SuccessiveHalving,
)
from cerebro.searchers.halving import OpenRung

EPOCHS = 4
SPACE = {"lr": cerebro.loguniform(0.003, 0.5), "batch_size": [5, 10]}
GRID = {"lr": [0.01, 0.1, 0.5], "batch_size": [5, 10]}
SEARCHERS = {
    "random": "random",
    "grid": "grid",
    "quasirandom": "quasirandom",
    "successive halving": lambda: SuccessiveHalving(1, 2),
    "hyperband": lambda: Hyperband(1, 2),
    "asha": lambda: ASHA(1, 2),
    "asha stopping": lambda: ASHA(1, 2, "stopping"),
    "median": lambda: MedianStopping(1, 2),
    "pbt": lambda: PBT(1, 0.34),
    "tpe": lambda: TPE(2),
    "gp": lambda: GaussianProcess(5),
}
NEEDS = {"quasirandom": ["scipy"], "tpe": ["optuna"], "gp": ["optuna", "scipy", "torch"]}


class LeastSquares:
    framework = "numpy"

    def __init__(self, config):
        self.w = np.zeros(3)
        self.lr = config["lr"]

    def train_batch(self, batch):
        x, y = batch["x"], batch["y"]
        error = x @ self.w - y
        self.w = self.w - self.lr * (x.T @ error / len(y) + 0.05 * np.random.normal(size=3))
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w, "lr": self.lr}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])
        self.lr = state["lr"]

    def load_clone(self, state, config):
        self.w = np.array(state["w"])
        self.lr = config["lr"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=240)
    return cerebro.shard({"x": x, "y": y}, tmp_path_factory.mktemp("data") / "set", shards=3)


def run(data, folder, name, **settings):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    searcher = SEARCHERS[name]
    options = {"epochs": EPOCHS, "n_trials": 6, "validation": 0.25, "workers": 0, "seed": 3}
    return cerebro.search(
        LeastSquares, GRID if name == "grid" else SPACE, data,
        searcher=searcher if isinstance(searcher, str) else searcher(),
        run=folder, progress=False, **{**options, **settings},
    )  # fmt: skip


def everything(result):
    """What must not depend on timing."""
    return result.best.number, [
        (
            t.number,
            t.config,
            t.status,
            t.parent,
            [(e["metrics"], e["state_hash"]) for e in t.history],
        )
        for t in result.trials
    ]


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_optuna_samplers_handle_a_name_with_conditional_ranges(data, tmp_path, name):
    for package in NEEDS[name]:
        pytest.importorskip(package)
    space = {
        "lr": cerebro.loguniform(0.003, 0.5),
        "kind": ["a", "b"],
        "if a": cerebro.when("kind", "a", {"width": [8, 16], "rate": cerebro.uniform(0, 1)}),
        "if b": cerebro.when(
            "kind", "b", {"width": [32, 64], "rate": cerebro.loguniform(0.01, 10.0)}
        ),
    }
    point = {"lr": 0.1, "kind": "b", "width": 64, "rate": 5.0}
    settings = {"epochs": 1, "n_trials": 14, "validation": 0.25, "workers": 0, "seed": 3}

    def run(folder, points):
        result = cerebro.search(
            LeastSquares, space, data, searcher=name, points=points, batch_size=10,
            run=folder, progress=False, **settings,
        )  # fmt: skip
        return [trial.config for trial in result.trials]

    configs = run(tmp_path / "run", [point])
    assert configs[0] == point
    for config in configs:
        assert config["width"] in ([8, 16] if config["kind"] == "a" else [32, 64])
        low, high = (0, 1) if config["kind"] == "a" else (0.01, 10.0)
        assert low <= config["rate"] <= high
    assert {config["kind"] for config in configs} == {"a", "b"}
    assert run(tmp_path / "again", [point]) == configs


def learned(result):
    """What the sampler learned of each trial."""
    log = result.saved.meta["searcher"]["log"]
    return {entry[1]: entry[2] for entry in log if entry[0] == "tell"}


@pytest.mark.parametrize("name", ["tpe", "gp"])
@pytest.mark.parametrize("select", ["best", "last"])
def test_samplers_of_optuna_learn_the_metric_that_ranks_trials(data, tmp_path, name, select):
    result = run(data, tmp_path / "run", name, select=select)
    assert any(trial.best_epoch < EPOCHS - 1 for trial in result.trials)
    assert learned(result) == {trial.number: trial.metrics["loss"] for trial in result.trials}


class FailsFast(LeastSquares):
    """Fails in its second epoch if its learning rate is high."""

    def __init__(self, config):
        super().__init__(config)
        self.batches = 0

    def train_batch(self, batch):
        self.batches += 1
        if self.lr > 0.05 and self.batches > 40:
            raise ValueError("too fast")
        return super().train_batch(batch)

    def state_dict(self):
        return {**super().state_dict(), "batches": self.batches}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.batches = state["batches"]


def test_optuna_samplers_rank_a_failed_trial_last(data, tmp_path):
    """Also if it was good before, and if it failed in an earlier run."""
    pytest.importorskip("optuna")
    space = {"lr": SPACE["lr"]}
    result = cerebro.search(
        FailsFast, space, data, searcher=TPE(4), run=tmp_path / "run", validation=0.25, epochs=2,
        n_trials=8, batch_size=5, workers=0, seed=3, progress=False,
    )  # fmt: skip
    failed = [trial.number for trial in result.trials if trial.status == "failed"]
    assert failed and all(result.trials[number].metrics for number in failed)
    assert [trial for trial, value in learned(result).items() if value is None] == failed
    later = TPE(4, earlier=result)
    later.setup(cerebro.Space(space), seed=0, epochs=2, n_trials=8, metric="loss", mode="min")
    known = later._study.trials
    assert [trial.number for trial in known if trial.state.name == "PRUNED"] == failed
    assert all(
        trial.value is None and not trial.intermediate_values
        for trial in known
        if trial.number in failed
    )


@pytest.mark.parametrize("name", SEARCHERS)
def test_the_same_search_with_any_number_of_workers(data, tmp_path, name):
    found = [
        everything(run(data, tmp_path / f"run-{workers}", name, workers=workers, width=3))
        for workers in (0, 1, 5)
    ]
    assert found[0] == found[1] == found[2]
    assert {status for _, _, status, _, _ in found[0][1]} <= {"finished", "stopped"}


@pytest.mark.parametrize("name", SEARCHERS)
def test_the_same_search_after_interruptions(data, tmp_path, name):
    """Interrupted after every third epoch, and gone on with by the same call."""

    class Interrupt:
        seen = 0

        def on_epoch_end(self, trial, metrics):
            self.seen += 1
            if self.seen == 3:
                raise KeyboardInterrupt

    undisturbed = run(data, tmp_path / "undisturbed", name, width=3)
    for _ in range(100):
        try:
            result = run(
                data, tmp_path / "run", name, width=3, if_exists="resume", callbacks=[Interrupt()]
            )
            break
        except KeyboardInterrupt:
            continue
    assert result.status == "finished"
    assert everything(result) == everything(undisturbed)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import cerebro, test_library_searchers
from cerebro.coordinator import searcher_record as notes

notes.SMALL_STATE = 0
notes.CHARACTERS_PER_DECISION = 1  # the searcher's state is seldom written down

class Killed:
    epochs = 0

    def on_epoch_end(self, trial, metrics):
        self.epochs += 1
        if self.epochs == 7:
            os.kill(os.getpid(), signal.SIGKILL)

data, folder, name = cerebro.Dataset(sys.argv[2]), sys.argv[3], sys.argv[4]
test_library_searchers.run(data, folder, name, width=3, workers=2, callbacks=[Killed()])
"""


@pytest.mark.parametrize("name", SEARCHERS)
def test_the_same_search_after_a_kill(data, tmp_path, name):
    """Killed for good in its seventh epoch, and gone on with by other numbers of workers."""
    undisturbed = run(data, tmp_path / "undisturbed", name, width=3)
    folder = tmp_path / "run"
    arguments = [str(Path(__file__).parent), str(data.path), str(folder), name]
    killed = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], timeout=120, check=False, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    result = run(data, folder, name, width=3, workers=5, if_exists="resume")
    assert result.status == "finished"
    assert everything(result) == everything(undisturbed)
    assert decisions_of(result) == decisions_of(undisturbed)
    assert result.saved.meta["searcher"] == undisturbed.saved.meta["searcher"]


def test_a_searcher_that_does_not_repeat_its_decisions_is_refused(data, tmp_path, monkeypatch):
    from cerebro.coordinator import searcher_record as notes

    monkeypatch.setattr(notes, "SMALL_STATE", 0)
    monkeypatch.setattr(notes, "CHARACTERS_PER_DECISION", 1)

    class Interrupt:
        def on_epoch_end(self, trial, metrics):
            if trial.number == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run", "asha", width=3, callbacks=[Interrupt()])
    monkeypatch.setattr(OpenRung, "pop_promoted", lambda self: None)
    with pytest.raises(
        InputError, match=r"ASHA does not repeat its stored decisions: it decided res"
    ):
        run(data, tmp_path / "run", "asha", width=3, if_exists="resume")


@pytest.mark.parametrize("name", ["asha", "hyperband", "median"])
def test_resume_repeats_fold_reports_to_the_searcher(data, tmp_path, monkeypatch, name):
    from cerebro.coordinator import searcher_record as notes

    monkeypatch.setattr(notes, "SMALL_STATE", 0)
    monkeypatch.setattr(notes, "CHARACTERS_PER_DECISION", 1)

    class Interrupt:
        def on_epoch_end(self, trial, metrics):
            if (trial.number, trial.epoch) == (4, 1):
                raise KeyboardInterrupt

    folds = {"validation": cerebro.KFold(2), "width": 3}
    undisturbed = run(data, tmp_path / "undisturbed", name, **folds)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run", name, callbacks=[Interrupt()], **folds)
    again = run(data, tmp_path / "run", name, if_exists="resume", **folds)
    assert everything(again) == everything(undisturbed)
    assert decisions_of(again) == decisions_of(undisturbed)


@pytest.mark.parametrize("name", ["asha", "hyperband", "median", "pbt"])
def test_the_same_search_with_early_stopping(data, tmp_path, name):
    """The same search with any number of workers and after interruptions, with a rule."""
    rule = cerebro.EarlyStopping("val_loss", patience=1, min_delta=0.05)
    found = [
        run(data, tmp_path / f"run-{workers}", name, workers=workers, width=3, stop=rule)
        for workers in (0, 2)
    ]
    assert everything(found[0]) == everything(found[1])
    short = [t for t in found[0].trials if rule.should_stop(t.history) and t.epoch < EPOCHS]
    assert short and {trial.status for trial in short} == {"stopped"}

    class Interrupt:
        def on_epoch_end(self, trial, metrics):
            if trial.number == short[0].number:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        callbacks = [Interrupt()]
        run(data, tmp_path / "run", name, width=3, stop=rule, callbacks=callbacks)
    again = run(data, tmp_path / "run", name, width=3, stop=rule, if_exists="resume")
    assert everything(again) == everything(found[0])


@pytest.mark.parametrize("name", ["successive halving", "hyperband", "pbt"])
def test_slots_of_stopped_trials_are_freed_during_the_run(data, tmp_path, name):
    """Slots of paused trials that lost are gone before the run is over."""
    folder = tmp_path / "run"
    stopped = []

    class Watch:
        def on_trial_end(self, trial):
            if trial.status == "stopped":
                stopped.append(trial.number)

        def on_epoch_end(self, trial, metrics):
            left = {int(file.stem) for file in (folder / "states").glob("*.slots")}
            assert not left & set(stopped)

    result = run(data, folder, name, callbacks=[Watch()])
    assert stopped and set(stopped) == {t.number for t in result.trials if t.status == "stopped"}


def test_clones_of_pbt_train_with_their_own_learning_rate_and_replay(data, tmp_path):
    result = run(data, tmp_path / "run", "pbt", keep="all")
    clone = next(trial for trial in result.trials if trial.parent is not None)
    assert clone.config["lr"] != result.trials[clone.parent].config["lr"]
    assert clone.load().lr == clone.config["lr"]
    assert replay(result, clone.number).identical


@pytest.mark.parametrize("name", ["asha", "hyperband", "median", "pbt", "tpe"])
def test_an_interrupted_asynchronous_search_resumes_from_its_record(
    data, tmp_path, monkeypatch, name
):
    """Interrupted, it is told again what it was told in the order in which that came."""
    from cerebro.coordinator import searcher_record as notes

    monkeypatch.setattr(notes, "SMALL_STATE", 0)
    monkeypatch.setattr(notes, "CHARACTERS_PER_DECISION", 1)

    class Interrupt:
        seen = 0

        def on_epoch_end(self, trial, metrics):
            self.seen += 1
            if self.seen == 8:
                raise KeyboardInterrupt

    settings = {"workers": 2, "asynchronous": True, "width": 3}
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run", name, callbacks=[Interrupt()], **settings)
    before = decisions_of(cerebro.open(tmp_path / "run"))
    result = run(data, tmp_path / "run", name, if_exists="resume", **settings)
    assert result.status == "finished"
    assert decisions_of(result)[: len(before)] == before
    assert {trial.status for trial in result.trials} <= {"finished", "stopped"}


def test_an_asynchronous_search_replays(data, tmp_path):
    result = run(data, tmp_path / "run", "asha", workers=2, asynchronous=True)
    for trial in result.trials:
        assert replay(result, trial.number).identical


def test_hyperband_without_a_number_of_trials_runs_its_brackets(data, tmp_path):
    result = run(data, tmp_path / "run", "hyperband", n_trials=None)
    assert sorted(trial.epoch for trial in result.trials) == [1, 1, 2, 2, 2, 4, 4, 4, 4, 4]


def test_points_come_first(data, tmp_path):
    result = run(data, tmp_path / "run", "hyperband", points=[{"lr": 0.1}])
    assert result.trials[0].config["lr"] == 0.1


def test_trials_of_an_earlier_run_are_points(data, tmp_path):
    earlier = run(data, tmp_path / "earlier", "random")
    again = run(data, tmp_path / "again", "hyperband", points=earlier.top(2), seed=4)
    assert [trial.config for trial in again.trials[:2]] == [t.config for t in earlier.top(2)]
    assert again.trials[2].config not in [trial.config for trial in earlier.trials]


def test_a_warm_sampler_is_resumed_with_what_it_knew(data, tmp_path):
    pytest.importorskip("optuna")
    earlier = run(data, tmp_path / "earlier", "random")
    options = {
        "epochs": EPOCHS, "n_trials": 6, "validation": 0.25, "workers": 0, "seed": 3, "width": 3,
        "progress": False,
    }  # fmt: skip

    def search(folder, **settings):
        searcher = TPE(startup_trials=4, earlier=[earlier])
        return cerebro.search(
            LeastSquares, SPACE, data, searcher=searcher, run=folder, **options, **settings
        )

    class Interrupt:
        def on_epoch_end(self, trial, metrics):
            if trial.number == 3:
                raise KeyboardInterrupt

    undisturbed = search(tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "run", callbacks=[Interrupt()])
    with pytest.raises(InputError, match=r"if_exists='resume'"):
        cerebro.resume(tmp_path / "run")  # the record does not have the earlier run
    assert everything(search(tmp_path / "run", if_exists="resume")) == everything(undisturbed)


def test_a_sampler_learns_from_an_earlier_run(data, tmp_path):
    pytest.importorskip("optuna")
    earlier = run(data, tmp_path / "earlier", "quasirandom")
    options = {"epochs": EPOCHS, "n_trials": 3, "validation": 0.25, "workers": 0, "seed": 3}
    runs = []
    for name, knowledge in (("cold", ()), ("warm", [earlier])):
        searcher = TPE(startup_trials=4, earlier=knowledge)
        runs.append(
            cerebro.search(
                LeastSquares,
                SPACE,
                data,
                searcher=searcher,
                run=tmp_path / name,
                progress=False,
                **options,
            )
        )
    assert runs[0].trials[0].config != runs[1].trials[0].config
