"""Batches on a device, in a process whose CUDA runtime is the stand-in of tests/standin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, compiled."""
    build = tmp_path_factory.mktemp("standin")
    path = build / "libcudart_standin.so"
    make = ["make", "-s", "-C", str(ROOT / "tests" / "c"), f"BUILD={build}", str(path)]
    subprocess.run(make, check=True, capture_output=True)
    return path


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_on_the_standin(library: Path, deferred: bool) -> None:
    environment = {
        **os.environ,
        "CEREBRO_CUDART": str(library),
        "STANDIN_DEFER": str(int(deferred)),
    }
    tests = Path("tests") / "standin" / "batches_on_standin.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
