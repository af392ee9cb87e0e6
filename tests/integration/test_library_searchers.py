"""Every searcher of the library in real searches: the same trials whoever trains them."""

from __future__ import annotations

import numpy as np
import pytest

import cerebro
from cerebro import replay
from cerebro.searchers import ASHA, PBT, TPE, Hyperband, MedianStopping, SuccessiveHalving

EPOCHS = 4
SPACE = {"lr": cerebro.loguniform(0.003, 0.5), "batch_size": [5, 10]}
SEARCHERS = {
    "quasirandom": "quasirandom",
    "successive halving": lambda: SuccessiveHalving(1, 2),
    "hyperband": lambda: Hyperband(1, 2),
    "asha": lambda: ASHA(1, 2),
    "asha stopping": lambda: ASHA(1, 2, "stopping"),
    "median": lambda: MedianStopping(1, 2),
    "pbt": lambda: PBT(1, 0.34),
    "tpe": lambda: TPE(2),
}
NEEDS = {"quasirandom": "scipy", "tpe": "optuna"}


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
    pytest.importorskip(NEEDS.get(name, "cerebro"))
    searcher = SEARCHERS[name]
    options = {"epochs": EPOCHS, "n_trials": 6, "validation": 0.25, "workers": 0, "seed": 3}
    return cerebro.search(
        LeastSquares, SPACE, data, searcher=searcher if isinstance(searcher, str) else searcher(),
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


@pytest.mark.parametrize("name", SEARCHERS)
def test_the_same_search_with_any_number_of_workers(data, tmp_path, name):
    found = [
        everything(run(data, tmp_path / f"run-{workers}", name, workers=workers, width=3))
        for workers in (0, 1, 2, 5)
    ]
    assert found[0] == found[1] == found[2] == found[3]
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


@pytest.mark.parametrize("name", ["successive halving", "hyperband", "pbt"])
def test_what_will_not_go_on_is_freed_while_others_train(data, tmp_path, name):
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
