"""Shared by the tests that need Ray: one small cluster per module, and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # send no statistics
os.environ["PYTHONPATH"] = os.pathsep.join(  # Ray's processes find the models
    [str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Return the address of a cluster of one node with two CPUs."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.tune")
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000,
        logging_level="ERROR", log_to_driver=False,
    )  # fmt: skip
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


@pytest.fixture
def run_program(cluster: str, tmp_path: Path):
    """Return a function that starts a program on the cluster."""
    import subprocess

    def start(program: Path, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", program, *arguments],
            cwd=tmp_path,
            env={**os.environ, "RAY_ADDRESS": cluster},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    return start
