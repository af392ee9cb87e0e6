"""The lanes of a GPU, over the stand-in for CUDA: states are the CPU's, user code takes turns."""

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
WARM = ["one 1", "two 1", *SEEDS, "again 1"]
"""Searches with the same variables, one after the other, with 1, 2, 5 and 5 workers."""
WATCHED = ["watched 2", "watched 5"]
CALLS = {
    *("build_watched", "__init__", "bind_info", "begin_epoch", "begin_unit", "train_batch"),
    *("end_unit", "training_metrics", "eval_batch", "end_epoch", "state_dict", "load_state_dict"),
}


@pytest.fixture(scope="module")
def said(cudart_standin: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each search found: hashes, metrics, logs, processes, units that overlapped."""
    folder = tmp_path_factory.mktemp("streams")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("STANDIN_")}
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "standin")))
    variables |= {"CEREBRO_CUDART": str(cudart_standin), "PYTHONPATH": path}
    variables["CEREBRO_CACHE"] = str(folder / "cache")
    program = str(TESTS / "standin" / "streams_on_standin.py")
    ways = ["cpu", *WARM, KILLED, "watched-cpu", *WATCHED]
    done = subprocess.run(
        [sys.executable, program, str(folder), *ways],
        env=variables, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_search_with_one_gpu_worker_matches_the_cpu(said: dict[str, Any]) -> None:
    assert said["one 1"]["hashes"] == said["cpu"]["hashes"]
    assert said["one 1"]["metrics"] == said["cpu"]["metrics"]
    assert len({tuple(trial) for trial in said["cpu"]["hashes"]}) == 5


@pytest.mark.parametrize("way", ["two 1", *SEEDS, "again 1", KILLED])
def test_units_that_overlap_in_one_process_change_nothing(said: dict[str, Any], way: str) -> None:
    found = said[way]
    assert found["status"] == ["finished"] * 5
    assert found["hashes"] == said["cpu"]["hashes"]
    assert found["metrics"] == said["cpu"]["metrics"]
    assert found["foreign"] == 0  # every line is in its own trial's log
    assert found["overlaps"] > 0


def test_a_search_trains_as_many_trials_at_once_as_it_has(said: dict[str, Any]) -> None:
    assert said[SEEDS[0]]["workers"] == 5


def test_a_process_stays_warm_for_other_numbers_of_workers(said: dict[str, Any]) -> None:
    """Its lanes are kept, some are added, and none of them need be used."""
    processes = {process for way in WARM for process in said[way]["processes"]}
    assert len(processes) == 1
    assert [said[way]["workers"] for way in WARM] == [1, 2, 5, 5]


def test_a_process_that_is_killed_is_replaced_by_one(said: dict[str, Any]) -> None:
    assert len(said[KILLED]["processes"]) == 2


@pytest.mark.parametrize("way", WATCHED)
def test_no_user_code_runs_off_its_turn(said: dict[str, Any], way: str) -> None:
    """Each call of a user's model looks whether another thread is in user code, too."""
    found = said[way]
    assert [call for call in found["calls"] if call[3]] == []
    assert found["hashes"] == said["watched-cpu"]["hashes"]
    assert found["overlaps"] > 0
    by_thread: dict[tuple[int, int], set[str]] = {}
    for process, thread, name, _ in found["calls"]:
        by_thread.setdefault((process, thread), set()).add(name)
    assert set().union(*by_thread.values()) == CALLS
    assert sum("train_batch" in names for names in by_thread.values()) == 5  # a thread for each
