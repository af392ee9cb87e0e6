"""A GPU that fails its check: the same search finds the same, over the stand-in for CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
PARTS = {
    "copies": "the check of memory failed: cuda:0: copies give wrong bytes",
    "fills": "the check of memory failed: cuda:0: copies give wrong bytes",
    "waits": "the check of streams failed: cuda:0: a stream does not wait for another's event",
    "events": "the check of streams failed: cuda:0: a stream does not wait for another's event",
    "kernels": "the check of kernels failed: cuda:0: cer_rows_16 gives wrong bytes",
    "memory": "the check of memory failed: out of memory on cuda:0: ",
    "streams": "the check of memory failed: cuda:0: cudaStreamCreateWithFlags: ",
    "module": "the check of kernels failed: cuda:0: cuModuleLoadDataEx: ",
    "crash": "cuda:0: its check ended by SIGABRT",
    "hang": "cuda:0: its check gave no answer within 3 seconds",
}


@pytest.fixture(scope="module")
def said(cudart_standin: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each search found: hashes of states, warnings, and lines of work that a GPU got."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("STANDIN_")}
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "standin" / "searches_on_standin.py"),
            str(tmp_path_factory.mktemp("searches")),
        ],
        env=variables | {"CEREBRO_CUDART": str(cudart_standin), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_gpu_that_works_makes_the_batches(said: dict[str, Any]) -> None:
    hashes, warnings, lines = said["none"]
    assert hashes == said["cpu"][0] and len(hashes) == 2
    assert warnings == []
    assert lines > 0


@pytest.mark.parametrize("fault", PARTS)
def test_a_failed_gpu_check_warns_and_changes_no_state(said: dict[str, Any], fault: str) -> None:
    """One warning says what failed; the device is left alone."""
    hashes, warnings, lines = said[fault]
    assert hashes == said["cpu"][0]
    (warning,) = warnings
    assert PARTS[fault] in warning
    assert "python -m cerebro doctor" in warning
    assert lines == 0
