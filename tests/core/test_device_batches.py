"""Batches on a device, in a process whose CUDA runtime is the stand-in of tests/standin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_device_batches_work_on_the_cuda_standin(cudart_standin: Path, deferred: bool) -> None:
    environment = {
        **os.environ,
        "CEREBRO_CUDART": str(cudart_standin),
        "STANDIN_DEFER": str(int(deferred)),
    }
    tests = Path("tests") / "standin" / "batches_on_standin.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
