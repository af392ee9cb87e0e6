"""Workers that share a process on a GPU, over the stand-in for CUDA: states are the CPU's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
TESTS = Path(__file__).parents[1]
SEEDS = ["shared 1"]
KILLED = "killed 4"


@pytest.fixture(scope="module")
def said(cudart_standin: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each search found: hashes, metrics, logs, processes, units that overlapped."""
    folder = tmp_path_factory.mktemp("streams")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("STANDIN_")}
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "standin")))
    variables |= {"CEREBRO_CUDART": str(cudart_standin), "PYTHONPATH": path}
    variables["CEREBRO_CACHE"] = str(folder / "cache")
    program = str(TESTS / "standin" / "streams_on_standin.py")
    done = subprocess.run(
        [sys.executable, program, str(folder), "cpu", "one", *SEEDS, KILLED],
        env=variables, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_search_with_one_gpu_worker_matches_the_cpu(said: dict[str, Any]) -> None:
    assert said["one"]["hashes"] == said["cpu"]["hashes"]
    assert said["one"]["metrics"] == said["cpu"]["metrics"]
    assert len({tuple(trial) for trial in said["cpu"]["hashes"]}) == 5


@pytest.mark.parametrize("way", [*SEEDS, KILLED])
def test_units_that_overlap_in_one_process_change_nothing(said: dict[str, Any], way: str) -> None:
    found = said[way]
    assert found["status"] == ["finished"] * 5
    assert found["hashes"] == said["cpu"]["hashes"]
    assert found["metrics"] == said["cpu"]["metrics"]
    assert found["foreign"] == 0  # every line is in its own trial's log
    assert found["overlaps"] > 0


def test_all_units_run_in_one_process(said: dict[str, Any]) -> None:
    assert [len(said[way]["processes"]) for way in SEEDS] == [1]


def test_a_process_that_is_killed_is_replaced_by_one(said: dict[str, Any]) -> None:
    assert len(said[KILLED]["processes"]) == 2
