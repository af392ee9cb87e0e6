"""Training begins with the first worker that is ready; the others join, or never do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from line_model import Line
from meeting import begin_to_meet, meet

import cerebro
from cerebro.coordinator import conduct
from cerebro.errors import StateError
from cerebro.executors.local import LocalExecutor
from cerebro.worker.messages import RunContext


class Held(LocalExecutor):
    """Two workers; the second one is stopped as soon as it has been started."""

    def __init__(self) -> None:
        super().__init__(2, 1, fresh=True, silence=100.0)
        self.held = 0

    def start(self, context: RunContext) -> list[int]:
        started = super().start(context)
        self.held = self.processes()[started[1]]
        os.kill(self.held, signal.SIGSTOP)
        return started


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Held:
    """The executor of the test's search."""
    held = Held()
    make = conduct.make_executor
    monkeypatch.setattr(
        conduct, "make_executor", lambda s, m: held if s.workers == 2 else make(s, m)
    )
    return held


class Meeting(Line):
    """From the second epoch on, its training may have to meet another worker."""

    def __init__(self, lr: float, folder: str) -> None:
        super().__init__(lr)
        self.folder = Path(folder)

    def begin_epoch(self, epoch: int) -> None:
        if epoch > 0:
            meet(self.folder)


def build(config: dict[str, Any]) -> Meeting:
    return Meeting(config["lr"], config["folder"])


class Forgetful(Line):
    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w * 0}


def search(folder: Path, made: Any = build, **options: Any) -> cerebro.Result:
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 3)).astype("f4")
    return cerebro.search(
        made,
        {"lr": [0.1, 0.2], "folder": str(folder)},
        {"x": x, "y": x[:, 0]},
        searcher="grid",
        epochs=3,
        validation=0.25,
        batch_size=8,
        progress=False,
        run=folder / "run",
        **options,
    )


def hashes(result: cerebro.Result) -> list[list[str]]:
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return hashes(search(tmp_path_factory.mktemp("calm"), workers=0))


class AtFirstEpoch:
    """Does something when the first epoch of a trial is over, and the second worker still waits."""

    def __init__(self, executor: Held, act: Any) -> None:
        self.executor, self.act = executor, act
        self.status = ""

    def on_epoch_end(self, trial: Any, metrics: Any) -> None:
        if not self.status:
            self.status = psutil.Process(self.executor.held).status()
            self.act(self.executor.held)


def trained_by(result: cerebro.Result) -> set[int]:
    return {unit["worker"] for unit in result.saved.units()}


def test_a_worker_that_comes_late_joins_the_training(
    executor: Held, tmp_path: Path, calm: Any
) -> None:

    def let_go(held: int) -> None:
        begin_to_meet(tmp_path)
        os.kill(held, signal.SIGCONT)

    late = AtFirstEpoch(executor, let_go)
    result = search(tmp_path, workers=2, callbacks=[late])
    assert late.status == psutil.STATUS_STOPPED
    assert hashes(result) == calm
    assert trained_by(result) == {0, 1}


def test_a_run_ends_without_a_worker_that_never_starts(
    executor: Held, tmp_path: Path, calm: Any
) -> None:
    result = search(tmp_path, workers=2)
    assert result.status == "finished" and hashes(result) == calm
    assert trained_by(result) == {0}
    assert not psutil.pid_exists(executor.held)


def test_a_worker_that_dies_while_it_starts_is_replaced(
    executor: Held, tmp_path: Path, calm: Any
) -> None:

    def kill(held: int) -> None:
        begin_to_meet(tmp_path)
        os.kill(held, signal.SIGKILL)

    killed = AtFirstEpoch(executor, kill)
    result = search(tmp_path, workers=2, callbacks=[killed])
    assert killed.status == psutil.STATUS_STOPPED
    assert hashes(result) == calm
    assert trained_by(result) == {0, 2}
    assert "SIGKILL, without a unit" in str(result.saved.events())


def test_a_failed_check_ends_the_search_while_a_worker_starts(
    executor: Held, tmp_path: Path
) -> None:
    with pytest.raises(StateError, match="does not survive a hop"):
        search(tmp_path, lambda config: Forgetful(config["lr"]), workers=2)
    assert cerebro.open(tmp_path / "run").trials == []
    assert not psutil.pid_exists(executor.held)


def test_a_resumed_run_continues_on_the_worker_that_is_ready(
    executor: Held, tmp_path: Path, calm: Any
) -> None:
    class Interrupted:
        def on_epoch_end(self, trial: Any, metrics: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, workers=0, callbacks=[Interrupted()])
    result = search(tmp_path, workers=2, if_exists="resume")
    assert result.status == "finished" and hashes(result) == calm
    assert trained_by(result) == {0}
    assert not psutil.pid_exists(executor.held)
