"""`cerebro.worker.UnitRunner` by itself: what it does with the states and files of trials."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro import _core
from cerebro.unit import RunContext, Task, UnitDone
from cerebro.worker import UnitRunner


class Mean:
    """Learns the mean of a column, with a step for each batch."""

    framework = "numpy"

    def __init__(self):
        self.value = np.zeros(1)

    def train_batch(self, batch):
        error = self.value - batch["x"].mean()
        self.value = self.value - 0.1 * error
        return {"loss": float(error[0] ** 2)}

    eval_batch = train_batch

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = np.array(state["value"])


def build(config):
    return Mean()


@pytest.fixture
def context(tmp_path):
    x = np.random.default_rng(0).normal(size=40)
    data = cerebro.shard({"x": x}, tmp_path / "data", shards=3, progress=False)
    for name in ("states", "trials"):
        (tmp_path / name).mkdir()
    states = str(tmp_path / "states")
    return RunContext(
        build=build,
        train=data,
        batch_size=4,
        live_models=2,
        state_dir=states,
        epoch_dir=states,
        log_dir=str(tmp_path / "trials"),
    )


def task(position: int, dispatch: int, trial: int = 0, ended: tuple[int, ...] = ()) -> Task:
    return Task(
        trial=trial,
        config={},
        epoch=0,
        step=position,
        shard=position,
        attempt=0,
        position=position,
        dispatch=dispatch,
        ended=ended,
    )


def done(runner: UnitRunner, a_task: Task) -> UnitDone:
    event = runner.run(a_task)
    assert isinstance(event, UnitDone), event
    return event


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_unit_committed_by_a_worker_that_died_before_its_answer_is_done_again(context, lost):
    straight = UnitRunner(context, worker=0)
    expected = [done(straight, task(position, position)).state_hash for position in range(3)][-1]
    straight.close()
    for file in Path(context.state_dir).iterdir():
        file.unlink()

    dies = UnitRunner(context, worker=0)
    for position in range(lost + 1):
        done(dies, task(position, position))
    # The answer to the last one never arrived: another worker is given the same unit.
    other = UnitRunner(context, worker=1)
    hashes = [done(other, task(position, position + 1)).state_hash for position in range(lost, 3)]
    assert hashes[-1] == expected


def mapped(folder: str) -> set[str]:
    """Names of the files below a folder that this process has mapped, deleted or not."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.partition("/")[2].removesuffix(" (deleted)") for line in lines]
    return {Path(path).name for path in paths if f"/{path}".startswith(folder)}


def test_models_and_slots_of_trials_that_have_ended_are_released(context):
    runner = UnitRunner(context, worker=0)
    done(runner, task(0, 0, trial=0))
    done(runner, task(0, 0, trial=1))
    assert set(runner.live_trials) == {0, 1}
    if Path("/proc/self/maps").exists():
        assert "0.slots" in mapped(context.state_dir)
    event = done(runner, task(0, 0, trial=2, ended=(0, 7)))
    assert set(runner.live_trials) == {1, 2}
    if Path("/proc/self/maps").exists():
        assert {name.split(".")[0] for name in mapped(context.state_dir)} == {"1", "2"}
    assert event.dropped == ()  # the coordinator knows that it has ended


def test_every_unit_seals_its_state_and_the_epochs_hash_is_its_seal(context):
    runner = UnitRunner(context, worker=0)
    for position in range(3):
        event = done(runner, task(position, position))
        slots = _core.Slots(str(Path(context.state_dir, "0")), False)
        found = slots.sealed()
        assert found is not None and found[:2] == (position + 1, position)
        slots.close()
    assert event.state_hash == _core.hash_state(found[2])
    runner.close()
