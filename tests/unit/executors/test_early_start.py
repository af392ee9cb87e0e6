"""Workers that start while the run is still being prepared."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import cerebro
from cerebro.executors.process import warm_workers


class Imported:
    """Reports whether its process has imported a module before it was built."""

    framework = "numpy"

    def __init__(self) -> None:
        self.found = float("this" in sys.modules)

    def train_batch(self, batch):
        return {"loss": self.found}

    eval_batch = train_batch

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.fixture
def no_workers():
    warm_workers.close()
    yield
    warm_workers.close()


def test_a_search_takes_the_workers_that_were_started_early(tmp_path, no_workers):
    warm_workers.start_early(1, [None, None], ["this", "a_module_that_does_not_exist"])
    early = {worker.process.pid for worker in warm_workers._idle}
    assert len(early) == 2
    result = cerebro.search(
        lambda config: Imported(),
        {"lr": cerebro.uniform(0, 1)},
        {"x": np.zeros((8, 1))},
        n_trials=4,
        epochs=1,
        batch_size=2,
        workers=2,
        metric="train_loss",
        run=tmp_path / "run",
        progress=False,
    )
    assert {trial.history[0]["metrics"]["train_loss"] for trial in result.trials} == {1.0}
    assert {worker.process.pid for worker in warm_workers._idle} == early


def test_workers_that_are_here_are_not_started_again(no_workers):
    warm_workers.start_early(1, [None])
    (before,) = [worker.process.pid for worker in warm_workers._idle]
    warm_workers.start_early(1, [None, None])
    after = [worker.process.pid for worker in warm_workers._idle]
    assert len(after) == 2 and before in after
