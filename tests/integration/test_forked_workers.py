"""Searches with workers that are forked give what those with started workers give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro.executors.fork_server import Child
from cerebro.executors.process import WorkerProcess, fork_servers, warm_workers

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks workers")


@pytest.fixture(autouse=True)
def no_servers():
    warm_workers.close()
    fork_servers.close()
    yield
    warm_workers.close()
    fork_servers.close()


@pytest.fixture
def spawned(monkeypatch):
    """The processes of all workers of the test, in order."""
    processes = []
    spawn = WorkerProcess.spawn

    def noted(*arguments, **options):
        worker = spawn(*arguments, **options)
        processes.append(worker.process)
        return worker

    monkeypatch.setattr(WorkerProcess, "spawn", noted)
    return processes


def build(config, info):
    """Large enough for PyTorch and OpenBLAS to use two threads."""
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(512, 1)
    )
    mixed = np.random.random((256, 256)) @ np.random.random((256, 256))
    network[3].bias.data[:] = float(mixed.sum() % 1)
    marker = config["kill_once"]

    class Model(cerebro.torch.Model):
        def begin_epoch(self, epoch):
            if marker and info.trial == 1 and epoch == 1 and not Path(marker).exists():
                Path(marker).touch()
                os.kill(os.getpid(), 9)

    optimizer = torch.optim.Adam(network.parameters(), lr=config["lr"])
    return Model(network, optimizer=optimizer, loss=torch.nn.functional.mse_loss)


def hashes(run, *, kill_once=None, **settings):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 64)).astype("f4")
    data = {"x": x, "y": x[:, :1] * 2}
    result = cerebro.search(
        build,
        {"lr": cerebro.loguniform(1e-4, 1e-2), "kill_once": kill_once and str(kill_once)},
        data,
        validation=0.2,
        n_trials=2,
        epochs=2,
        batch_size=128,
        seed=3,
        progress=False,
        run=run,
        **settings,
    )
    warm_workers.close()
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials], result


@pytest.mark.parametrize("threads", [1, 2])
def test_forked_and_started_workers_give_the_same_states(tmp_path, monkeypatch, spawned, threads):
    forked, _ = hashes(tmp_path / "forked", workers=2, threads=threads)
    assert [type(process) for process in spawned] == [Child, Child]
    monkeypatch.setenv("CEREBRO_FORK", "0")
    started, _ = hashes(tmp_path / "started", workers=2, threads=threads)
    assert [type(process) for process in spawned[2:]] == [subprocess.Popen, subprocess.Popen]
    assert forked == started


def test_a_fork_replaces_a_killed_worker(tmp_path, spawned):
    marker = tmp_path / "killed"
    lost, result = hashes(tmp_path / "lost", workers=1, kill_once=marker)
    assert [type(process) for process in spawned] == [Child, Child]
    assert spawned[0].returncode == -9
    (event,) = result.events()
    assert event["kind"] == "worker lost"
    assert "was ended by SIGKILL" in event["text"] and "trial 1, epoch 1" in event["text"]
    calm, _ = hashes(tmp_path / "calm", workers=1, kill_once=marker)  # it is there, so none dies
    assert lost == calm


def train_loss(build, run):
    """The training loss of one trial in one worker."""
    result = cerebro.search(
        build,
        {"lr": cerebro.uniform(0, 1)},
        {"x": np.zeros((4, 1))},
        n_trials=1,
        epochs=1,
        batch_size=2,
        metric="train_loss",
        progress=False,
        run=run,
        workers=1,
    )
    return result.best.history[0]["metrics"]["train_loss"]


def test_code_that_is_edited_between_two_searches_is_used(tmp_path, monkeypatch, spawned):
    file = tmp_path / "edited_model.py"
    monkeypatch.syspath_prepend(tmp_path)
    code = """
class Model:
    framework = "numpy"
    def train_batch(self, batch):
        return {"loss": VALUE}
    eval_batch = train_batch
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass
"""

    def from_the_file(config):
        import edited_model  # type: ignore[import-not-found]

        return edited_model.Model()

    for number, value in enumerate([1.0, 2.0]):
        file.write_text(code.replace("VALUE", f"{value}{'0' * number}"))
        assert train_loss(from_the_file, tmp_path / f"run{number}") == value
    assert [type(process) for process in spawned] == [Child, Child]
    assert len(fork_servers.processes()) == 1


def test_an_environment_variable_set_between_searches_reaches_workers(tmp_path, monkeypatch):
    """Such as the credentials of a storage, which a cell of a notebook sets."""

    class Model:
        framework = "numpy"

        def train_batch(self, batch):
            return {"loss": float(os.environ.get("AWS_TEST_TOKEN", "0"))}

        eval_batch = train_batch

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    for number in range(3):
        if number:
            monkeypatch.setenv("AWS_TEST_TOKEN", str(number))
        assert train_loss(lambda config: Model(), tmp_path / f"run{number}") == number
    assert len(fork_servers.processes()) == 1
