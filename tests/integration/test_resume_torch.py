"""PyTorch models, with dropout, batch norm, momentum and a schedule, over a resume."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")

import resumable_torch
from resumable import SHARDS, hashes

import cerebro


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(230, 3)).astype("float32")
    folder = tmp_path_factory.mktemp("data") / "set"
    cerebro.shard({"x": x, "y": x.sum(1)}, folder, shards=SHARDS, progress=False)
    return folder


def test_a_torch_run_killed_twice_resumes_and_is_extended(data, tmp_path):
    whole = resumable_torch.search(tmp_path / "whole", data, epochs=5)
    folder = tmp_path / "run"
    for at in (17, 22):
        command = [sys.executable, resumable_torch.__file__, folder, data, str(at)]
        killed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    result = cerebro.resume(folder, workers=1, progress=False)
    assert result.status == "finished"
    assert hashes(result) == [trial[:3] for trial in hashes(whole)]
    result = cerebro.resume(folder, epochs=5, workers=2, progress=False)
    assert hashes(result) == hashes(whole)
    assert cerebro.replay(result, 3).identical
    weights = [trial.load("last").net[0].weight for trial in (result.trials[1], whole.trials[1])]
    assert bool((weights[0] == weights[1]).all())
