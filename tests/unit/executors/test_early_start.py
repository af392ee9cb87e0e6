"""Workers that start while the run is still being prepared."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from meeting import Meet, meet

import cerebro
from cerebro.executors.process import fork_servers, warm_workers


class Imported:
    """Reports whether its process has imported a module before it was built."""

    framework = "numpy"

    def __init__(self, folder) -> None:
        self.folder = folder
        self.found = float("this" in sys.modules)

    def train_batch(self, batch):
        meet(self.folder)
        return {"loss": self.found}

    def eval_batch(self, batch):
        return {"loss": self.found}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.fixture
def no_workers():
    warm_workers.close()
    fork_servers.close()
    yield
    warm_workers.close()
    fork_servers.close()


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.setenv("CEREBRO_FORK", "0")


def imported(folder):
    """Search with two workers, which both train; return what they found, and their process ids."""
    result = cerebro.search(
        lambda config: Imported(folder),
        {"lr": cerebro.uniform(0, 1)},
        {"x": np.zeros((8, 1))},
        n_trials=4,
        epochs=1,
        batch_size=2,
        workers=2,
        metric="train_loss",
        run=folder / "run",
        progress=False,
        callbacks=[Meet(folder)],
    )
    found = {trial.history[0]["metrics"]["train_loss"] for trial in result.trials}
    return found, {worker.process.pid for worker in warm_workers._idle}


def test_a_search_takes_the_workers_that_were_started_early(tmp_path, no_workers, programs):
    warm_workers.start_early(1, [None, None], ["this", "a_module_that_does_not_exist"])
    early = {worker.process.pid for worker in warm_workers._idle}
    assert len(early) == 2
    assert imported(tmp_path) == ({1.0}, early)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks workers")
def test_a_search_forks_its_workers_from_a_server_started_early(tmp_path, no_workers):
    warm_workers.start_early(1, [None, None], ["this", "a_module_that_does_not_exist"])
    (server,) = fork_servers.processes()
    assert warm_workers._idle == []
    found, workers = imported(tmp_path)
    assert (found, len(workers)) == ({1.0}, 2)
    assert fork_servers.processes() == [server]
    warm_workers.start_early(1, [None, None], ["that"])  # they are here, so no server is needed
    assert fork_servers.processes() == [server]


def test_existing_workers_are_not_started_again(no_workers, programs):
    warm_workers.start_early(1, [None])
    (before,) = [worker.process.pid for worker in warm_workers._idle]
    warm_workers.start_early(1, [None, None])
    after = [worker.process.pid for worker in warm_workers._idle]
    assert len(after) == 2 and before in after
