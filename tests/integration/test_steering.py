"""Trials that the user adds to a running search: what they are, and that nothing else changes."""

from __future__ import annotations

import pytest

import cerebro
from cerebro import control
from cerebro.errors import InputError
from cerebro.run.store import read_actions, reader
from tests.integration.steered import BASE, DATA, build

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SPACE = {**{name: [value] for name, value in BASE.items()}, "lr": cerebro.loguniform(1e-3, 1e-1)}
SEARCHERS = {
    "random": {"searcher": "random"},
    "hyperband": {"searcher": "hyperband", "n_trials": 6},
    "asha": {"searcher": "asha"},
    "pbt": {"searcher": "pbt", "n_trials": 4},
    "median": {"searcher": "median"},
    "tpe": {"searcher": "tpe"},
    "folds": {"searcher": "random", "validation": cerebro.KFold(2), "n_trials": 4},
    "shards": {"searcher": "median", "shuffle": "shards"},
}


class AtEpoch:
    """Sends requests when trials have finished an epoch: (trial, epochs done) to a call."""

    def __init__(self, calls):
        self.calls = dict(calls)
        self.threads = []

    def on_epoch_end(self, trial, metrics):
        call = self.calls.pop((trial.number, trial.epoch), None)
        if call is not None:
            call()


def put(run, command):
    control.put(run / control.FOLDER, command)


def steer(folder, calls=(), **more):
    """Search, and send commands at given epochs; return the result."""
    requests = {
        when: lambda sent=sent: [put(folder, command) for command in sent] for when, *sent in calls
    }
    options = {
        "validation": 0.25, "workers": 0, "progress": False, "keep": "all", "epochs": 4,
        "n_trials": 5, "width": 3, "run": folder, "callbacks": [AtEpoch(requests)],
    }  # fmt: skip
    return cerebro.search(build, SPACE, DATA, **{**options, **more})


def hashes(result, origin="searcher"):
    """The states of all epochs of the trials of an origin, in their order, with what decided."""
    return [
        (trial.config, trial.status, [epoch["state_hash"] for epoch in trial.history])
        for trial in result.trials
        if trial.record.origin == origin
    ]


def actions(result):
    with reader(result.path) as connection:
        return read_actions(connection)


FEW = [
    ((0, 1), control.Clone(0, {"lr": 0.02}, epochs=4)),
    (
        (1, 1),
        control.Add({**BASE, "lr": 0.3}),
        control.Clone(1, {"lr": 0.5}, cold=True, epochs=3),
    ),
]


@pytest.mark.parametrize(
    ("name", "workers"),
    [*((name, 0) for name in SEARCHERS), ("random", 4), ("pbt", 1), ("folds", 2)],
)
def test_trials_of_the_user_change_no_other_trial(tmp_path, name, workers):
    settings = SEARCHERS[name]
    plain = steer(tmp_path / "plain", **settings)
    steered = steer(tmp_path / "steered", FEW, **{**settings, "workers": workers})
    assert [action.outcome for action in actions(steered)] == ["done"] * 3
    assert hashes(steered) == hashes(plain)
    mine = [trial for trial in steered.trials if trial.record.origin == "user"]
    assert [trial.status for trial in mine] == ["finished"] * 3
    # Which is sent first may depend on timing.
    assert sorted((trial.parent, trial.epoch) for trial in mine if trial.parent is not None) == [
        (0, 4),
        (1, 3),
    ]
    (added,) = (trial for trial in mine if trial.parent is None)
    assert added.epoch == 4 and added.config == {**BASE, "lr": 0.3}
    assert [trial.parent_epoch for trial in mine if trial.parent == 1] == [None]
    for trial in mine:
        assert cerebro.replay(steered, trial).identical
    assert not steered.verify().problems
