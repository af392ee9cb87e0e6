"""The time left that displays show, beside the time that a search really took from there.

The searches are real, and the clock is not: a batch advances it by the configuration's cost for
each row, so that every figure is exact. One worker trains in this process; several workers on a
simulated clock are in tests/unit/coordinator/test_forecast.py.
"""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro.machine import local
from cerebro.report.progress import Lines, Progress
from cerebro.searchers import ASHA, PBT, Hyperband, MedianStopping, SuccessiveHalving


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Model:
    """Learns nothing: its loss is `level`, and each row takes `cost` seconds."""

    cpu_only = True

    def __init__(self, clock: Clock, level: float, cost: float) -> None:
        self.clock, self.level, self.cost = clock, level, cost

    def train_batch(self, batch: Any) -> dict[str, float]:
        self.clock.now += self.cost * batch["y"].shape[0]
        return {"loss": self.level}

    def eval_batch(self, batch: Any) -> dict[str, float]:
        self.clock.now += self.cost * batch["y"].shape[0] / 3
        return {"loss": self.level}

    def state_dict(self) -> dict[str, Any]:
        return {"level": np.float64(self.level)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = float(state["level"])


class Recorder(Progress):
    """Keeps the time, the time left and the share at every update; stops the clock's run."""

    def __init__(self, clock: Clock, interrupt_at: float = math.inf) -> None:
        self.clock = clock
        self.interrupt_at = interrupt_at
        self.seen: list[tuple[float, float | None, float | None]] = []
        self.end = math.nan

    def run_started(self, snapshot: Any) -> None:
        self.update(snapshot)

    def update(self, snapshot: Any) -> None:
        self.seen.append((self.clock.now, snapshot.seconds_left, snapshot.share_done))
        if (snapshot.share_done or 0) >= self.interrupt_at:
            raise KeyboardInterrupt

    def finished(self, snapshot: Any, result: Any) -> None:
        self.end = self.clock.now

    def check(self, bound: float, *, since: float = 0.0) -> None:
        """Every estimate is at most `bound` times off, and the share never goes back.

        Parameters
        ----------
        since
            The share of the time before which estimates do not count.
        """
        begun = self.seen[0][0]
        whole = self.end - begun
        rest = [(now, left) for now, left, _ in self.seen if now - begun >= since * whole]
        assert len(rest) > 20
        for now, left in rest:
            really = self.end - now
            assert left is not None, f"no estimate after {(now - begun) / whole:.0%}"
            # Units are whole: a hundredth of the run is as good as nothing.
            assert left <= really * bound + 0.01 * whole, (now - begun, left, really)
            assert left >= really / bound - 0.01 * whole, (now - begun, left, really)
        shares = [share for _, _, share in self.seen]
        assert shares == sorted(shares)


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> cerebro.Dataset:
    x = np.arange(60, dtype=np.float32).reshape(60, 1)
    rows = {"x": x, "y": np.arange(60) % 2}
    return cerebro.shard(rows, tmp_path_factory.mktemp("data") / "rows", shards=2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(local.Clock, "perf_counter", lambda self: clock())
    return clock


def search(data: Any, clock: Clock, run: Path, progress: Any = None, **changes: Any) -> Any:
    recorder = Recorder(clock) if progress is None else progress

    def build(config: Any, info: Any) -> Model:
        return Model(clock, config["level"], config["cost"])

    settings: dict[str, Any] = {
        "epochs": 9, "n_trials": 12, "validation": 0.2, "batch_size": 4, "workers": 0,
        "progress": recorder, "run": run, "if_exists": "resume",
    }  # fmt: skip
    space = {"level": cerebro.uniform(0.0, 1.0), "cost": changes.pop("cost", 1.0)}
    cerebro.search(build, space, data, **{**settings, **changes})
    return recorder


def test_equal_trials_are_forecast_exactly(data: Any, clock: Clock, tmp_path: Path) -> None:
    search(data, clock, tmp_path / "run").check(1.001, since=0.03)


def test_trials_of_different_cost_are_forecast_within_bounds(
    data: Any, clock: Clock, tmp_path: Path
) -> None:
    found = search(data, clock, tmp_path / "run", cost=cerebro.uniform(0.5, 2.0))
    found.check(2.0, since=0.03)


def test_folds_are_forecast_within_bounds(data: Any, clock: Clock, tmp_path: Path) -> None:
    found = search(data, clock, tmp_path / "run", validation=cerebro.KFold(3), n_trials=4)
    found.check(1.02, since=0.03)


@pytest.mark.parametrize(
    ("searcher", "bound"),
    [
        (SuccessiveHalving(), 1.05),
        (Hyperband(), 1.05),
        (PBT(interval=3), 1.05),
        (ASHA(), 2.0),
        (ASHA(variant="stopping"), 3.0),
        (MedianStopping(), 3.0),
    ],
    ids=repr,
)
def test_searchers_that_stop_trials_are_forecast_within_bounds(
    data: Any, clock: Clock, tmp_path: Path, searcher: Any, bound: float
) -> None:
    trials = 6 if isinstance(searcher, PBT) else 27
    found = search(data, clock, tmp_path / "run", searcher=searcher, n_trials=trials)
    found.check(bound, since=0.1)


def test_a_resumed_run_is_forecast_at_once(data: Any, clock: Clock, tmp_path: Path) -> None:
    """Its trials' last epochs were timed by the earlier process."""
    settings: dict[str, Any] = {"n_trials": 13, "searcher": Hyperband()}
    with pytest.raises(KeyboardInterrupt):
        search(data, clock, tmp_path / "run", Recorder(clock, interrupt_at=0.6), **settings)
    clock.now += 10_000  # a night
    resumed = search(data, clock, tmp_path / "run", **settings)
    resumed.check(1.05)
    assert resumed.seen[0][2] == pytest.approx(0.6, abs=0.05)


def test_further_epochs_are_forecast_at_once(data: Any, clock: Clock, tmp_path: Path) -> None:
    search(data, clock, tmp_path / "run", n_trials=8, epochs=4)
    further = search(data, clock, tmp_path / "run", n_trials=8, epochs=8)
    further.check(1.001)
    assert further.seen[0][2] == pytest.approx(0.5)


def test_an_optuna_study_is_forecast_within_bounds(data: Any, clock: Clock, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    import cerebro.optuna

    def build(trial: Any) -> Model:
        return Model(clock, trial.suggest_float("level", 0, 1), 1.0)

    study = optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    recorder = Recorder(clock)
    cerebro.optuna.optimize(
        study, build, data, validation=0.2, epochs=9, n_trials=24, batch_size=4, workers=0,
        progress=recorder, run=tmp_path / "run",
    )  # fmt: skip
    states = {trial.state.name for trial in study.trials}
    assert states == {"PRUNED", "COMPLETE"}
    recorder.check(2.0, since=0.1)


def test_a_time_limit_is_forecast_exactly(data: Any, clock: Clock, tmp_path: Path) -> None:
    found = search(data, clock, tmp_path / "run", n_trials=None, time_limit=1000.0)
    begun = found.seen[0][0] + found.seen[0][1] - 1000.0  # before the first configuration is tried
    assert 0.0 < found.seen[0][0] - begun < 300.0
    for now, left, share in found.seen:
        assert left == pytest.approx(max(0.0, begun + 1000.0 - now))
        assert share == pytest.approx(min(1.0, (now - begun) / 1000.0))
    assert found.seen[-1][1] == 0.0


def test_plain_lines_have_the_best_so_far(data: Any, clock: Clock, tmp_path: Path) -> None:
    out = io.StringIO()
    search(data, clock, tmp_path / "run", Lines(out), n_trials=3, epochs=2)
    lines = out.getvalue().splitlines()
    assert lines[0] == "trying the first configuration ..."
    best = math.inf
    epochs = [line for line in lines if " epoch " in line]
    assert len(epochs) == 6
    for line in epochs:
        number, own = re.search(r"trial (\d+) .*val loss (\S+)", line).groups()  # type: ignore[union-attr]
        if float(own) < best:
            best, holder = float(own), number
        said = "(best so far)" if holder == number else f"(best so far: {best:.4f}, trial {holder})"
        assert line.endswith(said)
