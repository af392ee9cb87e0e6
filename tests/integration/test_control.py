"""Commands to runs that go on: what they do, and that states stay what they would have been."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adaptive_searchers import Halving, Population

import cerebro
import cerebro.control as control
import cerebro.report.displays
from cerebro.errors import InputError
from cerebro.executors.local import LocalExecutor
from cerebro.report.progress import Progress, Snapshot

EPOCHS, SHARDS, TRIALS = 3, 4, 4

MODEL = """
import numpy as np
import cerebro


class Line:
    framework = "numpy"

    def __init__(self, lr):
        self.lr = lr
        self.w = np.zeros(3)

    def loss(self, batch):
        return np.asarray(batch["x"]) @ self.w - np.asarray(batch["y"])

    def train_batch(self, batch):
        error = self.loss(batch)
        self.w = self.w - self.lr * (np.asarray(batch["x"]) * error[:, None]).mean(0)
        self.w += np.random.normal(size=3) * 1e-3  # the state of the generators counts, too
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float((self.loss(batch) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


def build(config):
    return Line(config["lr"])


space = {"lr": cerebro.loguniform(0.01, 0.3)}
data = "data"
settings = dict(epochs=3, n_trials=4, validation=0.25, batch_size=4, seed=1)
"""


# The same with a callback: the run is too short for a command that comes from outside.
PAUSING = """
from cerebro import control
from controlled import build, data, settings, space

class Pause:
    units = 0

    def on_run_start(self, run):
        self.run = run

    def on_unit_end(self, trial, metrics):
        self.units += 1
        if self.units == 30:  # half way: some epochs are done
            self.run.pause()

settings = dict(settings, callbacks=[Pause()])
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder with data and model, and the model's module."""
    folder = tmp_path_factory.mktemp("control")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    data = {"x": x, "y": x @ [1.0, -2.0, 0.5]}
    cerebro.shard(data, folder / "data", shards=SHARDS, progress=False)
    (folder / "controlled.py").write_text(MODEL)
    (folder / "pausing.py").write_text(PAUSING)
    sys.path.insert(0, str(folder))
    try:
        import controlled  # type: ignore[import-not-found]

        yield controlled
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def folder(module: Any) -> Path:
    return Path(module.__file__).parent


def search(module: Any, run: Path, **settings: Any) -> cerebro.Result:
    data = cerebro.Dataset(Path(module.__file__).parent / "data")
    arguments = {**module.settings, "workers": 0, "progress": "lines", "run": run, **settings}
    return cerebro.search(module.build, module.space, data, **arguments)


@pytest.fixture(scope="module")
def undisturbed(module: Any, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The state hashes of every trial, by epoch, of a run that nobody touched."""
    return hashes(search(module, tmp_path_factory.mktemp("undisturbed") / "run"))


def hashes(result: cerebro.Result) -> list[list[str]]:
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


def events(run: Path) -> list[str]:
    """What the run says about commands, in order."""
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as connection:
        rows = connection.execute("SELECT text FROM events WHERE kind = 'command' ORDER BY id")
        return [text for (text,) in rows]


class After:
    """A callback that does something after the nth unit, in the coordinator."""

    def __init__(self, n: int, action: Callable[[], None]) -> None:
        self.units = 0
        self._n = n
        self._action = action

    def on_unit_end(self, trial: Any, metrics: Any) -> None:
        self.units += 1
        if self.units == self._n:
            self._action()


class AfterEpoch:
    """A callback that does something when a trial has finished its first epoch."""

    def __init__(self, trial: int, action: Callable[[], None]) -> None:
        self._trial = trial
        self._action = action

    def on_epoch_end(self, trial: Any, metrics: Any) -> None:
        if (trial.number, trial.epoch) == (self._trial, 1):
            self._action()


class Display(Progress):
    """Instead of progress: does something each time that the run has come to rest.

    That is when it is paused, or only paused trials are left; with `whatever_waits`, when
    there are some and no unit runs.
    """

    def __init__(self, action: Callable[[], None], *, whatever_waits: bool = False) -> None:
        self.seen: list[Snapshot] = []
        self._action = action
        self._whatever_waits = whatever_waits

    def update(self, snapshot: Snapshot) -> None:
        self.seen.append(snapshot)
        statuses = {row.status for row in snapshot.trials}
        open_ones = statuses & {"running", "waiting"}
        idle = all(row.worker is None for row in snapshot.trials)
        held = "paused" in statuses and (idle if self._whatever_waits else not open_ones)
        if snapshot.resting or held:
            self._action()

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        self.seen.append(snapshot)


def put(run: Path, command: control.Command) -> None:
    """Send without looking whether the trial can be commanded: its row may not be written yet."""
    control.put(run / "control", command)


def show_on(display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the display stand for lines."""
    monkeypatch.setattr(cerebro.report.displays, "Lines", lambda stream: display)


# --- in one process, where the moment is known ------------------------------------


class LoggingExecutor(LocalExecutor):
    """Logs which units begin."""

    def __init__(self, workers: int, log: list[Any]) -> None:
        super().__init__(workers, 1)
        self.log = log

    def submit(self, worker: int, task: Any) -> None:
        if hasattr(task, "step"):
            self.log.append((task.trial, task.epoch, task.step))
        super().submit(worker, task)


@pytest.mark.parametrize("workers", [0, 2])
def test_no_unit_begins_between_pause_and_continue(
    module: Any,
    tmp_path: Path,
    undisturbed: list[list[str]],
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    log: list[Any] = []

    def pause() -> None:
        log.append("pause")
        control.pause(run)

    def go_on() -> None:
        log.append("resting")
        control.unpause(run)

    display = Display(go_on)
    show_on(display, monkeypatch)
    settings: dict[str, Any] = {"workers": 0}
    if workers:
        settings = {"executor": LoggingExecutor(workers, log)}
    result = search(module, run, callbacks=[After(5, pause)], **settings)
    at = log.index("pause")
    assert log[at : at + 2] == ["pause", "resting"]
    assert log.count("resting") == 1
    assert result.status == "finished"
    assert hashes(result) == undisturbed
    assert events(run) == ["pause", "unpause"]
    paused = [snapshot for snapshot in display.seen if snapshot.paused]
    assert all(row.worker is None for row in paused[-1].trials)
    assert not display.seen[-1].paused


def test_a_run_in_this_process_stops_between_units(module: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    counter = After(6, lambda: control.stop(run))
    result = search(module, run, callbacks=[counter])
    assert counter.units == 6
    assert len(result.units()) == 6
    assert result.status == "stopped"
    assert {trial.status for trial in result.trials} <= {"stopped", "finished"}
    assert list((run / "control").iterdir()) == []


def test_a_paused_run_can_be_stopped(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    display = Display(lambda: control.stop(run))
    show_on(display, monkeypatch)
    counter = After(3, lambda: control.pause(run))
    result = search(module, run, callbacks=[counter])
    assert (counter.units, result.status) == (3, "stopped")
    assert events(run) == ["pause", "stop"]


def test_the_time_limit_includes_pauses(module: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    counter = After(1, lambda: control.pause(run))
    result = search(module, run, callbacks=[counter], time_limit=1.0)
    assert (counter.units, result.status) == (1, "stopped")


def test_ctrl_c_ends_a_paused_run(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    display = Display(lambda: signal.raise_signal(signal.SIGINT))
    show_on(display, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        search(module, run, callbacks=[After(3, lambda: control.pause(run))])
    result = cerebro.open(run)
    assert result.status == "stopped"
    assert len(result.units()) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_run_is_resumed_and_loses_nothing(
    module: Any, tmp_path: Path, undisturbed: list[list[str]], workers: int
) -> None:
    """A paused trial waits for its user; commands that were left over are not for the new owner."""
    run = tmp_path / "run"
    pause = After(3, lambda: put(run, control.Command("pause", 2)))
    stop = After(20, lambda: control.stop(run))
    stopped = search(module, run, callbacks=[pause, stop], workers=workers)
    assert stopped.status == "stopped"
    for before, after in zip(hashes(stopped), undisturbed, strict=True):
        assert before == after[: len(before)]
    put(run, control.Command("stop"))
    put(run, control.Command("pause"))
    unpause = After(3, lambda: control.unpause(run, 2))
    result = cerebro.resume(run, module.build, progress=False, callbacks=[unpause])
    assert result.status == "finished"
    assert [trial.status for trial in result.trials] == ["finished"] * TRIALS
    assert hashes(result) == undisturbed
    assert sorted(events(run)) == ["pause trial 2", "stop", "unpause trial 2"]


def test_a_stopped_trial_resumes_only_if_listed_in_trials(
    module: Any, tmp_path: Path, undisturbed: list[list[str]]
) -> None:
    run = tmp_path / "run"
    stop_trial = AfterEpoch(1, lambda: put(run, control.Command("stop", 1)))
    stop_run = After(40, lambda: control.stop(run))
    search(module, run, callbacks=[stop_trial, stop_run])
    result = cerebro.resume(run, module.build, progress=False)
    assert [t.status for t in result.trials] == ["finished", "stopped", "finished", "finished"]
    assert hashes(result) == [undisturbed[0], undisturbed[1][:1], *undisturbed[2:]]
    result = cerebro.resume(run, module.build, trials=[1], progress=False)
    assert hashes(result) == undisturbed


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trial_is_stopped_at_its_units_end(
    module: Any, tmp_path: Path, undisturbed: list[list[str]], workers: int
) -> None:
    run = tmp_path / "run"
    stop = AfterEpoch(1, lambda: put(run, control.Command("stop", 1)))
    result = search(module, run, callbacks=[stop], workers=workers)
    assert result.status == "finished"
    assert [t.status for t in result.trials] == ["finished", "stopped", "finished", "finished"]
    stopped = result.trials[1]
    assert stopped.epoch == 1
    assert hashes(result) == [undisturbed[0], undisturbed[1][:1], *undisturbed[2:]]
    assert stopped.load("last", build=module.build) is not None
    assert events(run) == ["stop trial 1"]


def test_a_waiting_trial_is_stopped_at_once(module: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    last = control.Command("stop", TRIALS - 1)
    counter = After(1, lambda: put(run, last))
    result = search(module, run, callbacks=[counter], n_trials=TRIALS)
    assert result.trials[-1].status == "stopped"
    assert result.trials[-1].epoch == 0
    assert TRIALS - 1 not in {unit["trial"] for unit in result.units()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_paused_trial_resumes_where_it_stopped(
    module: Any,
    tmp_path: Path,
    undisturbed: list[list[str]],
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run waits for it when the others are done."""
    run = tmp_path / "run"
    go_on = control.Command("continue", 2)
    display = Display(lambda: put(run, go_on))
    show_on(display, monkeypatch)
    pause = control.Command("pause", 2)
    counter = After(7, lambda: put(run, pause))
    result = search(module, run, callbacks=[counter], workers=workers)
    assert [trial.status for trial in result.trials] == ["finished"] * TRIALS
    assert hashes(result) == undisturbed
    resting = [s for s in display.seen if s.trials[2].status == "paused"][-1]
    assert [row.status for row in resting.trials if row.number != 2] == ["finished"] * 3
    assert not resting.paused
    assert result.units()[-1]["trial"] == 2
    assert events(run) == ["pause trial 2", "unpause trial 2"]


def test_a_result_commands_its_run(module: Any, tmp_path: Path) -> None:
    """Also in a callback, where the run that is commanded is the caller's own."""

    class Stopper:
        def on_run_start(self, run: cerebro.Result) -> None:
            self.run = run

        def on_trial_start(self, trial: Any) -> None:
            if trial.number == 1:
                self.run.stop(0)
                self.run.pause()
                self.run.unpause()
                with pytest.raises(InputError, match="no trial 9"):
                    self.run.pause(9)

    run = tmp_path / "run"
    result = search(module, run, callbacks=[Stopper()])
    assert [trial.status for trial in result.trials] == ["stopped"] + ["finished"] * 3
    assert events(run) == ["stop trial 0", "pause", "unpause"]
    for command in (result.stop, result.pause, result.unpause):
        with pytest.raises(InputError, match="is finished: the run is not in progress"):
            command()


# --- searchers that listen ---------------------------------------------------------

SEARCHERS = {"halving": Halving, "population": Population}


def adaptive(module: Any, run: Path, name: str, **settings: Any) -> tuple[cerebro.Result, Any]:
    searcher = SEARCHERS[name]()
    arguments: dict[str, Any] = {"n_trials": 6, "epochs": 4, "width": 6, **settings}
    return search(module, run, searcher=searcher, **arguments), searcher


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SEARCHERS)
def test_a_paused_trial_changes_no_decision(
    module: Any, tmp_path: Path, name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round waits for its report; so does, in the end, the run."""
    before, undisturbed = adaptive(module, tmp_path / "before", name)
    run = tmp_path / "run"
    display = Display(lambda: put(run, control.Command("continue", 1)), whatever_waits=True)
    show_on(display, monkeypatch)
    counter = After(2, lambda: put(run, control.Command("pause", 1)))
    after, searcher = adaptive(module, run, name, workers=workers, callbacks=[counter])
    assert after.status == "finished"
    assert searcher.calls == undisturbed.calls
    assert hashes(after) == hashes(before)
    assert [t.status for t in after.trials] == [t.status for t in before.trials]
    assert events(run)[:2] == ["pause trial 1", "unpause trial 1"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SEARCHERS)
def test_a_stopped_trial_keeps_no_searcher_waiting(
    module: Any, tmp_path: Path, name: str, workers: int
) -> None:
    run = tmp_path / "run"
    counter = After(2, lambda: put(run, control.Command("stop", 1)))
    result, searcher = adaptive(module, run, name, workers=workers, callbacks=[counter])
    assert result.status == "finished"
    assert (result.trials[1].status, result.trials[1].epoch) == ("stopped", 0)
    heard = [call[2:4] for call in searcher.calls if call[:2] == ("report", 1)]
    assert heard == [(0, float("inf"))]
    assert {t.status for t in result.trials} <= {"finished", "stopped"}


# --- processes, driven by the command line ----------------------------------------


def cerebro_command(folder: Path, *arguments: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cerebro", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextlib.contextmanager
def running(
    folder: Path, run: str, *options: str, file: str = "controlled.py"
) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own, which is killed if the test fails."""
    arguments = ["run", file, "--progress", "lines", "--run", run, *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "cerebro", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    pytest.fail(f"the run ended before it said {text!r}: {process.communicate()}")


def processes_in(folder: Path) -> list[str]:
    psutil = pytest.importorskip("psutil")
    found = psutil.process_iter(["cwd", "cmdline"])
    return [" ".join(p.info["cmdline"] or ["?"]) for p in found if p.info["cwd"] == str(folder)]


ENDLESS = ("--epochs", "1000000")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_stop_ends_a_run_from_outside(folder: Path, workers: str) -> None:
    run = f"runs/stop{workers}"
    with running(folder, run, *ENDLESS, "--workers", workers) as process:
        wait_for_line(process, " epoch ")
        assert "what it has trained is kept" in cerebro_command(folder, "stop", run)
        out, err = process.communicate()
        assert process.returncode == 1
        assert err.startswith("error: the run is stopped, not finished")
        assert err.endswith(f"python -m cerebro resume {run}\n")
        assert "Traceback" not in out + err
    result = cerebro.open(folder / run)
    assert result.status == "stopped"
    assert {trial.status for trial in result.trials} == {"stopped"}
    assert max(trial.epoch for trial in result.trials) >= 1
    assert list((folder / run / "control").iterdir()) == []
    assert processes_in(folder) == []
    for verb in ("stop", "pause", "continue"):
        assert "the run is not in progress" in cerebro_command(folder, verb, run, status=1)


def test_pause_and_continue_from_outside(folder: Path, undisturbed: list[list[str]]) -> None:
    run = "runs/pause"
    with running(folder, run, "--workers", "2", file="pausing.py") as process:
        assert f"python -m cerebro continue {run}" in wait_for_line(process, "paused")
        shown = cerebro_command(folder, "show", run)
        assert shown.startswith(f"{run}: paused")
        units = len(cerebro.open(folder / run).units())
        cerebro_command(folder, "pause", run)  # nothing more happens
        assert len(cerebro.open(folder / run).units()) == units
        for arguments in (["show", run, "--trial", "0"], ["verify", run], ["export", run]):
            cerebro_command(folder, *arguments)
        if importlib.util.find_spec("matplotlib") is not None:
            cerebro_command(folder, "plot", run, "--out", "live.html")
        cerebro_command(folder, "continue", run)
        wait_for_line(process, "continued")
        process.communicate()
        assert process.returncode == 0
    assert hashes(cerebro.open(folder / run)) == undisturbed


def test_garbage_and_many_commands_at_once(folder: Path, undisturbed: list[list[str]]) -> None:
    """Nothing that lies in the folder harms the run, and no command is lost among it."""
    run = "runs/garbage"
    with running(folder, run, "--workers", "2", *ENDLESS) as process:
        inbox = folder / run / "control"
        wait_for_line(process, " epoch ")
        cerebro_command(folder, "pause", run)
        wait_for_line(process, "paused")
        (inbox / "folder.json").mkdir()
        (inbox / "folder.json" / "inner").write_text("x")
        (inbox / "link.json").symlink_to(folder / "data" / "manifest.json")
        os.mkfifo(inbox / "fifo.json")
        (inbox / "large.json").write_bytes(b" " * 10_000_000)
        (inbox / "pickle.json").write_bytes(b"\x80\x04\x8c\x02os\x8c\x06system\x93.")
        (inbox / "unknown.json").write_text('{"command": "stop", "trial": 1e3}')
        (inbox / "elsewhere.json").write_text('{"command": "stop", "trial": 77}')
        commands = [("stop", "0"), ("stop", "3"), ("stop", "2"), ("pause", "1")]
        senders = [
            subprocess.Popen(
                [sys.executable, "-m", "cerebro", verb, run, "--trial", trial],
                cwd=folder,
                stdout=subprocess.DEVNULL,
            )
            for verb, trial in commands
        ]
        assert [sender.wait() for sender in senders] == [0] * len(senders)
        cerebro_command(folder, "continue", run)
        wait_for_line(process, "continued")
        cerebro_command(folder, "continue", run, "--trial", "1")
        cerebro_command(folder, "stop", run)
        process.communicate()
        assert process.returncode == 1
    assert list(inbox.iterdir()) == []
    told = events(folder / run)
    assert sum("is removed" in line for line in told) == 6
    assert "stop trial 77: ignored, there is no such trial" in told
    assert {f"{verb} trial {trial}" for verb, trial in commands} <= set(told)
    assert (folder / "data" / "manifest.json").is_file()
    result = cerebro.open(folder / run)
    assert [t.status for t in result.trials] == ["stopped"] * TRIALS
    for before, after in zip(undisturbed, hashes(result), strict=True):
        assert after[: len(before)] == before[: len(after)]
