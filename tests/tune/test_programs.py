"""Programs in the manner of Ray Tune's documentation, in `examples/ray`, on one small cluster."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

import cerebro

for module in ("ray.tune", "torch", "sklearn", "pandas"):
    pytest.importorskip(module)

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "ray"
SMALL = {
    "pbt_convnet": ["--iterations", "4", "--interval", "1", "--samples", "3"],
    "asha_optuna": ["--epochs", "4", "--samples", "4"],
    "restored": [],
}
SECONDS = 200


def test_every_example_program_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SMALL.keys()


def finished(process: Any) -> str:
    text: str = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 0, text
    return text


def test_the_pbt_example_clones_trials(run_program: Any, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    text = finished(
        run_program(EXAMPLES / "pbt_convnet.py", "--storage", "results", "--workers", "2",
                    *SMALL["pbt_convnet"])
    )  # fmt: skip
    assert "best accuracy: " in text and "parameters: 310" in text
    run = cerebro.open(tmp_path / "results" / "pbt_convnet" / "cerebro")
    clones = [trial for trial in run.trials if trial.parent is not None]
    assert clones, text
    for clone in clones:  # it begins with its parent's weights, and its own learning rate
        assert clone.config["lr"] != run.trials[clone.parent].config["lr"]


def test_the_asha_optuna_example_trains_to_the_end(run_program: Any, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    text = finished(
        run_program(EXAMPLES / "asha_optuna.py", "--storage", "results", "--workers", "2",
                    *SMALL["asha_optuna"])
    )  # fmt: skip
    assert float(re.search(r"test accuracy: (\S+)", text)[1]) > 0.5
    run = cerebro.open(tmp_path / "results" / "asha_optuna" / "cerebro")
    assert len(run.trials) == 4 and max(trial.epoch for trial in run.trials) == 4


def test_a_killed_program_resumes_without_retraining(run_program: Any, tmp_path: Path) -> None:
    """Nothing that was trained is trained again, and nothing of it is left running."""
    arguments = ["--storage", "results", "--workers", "2", "--samples", "2", "--iterations", "20"]
    others = {child.pid for child in children()}  # idle workers of tests before
    first = run_program(EXAMPLES / "restored.py", *arguments)
    folder = tmp_path / "results" / "restored"
    wait_for_epochs(first, folder, 3)
    first.kill()
    first.communicate()
    wait_until_gone(others)
    before = histories(folder)
    assert sum(map(len, before.values())) < 40  # else it was over before it was killed
    text = finished(run_program(EXAMPLES / "restored.py", *arguments))
    assert "goes on" in text and "iterations: [20, 20]" in text
    after = histories(folder)
    for number, hashes in before.items():
        assert after[number][: len(hashes)] == hashes
    assert {number: len(hashes) for number, hashes in after.items()} == {0: 20, 1: 20}


def wait_for_epochs(process: Any, folder: Path, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        known = any(folder.glob("experiment_state-*.json"))
        trained = histories(folder) if (folder / "cerebro" / "run.sqlite").exists() else {}
        if known and any(len(hashes) >= count for hashes in trained.values()):
            return
        time.sleep(0.02)
    raise AssertionError("nothing was trained")


def children() -> Any:
    return pytest.importorskip("psutil").Process().children(recursive=True)


def wait_until_gone(others: set[int]) -> None:
    """Of a driver that died nothing is left: neither its engine nor its workers."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        lines = [command_of(child) for child in children() if child.pid not in others]
        if not any("cerebro._worker" in line or "ray::Engine" in line for line in lines):
            return
        time.sleep(0.05)
    raise AssertionError("an engine has outlived its driver")


def command_of(process: Any) -> str:
    try:
        return " ".join(process.cmdline())
    except Exception:  # it has just ended
        return ""


def histories(folder: Path) -> dict[int, list[str]]:
    run = cerebro.open(folder / "cerebro")
    return {t.number: [epoch["state_hash"] for epoch in t.history] for t in run.trials}
