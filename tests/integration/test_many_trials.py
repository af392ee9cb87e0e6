"""Runs of many trials: what has ended is forgotten, and nothing is lost by it."""

from __future__ import annotations

import contextlib
import gc
import math
import sqlite3

import numpy as np
import pytest
from adaptive_searchers import Recorded

import cerebro
from cerebro import DONE, Decision, Suggestion
from cerebro.coordinator import search_loop
from cerebro.coordinator.coordinator import Coordinator
from cerebro.coordinator.trial import LiveTrial
from cerebro.errors import InputError, RunError
from cerebro.results import saved_run
from cerebro.run.records import EpochRecord, TrialRecord
from cerebro.run.store import Store

SPACE = {"lr": cerebro.loguniform(1e-3, 1e-1), "units": [1, 2]}


class Model:
    framework = "numpy"

    def __init__(self, config, info):
        if config.get("bad"):
            raise (ValueError, KeyError, TypeError, OSError)[config["bad"] - 1]("it is bad")
        if info.trial % 10 == 5:
            print("trial", info.trial)
        self.lr = config["lr"]
        self.w = np.random.normal(size=2)

    def train_batch(self, batch):
        self.w = self.w * (1 - self.lr) + 1e-3 * np.random.normal(size=2)
        return {"loss": float((self.w**2).sum())}

    def eval_batch(self, batch):
        return {"loss": float((self.w**2).sum())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x = np.arange(24.0).reshape(12, 2)
    folder = tmp_path_factory.mktemp("many") / "data"
    return cerebro.shard({"x": x}, folder, shards=2, progress=False)


@pytest.fixture(autouse=True)
def few_in_advance(monkeypatch):
    monkeypatch.setattr(search_loop, "ADVANCE", 20)


@pytest.fixture
def coordinators(monkeypatch):
    """Every coordinator that is made, the newest last."""
    made = []
    init = Coordinator.__init__

    def noted(self, *arguments, **options):
        made.append(self)
        init(self, *arguments, **options)

    monkeypatch.setattr(Coordinator, "__init__", noted)
    return made


def search(data, run, n_trials, **options):
    defaults = {
        "epochs": 1,
        "batch_size": 6,
        "validation": 0.5,
        "workers": 0,
        "progress": False,
        "run": run,
    }
    space = options.pop("space", SPACE)
    return cerebro.search(Model, space, data, n_trials=n_trials, **{**defaults, **options})


def states(result):
    return [(t.number, t.status, t.config, [h["state_hash"] for h in t.history])
            for t in result.trials]  # fmt: skip


class Objects:
    """Counts, at the end of every 50th trial, the objects that stand for trials and epochs."""

    def __init__(self):
        self.ended = 0
        self.counts = []
        self.before = self.count()  # other tests' results

    def on_trial_end(self, trial):
        self.ended += 1
        if self.ended % 50 == 0:
            self.counts.append(self.count() - self.before)

    def count(self):
        gc.collect()
        kinds = (LiveTrial, TrialRecord, EpochRecord)
        return sum(type(o) in kinds for o in gc.get_objects())


class AskAndTell(Recorded):
    """Listens, `width` at a time, and keeps nothing itself."""

    kept = ("begun",)

    def __init__(self):
        super().__init__()
        self.begun = 0

    def next_suggestion(self):
        self.calls.clear()
        if self.begun == self.n_trials:
            return DONE
        self.begun += 1
        return Suggestion(self.space.sample(self.seed, self.begun), epochs=1)

    def decide(self, trial, epoch, loss):
        return Decision.STOP


@pytest.mark.parametrize("searcher", ["random", AskAndTell])
def test_memory_does_not_grow_with_the_number_of_trials(data, tmp_path, searcher, coordinators):
    made = searcher if isinstance(searcher, str) else searcher()
    objects = Objects()
    result = search(data, tmp_path / "run", 400, searcher=made, callbacks=[objects])
    assert len(objects.counts) == 8
    assert max(objects.counts) < 100  # of 400 trials with an epoch each
    (coordinator,) = coordinators
    assert len(coordinator.trials) <= 23  # in advance, and the first three
    assert len(coordinator._trials) == 400
    assert not coordinator._trials.states._kept.keys() - coordinator.trials.keys()
    assert not coordinator.events._growth._trials.keys() - coordinator.trials.keys()
    assert [t.status for t in result.trials] == ["finished"] * 400
    assert coordinator.snapshot().share_done == 1.0


def test_only_trials_that_print_have_logs(data, tmp_path):
    result = search(data, tmp_path / "run", 30, workers=1)
    names = {path.name for path in (tmp_path / "run" / "trials").iterdir()}
    assert names == {"5.log", "15.log", "25.log"}
    assert [t.log for t in result.trials[4:6]] == ["", "trial 5\n"]
    assert result.verify()


def test_share_done_counts_trials_not_yet_suggested(data, tmp_path, coordinators):
    shares, done = [], []

    class Share:
        def on_unit_end(self, trial, metrics):
            (coordinator,) = coordinators
            shares.append(coordinator.snapshot().share_done)
            done.append(coordinator._overview.forecaster.done)  # epochs

    search(data, tmp_path / "run", 40, callbacks=[Share()])
    assert len(done) == 120 and done == sorted(done) and done[-1] == pytest.approx(40)
    assert shares == pytest.approx([n / 40 for n in done])


def test_trials_share_disk_flushes(data, tmp_path, monkeypatch):
    flushes = []
    flush = Store.flush
    monkeypatch.setattr(Store, "flush", lambda self: (flushes.append(1), flush(self)))
    search(data, tmp_path / "run", 100)
    assert len(flushes) < 50  # those that were asked for in advance share one; how many varies


# --- commands and failures ---------------------------------------------------------


def test_a_forgotten_trial_can_no_longer_be_commanded(data, tmp_path, coordinators):
    said = []

    class Command:
        def on_trial_end(self, trial):
            if trial.number == 35:
                for verb in ("stop_trial", "pause_trial", "continue_trial"):
                    for number in (7, 77):
                        with pytest.raises(InputError) as caught:
                            getattr(coordinators[-1], verb)(number)
                        said.append(str(caught.value))
                assert coordinators[-1].status_of(7) == "finished"
                assert coordinators[-1].status_of(77) is None

    search(data, tmp_path / "run", 40, callbacks=[Command()])
    assert said == [
        "trial 7 is finished: it cannot be stopped",
        "there is no trial 77: it cannot be stopped",
        "trial 7 is finished: it cannot be paused",
        "there is no trial 77: it cannot be paused",
        "trial 7 is finished: it cannot be continued",
        "there is no trial 77: it cannot be continued",
    ]


def test_the_error_counts_all_failed_trials(data, tmp_path):
    points = [{"lr": 0.1, "units": 1, "bad": 1 + n % 4} for n in range(40)]
    with pytest.raises(RunError, match=r"all 40 trials failed; the first: ValueError: it is bad"):
        search(data, tmp_path / "run", 40, points=points, space={**SPACE, "bad": [0, 1, 2, 3, 4]})


def test_a_run_with_one_successful_trial_finishes(data, tmp_path):
    points = [{"lr": 0.1, "units": 1, "bad": 1 + n % 4} for n in range(40)]
    points[20]["bad"] = 0
    space = {**SPACE, "bad": [0, 1, 2, 3, 4]}
    result = search(data, tmp_path / "run", 40, points=points, space=space)
    assert result.status == "finished"
    assert result.best.number == 20


# --- clones ------------------------------------------------------------------------


class CloneOld(AskAndTell):
    """After 40 trials, clones of one that ended long ago; one of them is cloned again."""

    kept = ("begun",)

    def next_suggestion(self):
        self.calls.clear()
        self.begun += 1
        if self.begun <= 40:
            return Suggestion(self.space.sample(self.seed, self.begun), epochs=2)
        if self.begun <= 43:
            return Suggestion(self.space.sample(self.seed, 0), epochs=4, parent=7)
        if self.begun <= 60:
            return Suggestion(self.space.sample(self.seed, self.begun), epochs=2)
        if self.begun == 61:
            return Suggestion(self.space.sample(self.seed, 0), epochs=6, parent=41)
        return DONE

    def decide(self, trial, epoch, loss):
        return Decision.CONTINUE


@pytest.mark.parametrize("keep", ["best", "last", "all"])
def test_a_trial_that_was_forgotten_is_cloned(data, tmp_path, coordinators, keep):
    result = search(data, tmp_path / "run", 100, searcher=CloneOld(), epochs=8, keep=keep)
    clones = {t.number: (t.parent, t.parent_epoch) for t in result.trials if t.parent is not None}
    assert clones == {40: (7, 1), 41: (7, 1), 42: (7, 1), 60: (41, 3)}
    assert {t.status for t in result.trials} == {"finished"}
    (coordinator,) = coordinators
    assert sorted(coordinator.trials)[:3] == [0, 1, 2]
    assert 7 not in coordinator.trials
    assert 41 not in coordinator.trials
    assert not coordinator._trials.states._needed
    assert len(coordinator._trials) == 61
    assert result.verify()
    for number in (41, 60):
        assert cerebro.replay(result.path, number, Model).identical
    # Its state was there, and what `keep` lets stay still is.
    kept = [h["epoch"] for h in result.trials[7].history
            if result.trials[7].record.epochs[h["epoch"]].state_file]  # fmt: skip
    assert 1 in kept


class Resumes(AskAndTell):
    def next_suggestion(self):
        if self.begun < 30:
            return super().next_suggestion()
        return Suggestion({}, trial=self.wanted, epochs=9)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (5, "resumes trial 5, which it has not paused (finished)"),
        (500, "resumes trial 500, which does not exist"),
        ("five", "suggests trial='five': it must be a trial's number, or None"),
        (-1, "resumes trial -1, which does not exist"),
    ],
)
def test_a_searcher_that_resumes_an_ended_trial_is_refused(data, tmp_path, wanted, said):
    searcher = Resumes()
    searcher.wanted = wanted
    with pytest.raises(InputError) as caught:
        search(data, tmp_path / "run", 100, searcher=searcher, epochs=2)
    assert str(caught.value).endswith(said)


# --- going on ----------------------------------------------------------------------


class Interrupt:
    def __init__(self, at):
        self.left = at

    def on_unit_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [2, 61, 200])
def test_an_interrupted_run_of_many_trials_resumes_identically(data, tmp_path, coordinators, at):
    whole = search(data, tmp_path / "whole", 60, epochs=2)
    with pytest.raises(KeyboardInterrupt):
        search(data, tmp_path / "run", 60, epochs=2, callbacks=[Interrupt(at)])
    objects = Objects()
    result = cerebro.resume(tmp_path / "run", Model, callbacks=[objects], progress=False)
    assert states(result) == states(whole)
    assert len(coordinators[-1].trials) <= 23
    assert result.verify()
    further = cerebro.resume(tmp_path / "run", Model, epochs=3, progress=False)
    assert [len(t.history) for t in further.trials] == [3] * 60
    assert [s[3][:2] for s in states(further)] == [s[3] for s in states(whole)]
    assert len(coordinators[-1].trials) <= 23


def test_resuming_some_trials_does_not_end_an_unfinished_search(data, tmp_path):
    whole = search(data, tmp_path / "whole", 60)
    with pytest.raises(KeyboardInterrupt):
        search(data, tmp_path / "run", 60, callbacks=[Interrupt(10)])
    begun = range(len(cerebro.open(tmp_path / "run").trials))
    assert 20 <= len(begun) < 30
    part = cerebro.resume(tmp_path / "run", Model, trials=begun, progress=False)
    assert {t.status for t in part.trials} == {"finished"}
    assert part.status == "stopped"
    result = cerebro.resume(tmp_path / "run", Model, progress=False)
    assert result.status == "finished"
    assert states(result) == states(whole)


# --- results -----------------------------------------------------------------------


@pytest.mark.parametrize("select", ["best", "last"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_lazy_result_equals_one_that_holds_all_trials(data, tmp_path, monkeypatch, select, mode):
    points = [{"lr": 0.1, "units": 1, "bad": n % 3} for n in range(8)]
    space = {**SPACE, "bad": [0, 1, 2]}
    search(
        data, tmp_path / "run", 30, epochs=3, keep="all", points=points, space=space, mode=mode,
        select=select,
    )  # fmt: skip
    with_losses = (1.5, 1.5, math.nan, math.inf, -math.inf, 0.25)
    held = cerebro.open(tmp_path / "run")
    change_losses(tmp_path / "run", [t.number for t in held.trials if t.history], with_losses)
    held = cerebro.open(tmp_path / "run")
    assert held.saved.holds_trials
    monkeypatch.setattr(saved_run, "HELD_TRIALS", 10)

    def opened():
        result = cerebro.open(tmp_path / "run")
        assert not result.saved.holds_trials
        return result

    lazy = opened()
    assert lazy.best.config == held.best.config
    assert [t.number for t in lazy.top(100)] == [t.number for t in held.top(100)]
    assert 0 < len(lazy.top(100)) < 30
    assert [t.number for t in lazy.top(3)] == [t.number for t in held.top(3)]
    assert [t.history for t in lazy.top(5)] == [t.history for t in held.top(5)]
    assert repr(lazy) == repr(held)
    assert lazy.saved.counts() == held.saved.counts()
    assert not lazy.saved.holds_trials
    assert states(lazy) == states(held)
    assert lazy.saved.holds_trials
    assert lazy.summary() == held.summary()
    assert [t.number for t in lazy.top(100)] == [t.number for t in held.top(100)]
    lazy.refresh()
    assert not lazy.saved.holds_trials
    assert opened().best.load(build=Model).w.shape == (2,)


def change_losses(run, numbers, losses):
    """Make epochs of trials equal, and some no finite number."""
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as connection:
        for number in numbers:
            for epoch in range(3):
                value = losses[(number + 2 * epoch) % len(losses)]
                connection.execute(
                    "UPDATE metrics SET value = ? WHERE trial = ? AND epoch = ? AND name = 'loss'",
                    (None if math.isnan(value) else value, number, epoch),
                )
        connection.commit()


def test_unfinished_trials_of_a_dead_run_count_as_stopped(data, tmp_path, monkeypatch):
    search(data, tmp_path / "run", 5)
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "run.sqlite")) as connection:
        connection.execute("UPDATE meta SET value = '\"running\"' WHERE key = 'status'")
        connection.execute("UPDATE trials SET status = 'running' WHERE number > 2")
        connection.commit()
    for held in (10, 2):
        monkeypatch.setattr(saved_run, "HELD_TRIALS", held)
        result = cerebro.open(tmp_path / "run")
        assert result.saved.holds_trials == (held == 10)
        assert result.status == "interrupted"
        assert result.saved.counts() == {"finished": 3, "stopped": 2}
        assert [t.status for t in result.top(5)].count("stopped") == 2
        assert [t.status for t in result.trials[3:]] == ["stopped", "stopped"]
