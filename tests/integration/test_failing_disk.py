"""A search whose disk fails ends at once, says which file, and has recorded nothing wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import cerebro

PROGRAM = """
import sys
import numpy as np
import cerebro

class Line:
    framework = "numpy"

    def __init__(self, config):
        self.w, self.lr = np.zeros(3), config["lr"]

    def train_batch(self, batch):
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.lr * batch["x"].T @ error / len(error)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])

class Settle:
    # One epoch after the other is durable, so that failures come where they are meant to.
    def on_epoch_end(self, trial, metrics):
        run.verify()

    def on_run_start(self, result):
        global run
        run = result

try:
    cerebro.search(
        Line, {"lr": cerebro.loguniform(1e-3, 1e-1)}, sys.argv[1], run=sys.argv[2],
        workers=int(sys.argv[3]), epochs=3, n_trials=4, batch_size=16, validation=0.25,
        keep="all", progress=False, callbacks=[Settle()],
    )
except OSError as error:
    print(error)
else:
    print("no error")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 3))
    y = x @ np.array([1.0, -2.0, 0.5])
    return cerebro.shard({"x": x, "y": y}, tmp_path_factory.mktemp("data") / "set", shards=2)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("call", "path", "code", "named"),
    [
        ("fsync", ".safetensors.new:5", errno.EIO, "safetensors.new"),
        ("rename", ".safetensors.new:5", errno.EROFS, "safetensors.new"),
        ("write", ".safetensors.new:5", errno.ENOSPC, "safetensors.new"),
        ("fsync", "run.sqlite-wal:10", errno.EIO, "run.sqlite"),
        ("write", "run.sqlite-wal:30", errno.ENOSPC, "run.sqlite"),
    ],
)
def test_a_disk_that_fails_ends_the_search(
    disk_shim, data, tmp_path, workers, call, path, code, named
):
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(data.path), str(run), str(workers)],
        env={**os.environ, "LD_PRELOAD": str(disk_shim), "DISK_FAIL": f"{call}:{path}:{code}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (message,) = done.stdout.splitlines()
    assert named in message
    assert str(run) in message
    result = cerebro.open(run)
    assert result.status != "finished"
    # What is recorded is right: every epoch has its state, whole.
    epochs = [epoch for trial in result.trials for epoch in trial.history]
    assert 0 < len(epochs) < 12
    found = result.verify()
    assert found, str(found)
    assert found.states == len(epochs)
