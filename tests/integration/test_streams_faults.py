"""Faults while the units of workers that share a process overlap, over the stand-in for CUDA.

`tests/standin/faults_on_streams.py` searches; the trial that meets a fault waits until the other
units are where the test wants them. All other trials must have the states of the CPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
TESTS = Path(__file__).parents[1]
TOGETHER = (
    ("cpu", "kills"),
    ("kills beside", "kills beside idle"),
    ("interrupted", "two, killed"),
    ("out of memory", "others keep", "too large"),
    ("waits", "hangs", "hangs on device"),
)
"""Searches that one program makes."""
ROW_BYTES = 5 * 4

Found = dict[str, Any]
Search = Callable[[str], Found]


@pytest.fixture(scope="module")
def said(cudart_standin: Path, tmp_path_factory: pytest.TempPathFactory) -> Search:
    """What a search found; the searches of a program run when the first of them is asked for."""
    folder = tmp_path_factory.mktemp("faults")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("STANDIN_")}
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "standin")))
    variables |= {"CEREBRO_CUDART": str(cudart_standin), "PYTHONPATH": path}
    variables["CEREBRO_CACHE"] = str(folder / "cache")
    program = str(TESTS / "standin" / "faults_on_streams.py")
    found: dict[str, Found] = {}

    def search(way: str) -> Found:
        if way not in found:
            ways = next(ways for ways in TOGETHER if way in ways)
            done = subprocess.run(
                [sys.executable, program, str(folder / ways[0]), *ways],
                env=variables, capture_output=True, text=True, timeout=380,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
            found.update(json.loads(done.stdout.splitlines()[-1]))
        return found[way]

    return search


def check_states(said: Search, found: Found, *failed: int) -> None:
    """Check that all trials but the failed ones have finished with the states of the CPU."""
    expected = said("cpu")["hashes"]
    for trial, status in enumerate(found["status"]):
        assert status == ("failed" if trial in failed else "finished"), (trial, found["errors"])
        if trial not in failed:
            assert found["hashes"][trial] == expected[trial]


def lost(found: Found) -> list[tuple[int | None, str]]:
    return [(trial, text) for kind, trial, text in found["events"] if kind == "worker lost"]


# --- blame ---------------------------------------------------------------------------


def test_a_unit_that_kills_its_process_is_blamed_at_once(said: Search) -> None:
    """The others waited for their turn; without retries, it fails at its first death."""
    found = said("kills")
    check_states(said, found, 3)
    how = "the worker process was ended by SIGKILL"
    assert found["errors"][3] == f"{how} in epoch 0, unit 1, once"
    events = dict(lost(found))
    assert len(lost(found)) == len(events) == 3  # the process has three workers
    assert events.pop(3) == f"{how} in trial 3, epoch 0, unit 1, attempt 0"
    assert all(text == f"{how}; it was training trial {trial}" for trial, text in events.items())
    assert found["foreign"] == []


def test_a_unit_not_certainly_to_blame_runs_again_alone(said: Search) -> None:
    """Another unit waited for the device: the second death shows which of them it is."""
    found = said("kills beside")
    check_states(said, found, 1)
    how = "the worker process was ended by SIGKILL"
    assert found["errors"][1] == f"{how} in epoch 0, unit 1, once"
    texts = [text for trial, text in lost(found) if trial == 1]
    assert texts == [
        f"{how}; it was training trial 1",
        f"{how} in trial 1, epoch 0, unit 1, attempt 1",
    ]
    assert not [text for trial, text in lost(found) if trial != 1 and "attempt" in text]


def test_an_idle_worker_of_the_process_takes_no_blame(said: Search) -> None:
    found = said("kills beside idle")
    check_states(said, found, 1, 2)
    how = "the worker process was ended by SIGKILL"
    assert found["errors"][1] == f"{how} in epoch 0, unit 2, once"
    assert sorted(lost(found), key=str) == [
        (0, f"{how}; it was training trial 0"),
        (1, f"{how} in trial 1, epoch 0, unit 2, attempt 0"),
        (None, how),
    ]


# --- Ctrl-C ---------------------------------------------------------------------------


def test_an_interrupt_ends_the_process_and_the_run_can_be_resumed(said: Search) -> None:
    """Two units wait for their turn, which the third one keeps, when Ctrl-C is pressed."""
    found = said("interrupted")
    assert found["run"] == "stopped" and found["left"] == []
    assert re.match(r"interrupted: 5 trials with \d finished epochs? ", found["interrupted"])
    assert found["status"] == ["stopped"] * 5
    assert lost(found) == []
    resumed = found["resumed"]
    check_states(said, resumed)
    assert resumed["run"] == "finished" and resumed["foreign"] == []
    assert lost(resumed) == [] and {attempt for *_, attempt in resumed["units"]} == {0}


# --- several GPUs ---------------------------------------------------------------------


def test_units_on_another_gpu_continue_when_a_process_is_killed(said: Search) -> None:
    found = said("two, killed")
    check_states(said, found, 3)
    events = lost(found)
    assert len(events) == 2  # the workers of one of two processes
    assert dict(events)[3].endswith("in trial 3, epoch 0, unit 1, attempt 0")
    assert sum(attempt > 0 for *_, attempt in found["units"]) == 1  # of the killed one's units


def test_a_plan_matches_the_search_that_follows(said: Search) -> None:
    """The workers of a GPU hold the data once, also if there are two."""
    one, two = said("waits"), said("two, killed")
    assert one["plan"]["units"] == len(one["units"]) == 3 * 2 * 4
    assert (one["plan"]["workers"], two["plan"]["workers"]) == (3, 4)
    assert one["plan"]["held"] == ROW_BYTES * 240
    assert two["plan"]["held"] == ROW_BYTES * 240  # each GPU has all rows


# --- out of memory ---------------------------------------------------------------------


def test_units_without_memory_run_again_one_by_one(said: Search) -> None:
    """Three units begin, and the memory is enough for one: two of them wait for it to end."""
    found = said("out of memory")
    check_states(said, found)
    assert len(set(found["short"])) == len(found["short"]) == 2
    assert lost(found) == [] and found["foreign"] == []


def test_models_that_other_workers_keep_make_room(said: Search) -> None:
    """The memory is enough for one live model; models of other workers are dropped for it."""
    found = said("others keep")
    check_states(said, found)
    assert len(set(found["short"])) >= 2
    assert lost(found) == [] and found["foreign"] == []


def test_a_unit_that_needs_more_than_the_gpu_has_fails(said: Search) -> None:
    found = said("too large")
    check_states(said, found, 1)
    assert found["errors"][1].startswith("OutOfMemoryError: CUDA out of memory")
    assert found["short"] == [1, 1]  # once beside others, once alone
    assert lost(found) == []


# --- unit_timeout ----------------------------------------------------------------------


def test_waiting_for_a_turn_does_not_count_toward_unit_timeout(said: Search) -> None:
    """Three units keep the turn for 1.6 seconds each; the limit is 3."""
    found = said("waits")
    check_states(said, found)
    assert lost(found) == []
    assert found["foreign"] == []  # no traceback of a unit that only waited


def test_only_the_hanging_unit_times_out_not_those_waiting_for_it(said: Search) -> None:
    found = said("hangs")
    check_states(said, found, 1)
    late = "the unit took longer than unit_timeout=2 seconds"
    where = "(where it was: trials/1.log)"
    assert found["errors"][1] == f"{late} in epoch 0, unit 1, once {where}"
    events = dict(lost(found))
    assert events.pop(1) == f"{late} in trial 1, epoch 0, unit 1, attempt 0"
    assert len(events) == 2 and all(
        f": {late}; it was training trial {trial}" in text for trial, text in events.items()
    )
    assert found["tracebacks"] == [0, 1, 0, 0, 0]


def test_the_traceback_of_a_unit_whose_device_hangs_goes_to_its_log(said: Search) -> None:
    """Others run meanwhile, and theirs may be standard error; alone, it is to blame."""
    found = said("hangs on device")
    check_states(said, found, 1)
    late = "the unit took longer than unit_timeout=2 seconds"
    texts = [text for trial, text in lost(found) if trial == 1]
    # It is blamed at once if the other units had ended when it was late.
    assert len(texts) <= 2 and texts[:-1] in ([], [f"{late}; it was training trial 1"])
    assert texts[-1] == f"{late} in trial 1, epoch 0, unit 1, attempt {len(texts) - 1}"
    assert found["tracebacks"] == [0, len(texts), 0, 0, 0]
