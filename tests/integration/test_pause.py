"""Pausing, continuing and stopping single trials while a run goes on."""

from __future__ import annotations

import numpy as np
import pytest

import cerebro
from cerebro.coordinator import conduct
from cerebro.coordinator.coordinator import Coordinator
from cerebro.errors import InputError

EPOCHS = 3


class Mean:
    framework = "numpy"

    def __init__(self, rate):
        self.rate = rate
        self.value = np.zeros(1)

    def train_batch(self, batch):
        error = self.value - batch["x"].mean() + 0.01 * np.random.normal()
        self.value = self.value - self.rate * error
        return {"loss": float(error[0] ** 2)}

    def eval_batch(self, batch):
        return {"loss": float((self.value[0] - batch["x"].mean()) ** 2)}

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = np.array(state["value"])


def build(config):
    return Mean(config["rate"])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a search of four trials, calling `command(coordinator, trial)` after every unit."""
    x = np.random.default_rng(0).normal(size=90)
    data = cerebro.shard({"x": x}, tmp_path / "data", shards=3, progress=False)
    made = []

    class Seen(Coordinator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(conduct, "Coordinator", Seen)

    def run(command=None, workers=0):
        class Commands:
            def on_unit_end(self, trial, metrics):
                if command is not None:
                    command(made[-1], trial)

        return cerebro.search(
            build,
            {"rate": [0.1, 0.2, 0.3, 0.4], "batch_size": 5},
            data,
            epochs=EPOCHS,
            searcher="grid",
            validation=0.2,
            workers=workers,
            run=tmp_path / f"run-{len(made)}",
            progress=False,
            keep="all",
            callbacks=[Commands()],
        )

    return run


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_paused_trial_continues_where_it_stopped(run, workers):
    undisturbed = hashes(run())
    units = []
    paused = []

    def command(coordinator, trial):
        units.append(trial.number)
        record = coordinator.trials[0].record
        if units.count(0) == 2 and trial.number == 0:
            coordinator.pause_trial(0)
        elif record.status == "paused":
            paused.append(trial.number)
            if len(paused) == 4:
                coordinator.continue_trial(0)

    result = run(command, workers)
    assert hashes(result) == undisturbed
    assert len(paused) >= 4
    assert 0 not in paused[1:]
    assert [trial.status for trial in result.trials] == ["finished"] * 4


def test_a_trial_that_stays_paused_does_not_hold_up_the_others(run):
    units = []

    def command(coordinator, trial):
        units.append(trial.number)
        if trial.number == 1 and units.count(1) == 4:
            coordinator.pause_trial(1)
        if len(units) == 4 + 3 * EPOCHS * 4:  # all that the others have
            coordinator.continue_trial(1)

    undisturbed, result = hashes(run()), run(command)
    assert hashes(result) == undisturbed
    assert units[-8:] == [1] * 8


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_trial_ends_with_its_unit(run, workers):
    def command(coordinator, trial):
        if trial.number == 2 and trial.epoch == 2:
            coordinator.stop_trial(2)

    undisturbed, result = hashes(run()), run(command, workers)
    assert [trial.status for trial in result.trials] == ["finished"] * 2 + ["stopped", "finished"]
    assert hashes(result)[2] == undisturbed[2][:2]
    assert hashes(result)[3] == undisturbed[3]
    assert not list((result.path / "states").glob("*.slots"))


def test_commands_that_make_no_sense_are_refused(run):
    messages, others = [], []

    def refused(command, number):
        with pytest.raises(InputError) as caught:
            command(number)
        messages.append(str(caught.value))

    def command(coordinator, trial):
        if messages or coordinator.trials[0].record.status != "finished":
            return
        refused(coordinator.pause_trial, 9)
        refused(coordinator.pause_trial, 0)
        refused(coordinator.stop_trial, 0)
        refused(coordinator.continue_trial, 0)
        others.append(trial.number)
        refused(coordinator.continue_trial, trial.number)

    run(command)
    assert messages == [
        "there is no trial 9: it cannot be paused",
        "trial 0 is finished: it cannot be paused",
        "trial 0 is finished: it cannot be stopped",
        "trial 0 is finished: it cannot be continued",
        f"trial {others[0]} is running: no command has paused it",
    ]
