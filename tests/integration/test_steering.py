"""Trials that the user adds to a running search: what they are, and that nothing else changes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro import control
from cerebro.cli import main
from cerebro.errors import InputError
from cerebro.machine.disk import Disk
from cerebro.run.store import read_actions, reader
from cerebro.searchers import Decision, Searcher
from tests.integration.steered import BASE, DATA, AtEpoch, build

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


def put(run, command):
    control.put(run / control.FOLDER, command)


def steer(folder, calls=(), space=SPACE, **more):
    """Search, and send commands at given epochs; return the result."""
    requests = {
        when: lambda sent=sent: [put(folder, command) for command in sent] for when, *sent in calls
    }
    options = {
        "validation": 0.25, "workers": 0, "progress": False, "keep": "all", "epochs": 4,
        "n_trials": 5, "width": 3, "run": folder, "callbacks": [AtEpoch(requests)],
    }  # fmt: skip
    return cerebro.search(build, space, DATA, **{**options, **more})


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
    ((0, 1), control.Clone(0, {"lr": 0.02}, after=1, epochs=4)),
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
    assert sorted(action.outcome for action in actions(steered)) == [
        "done",
        "done: outside the space: lr=0.3",
        "done: outside the space: lr=0.5",
    ]
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


REFUSED = {
    "unknown name": (control.Clone(0, {"lrr": 0.1}), "did you mean lr?"),
    "no number": (control.Clone(0, {"lr": "0.1x"}), "lr='0.1x': it is not a number"),
    "no change": (control.Clone(0, {}), "nothing differs from trial 0"),
    "no epoch": (control.Clone(1, {"lr": 0.1}), "trial 1 has finished no epoch yet"),
    "too late": (control.Clone(0, {"lr": 0.1}, after=3), "trial 0 has done 2 epochs, not 3"),
    "too short": (control.Clone(0, {"lr": 0.1}, epochs=2), "has done 2 epochs, which count"),
    "deleted": (
        control.Clone(0, {"lr": 0.1}, after=1),
        "after 1 epochs was deleted; those after 2",
    ),
    "no trial": (control.Clone(9, {"lr": 0.1}), "there is no trial 9: the run has 0 to 4"),
    "shape": (control.Clone(0, {"width": 8}), "width changes 1.weight from 4x8 to 8x8"),
    "optimizer": (control.Clone(0, {"opt": "adamw"}), "opt makes the optimizer AdamW"),
    "build": (control.Clone(0, {"schedule": "none"}), "KeyError: 'none'"),
    "missing": (control.Add({"lr": 0.1}), "width, dropout, batch_size"),
    "added unknown": (control.Add({**BASE, "lrr": 0.1}), "did you mean lr?"),
    "not longer": (control.Extend(0, 4), "trains for 4 epochs already"),
    "extend no trial": (control.Extend(9, 40), "there is no trial 9"),
}


def test_what_is_refused_leaves_no_trial_and_a_sentence(tmp_path):
    commands = [command for command, _ in REFUSED.values()]
    calls = [((0, 2), *commands)]
    plain = steer(tmp_path / "plain", keep="last")
    result = steer(tmp_path / "run", calls, keep="last")
    assert hashes(result) == hashes(plain)
    assert len(result.trials) == 5
    for (name, (command, sentence)), action in zip(REFUSED.items(), actions(result), strict=True):
        assert action.outcome.startswith("refused: "), name
        assert sentence in action.outcome, name
        assert action.request == command.request and action.child is None


def test_a_clone_has_its_parents_state_and_only_other_settings(tmp_path):
    """And a clone of a clone, with other batch sizes, is repeated by a replay."""
    calls = [
        ((0, 2), control.Clone(0, {"batch_size": 8}, after=1)),
        ((5, 3), control.Clone(5, {"lr": 0.001, "w1": 3.0}, epochs=6)),
    ]
    result = steer(tmp_path / "run", calls)
    assert [action.outcome for action in actions(result)] == [
        "done: outside the space: batch_size=8",
        "done: outside the space: w1=3.0",
    ]
    first, second = result.trials[5:]
    assert (first.parent, first.parent_epoch, second.parent) == (0, 0, 5)
    assert first.config == {**result.trials[0].config, "batch_size": 8}
    assert second.config == {**first.config, "lr": 0.001, "w1": 3.0}
    assert (first.epoch, second.epoch) == (4, 6)
    for trial in (first, second):
        assert cerebro.replay(result, trial).identical
    asked = actions(result)[0]
    assert (asked.verb, asked.trial, asked.child, asked.epoch) == ("clone", 0, 5, 0)


def test_the_same_actions_at_the_same_epochs_give_the_same_states(tmp_path):
    first = steer(tmp_path / "first", FEW)
    requests = []
    for a in actions(first):
        if a.verb == "add":
            requests.append(control.Add(a.changes, epochs=a.epochs))
            continue
        after = None if a.epoch is None else a.epoch + 1
        requests.append(
            control.Clone(a.trial, a.changes, after=after, epochs=a.epochs, cold=after is None)
        )
    # All at once and later: it matters where a clone begins, not when.
    second = steer(tmp_path / "second", [((0, 3), *requests)], workers=2)
    assert hashes(second) == hashes(first)
    assert hashes(second, "user") == hashes(first, "user")
    assert len(hashes(first, "user")) == 3


def test_an_open_trial_is_extended_and_replays(tmp_path):
    space = {**SPACE, "schedule": ["cosine"]}
    result = steer(tmp_path / "run", [((0, 2), control.Extend(0, 7))], space=space)
    assert result.trials[0].epoch == 7 and result.trials[0].status == "finished"
    assert [trial.epoch for trial in result.trials[1:]] == [4] * 4
    assert cerebro.replay(result, 0).identical
    adaptive = steer(tmp_path / "other", [((0, 2), control.Extend(0, 7))], searcher="median")
    assert "the searcher decides how long trial 0 trains" in actions(adaptive)[0].outcome


def test_a_finished_run_goes_on_with_a_clone(tmp_path):
    before = steer(tmp_path / "run")
    kept = hashes(before)
    clone = control.Clone(3, {"lr": 0.01}, after=2, epochs=5)
    result = cerebro.resume(tmp_path / "run", build, actions=[clone], progress=False)
    assert hashes(result) == kept
    assert result.trials[5].epoch == 5 and cerebro.replay(result, 5).identical
    with pytest.raises(InputError, match="lrr is not a setting of trial 3: did you mean lr"):
        cerebro.resume(
            tmp_path / "run", build, actions=[control.Clone(3, {"lrr": 1})], progress=False
        )
    after = cerebro.open(tmp_path / "run", build=build)
    assert len(after.trials) == 6 and after.status == "finished"
    with pytest.raises(InputError, match=r"actions must be a list of cerebro\.control"):
        cerebro.resume(tmp_path / "run", build, actions=[3])
    with pytest.raises(InputError, match=r"is finished.*resume .* --clone 3 --set lr=0.5"):
        control.clone(tmp_path / "run", 3, {"lr": 0.5})


def test_the_functions_and_the_command_line_answer(tmp_path, capsys):
    run = tmp_path / "run"
    told = {}

    def ask():
        told["clone"] = control.clone(run, 0, {"lr": 0.02})
        told["add"] = control.add(run, {**BASE, "lr": 0.5})
        with pytest.raises(InputError, match="did you mean lr"):
            control.clone(run, 0, {"lrr": 1})
        words = ["clone", str(run), "--trial", "0", "--set", "lr=.5", "w1=2", "--cold"]
        told["cli"] = main([*words, "--epochs", "3"])
        told["bad"] = main(["clone", str(run), "--trial", "0", "--set", "lr=0.1x"])
        control.unpause(run)

    threads = []

    def begin():
        control.pause(run)
        threads.append(threading.Thread(target=ask))
        threads[0].start()

    options = {"callbacks": [AtEpoch({(0, 1): begin})]}
    result = steer(run, workers=2, **options)
    threads[0].join()
    assert told == {"clone": 5, "add": 6, "cli": 0, "bad": 1}
    assert result.trials[7].config == {**result.trials[0].config, "lr": 0.5, "w1": 2}
    assert result.trials[7].epoch == 3 and len(result.trials) == 8
    said = capsys.readouterr()
    assert "trial 7 is a clone of trial 0" in said.out
    assert "error: lr='0.1x': it is not a number" in said.err
    assert main(["actions", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert "clone --trial 0 --set lr=0.02" in lines[1] and "trial 5  done" in lines[1]
    assert "--set lr=0.5 w1=2 --cold --epochs 3 -> trial 7" in "".join(lines)
    assert main(["actions", str(run), "--json"]) == 0
    assert [row["verb"] for row in json.loads(capsys.readouterr().out)] == [
        *("pause", "clone", "add", "clone", "clone", "clone", "unpause"),
    ]


def test_a_paused_run_whose_trials_have_all_ended_waits_for_a_clone(tmp_path):
    run = tmp_path / "run"
    thread = threading.Thread(
        target=lambda: (control.clone(run, 0, {"lr": 0.5}, after=1), control.unpause(run))
    )
    ends = []

    class PauseAtEnd:
        def on_trial_end(self, trial):
            ends.append(trial.number)
            if len(ends) == 5:
                control.pause(run)
                thread.start()

    result = steer(run, callbacks=[PauseAtEnd()])
    thread.join()
    assert result.trials[5].parent == 0 and result.status == "finished"


def test_a_trial_paused_by_hand_stays_paused_when_the_run_is_resumed(tmp_path):
    run = tmp_path / "run"
    stop = [((0, 1), control.Command("pause", 1)), ((0, 2), control.Command("stop"))]
    steer(run, stop)
    seen = []

    class Watch:
        def on_epoch_end(self, trial, metrics):
            seen.append(trial.number)
            if len(seen) == 8:
                control.unpause(run, 1)

    result = cerebro.resume(run, build, callbacks=[Watch()], progress=False)
    assert result.status == "finished" and 1 not in seen[:8]
    assert hashes(result) == hashes(steer(tmp_path / "plain"))


KILLED = """
import os, signal, sys
from cerebro import control
from cerebro.coordinator.steering import Steering
from cerebro.coordinator.user import Inbox
from cerebro.run.store import Store
from tests.integration.test_steering import steer
step, folder = sys.argv[1:]
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if step == "read":
    Steering.take = die
elif step == "row":
    Store.add_action = die
elif step == "flush":
    add, flush, added = Store.add_action, Store.flush, []
    Store.add_action = lambda self, action: (added.append(1), add(self, action))
    Store.flush = lambda self: die() if added else flush(self)
elif step == "removal":
    Inbox._remove = lambda self, name: die() if name.endswith(".json") else None
steer(__import__("pathlib").Path(folder), [((0, 2), control.Clone(0, {"lr": 0.02}, after=1))])
"""


@pytest.mark.parametrize("step", ["read", "row", "flush", "removal"])
def test_a_request_is_carried_out_at_most_once_whenever_the_process_is_killed(tmp_path, step):
    run = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", KILLED, step, str(run)], check=False)
    assert killed.returncode == -signal.SIGKILL
    cerebro.resume(run, build, progress=False)
    result = cerebro.open(run, build=build)
    assert result.status == "finished" and list((run / "control").glob("*")) == []
    assert hashes(result) == hashes(steer(tmp_path / "plain"))
    rows, mine = actions(result), [t for t in result.trials if t.record.origin == "user"]
    assert len(rows) == len(mine) == (1 if step == "removal" else len(rows))
    assert [row.child for row in rows] == [trial.number for trial in mine]
    for trial in mine:
        assert trial.status == "finished" and cerebro.replay(result, trial).identical


def test_two_files_with_one_request_are_one_request(tmp_path):
    twice = control.Clone(0, {"lr": 0.02})
    result = steer(tmp_path / "run", [((0, 1), twice, twice)])
    assert len(result.trials) == 6 and len(actions(result)) == 1


def test_a_study_does_not_see_the_trials_of_the_user(tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    requests = [
        control.Clone(0, {"lr": 0.02}, epochs=6),
        control.Add({"lr": 0.3}),
        control.Clone(0, {"lr": 0.5}, cold=True, epochs=3),
    ]
    results, studies = [], []
    for name, calls in (("plain", []), ("steered", [requests])):
        folder = tmp_path / name
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=1), pruner=optuna.pruners.MedianPruner(2, 1)
        )

        def ask(study, trial, to=folder, calls=calls):
            for command in calls.pop() if calls else ():
                put(to, command)

        results.append(
            cerebro.optuna.optimize(
                study, build_of_study, DATA, batch_size=16, epochs=4, validation=0.25, n_trials=5,
                width=2, workers=0, run=folder, progress=False, callbacks=[ask], keep="all",
            )
        )  # fmt: skip
        studies.append([(t.params, t.state, t.intermediate_values) for t in study.trials])
    plain, steered = results
    assert studies[0] == studies[1]
    assert [[e["state_hash"] for e in t.history] for t in plain.trials] == [
        [e["state_hash"] for e in t.history]
        for t in steered.trials
        if t.record.origin == "searcher"
    ]
    assert [action.outcome for action in actions(steered)] == ["done"] * 3
    mine = [trial for trial in steered.trials if trial.record.origin == "user"]
    for trial in mine:
        assert cerebro.replay(steered, trial, build_of_study).identical


def build_of_study(trial, info):
    return build({**BASE, "lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}, info)


def test_the_display_says_whom_a_round_waits_for(tmp_path, capsys):
    run = tmp_path / "run"

    class Unpause:
        def on_epoch_end(self, trial, metrics):
            if trial.number == 0 and trial.epoch == 1:
                put(run, control.Command("pause", 1))
                threading.Timer(2.5, control.unpause, (run, 1)).start()

    plain = steer(tmp_path / "plain", searcher="median")
    result = steer(run, searcher="median", callbacks=[Unpause()], progress="lines")
    assert "waits for trial 1 (paused by you)" in capsys.readouterr().out
    assert hashes(result) == hashes(plain)
    assert actions(result)[0].outcome == "done: 2 trials will wait for it; to free them: stop"


def test_a_killed_run_goes_on_with_the_trials_of_the_user(tmp_path):
    """Between their epochs, in an adaptive search, with a clone whose parent is theirs."""
    whole = steer(tmp_path / "whole", FEW, searcher="median", workers=2)
    for after in (1, 6):
        run = tmp_path / f"run-{after}"
        code = KILLED_LATER.format(run=str(run), after=after)
        killed = subprocess.run([sys.executable, "-c", code], check=False)
        assert killed.returncode == -signal.SIGKILL
        cerebro.resume(run, build, progress=False)
        result = cerebro.open(run, build=build)
        assert hashes(result) == hashes(whole)
        done = [row for row in actions(result) if row.is_done]
        mine = [trial for trial in result.trials if trial.record.origin == "user"]
        assert [row.child for row in done] == [trial.number for trial in mine]
        assert [trial.status for trial in mine] == ["finished"] * len(mine)
        clone = next(trial for trial in mine if trial.parent_epoch is not None)
        assert cerebro.replay(result, clone).identical


KILLED_LATER = """
import os, signal
from pathlib import Path
from types import SimpleNamespace
from tests.integration.steered import AtEpoch
from tests.integration.test_steering import FEW, put, steer
run, ends = Path({run!r}), []
class Die(AtEpoch):
    def on_epoch_end(self, trial, metrics):
        super().on_epoch_end(trial, metrics)
        if trial.record.origin == "user":
            ends.append(1)
            if len(ends) == {after}:
                os.kill(os.getpid(), signal.SIGKILL)
calls = {{when: lambda sent=sent: [put(run, c) for c in sent] for when, *sent in FEW}}
steer(run, searcher="median", callbacks=[Die(calls)])
"""


@pytest.mark.parametrize("searcher", ["random", "median"])
def test_folds_are_cloned_extended_and_cloned_after_the_end(tmp_path, searcher):
    settings = {"validation": cerebro.KFold(2), "n_trials": 4, "width": 4, "searcher": searcher}
    space = {**SPACE, "schedule": ["cosine"]}
    plain = steer(tmp_path / "plain", space=space, **settings)
    calls = [
        ((0, 1), control.Clone(0, {"lr": 0.02}, epochs=4), control.Clone(0, {"width": 8})),
        ((4, 2), control.Extend(4, 6), control.Clone(4, {"w1": 2.0}, after=2, epochs=4)),
    ]
    run = tmp_path / "run"
    result = steer(run, calls, space=space, **settings)
    outcomes = [action.outcome.partition(":")[0] for action in actions(result)]
    assert outcomes == ["done", "refused", "done", "done"]
    assert hashes(result) == hashes(plain)
    first, second = (trial for trial in result.trials if trial.record.origin == "user")
    assert (first.epoch, second.epoch, second.parent) == (6, 4, first.number)
    clone = control.Clone(second.number, {"lr": 0.5}, epochs=5)
    result = cerebro.resume(run, build, actions=[clone], progress=False)
    third = result.trials[-1]
    assert (third.parent, third.epoch, third.status) == (second.number, 5, "finished")
    for trial in (first, second, third):
        assert cerebro.replay(result, trial).identical
    assert not result.verify().problems and hashes(result) == hashes(plain)


def test_the_command_resumes_with_a_clone(tmp_path, capsys):
    run = str(tmp_path / "run")
    steer(tmp_path / "run")
    file = str(Path(__file__).with_name("steered.py"))
    words = ["resume", run, "--build", file, "--progress", "none", "--clone", "2", "--set"]
    assert main([*words, "lr=0.02", "--after", "1"]) == 0
    result = cerebro.open(run)
    assert (result.trials[5].parent, result.trials[5].parent_epoch) == (2, 0)
    assert main([*words, "lrr=0.02"]) == 1
    assert "did you mean lr" in capsys.readouterr().err
    assert main([*words, "lr=0.02", "--epochs", "6"]) == 0
    longer = cerebro.open(run).trials
    assert [trial.epoch for trial in longer] == [4, 4, 4, 4, 4, 4, 6]
    assert (longer[6].parent, longer[6].parent_epoch) == (2, 3)
    assert main(["resume", run, "--build", file, "--set", "lr=0.02"]) == 1
    assert "give --clone N, too" in capsys.readouterr().err


class Pinning(Searcher):
    """Keeps the first state of its second trial, which begins late."""

    adaptive = True
    pinned = frozenset({(1, 0)})

    def __init__(self):
        self.begun, self.ready = 0, False

    def suggest(self):
        if self.begun == 2:
            return cerebro.DONE
        if self.begun == 1 and not self.ready:
            return None
        self.begun += 1
        return cerebro.Suggestion({**BASE, "lr": 0.01 * self.begun})

    def report(self, trial, epoch, metrics):
        self.ready |= epoch == 2
        return Decision.CONTINUE

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Nothing: no run with it is resumed."""


def test_what_a_searcher_pins_is_its_own_trial(tmp_path):
    calls = [((0, 1), control.Add({**BASE, "lr": 0.3}))]
    result = steer(tmp_path / "run", calls, searcher=Pinning(), keep="last")
    assert [trial.record.origin for trial in result.trials] == ["searcher", "user", "searcher"]
    kept = [
        [epoch.epoch for epoch in trial.record.epochs if epoch.state_file is not None]
        for trial in result.trials
    ]
    assert kept == [[3], [3], [0, 3]]


def test_a_disk_that_is_short_refuses_a_warm_clone_only(tmp_path, monkeypatch):
    run = tmp_path / "run"

    def ask():
        monkeypatch.setattr(Disk, "free_bytes", lambda disk, folder: 1000)
        put(run, control.Clone(0, {"lr": 0.02}))
        put(run, control.Clone(0, {"lr": 0.02}, cold=True))

    result = steer(run, callbacks=[AtEpoch({(0, 2): ask})])
    warm, cold = (action.outcome for action in actions(result))
    assert re.fullmatch(r"refused: its states take [\d,]+ bytes, and the disk has 1,000 left", warm)
    assert cold == "done"
    assert [trial.record.origin for trial in result.trials[5:]] == ["user"]


class Breaking:
    """Its loss is not finite from its third epoch on."""

    framework = "numpy"

    def __init__(self, lr):
        self.lr, self.epochs = lr, 0

    def begin_epoch(self, epoch):
        self.epochs = epoch

    def train_batch(self, batch):
        return {"loss": float("nan") if self.lr > 0.5 and self.epochs >= 2 else 1.0}

    def eval_batch(self, batch):
        return {"loss": 1.0}

    def state_dict(self):
        return {"lr": np.array(self.lr)}

    def load_state_dict(self, state):
        """Take only the progress, of which there is none."""


def test_a_trial_that_has_diverged_is_cloned_from_before(tmp_path):
    run = tmp_path / "run"
    calls = [
        (
            (1, 1),
            control.Clone(0, {"lr": 0.1}),
            control.Clone(0, {"lr": 0.1}, after=1),
            control.Clone(0, {"lr": 0.1}, after=3),
        )
    ]
    requests = {
        when: lambda sent=sent: [put(run, command) for command in sent] for when, *sent in calls
    }
    result = cerebro.search(
        lambda config: Breaking(config["lr"]),
        {"lr": [0.9, 0.2]},
        DATA,
        searcher="grid",
        epochs=4,
        width=1,
        batch_size=16,
        workers=0,
        keep="all",
        run=run,
        callbacks=[AtEpoch(requests)],
        progress=False,
    )
    assert [trial.status for trial in result.trials] == ["diverged", "finished", "finished"]
    last, before, after = (action.outcome for action in actions(result))
    assert last == (
        "refused: trial 0 has diverged: give after=, an epoch before that, or clone it cold"
    )
    assert before == "done: outside the space: lr=0.1"
    assert after == "refused: trial 0 has done 2 epochs, not 3"
    assert (result.trials[2].parent, result.trials[2].parent_epoch) == (0, 0)
