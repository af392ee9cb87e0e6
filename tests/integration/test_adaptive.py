"""Searchers that listen: the same search whatever the timing, trials that pause and are cloned."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from adaptive_searchers import Halving, Population, Recorded, decisions_of

import cerebro
from cerebro import DONE, Decision, Suggestion
from cerebro.coordinator import conduct
from cerebro.coordinator.coordinator import Coordinator
from cerebro.errors import InputError, RunError

SEED = 3
EPOCHS = 4
SPACE = {"lr": cerebro.loguniform(0.01, 0.5), "batch_size": [5, 10]}


class LeastSquares:
    framework = "numpy"

    def __init__(self, config):
        self.config = config
        self.w = np.zeros(3)
        self.lr = config["lr"]

    def train_batch(self, batch):
        x, y = batch["x"], batch["y"]
        error = x @ self.w - y
        noise = 0.05 * np.random.normal(size=3)
        self.w = self.w - self.lr * ((x.T @ error) / len(y) + noise)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w, "lr": self.lr}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])
        self.lr = state["lr"]


class Clonable(LeastSquares):
    def load_clone(self, state, config):
        np.random.normal(size=7)  # whatever this draws is not the trial's
        self.w = np.array(state["w"])
        self.lr = config["lr"]


def build(config):
    return Clonable(config)


def build_uneven(config, info):
    """Trials of different cost, so that they arrive in another order."""
    time.sleep(0.004 * (info.trial * 5 % 7))
    return Clonable(config)


class SometimesBad(Clonable):
    def train_batch(self, batch):
        if 0.1 < self.config["lr"] < 0.2 and np.random.random() < 0.1:
            raise ValueError("no such learning rate")
        metrics = super().train_batch(batch)
        return {"loss": math.nan} if self.config["lr"] > 0.25 else metrics


def build_some_bad(config):
    return SometimesBad(config)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=240)
    return cerebro.shard({"x": x, "y": y}, tmp_path_factory.mktemp("data") / "set", shards=3)


def run(data, folder, searcher, build=build, **settings):
    defaults = {"epochs": EPOCHS, "n_trials": 8, "validation": 0.25, "workers": 0, "seed": SEED}
    space = settings.pop("space", SPACE)
    return cerebro.search(
        build,
        space,
        data,
        searcher=searcher,
        run=folder,
        progress=False,
        **{**defaults, **settings},
    )


def everything(result):
    """What must not depend on timing."""
    trials = [
        (t.number, t.config, t.status, t.epochs, t.parent, t.parent_epoch, t.error, history(t))
        for t in result.trials
    ]
    return trials, decisions_of(result), result.best.number, result.saved.meta["searcher"]


def units_of(result):
    return {(unit["trial"], unit["epoch"], unit["step"]) for unit in result.units()}


def history(trial):
    return [(e["epoch"], e["metrics"], e["state_hash"]) for e in trial.history]


@pytest.mark.parametrize(
    ("make", "build", "width"),
    [
        (Halving, build_uneven, 1),
        (Halving, build_some_bad, 8),
        (Population, build_uneven, 8),
        (Population, build_some_bad, 3),
    ],
)
def test_the_same_search_with_any_number_of_workers(data, tmp_path, make, build, width):
    found, calls = [], []
    for workers in (0, 1, 5):
        searcher = make()
        folder = tmp_path / f"run-{workers}"
        result = run(data, folder, searcher, build, workers=workers, width=width, n_trials=6)
        found.append(everything(result))
        calls.append(searcher.calls)
        assert len(result.trials) >= 6
    assert repr(found[0]) == repr(found[1]) == repr(found[2])
    assert repr(calls[0]) == repr(calls[1]) == repr(calls[2])


def test_successive_halving(data, tmp_path):
    searcher = Halving()
    result = run(data, tmp_path / "run", searcher, workers=2)
    by_loss = sorted(result.trials, key=lambda t: t.history[0]["metrics"]["val_loss"])
    lengths = [t.epoch for t in by_loss]
    assert sorted(lengths, reverse=True) == [4, 4, 2, 2, 1, 1, 1, 1]
    assert set(lengths[:4]) <= {2, 4}
    assert [t.status for t in result.trials] == ["stopped"] * 8, "the last rung was paused too"
    # Nothing was trained twice, nothing that was given up was trained again.
    units = [(u["trial"], u["epoch"], u["step"]) for u in result.units()]
    assert len(set(units)) == len(units) == sum(lengths) * 4
    reported = [call[1:3] for call in searcher.calls if call[0] == "report"]
    assert sorted(reported) == [(t.number, e) for t in result.trials for e in range(t.epoch)]
    assert not list((result.path / "states").glob("*.slots"))


def test_a_resumed_trial_equals_one_that_never_paused(data, tmp_path):
    straight = run(data, tmp_path / "straight", "random")
    halved = run(data, tmp_path / "halved", Halving(), workers=2)
    for trial in halved.trials:
        assert trial.config == straight.trials[trial.number].config
        assert history(trial) == history(straight.trials[trial.number])[: trial.epoch]


def test_reports_come_in_rounds(data, tmp_path):
    searcher = Population(clones=0)
    run(data, tmp_path / "run", searcher, build_uneven, workers=2, n_trials=5)
    reported = [call[1:3] for call in searcher.calls if call[0] == "report"]
    assert reported == [(trial, epoch) for epoch in range(EPOCHS) for trial in range(5)]


def test_width_limits_how_many_trials_are_live(data, tmp_path):
    running = []

    class Watch:
        def on_trial_start(self, trial):
            running.append(trial.number)
            assert len(running) <= 3

        def on_trial_end(self, trial):
            running.remove(trial.number)

    run(data, tmp_path / "run", Population(), width=3, workers=2, callbacks=[Watch()])
    assert running == []


# --- more trials -----------------------------------------------------------------


def test_halving_compares_the_trials_that_are_added(data, tmp_path):
    """One run grows after its end, another is interrupted and grows before its end."""
    whole = run(data, tmp_path / "whole", cerebro.SuccessiveHalving(1, 2), n_trials=4)
    assert sorted(trial.epoch for trial in whole.trials) == [1, 1, 2, 4]
    more = {"n_trials": 12, "if_exists": "resume"}
    grown = run(data, whole.path, cerebro.SuccessiveHalving(1, 2), **more)
    assert (grown.status, grown.settings["n_trials"]) == ("finished", 12)
    assert [history(t) for t in grown.trials[:4]] == [history(t) for t in whole.trials]
    later = grown.trials[4:]
    assert sorted(trial.epoch for trial in later) == [1, 1, 1, 1, 2, 2, 4, 4]
    by_loss = sorted(later, key=lambda t: t.history[0]["metrics"]["val_loss"])
    assert all(trial.epoch > 1 for trial in by_loss[:4])
    assert all(cerebro.replay(grown, trial, build).identical for trial in (0, 11))
    with contextlib.suppress(KeyboardInterrupt):
        run(data, tmp_path / "cut", cerebro.SuccessiveHalving(1, 2), n_trials=4,
            callbacks=[Interrupted(9)])  # fmt: skip
    cut = run(data, tmp_path / "cut", cerebro.SuccessiveHalving(1, 2), **more)
    assert [history(t) for t in cut.trials] == [history(t) for t in grown.trials]
    units = len(grown.units())
    again = run(data, whole.path, cerebro.SuccessiveHalving(1, 2), **more)
    assert len(again.units()) == units


class WithoutScore(Clonable):
    """Its score is NaN for some configurations, at every comparison."""

    def eval_batch(self, batch):
        score = math.nan if self.config["score"] is None else self.config["score"]
        return super().eval_batch(batch) | {"score": score}


@pytest.mark.parametrize("searcher", ["successive_halving", "hyperband", "asha", "pbt"])
def test_trials_stopped_by_a_comparison_are_not_trained_further(data, tmp_path, searcher):
    settings = {"metric": "score", "mode": "max", "epochs": 3, "n_trials": 6}
    space = {"lr": 0.01, "score": [None, 1, 2, 3], "batch_size": 10}
    run(data, tmp_path / "run", searcher, WithoutScore, space=space, **settings)
    result = cerebro.resume(tmp_path / "run", WithoutScore, epochs=4, workers=0, progress=False)
    without = [trial for trial in result.trials if trial.config["score"] is None]
    assert {(trial.status, trial.epoch) for trial in without} == {("stopped", 1)}
    assert (result.best.status, result.best.epoch) == ("finished", 4)


@pytest.mark.parametrize("epochs", [2, EPOCHS])
def test_resume_refuses_a_larger_population(data, tmp_path, epochs):
    """Neither a finished one nor one that was interrupted."""
    folder, cut = tmp_path / "run", tmp_path / "cut"
    result = run(data, folder, cerebro.PBT(), n_trials=4, epochs=epochs)
    with contextlib.suppress(KeyboardInterrupt):
        run(data, cut, cerebro.PBT(), n_trials=4, epochs=epochs, callbacks=[Interrupted(9)])
    for path in (folder, cut):
        with pytest.raises(
            InputError, match="n_trials was 4, is 8: with PBT it is the size of the population"
        ):
            run(data, path, cerebro.PBT(), n_trials=8, epochs=epochs, if_exists="resume")
    assert cerebro.open(folder).settings["n_trials"] == 4
    for path in (folder, cut):
        again = run(data, path, cerebro.PBT(), n_trials=4, epochs=epochs, if_exists="resume")
        assert repr(everything(again)) == repr(everything(result))


def test_more_points_than_trials_are_refused_before_a_run_begins(data, tmp_path):
    points = [{"lr": 0.02 + i / 100} for i in range(9)]
    with pytest.raises(InputError, match="PBT begins 8 trials, but there are 9 points"):
        run(data, tmp_path / "run", "pbt", n_trials=None, points=points)
    assert not (tmp_path / "run").exists()


# --- interrupted and resumed ----------------------------------------------------


class Interrupted:
    """Ctrl-C after so many units."""

    def __init__(self, units):
        self.units = units

    def on_unit_end(self, trial, metrics):
        self.units -= 1
        if self.units == 0:
            raise KeyboardInterrupt


def go_on(data, folder, make, build, undisturbed, **settings):
    """Interrupt what goes on once more, then let it end; compare with the undisturbed run."""
    settings = {**settings, "if_exists": "resume"}
    with contextlib.suppress(KeyboardInterrupt):
        run(data, folder, make(), build, callbacks=[Interrupted(7)], **settings)
    result = run(data, folder, make(), build, **settings)
    assert repr(everything(result)) == repr(everything(undisturbed))
    # Nothing else was trained; a unit in flight may have been committed without its row.
    assert units_of(result) <= units_of(undisturbed)


@pytest.mark.parametrize(
    ("make", "build", "before", "after", "every"),
    [
        (Halving, build_uneven, 0, 0, 13),
        (Halving, build_some_bad, 2, 1, 70),
        (Population, build_uneven, 2, 1, 70),
        (Population, build_some_bad, 0, 0, 13),
    ],
)
def test_an_interrupted_search_resumes_identically(
    data, tmp_path, make, build, before, after, every
):
    undisturbed = run(data, tmp_path / "undisturbed", make(), build, width=4)
    for units in range(1, len(undisturbed.units()), every):
        folder = tmp_path / f"run-{units}"
        with pytest.raises(KeyboardInterrupt):
            callbacks = [Interrupted(units)]
            run(data, folder, make(), build, width=4, workers=before, callbacks=callbacks)
        go_on(data, folder, make, build, undisturbed, width=4, workers=after)


@pytest.mark.parametrize("make", [Halving, Population])
def test_missing_states_are_trained_again(data, tmp_path, make):
    """Of all trials that have not ended: reports and decisions stay as they were.

    Paused trials and parents of clones that have not begun are among them.
    """
    settings = {"width": 4, "keep": "all"}  # a clone may need a state of a parent that has ended
    undisturbed = run(data, tmp_path / "undisturbed", make(), **settings)
    for units in range(5, len(undisturbed.units()), 9):
        folder = tmp_path / f"run-{units}"
        with pytest.raises(KeyboardInterrupt):
            run(data, folder, make(), callbacks=[Interrupted(units)], **settings)
        ended = {t.number for t in cerebro.open(folder).trials if not t.record.is_open}
        for file in (folder / "states").iterdir():
            if int(re.match(r"\d+", file.name)[0]) not in ended:
                file.unlink()
        result = run(data, folder, make(), if_exists="resume", **settings)
        assert repr(everything(result)) == repr(everything(undisturbed)), units


def test_an_interrupted_search_remembers_what_was_stopped_early(data, tmp_path):
    def make():
        return Halving((2, 4, 8))

    settings = {"stop": cerebro.EarlyStopping("val_loss", patience=1), "epochs": 8, "width": 3}
    undisturbed = run(data, tmp_path / "undisturbed", make(), **settings)
    for units in range(20, len(undisturbed.units()), 11):
        folder = tmp_path / f"run-{units}"
        with pytest.raises(KeyboardInterrupt):
            run(data, folder, make(), callbacks=[Interrupted(units)], **settings)
        go_on(data, folder, make, build, undisturbed, **settings)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import cerebro, test_adaptive
from adaptive_searchers import Halving, Population

class Killed:
    units = int(sys.argv[5])

    def on_unit_end(self, trial, metrics):
        self.units -= 1
        if self.units == 0:
            os.kill(os.getpid(), signal.SIGKILL)

data = cerebro.Dataset(sys.argv[2])
searcher = {"Halving": Halving, "Population": Population}[sys.argv[4]]()
build = test_adaptive.build_uneven
test_adaptive.run(data, sys.argv[3], searcher, build, width=4, workers=2, callbacks=[Killed()])
"""


@pytest.mark.parametrize(("make", "units"), [(Halving, 50), (Population, 11)])
def test_a_killed_search_resumes_identically(data, tmp_path, make, units):
    undisturbed = run(data, tmp_path / "undisturbed", make(), build_uneven, width=4)
    folder = tmp_path / "run"
    here = str(Path(__file__).parent)
    arguments = [here, str(data.path), str(folder), make.__name__, str(units)]
    killed = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], timeout=120, check=False, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    go_on(data, folder, make, build_uneven, undisturbed, width=4)


# --- clones -------------------------------------------------------------------


def test_clones_begin_with_their_parents_state(data, tmp_path):
    result = run(data, tmp_path / "run", Population(), keep="all")
    clones = [t for t in result.trials if t.parent is not None]
    assert len(clones) == 4
    train = data.split(0.75, 0.25)[0]
    for clone in clones:
        parent = result.trials[clone.parent]
        assert clone.config["lr"] == parent.config["lr"] * 0.8
        assert clone.parent_epoch < parent.epoch
        assert [e["epoch"] for e in clone.history] == list(range(clone.parent_epoch + 1, EPOCHS))
        assert (clone.epoch, clone.epochs) == (EPOCHS, EPOCHS)
        # The clone's first epoch by hand.
        model = Clonable(clone.config)
        model.w = parent.load(clone.parent_epoch).w
        epoch = clone.parent_epoch + 1
        np.random.seed(cerebro.trial_seed(SEED, clone.number))
        for batch in train.batches(
            clone.config["batch_size"], seed=SEED, epoch=epoch, framework="numpy"
        ):
            model.train_batch(batch)
        assert np.array_equal(clone.load(epoch).w, model.w)
        assert clone.load(epoch).lr == clone.config["lr"]


def test_a_model_without_load_clone_takes_its_parents_state_as_it_is(data, tmp_path):
    result = run(data, tmp_path / "run", Population(), LeastSquares)
    clones = [t for t in result.trials if t.parent is not None]
    assert [t.load("last").lr for t in clones] == [
        result.trials[t.parent].load("last").lr for t in clones
    ]


def test_clones_of_torch_models_use_their_own_learning_rate(data, tmp_path):
    torch = pytest.importorskip("torch")

    def build(config, info):
        net = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(3, 1)).double()
        optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, config["lr"], total_steps=info.total_steps
        )
        return cerebro.torch.Model(
            net,
            optimizer=optimizer,
            loss=lambda output, target: ((output[:, 0] - target) ** 2).mean(),
            scheduler=schedule,
            scheduler_step="batch",
        )

    found = []
    for workers in (0, 2):
        result = run(
            *(data, tmp_path / f"run-{workers}", Population(clones=2), build),
            workers=workers,
            n_trials=4,
            space={"lr": SPACE["lr"], "batch_size": 10},
        )
        found.append(everything(result))
    assert repr(found[0]) == repr(found[1])
    clones = [trial for trial in result.trials if trial.parent is not None]
    assert len(clones) == 2
    for clone in clones:
        groups = {
            trial.number: trial.load("last").state_dict()["optimizer"]["param_groups"][0]
            for trial in (clone, result.trials[clone.parent])
        }
        assert groups[clone.number]["max_lr"] == clone.config["lr"]
        if result.trials[clone.parent].epoch == clone.epoch:  # at the same place of its schedule
            ratio = groups[clone.number]["lr"] / groups[clone.parent]["lr"]
            assert ratio == pytest.approx(clone.config["lr"] / groups[clone.parent]["max_lr"])
        assert cerebro.replay(result, clone.number, build).identical


@pytest.mark.parametrize("keep", ["best", "last", "all"])
def test_only_states_that_keep_allows_remain_on_disk(data, tmp_path, keep):
    result = run(data, tmp_path / "run", Population(), keep=keep)
    on_disk = {file.name for file in (result.path / "states").iterdir()}
    recorded = set()
    for trial in result.trials:
        states = {e.epoch for e in trial.record.epochs if e.state_file is not None}
        if keep == "all":
            assert states == {e["epoch"] for e in trial.history}
        wanted = {trial.history[-1]["epoch"]} | ({trial.best_epoch} if keep == "best" else set())
        assert keep == "all" or states <= wanted
        recorded |= {e.state_file for e in trial.record.epochs if e.state_file is not None}
    assert on_disk == recorded


def test_clones_of_clones_are_replayed_with_their_ancestors(data, tmp_path):
    class Chain(Recorded):
        kept = ()

        def next_suggestion(self):
            begun = sum(call[0] == "suggest" for call in self.calls)
            if begun == 3:
                return DONE
            config = {"lr": 0.1 / (begun + 1), "batch_size": 5}
            return Suggestion(config, epochs=begun + 2, parent=begun - 1 if begun else None)

        def decide(self, trial, epoch, loss):
            return Decision.CONTINUE

    result = run(data, tmp_path / "run", Chain(), width=1)
    assert [(t.parent, t.parent_epoch, t.epoch) for t in result.trials] == [
        (None, None, 2),
        (0, 1, 3),
        (1, 2, 4),
    ]
    again = cerebro.replay(result, 2)
    assert again.identical
    assert [epoch.epoch for epoch in again.epochs] == [3]


def test_a_replayed_clone_says_which_ancestor_differs(data, tmp_path):
    result = run(data, tmp_path / "run", Population())
    clone = next(t for t in result.trials if t.parent is not None)
    parent = result.trials[clone.parent].record
    parent.config["lr"] *= 1.5
    again = cerebro.replay(result, clone.number)
    assert again.first_difference == clone.parent_epoch + 1
    assert f"its parent: trial {parent.number}: differs from epoch 0 on" in again.differences


# --- failures -----------------------------------------------------------------


def test_a_failed_trial_is_reported_once_as_worst(data, tmp_path):
    searcher = Population(clones=0)
    result = run(data, tmp_path / "run", searcher, build_some_bad, workers=2, n_trials=12)
    bad = {t.number for t in result.trials if t.status in ("failed", "diverged")}
    assert {result.trials[n].status for n in bad} == {"failed", "diverged"}
    worst = [call[1:3] for call in searcher.calls if call[0] == "report" and call[3] == math.inf]
    assert sorted(worst) == [(n, result.trials[n].epoch) for n in sorted(bad)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_bad_configuration_fails_alone(data, tmp_path, workers, adaptive):
    class Listed(Recorded):
        kept = ()

        def next_suggestion(self):
            begun = sum(call[0] == "suggest" for call in self.calls)
            sizes = [5, 0, 10, "many", object]
            return Suggestion({"lr": 0.1, "batch_size": sizes[begun]}) if begun < 5 else DONE

        def decide(self, trial, epoch, loss):
            return Decision.CONTINUE

    searcher = Listed()
    searcher.adaptive = adaptive
    result = run(data, tmp_path / "run", searcher, workers=workers)
    assert [t.status for t in result.trials] == ["finished", "failed", "finished"] + ["failed"] * 2
    assert result.trials[1].error == "batch_size must be a whole number from 1 to 2147483647, not 0"
    assert "not 'many'" in result.trials[3].error
    assert "cannot record <class 'object'>" in result.trials[4].error
    assert result.trials[4].config == {"lr": 0.1, "batch_size": "<class 'object'>"}


def test_a_bad_configuration_is_reported_as_worst(data, tmp_path):
    searcher = Population(clones=0)
    space = {"lr": 0.1, "batch_size": [5, 0, 10]}
    result = run(data, tmp_path / "run", searcher, space=space, n_trials=6)
    bad = [t.number for t in result.trials if t.config["batch_size"] == 0]
    assert bad
    assert [t.number for t in result.trials if t.status == "failed"] == bad
    worst = [call[1:3] for call in searcher.calls if call[0] == "report" and call[3] == math.inf]
    assert worst == [(n, 0) for n in bad]


def test_the_time_limit_ends_a_search_whose_trials_cannot_start(data, tmp_path):
    class Hopeless(Population):
        def next_suggestion(self):
            self.begun += 1
            return Suggestion(
                {"lr": 0.1, "batch_size": 5, **({"x": object} if self.begun > 1 else {})}
            )

        def decide(self, trial, epoch, loss):
            return Decision.STOP

    result = run(data, tmp_path / "run", Hopeless(), n_trials=None, time_limit=0.5)
    assert result.status == "stopped"
    assert result.trials[0].status == "stopped"
    assert {t.status for t in result.trials[1:]} == {"failed"}


def test_a_run_whose_trials_all_fail_reports_the_first_cause(data, tmp_path):
    def nothing(config):
        raise ValueError("no model today")

    with pytest.raises(
        RunError, match=r"the first 3 trials failed in the same way: .*no model"
    ) as caught:
        run(data, tmp_path / "run", Halving(), nothing)
    assert {t.status for t in caught.value.result.trials} <= {"failed", "stopped"}


# --- early stopping -----------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_an_early_stopped_trial_keeps_reporting_its_last_value(data, tmp_path, workers):
    """Rungs are complete, so that the search ends, and no epoch is trained for it."""
    searcher = Halving((2, 4, 8))
    stop = cerebro.EarlyStopping("val_loss", patience=1)
    result = run(data, tmp_path / "run", searcher, stop=stop, epochs=8, workers=workers)
    reported = {}
    for call in searcher.calls:
        if call[0] == "report":
            reported.setdefault(call[1], []).append(call[2:4])
    standing = 0
    for trial in result.trials:
        epochs, values = zip(*reported[trial.number], strict=True)
        assert epochs == tuple(range(len(epochs)))
        own = [e["metrics"]["val_loss"] for e in trial.history]
        assert list(values) == own + own[-1:] * (len(values) - len(own))
        standing += len(values) - len(own)
    assert standing > 0
    assert max(len(calls) for calls in reported.values()) == 8
    assert searcher.next_suggestion() is DONE


# --- what is on record --------------------------------------------------------


def test_decisions_are_on_record_in_the_order_they_were_taken(data, tmp_path):
    searcher = Halving()
    result = run(data, tmp_path / "run", searcher, workers=2)
    expected = []
    for kind, *said in searcher.calls:
        if kind == "report":
            trial, epoch, _, decision = said
            expected.append((trial, epoch, decision.value, None))
        elif isinstance(said[0], Suggestion):
            new = said[0].trial is None
            number = sum(e[2] == "begin" for e in expected) if new else said[0].trial
            done = 0 if new else sum(e[:1] == (number,) and e[3] is None for e in expected)
            expected.append((number, done, "begin" if new else "resume", said[0].epochs))
    recorded = decisions_of(result)
    assert [row[1:] for row in recorded] == expected
    assert [row[0] for row in recorded] == sorted(row[0] for row in recorded)


def test_the_searchers_state_is_on_record_with_its_decisions(data, tmp_path):
    searcher = Halving()
    result = run(data, tmp_path / "run", searcher)
    assert result.saved.meta["searcher"] == json.loads(json.dumps(searcher.state_dict()))
    assert result.saved.meta["search_loop"]["is_exhausted"]


def test_a_searchers_decisions_are_recorded_atomically(data, tmp_path):
    """A searcher that fails in the middle of what it has to say leaves no half of it."""

    class Failing(Halving):
        def next_suggestion(self):
            if self.rung == 1:
                raise RuntimeError("lost the thread")
            return super().next_suggestion()

    searcher = Failing()
    with pytest.raises(RuntimeError, match="lost the thread"):
        run(data, tmp_path / "run", searcher)
    result = cerebro.open(tmp_path / "run")
    recorded = decisions_of(result)
    state = result.saved.meta["searcher"]
    assert state["rung"] == 0
    assert state["begun"] == sum(row[3] == "begin" for row in recorded)
    # What the searcher has on record is what it was told on record.
    told = [row for row in recorded if row[3] in ("continue", "pause", "stop")]
    assert len(state["results"]) == len(told)
    assert len(told) < len(result.trials)


def test_a_random_search_records_its_position(data, tmp_path):
    result = run(data, tmp_path / "run", "random", n_trials=5)
    assert result.saved.meta["searcher"] == {"next": 5}
    assert decisions_of(result) == []


# --- asynchronous -------------------------------------------------------------


@pytest.mark.parametrize("make", [Halving, Population])
def test_an_asynchronous_search_can_be_repeated_from_its_record(data, tmp_path, make):
    searcher = make()
    result = run(data, tmp_path / "run", searcher, build_uneven, workers=2, asynchronous=True)
    assert result.settings["asynchronous"] is True
    assert {t.status for t in result.trials} <= {"finished", "stopped"}
    # The record can be followed: a fresh searcher that hears the same says the same.
    follower = make()
    follower.setup(
        cerebro.space.as_space(SPACE),
        seed=SEED,
        epochs=EPOCHS,
        n_trials=8,
        metric="loss",
        mode="min",
        points=[],
    )
    metrics = {(t.number, e["epoch"]): e["metrics"] for t in result.trials for e in t.history}
    for _, trial, epoch, decision, epochs in decisions_of(result):
        if decision in ("begin", "resume", "clone"):
            suggestion = follower.suggest()
            while suggestion is None:
                suggestion = follower.suggest()
            assert (suggestion.epochs or EPOCHS) == epochs
            assert suggestion.trial in (None, trial)
            assert suggestion.parent == result.trials[trial].parent or decision == "resume"
        else:
            assert follower.report(trial, epoch, metrics[trial, epoch]).value == decision


@pytest.mark.parametrize("workers", [0, 2])
def test_asynchronous_does_not_hold_a_report_back(data, tmp_path, monkeypatch, workers):
    """A trial is told of to its end while a lower one has not finished an epoch."""
    made = []

    class Seen(Coordinator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    class Hold:
        def on_trial_start(self, trial):
            if trial.number == 0:
                made[0].pause_trial(0)

        def on_trial_end(self, trial):
            if trial.number == 1:
                made[0].continue_trial(0)

    monkeypatch.setattr(conduct, "Coordinator", Seen)
    searcher = Population(clones=0)
    settings = {"width": 2, "n_trials": 2, "asynchronous": True, "workers": workers}
    run(data, tmp_path / "run", searcher, callbacks=[Hold()], **settings)
    reported = [call[1:3] for call in searcher.calls if call[0] == "report"]
    assert reported == [(trial, epoch) for trial in (1, 0) for epoch in range(EPOCHS)]


# --- nonsense -----------------------------------------------------------------


class Says(Recorded):
    """Begins with a trial, pauses it, then says what it was made with."""

    kept = ()

    def __init__(self, suggestion):
        super().__init__()
        self.suggestion = suggestion

    def next_suggestion(self):
        asked = sum(call[0] == "suggest" for call in self.calls)
        return Suggestion({"lr": 0.1, "batch_size": 5}, epochs=2) if asked == 0 else self.suggestion

    def decide(self, trial, epoch, loss):
        return Decision.CONTINUE if epoch == 0 else Decision.PAUSE


@pytest.mark.parametrize(
    ("suggestion", "message"),
    [
        ({"lr": 0.1}, "suggests {'lr': 0.1}: suggest.. must return a Suggestion, None or DONE"),
        (Suggestion([1]), r"suggests the configuration \[1\]: it must be a mapping"),
        (Suggestion({}, epochs=2.5), "suggests epochs=2.5: it must be a whole number"),
        (Suggestion({}, trial=7), "resumes trial 7, which does not exist"),
        (Suggestion({}, trial=0, epochs=2), "until 2 epochs are done, but it has done 2"),
        (Suggestion({}, parent=0, epochs=2), "until 2 epochs are done, but its parent has done 2"),
    ],
)
def test_an_invalid_suggestion_raises_an_error_with_the_cause(data, tmp_path, suggestion, message):
    with pytest.raises(InputError, match=f"the searcher Says .*{message}"):
        run(data, tmp_path / "run", Says(suggestion), width=1)


def test_only_paused_trials_are_resumed_and_only_trained_ones_cloned(data, tmp_path):
    class Early(Says):
        def decide(self, trial, epoch, loss):
            return Decision.CONTINUE

    with pytest.raises(InputError, match=r"resumes trial 0, which it has not paused \(waiting\)"):
        run(data, tmp_path / "resumed", Early(Suggestion({}, trial=0)), width=2)
    with pytest.raises(InputError, match="clones trial 0, which has not reported an epoch yet"):
        run(data, tmp_path / "cloned", Early(Suggestion({}, parent=0)), width=2)
