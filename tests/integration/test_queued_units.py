"""Units in the queue of a busy worker: they follow at once, or not at all."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro.coordinator import coordinator
from cerebro.executors.local import LocalExecutor
from cerebro.machine.program import NONE
from cerebro.run.settings import Batches, Limits
from cerebro.worker.messages import (
    RunContext,
    RunFolders,
    Task,
    UnitDone,
    UnitFailed,
    WorkerLost,
)

SHARDS = 6
PATIENCE = 30.0


class Steps:
    """Counts its batches, and does in one of them what the configuration says.

    With the executor alone, a unit has one batch.
    """

    framework = "numpy"

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.w = np.zeros(1)
        self.batches = 0

    def train_batch(self, batch: Any) -> dict[str, float]:
        if self.config.get("fails at") == self.batches:
            raise ValueError("it fails")
        if self.config.get("begins at") == self.batches:
            Path(self.config["begun"]).touch()
        if self.config.get("waits at") == self.batches:
            while not Path(self.config["goes on"]).exists():
                time.sleep(0.01)
        self.w = self.w - 0.1 * (self.w - batch["x"].mean())
        self.batches += 1
        return {"loss": float(self.w[0] ** 2)}

    eval_batch = train_batch

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w, self.batches = np.array(state["w"]), int(state["batches"])


def build(config: dict[str, Any]) -> Steps:
    return Steps(config)


def build_failing(config: dict[str, Any]) -> Steps:
    return Steps({"fails at": 4} if config["index"] == 2 else {})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    x = np.random.default_rng(0).normal(size=8 * SHARDS)
    return cerebro.shard(
        {"x": x}, tmp_path_factory.mktemp("d") / "x", shards=SHARDS, progress=False
    )


@pytest.fixture
def context(tmp_path: Path, data: Any) -> RunContext:
    for name in ("states", "trials"):
        (tmp_path / name).mkdir()
    states = str(tmp_path / "states")
    return RunContext(
        *(build, data, RunFolders(states, states, str(tmp_path / "trials"))),
        batches=Batches(batch_size=8),
        program=NONE,  # the sources of all tests do not fit into a socket at once
    )


@pytest.fixture
def executor(context: RunContext) -> Any:
    executor = LocalExecutor(1, 1, fresh=True)
    assert executor.start(context) == [0]
    yield executor
    executor.close(kill=True)


def unit(position: int, *, after: int | None = None, dispatch: int | None = None, **config: Any):
    """Return a unit of trial 0."""
    dispatch = position if dispatch is None else dispatch
    return Task(0, config, 0, position, position, 0, position, dispatch, after=after)


def events_of(executor: LocalExecutor, count: int) -> list[Any]:
    found: list[Any] = []
    end = time.monotonic() + PATIENCE
    while len(found) < count and time.monotonic() < end:
        found += executor.wait(1.0)
    return found


def noting(tmp_path: Path, position: int) -> dict[str, Any]:
    """Return a configuration whose unit makes a file when it begins."""
    return {"begins at": position, "begun": str(tmp_path / "begun")}


def waiting(tmp_path: Path, position: int) -> dict[str, Any]:
    """Return a configuration whose unit then waits for another file."""
    files = noting(tmp_path, position)
    return {**files, "waits at": position, "goes on": str(tmp_path / "goes on")}


def await_file(path: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not Path(path).exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.01)


def test_a_queued_unit_follows_without_a_command(executor):
    executor.submit(0, unit(0))
    executor.queue(0, unit(1, after=0))
    first, second = events_of(executor, 2)
    assert isinstance(first, UnitDone) and isinstance(second, UnitDone)
    assert (first.task.position, second.task.position) == (0, 1)
    assert executor.wait(0.0) == []


def test_queued_units_give_the_same_states_as_submitted_ones(executor, context):
    executor.submit(0, unit(0))
    executor.queue(0, unit(1, after=0))
    queued = [event.state.hash for event in events_of(executor, 2)]
    executor.close(kill=True)
    for file in Path(context.folders.slots).iterdir():
        file.unlink()
    assert executor.start(context) == [1]
    for position in range(2):
        executor.submit(1, unit(position))
        (event,) = events_of(executor, 1)
        assert event.state.hash == queued[position]


def test_a_unit_behind_one_that_fails_is_dropped(executor):
    fails = {"fails at": 0}
    executor.submit(0, unit(0, **fails))
    executor.queue(0, unit(1, after=0, **fails))
    (failed,) = events_of(executor, 1)
    assert isinstance(failed, UnitFailed) and failed.kind == "error"
    executor.submit(0, unit(0, dispatch=2))  # the worker has read the queued unit before
    (done,) = events_of(executor, 1)
    assert isinstance(done, UnitDone) and done.task.dispatch == 2
    assert executor.wait(0.0) == []


def test_a_unit_behind_one_that_is_cancelled_is_dropped(executor, tmp_path):
    config = waiting(tmp_path, 0)
    executor.submit(0, unit(0, **config))
    executor.queue(0, unit(1, after=0, **config))
    await_file(config["begun"])
    executor.cancel(0)
    Path(config["goes on"]).touch()
    (failed,) = events_of(executor, 1)
    assert isinstance(failed, UnitFailed) and failed.kind == "cancelled"
    assert executor.wait(0.5) == []


@pytest.mark.parametrize("killed_in", [0, 1])
def test_a_killed_worker_loses_the_queued_unit(executor, tmp_path, killed_in):
    config = waiting(tmp_path, killed_in)
    executor.submit(0, unit(0, **config))
    executor.queue(0, unit(1, after=0, **config))
    await_file(config["begun"])
    os.kill(executor.processes()[0], signal.SIGKILL)
    *done, lost = events_of(executor, killed_in + 1)
    assert [event.task.position for event in done] == list(range(killed_in))
    assert isinstance(lost, WorkerLost) and lost.began
    Path(config["goes on"]).touch()
    worker = executor.replace(0)
    executor.submit(worker, unit(killed_in, dispatch=2, **config))
    (again,) = events_of(executor, 1)
    assert isinstance(again, UnitDone) and again.task.position == killed_in


def test_a_queued_unit_commits_only_after_the_previous_result_is_received(executor, tmp_path):
    """A worker that is lost before its answer is read: its unit can run again."""
    config = noting(tmp_path, 2)
    executor.submit(0, unit(0, **config))
    events_of(executor, 1)
    executor.submit(0, unit(1, **config))
    executor.queue(0, unit(2, after=1, **config))
    await_file(config["begun"])
    time.sleep(0.5)  # all batches are done; it would have been committed
    executor._lose_worker(0, "it is lost without a look at its messages")
    (lost,) = executor.wait(0.0)
    assert isinstance(lost, WorkerLost)
    worker = executor.replace(0)
    for dispatch, position in enumerate((1, 2), start=5):
        executor.submit(worker, unit(position, dispatch=dispatch))
        (done,) = events_of(executor, 1)
        assert isinstance(done, UnitDone), done


def test_a_unit_whose_result_is_unread_does_not_time_out(context, tmp_path):
    """The coordinator may be in a callback meanwhile."""
    executor = LocalExecutor(1, 1, fresh=True)
    executor.start(replace(context, limits=Limits(unit_timeout=0.5)))
    try:
        executor.submit(0, unit(0))
        executor.queue(0, unit(1, after=0))
        time.sleep(2.0)
        assert [type(event) for event in events_of(executor, 2)] == [UnitDone, UnitDone]
    finally:
        executor.close(kill=True)


def test_a_queued_unit_that_waits_to_commit_can_be_cancelled(executor, tmp_path):
    config = noting(tmp_path, 1)
    executor.submit(0, unit(0, **config))
    executor.queue(0, unit(1, after=0, **config))
    await_file(config["begun"])
    time.sleep(0.5)  # all batches are done
    executor.cancel(0)
    done, cancelled = events_of(executor, 2)
    assert isinstance(done, UnitDone)
    assert isinstance(cancelled, UnitFailed) and cancelled.kind == "cancelled"


def test_a_unit_for_a_lost_worker_is_dropped(executor, tmp_path):
    config = waiting(tmp_path, 0)
    executor.submit(0, unit(0, **config))
    await_file(config["begun"])
    executor._lose_worker(0, "it is lost")
    executor.queue(0, unit(1, after=0, **config))
    (lost,) = executor.wait(0.0)
    assert isinstance(lost, WorkerLost)


# --- searches -----------------------------------------------------------------------


def search(run: Path, data: Any, build: Any = build, trials: int = 6, **options: Any) -> Any:
    given = {"epochs": 3, "batch_size": 4, "workers": 2, "validation": 0.2, **options}
    space = {"index": list(range(trials))}
    return cerebro.search(build, space, data, searcher="grid", run=run, progress=False, **given)


def hashes(result: cerebro.Result) -> list[list[str | None]]:
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """The units that are queued."""
    found: list[Task] = []
    queue = LocalExecutor.queue

    def noted(self: LocalExecutor, worker: int, task: Task) -> None:
        found.append(task)
        queue(self, worker, task)

    monkeypatch.setattr(LocalExecutor, "queue", noted)
    return found


def test_a_search_is_the_same_with_and_without_queues(tmp_path, data, queued, monkeypatch):
    with_queues = search(tmp_path / "queues", data)
    count = len(queued)
    assert count > 0
    assert all(task.step > 0 for task in queued)  # an epoch may begin with a decision
    monkeypatch.setattr(coordinator, "QUEUED_SECONDS", 0.0)
    without = search(tmp_path / "none", data)
    assert len(queued) == count
    assert hashes(with_queues) == hashes(without)
    units = with_queues.units()
    assert len(units) == len(without.units()) == 6 * 3 * (SHARDS + 1)


def test_a_trial_that_fails_leaves_the_others_as_they_are(tmp_path, data, queued):
    result = search(tmp_path / "run", data, build_failing)
    assert queued
    assert [trial.status for trial in result.trials] == ["finished"] * 2 + ["failed"] + [
        "finished"
    ] * 3
    expected = hashes(search(tmp_path / "all", data))
    found = hashes(result)
    assert found[2] == [] and found[:2] + found[3:] == expected[:2] + expected[3:]


@pytest.mark.parametrize("command", ["stop", "pause"])
def test_a_command_waits_at_most_for_the_queued_unit(tmp_path, data, queued, command):
    run = tmp_path / "run"

    class Commands:
        units = told = 0

        def on_unit_end(self, trial: Any, metrics: Any) -> None:
            self.units += trial.number == 0
            if queued and not self.told:
                getattr(cerebro.control, command)(run, 0)
                self.told = self.units
            if trial.number == 1 and trial.epochs and len(trial.epochs) == 3:
                cerebro.control.stop(run)

    commands = Commands()
    result = search(run, data, trials=1, workers=1, epochs=50, callbacks=[commands], time_limit=8)
    assert result.trials[0].status in ("stopped", "paused")
    # One unit is in flight when the command is given, and one is queued before it is read.
    assert 0 < commands.told <= commands.units <= commands.told + 2
