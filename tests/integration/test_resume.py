"""Runs that are struck go on as if nothing had happened: real processes, real signals."""

from __future__ import annotations

import itertools
import signal
import sqlite3

import numpy as np
import pytest
import resumable
from resumable import EPOCHS, SHARDS, TRIALS, UNITS, hashes, search, struck

import cerebro


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(230, 3))
    folder = tmp_path_factory.mktemp("data") / "set"
    cerebro.shard({"x": x, "y": x.sum(1)}, folder, shards=SHARDS, progress=False)
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The run that nobody disturbs."""
    return search(tmp_path_factory.mktemp("runs") / "whole", data, workers=2)


def files(result):
    return sorted(file.name for file in (result.path / "states").iterdir())


def assert_as_whole(result, whole):
    assert result.status == "finished"
    assert [t.status for t in result.trials] == [t.status for t in whole.trials]
    assert hashes(result) == hashes(whole)
    assert [[e["metrics"] for e in t.history] for t in result.trials] == [
        [e["metrics"] for e in t.history] for t in whole.trials
    ]
    assert [[e["epoch"] for e in t.history] for t in result.trials] == [[*range(EPOCHS)]] * TRIALS
    assert result.best.number == whole.best.number
    assert files(result) == files(whole)
    assert result.verify(), str(result.verify())


@pytest.mark.parametrize(
    ("at", "workers"), [(1, 0), (9, 1), (20, 3), (21, 0), (37, 0), (UNITS - 1, 0), (UNITS, 0)]
)
def test_a_run_resumes_after_its_coordinator_is_killed(data, whole, tmp_path, at, workers):
    assert struck(tmp_path / "run", data, at=at, workers=2).returncode == -signal.SIGKILL
    left = cerebro.open(tmp_path / "run")
    assert left.status == "interrupted"
    assert {trial.status for trial in left.trials} <= {"stopped", "finished"}
    result = cerebro.resume(tmp_path / "run", workers=workers, progress=False)
    assert_as_whole(result, whole)
    assert cerebro.replay(result, 2).identical


@pytest.mark.parametrize("at", [8, 30])
def test_a_run_resumes_after_coordinator_and_workers_are_killed(data, whole, tmp_path, at):
    assert struck(tmp_path / "run", data, at=at, workers=2, all=True).returncode == -signal.SIGKILL
    assert_as_whole(cerebro.resume(tmp_path / "run", progress=False), whole)


@pytest.mark.parametrize("at", [*range(2, UNITS, 11)])
def test_inline_runs_lose_no_unit(data, whole, tmp_path, at):
    """Nothing is in flight when the coordinator is killed: no unit is trained twice."""
    struck(tmp_path / "run", data, at=at)
    before = len(cerebro.open(tmp_path / "run").saved.units())
    result = cerebro.resume(tmp_path / "run", progress=False)
    assert_as_whole(result, whole)
    units = result.saved.units()
    assert len(units) - before == UNITS - at
    keys = [(u["trial"], u["epoch"], u["step"]) for u in units]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_a_signal_stops_the_run_cleanly(data, whole, tmp_path, number, status):
    process = struck(tmp_path / "run", data, at=23, number=number, workers=2)
    assert process.returncode == status
    assert "interrupted: 4 trials with" in process.stderr
    assert f"python -m cerebro resume {tmp_path / 'run'}" in process.stderr
    left = cerebro.open(tmp_path / "run")
    assert left.status == "stopped"
    assert {trial.status for trial in left.trials} <= {"stopped", "finished"}
    assert all(t.record.is_open for t in left.trials if t.status == "stopped")
    # What was stopped cleanly has a row for every epoch that is over.
    result = cerebro.resume(tmp_path / "run", progress=False)
    assert_as_whole(result, whole)


def test_a_resumed_run_is_killed_and_resumed(data, whole, tmp_path):
    folder = tmp_path / "run"
    struck(folder, data, at=9, workers=2)
    assert struck(folder, data, at=7, resume=True, workers=2).returncode == -signal.SIGKILL
    assert struck(folder, data, at=16, resume=True, workers=1).returncode == -signal.SIGKILL
    assert struck(folder, data, at=2, resume=True, workers=0).returncode == -signal.SIGKILL
    assert_as_whole(cerebro.resume(folder, workers=2, progress=False), whole)


def test_the_clock_continues_over_a_resume(data, tmp_path):
    folder = tmp_path / "run"
    struck(folder, data, at=9, number=signal.SIGTERM)  # whatever was trained has a row
    struck(folder, data, at=9, number=signal.SIGTERM, resume=True, workers=0)
    result = cerebro.resume(folder, progress=False)
    units = sorted(result.saved.units(), key=lambda unit: unit["start"])
    assert all(unit["start"] >= 0 for unit in units)
    for one, two in itertools.pairwise(units):  # one inline worker
        assert two["start"] >= one["end"] - 1e-3
    connection = sqlite3.connect(folder / "run.sqlite")
    times = [t for (t,) in connection.execute("SELECT time FROM events WHERE kind = 'resumed'")]
    connection.close()
    assert len(times) == 2 and 0 < times[0] < times[1]
    for trial in result.trials:
        assert all(epoch["seconds"] > 0 for epoch in trial.history)


def test_a_finished_run_is_given_back(whole, monkeypatch):
    monkeypatch.setattr(resumable, "build", None)
    units = len(whole.saved.units())
    again = cerebro.resume(whole.path)
    assert again.status == "finished" and len(again.saved.units()) == units
    assert hashes(again) == hashes(whole)
