"""What a trial prints goes to its own log, from whichever library it comes."""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap

import numpy as np
import pytest

import cerebro
from cerebro.recipe import import_file

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


def test_in_workers_everything_is_caught(run, capfd):
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
    # pytest has handlers of its own, so that logging's last resort is not asked.
    expected = [word for word in PYTHON if word != "last resort"]
    for trial in range(3):
        for epoch in range(2):
            assert lines_about(result, trial, epoch) == sorted(expected)
    assert capsys.readouterr() == ("", "")
    # Afterwards everybody speaks where they did before; late ones where all others do.
    streams = [handler.stream for handler in module.early.handlers]
    assert [type(stream).__name__ for stream in streams].count("SwitchedStream") == 0
    with contextlib.redirect_stderr(sys.stdout):
        logging.getLogger("late").warning("after the run")
    assert capsys.readouterr().out == "after the run\n"
    for trial in range(3):
        assert "after the run" not in (result.path / "trials" / f"{trial}.log").read_text()
