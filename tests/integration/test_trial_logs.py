"""What a trial prints goes to its own log, from whichever library it comes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import textwrap
import warnings

import numpy as np
import pytest

import cerebro
from cerebro.run.recipe import import_file
from cerebro.worker.log import SwitchedStream

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


def test_workers_capture_all_output_of_a_trial(run, capfd, recwarn):
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


def test_inline_trials_capture_output_of_python(run, capsys, recwarn):
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


STREAMS = """
import contextlib, faulthandler, io, logging, os, subprocess, sys

class Model:
    framework = "numpy"

    def __init__(self, what):
        self.what = what

    def train_batch(self, batch):
        return {"loss": 1.0}

    def eval_batch(self, batch):
        return {"loss": 1.0}

    def begin_epoch(self, epoch):
        if epoch == 1:
            globals()[self.what]()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

def build(config):
    return Model(config["what"])

def faults():
    was_on = faulthandler.is_enabled()
    faulthandler.enable()
    faulthandler.dump_traceback()
    sys.stderr.flush()
    if not was_on:
        faulthandler.disable()

def faults_of_a_kept_stream():
    faulthandler.dump_traceback(file=sys.stdout)

def children():
    print("before", flush=True)
    command = "echo child; echo child-error >&2"
    subprocess.run(["sh", "-c", command], stdout=sys.stdout, stderr=sys.stderr, check=True)
    print("after")

def descriptors():
    os.write(sys.stdout.fileno(), b"out\\n")
    os.write(sys.stderr.fileno(), b"error\\n")
    os.write(sys.stdout.buffer.fileno(), b"bytes\\n")
    assert sys.stdout.fileno() != sys.stderr.fileno()

def written():
    sys.stdout.write("text ")
    sys.stdout.flush()
    sys.stdout.buffer.write(b"bytes ")
    sys.stdout.buffer.flush()
    sys.stdout.writelines(["lines\\n"])

def wrapped():
    stream = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", line_buffering=True)
    print("wrapped \u00e9", file=stream)
    del stream
    print("still there")

def detached():
    sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="latin-1")
    print("detached \u00e9", flush=True)

def settings():
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    sys.stdout.reconfigure(encoding="ascii", errors="replace")
    print("\u00e9", sys.stdout.encoding, sys.stdout.errors)
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")

def wrong_settings():
    for wrong in ({"encoding": "no such"}, {"no_such": 1}):
        try:
            sys.stdout.reconfigure(**wrong)
        except (LookupError, TypeError) as error:
            print(type(error).__name__)

def facts():
    stream = sys.stdout
    print(stream.isatty(), stream.readable(), stream.writable(), stream.closed, stream.name)
    print(stream.line_buffering, stream.newlines, stream.mode[0] in "wa")
    print(sys.stderr.name, stream.encoding, stream.buffer.writable(), stream.buffer.closed)

def closed():
    sys.stdout.flush()
    with contextlib.suppress(io.UnsupportedOperation):
        sys.stdout.read()
    sys.stdout.close()
    sys.stderr.close()

def entered():
    with sys.stdout:
        print("entered")

def of_its_descriptor():
    sys.stdout = os.fdopen(sys.stdout.fileno(), "w", 1)
    print("of its descriptor")

def replaced():
    with open(os.devnull, "w") as sys.stdout:
        print("nowhere")
"""

KINDS = [
    *("faults", "faults_of_a_kept_stream", "children", "descriptors", "written", "settings"),
    *("wrong_settings", "facts"),
]
CLOSING = {
    "wrapped": "wrapped é\nstill there\n",
    "detached": "detached é\n",
    "closed": "",
    "entered": "entered\n",
    "replaced": "",
}
"""Uses that would leave a stream closed, also for later trials, and what they print;"""
CLOSES_DESCRIPTOR = {"of_its_descriptor": "of its descriptor\n"}
"""the same of a worker's descriptor."""


@pytest.fixture(scope="module")
def with_streams(tmp_path_factory):
    """Train one trial for each kind of use of a stream, without and with a worker."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "streams_user.py").write_text(textwrap.dedent(STREAMS))
    module = import_file(folder / "streams_user.py")
    data = cerebro.shard({"x": np.arange(8.0)}, folder / "data", shards=1, progress=False)
    results = {}
    for workers in (0, 1):
        kinds = [*(CLOSES_DESCRIPTOR if workers else []), *CLOSING, *KINDS]
        results[workers] = cerebro.search(
            module.build, {"what": kinds}, data, epochs=3, searcher="grid", batch_size=8,
            workers=workers, run=folder / f"run-{workers}", progress=False,
        )  # fmt: skip
    return results


def log_of(result, kind):
    trial = next(trial for trial in result.trials if trial.config["what"] == kind)
    assert trial.error is None, (kind, trial.error)
    file = result.path / "trials" / f"{trial.number}.log"
    return file.read_bytes() if file.exists() else b""


@pytest.mark.parametrize("kind", KINDS)
def test_inline_streams_behave_like_those_of_a_worker(with_streams, kind):
    inline, worker = (log_of(with_streams[workers], kind) for workers in (0, 1))
    if kind.startswith("faults"):  # their lines differ: these are stacks
        assert b"begin_epoch" in inline and b"begin_epoch" in worker
    else:
        assert inline == worker
    assert inline


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", CLOSING)
def test_streams_stay_open_for_later_trials(with_streams, kind, workers):
    encoding = "latin-1" if kind == "detached" else "utf-8"
    assert log_of(with_streams[workers], kind).decode(encoding) == CLOSING[kind]


def test_a_workers_descriptors_stay_open_for_later_trials(with_streams):
    for kind, said in CLOSES_DESCRIPTOR.items():
        assert log_of(with_streams[1], kind).decode() == said


def test_a_descriptor_that_a_library_keeps_never_points_to_another_file(tmp_path, capfd):
    """After its unit, it points to the stream that is replaced; later, to the log of the time."""
    stream = SwitchedStream("stdout")
    with stream.redirect_to(tmp_path / "0.log", []):
        kept = sys.stdout.fileno()
        os.write(kept, b"first\n")
    os.write(kept, b"between\n")
    others = [os.open(tmp_path / f"other-{n}", os.O_CREAT | os.O_WRONLY) for n in range(4)]
    assert kept not in others
    with stream.redirect_to(tmp_path / "1.log", []):
        os.write(kept, b"second\n")
        assert sys.stdout.fileno() == kept and not os.get_inheritable(kept)
    for other in (*others, kept):
        os.close(other)
    assert (tmp_path / "0.log").read_text() == "first\n"
    assert (tmp_path / "1.log").read_text() == "second\n"
    assert capfd.readouterr().out == "between\n"


@pytest.mark.parametrize("behind", [io.StringIO(), None])
def test_a_redirected_stream_has_a_descriptor_even_if_the_original_has_none(
    tmp_path, monkeypatch, behind
):
    monkeypatch.setattr(sys, "stdout", behind)
    stream = SwitchedStream("stdout")
    with stream.redirect_to(tmp_path / "0.log", []):
        os.write(kept := sys.stdout.fileno(), b"unit\n")
        assert sys.stdout.buffer.write(memoryview(b"bytes\n")) == 6
    stream.write("text ")
    stream.buffer.write(b"bytes")
    os.close(kept)
    assert (tmp_path / "0.log").read_text() == "unit\nbytes\n"
    assert behind is None or behind.getvalue() == "text bytes"


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
def test_a_warning_whose_text_changes_does_not_flood(search, workers):
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
