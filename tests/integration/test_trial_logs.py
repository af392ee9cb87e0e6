"""What a trial prints goes to its own log, from whichever library it comes."""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
import warnings

import numpy as np
import pytest

import cerebro
from cerebro.run.recipe import import_file

PROGRAM = """
import ctypes, logging, subprocess, sys, warnings
import numpy as np

early = logging.getLogger("early")
early.propagate = False
early.addHandler(logging.StreamHandler())  # bound to sys.stderr as it is now
early.addHandler(logging.StreamHandler(sys.stdout))

class Model:
    framework = "numpy"

    def __init__(self, trial):
        self.trial = trial

    def train_batch(self, batch):
        return {"loss": 1.0}

    def eval_batch(self, batch):
        return {"loss": 1.0}

    def begin_epoch(self, epoch):
        talk(f"trial {self.trial} epoch {epoch}")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

def talk(what):
    print("print", what)
    print("stderr", what, file=sys.stderr)
    early.warning("early %s", what)
    late = logging.getLogger("late")
    if not late.handlers:
        late.propagate = False
        late.addHandler(logging.StreamHandler())
    late.warning("late %s", what)
    logging.getLogger("no handlers").warning("last resort %s", what)
    warnings.warn(f"warning {what}")
    if C:
        ctypes.CDLL(None).printf(b"C %s\\n", what.encode())
        subprocess.run(["sh", "-c", f"echo subprocess {what}; echo subprocess-error {what} >&2"])

def build(config, info):
    return Model(info.trial)
"""

PYTHON = ("print", "stderr", "early", "early", "late", "last resort")
OUTSIDE = ("C", "subprocess", "subprocess-error")


@pytest.fixture
def run(tmp_path):
    data = cerebro.shard({"x": np.arange(40.0)}, tmp_path / "data", shards=2, progress=False)

    def run(workers, *, beyond_python):
        file = tmp_path / "talks.py"
        file.write_text(textwrap.dedent(PROGRAM) + f"\nC = {beyond_python}\n")
        module = import_file(file)
        return module, cerebro.search(
            module.build,
            {"x": [1, 2, 3]},
            data,
            epochs=2,
            searcher="grid",
            batch_size=10,
            validation=0.2,
            workers=workers,
            run=tmp_path / "run",
            progress=False,
        )

    return run


def lines_about(result, trial, epoch):
    """First words of a log's lines that end with an epoch of a trial."""
    log = (result.path / "trials" / f"{trial}.log").read_text().splitlines()
    end = f" trial {trial} epoch {epoch}"
    return sorted(line.removesuffix(end) for line in log if line.endswith(end))


def test_in_workers_everything_is_caught(run, capfd, recwarn):
    _, result = run(2, beyond_python=True)
    for trial in range(3):
        for epoch in range(2):
            lines = [line for line in lines_about(result, trial, epoch) if "Warning" not in line]
            assert lines == sorted(PYTHON + OUTSIDE)
        log = (result.path / "trials" / f"{trial}.log").read_text()
        assert "UserWarning: warning trial" in log
        assert {int(word) for word in log.split("trial ")[1:] for word in word.split()[:1]} == {
            trial
        }
    assert capfd.readouterr() == ("", "")


def test_inline_what_python_says_is_caught(run, capsys, recwarn):
    module, result = run(0, beyond_python=False)
    assert "trial 0: warning trial 0 epoch 0" in [str(warning.message) for warning in recwarn]
    # pytest has handlers of its own, so that logging's last resort is not asked.
    expected = [word for word in PYTHON if word != "last resort"]
    for trial in range(3):
        for epoch in range(2):
            lines = [line for line in lines_about(result, trial, epoch) if "Warning" not in line]
            assert lines == sorted(expected)
    assert capsys.readouterr() == ("", "")
    # Afterwards everybody speaks where they did before; late ones where all others do.
    streams = [handler.stream for handler in module.early.handlers]
    assert [type(stream).__name__ for stream in streams].count("SwitchedStream") == 0
    with contextlib.redirect_stderr(sys.stdout):
        logging.getLogger("late").warning("after the run")
    assert capsys.readouterr().out == "after the run\n"
    for trial in range(3):
        assert "after the run" not in (result.path / "trials" / f"{trial}.log").read_text()


# --- warnings ------------------------------------------------------------------

BROADCASTS = "Using a target size"


def build_broadcasting(config):
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.MSELoss())


class Rare(UserWarning):
    """A category that workers know by its name alone."""


class Warns(dict):
    """Warns of the same at every batch, and of what is not the same."""

    framework = "numpy"

    def train_batch(self, batch):
        warnings.warn("every time", Rare, stacklevel=1)
        self["count"] = self.get("count", 0) + 1
        warnings.warn(f"batch {self['count']}", stacklevel=1)
        return {"loss": 1.0}

    def eval_batch(self, batch):
        return {"loss": 1.0}

    def state_dict(self):
        return dict(self)

    load_state_dict = dict.update


def build_warning(config):
    assert config["lr"]  # a name that nobody reads is told in a warning
    return Warns()


@pytest.fixture
def search(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=(48, 2)).astype("f4"), "y": rng.normal(size=48).astype("f4")}
    data = cerebro.shard(columns, tmp_path / "data", shards=3, progress=False)
    arguments = {"epochs": 2, "searcher": "grid", "batch_size": 8, "progress": False}

    def search(build, **changes):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("default")
            folder = tmp_path / "run"
            result = cerebro.search(
                build, {"lr": [0.1, 0.2, 0.3]}, data, run=folder, **arguments | changes
            )
        return result, [
            warning for warning in shown if not str(warning.message).startswith("no validation")
        ]

    return search


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_warning_of_pytorch_is_shown_once_and_recorded_for_every_trial(search, workers):
    result, shown = search(build_broadcasting, workers=workers)
    assert [str(warning.message).split(" (")[0] for warning in shown] == [f"trial 0: {BROADCASTS}"]
    assert shown[0].category is UserWarning
    assert shown[0].filename.endswith("loss.py")
    events = [event for event in result.events() if event["kind"] == "warning"]
    assert sorted(event["trial"] for event in events[1:]) == [0, 1, 2]
    assert events[0]["trial"] is None  # of the hop check
    assert all(event["text"].startswith(f"UserWarning: {BROADCASTS}") for event in events)
    assert f"3 trials: UserWarning: {BROADCASTS}" in result.summary()
    for trial in result.trials:
        assert BROADCASTS in trial.log


@pytest.mark.parametrize("workers", [0, 1])
def test_a_text_that_changes_does_not_flood(search, workers):
    result, shown = search(build_warning, workers=workers)
    assert [str(warning.message) for warning in shown] == [
        "trial 0: every time",
        "trial 0: batch 1",
        "trial 0: batch 2",
        "trial 0: batch 3",
    ]
    assert [warning.category.__name__ for warning in shown] == ["Rare", *3 * ["UserWarning"]]
    assert [trial.log.count("Rare: every time") for trial in result.trials] == [1, 1, 1]
    for trial in result.trials:
        assert trial.log.count("UserWarning: batch") == 12  # the log has all of them


@pytest.mark.parametrize("workers", [0, 1])
def test_filters_of_the_users_process_hold_for_trials(search, workers, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", "batch", UserWarning)
        warnings.filterwarnings("ignore", category=Rare)
        monkeypatch.setattr(warnings, "simplefilter", lambda *_: None)  # in `search` above
        result, shown = search(build_warning, workers=workers)
    assert shown == []
    assert [trial.log for trial in result.trials] == ["", "", ""]
    assert all(event["kind"] != "warning" for event in result.events())
