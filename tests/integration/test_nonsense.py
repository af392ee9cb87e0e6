"""Searchers that say nonsense, and metrics that go missing: one line that says what to change."""

from __future__ import annotations

import re
import textwrap

import numpy as np
import pytest
from test_bad_input import (  # noqa: F401
    assert_nothing_lives,
    imports_are_undone,
    no_worker_outlives_the_tests,
    one_line_error,
    program,
    run_file,
)

import cerebro

ODD = """
from cerebro import DONE, Decision, Suggestion
from cerebro.searchers import RandomSearch

GOOD = {"lr": 0.01}

class Odd(RandomSearch):
    adaptive = True
    words = ()
    answers = {}

    def suggest(self):
        self.asked = getattr(self, "asked", 0) + 1
        return self.words[self.asked - 1] if self.asked <= len(self.words) else DONE

    def report(self, trial, epoch, metrics):
        return self.answers.get((trial, epoch), Decision.CONTINUE)

class Said(Odd):
    BODY

settings.update(searcher=Said(), width=2, epochs=4)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x = np.random.default_rng(1).normal(size=(400, 3))
    arrays = {"x": x, "y": x @ np.array([1.0, -2.0, 0.5])}
    return cerebro.shard(arrays, tmp_path_factory.mktemp("data") / "set", shards=4)


# What the searcher says, and what is said of it.
NONSENSE = {
    "a mapping": ("words = [GOOD]", r"suggests {'lr': 0.01}: suggest\(\) must return a Sugg"),
    "a mapping later": (
        "words = [Suggestion(GOOD), GOOD]",
        r"suggests {'lr': 0.01}: suggest\(\) must return a Suggestion, None or DONE",
    ),
    "nothing at all": ("words = [None]", "suggests no trial"),
    "a list as configuration": ("words = [Suggestion([1])]", r"the configuration \[1\]: it must"),
    "an unknown trial": (
        "words = [Suggestion(GOOD), Suggestion({}, trial=7)]",
        "resumes trial 7, which does not exist",
    ),
    "a trial at first": (
        "words = [Suggestion({}, trial=0)]",
        "there is no trial yet to resume or clone",
    ),
    "a trial by name": (
        "words = [Suggestion(GOOD), Suggestion({}, trial=['first'])]",
        r"suggests trial=\['first'\]: it must be a trial's number, or None",
    ),
    "a parent by name": (
        "words = [Suggestion(GOOD), Suggestion(GOOD, parent='best')]",
        "suggests parent='best': it must be a trial's number, or None",
    ),
    "a finished trial": (
        "words = [Suggestion(GOOD, 1), Suggestion(GOOD, 4), None, Suggestion({}, trial=0)]",
        r"resumes trial 0, which it has not paused \(finished\)",
    ),
    "epochs that do not grow": (
        """
        words = [Suggestion(GOOD, 2), Suggestion(GOOD, 4), Suggestion({}, 1, trial=0)]
        answers = {(0, 0): Decision.PAUSE}
        """,
        "resumes trial 0 until 1 epochs are done, but it has done 1",
    ),
    "no epochs": ("words = [Suggestion(GOOD, epochs=0)]", "epochs=0: it must be a whole number"),
    "half an epoch": (
        "words = [Suggestion(GOOD), Suggestion(GOOD, epochs=0.5)]",
        "epochs=0.5: it must be a whole number",
    ),
    "a report answered by a word": (
        "words = [Suggestion(GOOD)]; answers = {(0, 1): 'continue'}",
        r"answered 'continue' to the report of trial 0, epoch 1: report\(\) must return a Decision",
    ),
    "a report not answered": (
        "words = [Suggestion(GOOD)]; answers = {(0, 0): None}",
        "answered None to the report of trial 0, epoch 0",
    ),
    "a state that is not JSON": (
        "words = [Suggestion(GOOD)]; state_dict = lambda self: {'best': {1, 2}}",
        r"state_dict\(\) must return JSON: cannot record {1, 2}",
    ),
    "drops nothing": (
        "words = [Suggestion(GOOD)]; dropped = lambda self: None",
        r"dropped\(\) must return a list of trials' numbers, not None",
    ),
    "drops what trains": (
        "words = [Suggestion(GOOD)]; dropped = lambda self: [0]",
        "drops trial 0, which it has not paused",
    ),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", NONSENSE)
def test_a_searcher_that_says_nonsense(data, tmp_path, capfd, name, workers):
    body, message = NONSENSE[name]
    body = textwrap.indent(textwrap.dedent(body).strip().replace("; ", "\n"), "    ")
    file = program(tmp_path, data, ODD.replace("    BODY", body))
    assert run_file(file, workers=workers) == 1
    shown = one_line_error(capfd)
    assert re.search(f"the searcher Said:? .*{message}", shown), shown
    assert_nothing_lives()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "class Deaf:\n    pass\n\nsettings['searcher'] = Deaf()",
            r"is not a searcher: it has no suggest\(\) method",
        ),
        (
            "class Mute(RandomSearch):\n    adaptive = None\n\nsettings['searcher'] = Mute",
            "does not declare whether it uses reports: give it an attribute adaptive",
        ),
        ("settings['searcher'] = 'hyperbrand'", "searcher='hyperbrand' is not known; there are"),
        (
            "settings['searcher'] = cerebro.Hyperband(min_epochs=5)",
            r"min_epochs=5 is above epochs=2: give search\(\) more epochs, or the searcher",
        ),
        (
            "settings['searcher'] = cerebro.ASHA(min_epochs=3)",
            "min_epochs=3 is above epochs=2",
        ),
        ("settings['points'] = {'lr': 0.1}", "points must be a list of configurations or trials"),
        ("settings['points'] = [0.1]", "a point must be a mapping of names to values, not 0.1"),
    ],
)
def test_an_invalid_searcher_is_refused(data, tmp_path, capfd, extra, message):
    file = program(tmp_path, data, "\nfrom cerebro.searchers import RandomSearch\n" + extra)
    assert run_file(file) == 1
    assert re.search(message, one_line_error(capfd))
    assert not (tmp_path / "run").exists()
    assert_nothing_lives()


class Linear:
    framework = "numpy"

    def __init__(self, config, info):
        self.lr = config["lr"]
        self.epoch = 0
        self.gone = config.get("gone", 99)
        self.value = float(config["value"]) if config.get("value") else None

    def begin_epoch(self, epoch):
        self.epoch = epoch

    def train_batch(self, batch):
        return {"loss": 1.0 / (2 + self.epoch) + self.lr}

    def eval_batch(self, batch):
        name = "other" if self.epoch >= self.gone else "loss"
        value = self.value if self.value is not None and self.epoch >= 1 else None
        return {name: 1.0 / (2 + self.epoch) + self.lr if value is None else value}

    def state_dict(self):
        return {"lr": self.lr, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.lr, self.epoch = state["lr"], state["epoch"]


def search(data, folder, configs, **settings):
    class Listed(cerebro.searchers.RandomSearch):
        adaptive = settings.pop("adaptive", False)

        def suggest(self):
            self._next += 1
            known = configs[self._next - 1 : self._next]
            return cerebro.Suggestion(known[0]) if known else cerebro.DONE

    options = {"epochs": 5, "batch_size": 16, "validation": 0.2, "workers": 0, "progress": False}
    options |= {"searcher": Listed(), "n_trials": len(configs), "run": folder, **settings}
    return cerebro.search(Linear, {"lr": [0.1, 0.2]}, data, **options)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("bad", [object(), lambda: 0, {1, 2}], ids=["object", "lambda", "set"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_configuration_that_cannot_be_recorded_fails_alone(
    data,
    tmp_path,
    adaptive,
    bad,
    workers,
):
    configs = [{"lr": bad}, {"lr": 0.1}, {"lr": 0.2}]
    result = search(data, tmp_path / "run", configs, adaptive=adaptive, workers=workers)
    assert [trial.status for trial in result.trials] == ["failed", "finished", "finished"]
    assert (
        "cannot record" in result.trials[0].error
        and "it is not a JSON value" in result.trials[0].error
    )


def test_duplicate_and_out_of_space_configurations_are_trained(
    data,
    tmp_path,
):
    configs = [{"lr": 7.0}, {"lr": 0.1}, {"lr": 0.1, "more": [1]}, {"lr": 0.1}]
    result = search(data, tmp_path / "run", configs)
    assert [trial.config for trial in result.trials] == configs
    assert {trial.status for trial in result.trials} == {"finished"}
    second, _, fourth = result.trials[1:]
    assert second.metrics == fourth.metrics


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_metric_that_is_missing_from_the_third_epoch_on(data, tmp_path, adaptive):
    configs = [{"lr": 0.1}, {"lr": 0.2, "gone": 3}]
    result = search(data, tmp_path / "run", configs, adaptive=adaptive)
    assert [trial.status for trial in result.trials] == ["finished", "failed"]
    assert result.trials[1].epoch == 3
    text = r"epoch 3, unlike before: the model reports no metric 'loss' in validation: return it"
    assert result.trials[1].error.startswith(text)
    with pytest.raises(cerebro.RunError, match=f"the only trial failed: {text}"):
        search(data, tmp_path / "all", configs[1:], adaptive=adaptive)


@pytest.mark.parametrize("searcher", ["random", "asha", "hyperband", "median", "tpe"])
def test_metrics_that_are_not_numbers_never_win(data, tmp_path, searcher):
    if searcher == "tpe":
        pytest.importorskip("optuna")
    space = {"lr": [0.1, 0.2], "value": ["inf", None, "nan"]}
    result = cerebro.search(
        Linear, space, data, epochs=5, n_trials=9, batch_size=16, validation=0.2, workers=0,
        searcher=searcher, run=tmp_path / "run", progress=False, seed=2, select="last",
    )  # fmt: skip
    assert result.status == "finished"
    assert result.best.config["value"] is None
    odd = [t for t in result.trials if t.config["value"] is not None and t.epoch > 1]
    assert odd if searcher == "random" else all(trial.epoch == 2 for trial in odd)
