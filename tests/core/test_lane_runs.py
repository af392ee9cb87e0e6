"""Units whose steps are CUDA graphs, in a process whose CUDA runtime is that of tests/standin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAYS = {
    "at once": {},
    "deferred": {"STANDIN_DEFER": "1"},
    "odd": {"STANDIN_DEFER": "1", "STANDIN_ODD": "7"},
}


@pytest.mark.parametrize("way", WAYS)
def test_lanes_work_on_the_cuda_standin(cudart_standin: Path, way: str) -> None:
    environment = {**os.environ, "CEREBRO_CUDART": str(cudart_standin), **WAYS[way]}
    tests = Path("tests") / "standin" / "lanes_on_standin.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
