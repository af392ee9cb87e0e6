"""Whatever the user's code does, it costs its own trial alone, and the cause is told."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro.coordinator import conduct
from cerebro.errors import RunError
from cerebro.executors.local import LocalExecutor
from cerebro.searchers import GridSearch
from cerebro.searchers.base import Decision

FILE = "test_user_errors.py"


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("no pickle of me")
        self.lock = threading.Lock()
        self.function = lambda: None


class Unprintable(Exception):
    def __str__(self):
        raise SystemExit("not even my text")

    __repr__ = __str__


class NoText(Exception):
    def __str__(self):
        return 7


class Ending(BaseException):
    pass


class Misbehaving:
    """Least squares; ``config["do"]`` says what goes wrong, and when."""

    framework = "numpy"

    def __init__(self, config):
        self.do = config["do"]
        self.w = np.zeros(2)

    def begin_epoch(self, epoch):
        self.fail("begin_epoch")

    def end_epoch(self, epoch, metrics):
        metrics["not a number"] = self  # a copy: nobody sees it
        self.fail("end_epoch")

    def train_batch(self, batch):
        self.fail("train_batch")
        if self.do in RAISED:
            misbehave(self.do)
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - 0.1 * batch["x"].T @ error / len(error)
        metrics = {"loss": float((error**2).mean())}
        return WRONG_METRICS.get(self.do, lambda metrics: metrics)(metrics)

    def eval_batch(self, batch):
        self.fail("eval_batch")
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        self.fail("state_dict")
        return {"w": object() if self.do == "a state of objects" else self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])

    def fail(self, where):
        if self.do == where:
            raise ValueError(f"wrong in {where}")


def build(config):
    if config["do"] == "build":
        raise ValueError("wrong in build")
    if config["do"] == "returns None":
        return None
    return Misbehaving(config)


def misbehave(how):
    if how == "recursion":
        misbehave(how)
    if how == "closed streams":
        sys.stdout = None
        sys.stderr = object()
        print_nothing = ValueError("said without streams")
        raise print_nothing
    error = RAISED[how]
    raise error() if isinstance(error, type) else error


RAISED = {
    "unpicklable": Unpicklable,
    "unprintable": Unprintable,
    "no text": NoText,
    "huge": ValueError("x" * 30_000_000),
    "surrogates": ValueError("\udc80 and \x1b[31m"),
    "SystemExit": SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
    "BaseException": Ending("of its own"),
    "recursion": None,
    "closed streams": None,
    "KeyboardInterrupt": KeyboardInterrupt,
}

WRONG_METRICS = {
    "generator": lambda metrics: (pair for pair in metrics.items()),
    "a metric that is a generator": lambda metrics: {"loss": (v for v in (1.0,))},
    "a list": lambda metrics: [metrics],
    "text": lambda metrics: {"loss": "low"},
    "an array": lambda metrics: {"loss": np.zeros(2)},
    "a name": lambda metrics: {1: 2.0},
    "a name with a surrogate": lambda metrics: {"\udc80": 2.0},
}

EXPECTED = {
    "good": None,
    "build": "ValueError: wrong in build",
    "begin_epoch": "ValueError: wrong in begin_epoch",
    "end_epoch": "ValueError: wrong in end_epoch",
    "train_batch": "ValueError: wrong in train_batch",
    "eval_batch": "ValueError: wrong in eval_batch",
    "state_dict": "ValueError: wrong in state_dict",
    "returns None": "build returned None",
    "a state of objects": "the value at '/model/w' is of type object",
    "unpicklable": "Unpicklable: no pickle of me",
    "unprintable": "Unprintable: (its text cannot be shown)",
    "no text": "NoText: (its text cannot be shown)",
    "huge": "ValueError: xxx",
    "surrogates": r"ValueError: \udc80 and \x1b[31m",
    "SystemExit": "SystemExit: 3",
    "GeneratorExit": "GeneratorExit",
    "StopIteration": "StopIteration",
    "BaseException": "Ending: of its own",
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "closed streams": "ValueError: said without streams",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "generator": "must return a dict of metrics or None, not generator",
    "a metric that is a generator": "the metric 'loss' must be a number",
    "a list": "must return a dict of metrics or None, not list",
    "text": "the metric 'loss' must be a number",
    "an array": "the metric 'loss' must be a number",
    "a name": "the name of a metric must be a str, not 1",
    "a name with a surrogate": "UnicodeEncodeError",
    "good again": None,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2))
    columns = {"x": x, "y": x.sum(1), "row": np.arange(120)}
    return cerebro.shard(columns, tmp_path_factory.mktemp("data") / "d", shards=3)


def search(data, run, function=build, **settings):
    arguments = {
        "epochs": 2,
        "validation": 0.25,
        "batch_size": 8,
        "workers": 1,
        "searcher": "grid",
        "progress": False,
        "run": run,
    }
    space = settings.pop("space", {"do": ["good"]})
    return cerebro.search(function, space, data, **{**arguments, **settings})


@pytest.mark.parametrize("workers", [0, 2])
def test_whatever_is_raised_fails_its_trial_alone(data, tmp_path, workers):
    expected = dict(EXPECTED)
    if workers == 0:
        del expected["KeyboardInterrupt"]  # inline it is Ctrl-C, and ends the run
    streams = sys.stdout, sys.stderr
    try:
        result = search(data, tmp_path / "run", space={"do": list(expected)}, workers=workers)
    finally:
        sys.stdout, sys.stderr = streams
    assert result.status == "finished"
    for trial, (do, cause) in zip(result.trials, expected.items(), strict=True):
        if cause is None:
            assert (trial.status, trial.error, trial.epoch) == ("finished", None, 2), do
            continue
        assert trial.status == "failed", do
        assert cause in trial.error and len(trial.error) < 1000, do
        assert trial.error.isprintable(), do
        assert len(trial.traceback) < 25_000, do
        assert trial.traceback.startswith("Traceback") or "File" in trial.traceback, do
        last = trial.traceback.strip().splitlines()[-1]
        assert last[-40:] in trial.log, do
    for do in ("train_batch", "recursion", "unprintable", "closed streams"):
        trial = result.trials[list(expected).index(do)]
        assert FILE in trial.traceback and FILE in trial.log, do


def test_good_trials_are_unaffected_by_failing_ones(data, tmp_path):
    dos = ["good", "train_batch", "recursion", "good", "eval_batch", "good"]
    result = search(data, tmp_path / "run", space={"do": dos}, workers=2)
    assert [t.status for t in result.trials].count("finished") == 3
    for number in (0, 3, 5):
        assert cerebro.replay(result.path, number, build).identical


class Exiting(Misbehaving):
    def train_batch(self, batch):
        if self.do == "exit":
            os._exit(9)
        return super().train_batch(batch)


def build_exiting(config):
    if config["do"] == "exit in build":
        os._exit(9)
    return Exiting(config)


@pytest.mark.parametrize("how", ["exit", "exit in build"])
def test_a_first_trial_that_ends_its_worker_fails_alone(data, tmp_path, how):
    space = {"do": [how, "good", "good"]}
    result = search(data, tmp_path / "run", build_exiting, space=space, max_retries=1)
    assert [t.status for t in result.trials] == ["failed", "finished", "finished"]
    assert "exited with status 9" in result.trials[0].error


def test_workers_that_always_die_end_the_run(data, tmp_path):
    space = {"do": ["exit"] * 8}
    with pytest.raises(
        RunError, match="failed in the same way: the worker process exited with status 9"
    ):
        search(data, tmp_path / "run", build_exiting, space=space, max_retries=0, workers=2)


class Whole(Misbehaving):
    """Validates in one pass of its own."""

    def evaluate(self, batches):
        for _ in batches:
            pass
        return {"good": {"loss": 1.0}, "list": [1.0], "name": {2: 1.0}, "value": {"loss": "x"}}[
            self.do
        ]


def build_whole(config):
    return Whole(config)


def test_what_evaluate_returns_is_checked(data, tmp_path):
    space = {"do": ["good", "list", "name", "value"]}
    result = search(data, tmp_path / "run", build_whole, space=space)
    assert [t.status for t in result.trials] == ["finished", "failed", "failed", "failed"]
    assert "evaluate must return a dict of metrics, not list" in result.trials[1].error
    assert "the name of a metric must be a str, not 2" in result.trials[2].error
    assert "the metric 'loss' must be a number, not str" in result.trials[3].error


def test_an_invalid_later_batch_size_fails_its_trial_alone(data, tmp_path):
    space = {"do": ["good"], "batch_size": [8, "many", 0, 16]}
    result = search(data, tmp_path / "run", space=space, batch_size=None)
    assert [t.status for t in result.trials] == ["finished", "failed", "failed", "finished"]
    assert "batch_size must be a whole number" in result.trials[1].error


# --- an interrupt while a run that failed is put away -------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_failed_run_is_closed_is_raised(
    data, tmp_path, monkeypatch, capsys, number
):
    def interrupted_close(run, context):
        os.kill(os.getpid(), number)
        close(run, context)

    close = conduct.close_store
    monkeypatch.setattr(conduct, "close_store", interrupted_close)
    kind = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(kind) as caught:
        search(data, tmp_path / "run", space={"do": ["build"] * 3}, workers=0)
    text = str(caught.value) if number == signal.SIGINT else capsys.readouterr().err
    assert (
        "interrupted; the run had failed before: the first 3 trials failed in the same way" in text
    )
    assert cerebro.open(tmp_path / "run").status == "failed"


# --- first trials that fail alike --------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("where", ["build", "begin_epoch", "eval_batch", "end_epoch"])
def test_a_run_whose_first_trials_fail_alike_stops(data, tmp_path, workers, where):
    """Also where many units of other trials are done in between."""
    space = {"do": [where] * 120}  # more than fail before the slowest of the first three
    with pytest.raises(RunError) as caught:
        search(data, tmp_path / "run", space=space, workers=workers)
    assert f"the first 3 trials failed in the same way: ValueError: wrong in {where}" in str(
        caught.value
    )
    result = caught.value.result
    assert result.status == "failed"
    assert [t.status for t in result.trials[:3]] == ["failed"] * 3
    assert "stopped" in {t.status for t in result.trials}
    assert str(caught.value) == result.error


@pytest.mark.parametrize("workers", [1, 3])
def test_failures_after_a_good_first_trial_do_not_stop_the_run(data, tmp_path, workers):
    """Whichever ends first: trials are judged by number."""
    space = {"do": ["good", *["build"] * 6, "good"]}
    result = search(data, tmp_path / "run", space=space, workers=workers)
    assert [t.status for t in result.trials] == ["finished", *["failed"] * 6, "finished"]


def test_first_trials_that_fail_differently_do_not_stop_the_run(data, tmp_path):
    space = {"do": ["build", "train_batch", "eval_batch", "good"]}
    result = search(data, tmp_path / "run", space=space, workers=2)
    assert [t.status for t in result.trials] == ["failed"] * 3 + ["finished"]


# --- callbacks -----------------------------------------------------------------------------


class Broken:
    """A callback that fails in one hook, and remembers the workers' processes."""

    def __init__(self, hook, executor):
        self.pids = []
        self.executor = executor
        setattr(self, hook, self.fail)

    def on_run_start(self, run):
        self.pids = list(self.executor.processes().values())

    def fail(self, *arguments):
        self.pids = list(self.executor.processes().values())
        raise LookupError("not again")


@pytest.mark.parametrize(
    "hook", ["on_run_start", "on_trial_start", "on_unit_end", "on_epoch_end", "on_trial_end"]
)
def test_a_failing_callback_ends_the_run_cleanly_and_is_named(data, tmp_path, hook):
    executor = LocalExecutor(2, 1)
    broken = Broken(hook, executor)
    space = {"do": ["good"] * 4}
    with pytest.raises(LookupError, match="not again"):
        search(data, tmp_path / "run", space=space, callbacks=[broken], executor=executor)
    result = cerebro.open(tmp_path / "run")
    assert result.status == "failed"
    assert result.error == f"the callback Broken failed in {hook}: LookupError: not again"
    assert {t.status for t in result.trials} <= {"stopped", "finished"}
    assert len(broken.pids) == 2
    for pid in broken.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert result.verify(), str(result.verify())
    if hook == "on_trial_end":
        # The other worker's trial may have ended in the meantime.
        done = [trial for trial in result.trials if trial.status == "finished"]
        assert done and all(trial.load(build=build).w.any() for trial in done)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_ended_by_a_callback_can_be_resumed(data, tmp_path, workers):
    class Late:
        def on_unit_end(self, trial, metrics):
            if trial.number == 2 and trial.epoch == 1:
                raise LookupError("not again")

    space = {"do": ["good"] * 4}
    with pytest.raises(LookupError):
        search(data, tmp_path / "run", space=space, callbacks=[Late()], workers=workers)
    result = cerebro.resume(tmp_path / "run", build, progress=False)
    assert result.status == "finished" and result.error is None
    assert result.verify(), str(result.verify())
    whole = search(data, tmp_path / "whole", space=space)
    assert hashes(result) == hashes(whole)
    assert cerebro.replay(result, 2, build).identical


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


def test_a_callback_cannot_change_the_recorded_metrics(data, tmp_path):
    class Meddling:
        def on_epoch_end(self, trial, metrics):
            metrics["loss"] = math.nan
            metrics.clear()

    result = search(data, tmp_path / "run", callbacks=[Meddling()])
    assert result.best.metrics["loss"] < 10


# --- losses and metrics that are not finite --------------------------------------------


class Diverging(Misbehaving):
    """Its loss is ``config["do"]`` for the batch with row 100 in epoch 1."""

    epoch = 0

    def begin_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"w": self.w, "epoch": self.epoch}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch = state["epoch"]

    def train_batch(self, batch):
        metrics = super().train_batch(batch)
        if self.epoch == 1 and self.do != "good" and (batch["row"] == 100).any():
            metrics["loss"] = float(self.do)
        return metrics


def build_diverging(config):
    return Diverging(config)


class Listening(GridSearch):
    """A grid that keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def report(self, trial, epoch, metrics):
        self.told.append((trial, epoch, metrics["loss"]))
        return Decision.CONTINUE


@pytest.mark.parametrize("workers", [0, 2])
def test_a_divergence_names_epoch_and_batch(data, tmp_path, workers):
    train, valid = data.split(0.9, 0.1)
    searcher = Listening()
    result = search(
        train,
        tmp_path / "run",
        build_diverging,
        space={"do": ["good", "nan", "inf", "-inf"]},
        validation=valid,
        epochs=3,
        workers=workers,
        searcher=searcher,
    )
    assert [t.status for t in result.trials] == ["finished"] + ["diverged"] * 3
    for trial in result.trials[1:]:
        (place,) = [
            number
            for number, batch in enumerate(train.batches(8, seed=0, epoch=1, framework="numpy"))
            if (batch["row"] == 100).any()
        ]
        value = trial.config["do"]
        assert trial.error == f"the training loss became {value} in epoch 1, batch {place}"
        assert trial.error in trial.log
        assert trial.epoch == 1 and trial.traceback is None
        assert [told for told in searcher.told if told[0] == trial.number][1:] == [
            (trial.number, 1, math.inf)
        ]
    assert result.best.number == 0


class Undefined(Diverging):
    """Its validation loss is no number in the first epoch."""

    def train_batch(self, batch):
        return Misbehaving.train_batch(self, batch)

    def eval_batch(self, batch):
        metrics = super().eval_batch(batch)
        return {"loss": math.nan} if self.do == "bad" and self.epoch == 0 else metrics


def build_undefined(config):
    return Undefined(config)


def test_a_non_finite_validation_metric_ranks_worst_and_training_continues(data, tmp_path):
    searcher = Listening()
    space = {"do": ["good", "bad"]}
    result = search(data, tmp_path / "run", build_undefined, space=space, searcher=searcher)
    bad = result.trials[1]
    assert [t.status for t in result.trials] == ["finished", "finished"]
    assert math.isnan(bad.history[0]["metrics"]["val_loss"])
    assert bad.best_epoch == 1
    assert (1, 0, math.inf) in searcher.told
    assert not any(math.isnan(value) for _, _, value in searcher.told)
    connection = sqlite3.connect(result.path / "run.sqlite")
    events = connection.execute("SELECT trial, text FROM events WHERE kind = 'not finite'")
    assert events.fetchall() == [(1, "trial 1, epoch 0: val_loss is nan")]
    connection.close()


# --- other mistakes ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-1, 1.5, "x", None, True, 2**64])
@pytest.mark.parametrize("how", [{}, {"stratify": "row"}, {"groups": "row"}])
def test_a_seed_of_a_split_is_checked(data, seed, how):
    with pytest.raises(cerebro.InputError, match="seed must be a whole number from 0"):
        data.split(0.5, 0.5, seed=seed, **how)


@pytest.mark.parametrize("name", ["json", "random"])
def test_an_experiment_called_like_a_library_runs_in_workers(data, tmp_path, name):
    """The library stays what it is, here and in the workers."""
    source = (Path(__file__).with_name("test_search.py").read_text()).split("class NoState")[0]
    head = source[source.index("class LeastSquares") :]
    program = f"import math\nimport numpy as np\nimport {name}\nassert {name}.__doc__\n{head}"
    file = tmp_path / "experiments" / f"{name}.py"
    file.parent.mkdir()
    file.write_text(
        program.replace("np.zeros(3)", "np.zeros(2)")
        + f"data = {str(data.path)!r}\nspace = {{'lr': [0.1, 0.2]}}\n"
        + "settings = dict(epochs=1, batch_size=8, workers=1, searcher='grid', validation=0.25)\n"
    )
    out = subprocess.run(
        [sys.executable, "-m", "cerebro", "run", file, "--run", "run", "--progress", "none"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    replayed = subprocess.run(
        [sys.executable, "-m", "cerebro", "replay", "run", "--trial", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_before_the_first_trial_says_so(tmp_path, workers):
    file = tmp_path / "program.py"
    file.write_text(
        "import os, signal, sys, time\n"
        "import numpy as np\n"
        "import cerebro\n"
        "def build(config):\n"
        "    os.kill(int(os.environ['PARENT']), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "os.environ['PARENT'] = str(os.getpid())\n"
        "if __name__ == '__main__':\n"
        "    cerebro.search(build, {'lr': [1]}, (np.zeros((20, 2)), np.zeros(20)), epochs=1,\n"
        "                   batch_size=5, searcher='grid', validation=0.2, run='run',\n"
        "                   workers=int(sys.argv[1]), progress='table')\n"
    )
    done = subprocess.run(
        [sys.executable, file, str(workers)], cwd=tmp_path, capture_output=True, text=True
    )
    said = done.stderr.splitlines()
    first = "KeyboardInterrupt: interrupted before the first trial began; the search is kept in run"
    assert any(line.startswith(first) for line in said), done.stderr
    assert "no worker process" not in done.stdout and "0% busy" not in done.stdout
    assert "0 trials" not in done.stdout + done.stderr
