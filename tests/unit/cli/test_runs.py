"""Commands that look at runs: list, compare, logs, plan, and ``--json``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from line_model import SPACE, build

import cerebro
import cerebro.cli as cli


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    data = cerebro.shard({"x": x, "y": x.sum(1)}, folder / "data", shards=2, progress=False)
    for name, batch_size in (("first", 16), ("same", 16), ("other", 32)):
        cerebro.search(
            *(build, SPACE, data),
            searcher="grid",
            epochs=2,
            validation=0.25,
            batch_size=batch_size,
            workers=0,
            run=folder / "runs" / name,
            progress=False,
        )
    return folder / "runs"


def output(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> str:
    assert cli.main([str(argument) for argument in arguments]) == status
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> Any:
    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = output(capsys, *arguments, "--json", status=status)
    return json.loads(text, parse_constant=refused)


def test_list(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = document(capsys, "list", runs)
    assert [Path(row["path"]).name for row in rows] == ["other", "same", "first"]
    best = cerebro.open(runs / "first").best
    assert rows[2]["trials"] == 3 and rows[2]["status"] == "finished"
    assert rows[2]["best"] == best.number and rows[2]["value"] == best.metrics["loss"]
    lines = output(capsys, "list", runs).splitlines()
    assert lines[0].split() == ["run", "started", "status", "trials", "best", "metric", "value"]
    assert len(lines) == 4 and str(runs / "other") in lines[1]


def test_list_shows_a_damaged_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output(capsys, "list", tmp_path) == f"no runs in {tmp_path}\n"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.sqlite").write_bytes(b"not a store" * 500)
    (row,) = document(capsys, "list", tmp_path)
    assert row["status"].startswith("unreadable: ") and row["trials"] is None
    assert "unreadable" in output(capsys, "list", tmp_path)
    assert cli.main(["list", str(tmp_path / "none")]) == 1


def test_compare(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "compare", runs / "first", runs / "same", runs / "other")
    assert found["settings"] == {"batch_size": [16, 16, 32]}
    assert found["environment"] == {}
    # The third configuration has failed before its first state.
    assert found["states"][0] == {"configurations": 2, "same": 2, "shorter": 0, "differing": []}
    differing = [[0, 0], [1, 1]]
    assert found["states"][1] == {
        "configurations": 2, "same": 0, "shorter": 0, "differing": differing,
    }  # fmt: skip
    text = output(capsys, "compare", runs / "first", runs / "other")
    assert "states: 0 of 2 common configurations have the same states, bit for bit" in text
    assert "trials that differ: 0 and 0, 1 and 1" in text
    assert "environment: no difference" in text


def test_compare_runs_of_different_lengths(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cerebro.search(
        *(build, {"lr": [0.01, 0.1], "momentum_of_a_long_name": [0.0]}, runs.parent / "data"),
        searcher="grid", epochs=1, validation=0.25, batch_size=16, workers=0,
        run=tmp_path / "one", progress=False,
    )  # fmt: skip
    cerebro.search(
        *(build, {"lr": [0.01, 0.1], "momentum_of_a_long_name": [0]}, runs.parent / "data"),
        searcher="grid", epochs=3, validation=0.25, batch_size=16, workers=0,
        run=tmp_path / "three", progress=False,
    )  # fmt: skip
    shutil.copytree(tmp_path / "three", tmp_path / "again")
    cerebro.resume(tmp_path / "again", epochs=4, progress=False)
    text = output(capsys, "compare", tmp_path / "again", tmp_path / "three")
    assert (
        "states: 2 of 2 common configurations have the same states, bit for bit "
        "(2 of them for the epochs that both runs trained)"
    ) in text
    text = output(capsys, "compare", tmp_path / "one", tmp_path / "three")
    (space,) = [line for line in text.splitlines() if line.startswith("space ")]
    assert "[0.0]" in space and "[0]" in space  # after more than 40 equal characters
    assert "no configuration in common" in text


def test_logs_shows_each_trials_output(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "logs", runs / "first")
    assert "--- trial 0\na rate of 0.01\n" in text and "--- trial 1\na rate of 0.1\n" in text
    assert output(capsys, "logs", runs / "first", "--trial", "1") == "a rate of 0.1\n"
    assert output(capsys, "logs", runs / "first", "--follow", "--trial", "0")
    assert cli.main(["logs", str(runs / "first"), "--trial", "7"]) == 1


def test_show_as_json_has_the_trials_and_errors_of_the_result(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = cerebro.open(runs / "first")
    found = document(capsys, "show", runs / "first")
    assert found["best"] == result.best.number
    assert [trial["config"] for trial in found["trials"]] == [t.config for t in result.trials]
    assert found["trials"][0]["history"] == result.trials[0].history
    assert found["trials"][2]["status"] == "failed"
    assert "too fast" in found["trials"][2]["error"]
    one = document(capsys, "show", runs / "first", "--trial", "1")
    assert one == found["trials"][1]


def test_a_number_that_json_cannot_hold_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    from cerebro.cli.options import print_json

    print_json({"a": [float("nan"), float("inf"), 1.5], "b": Path("c"), 3: (True, None)})
    assert json.loads(capsys.readouterr().out) == {
        "a": [None, None, 1.5], "b": "c", "3": [True, None],
    }  # fmt: skip


def test_verify_as_json(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "verify", runs / "first")
    assert found["problems"] == [] and found["trials"] == 3
    data = tmp_path / "data"
    x = np.arange(32, dtype=np.float32)
    cerebro.shard({"x": x}, data, shards=2, progress=False)
    assert document(capsys, "verify", data) == {"path": str(data), "problems": []}
    file = next((data / "shard-00001").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    (problem,) = document(capsys, "verify", data, status=1)["problems"]
    assert "shard-00001" in problem


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "doctor")
    assert {"cerebro", "python", "cpu", "cores", "disk", "gpus", "extras"} <= found.keys()
    assert found["extras"]["torch"]["purpose"] == "PyTorch models"


FILE = """
import cerebro

space = {"lr": [0.01, 0.1]}
data = cerebro.Dataset(%r)
settings = dict(epochs=3, searcher="grid", validation=0.25, batch_size=16, workers=1)
"""


def test_plan(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "search.py"
    file.write_text(FILE % str(runs.parent / "data"))
    found = document(capsys, "plan", file)
    assert found["trials"] == 2 and found["epochs"] == 6 and found["makespan"] is None
    text = output(capsys, "plan", file, "--epochs", "5", "--rows-per-second", "1000")
    assert "epochs      10 over all trials" in text
    assert "error: " not in text
    assert cli.main(["plan", str(tmp_path / "none.py")]) == 1


def test_an_unknown_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sho"]) == 1
    assert "unknown command 'sho': did you mean 'show'?" in capsys.readouterr().err
    assert cli.main(["frobnicate"]) == 1
    assert "use one of demo, shard, plan" in capsys.readouterr().err


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    script = output(capsys, "completion", "bash")
    completed = subprocess.run(
        ["bash", "-c", f'{script}\nCOMP_WORDS=(cerebro comp); COMP_CWORD=1\n'
         '_shtab_cerebro cerebro comp cerebro; echo "${COMPREPLY[@]}"'],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert completed.stdout.split() == ["compare", "completion"]


def test_report(runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "run.html"
    assert output(capsys, "report", runs / "first", "--out", out).strip() == str(out)
    page = out.read_text(encoding="utf-8")
    result = cerebro.open(runs / "first")
    best = result.best
    data = result.saved.dataset("data")
    told = page_data(page)["about"]
    assert told["best"]["text"].startswith(f"trial {best.number}, loss {best.metrics['loss']:.4f}")
    facts = told["data"]["Training data"]
    assert facts["checksum"] == result.saved.meta["data"]["checksum"]
    assert (facts["rows"], facts["column x"]) == (str(len(data)), "float32 of shape (3,)")
    assert told["environment"]["cerebro"] == result.environment["cerebro"]
    assert f"took {html_time(result)}" in told["facts"]
    values = [row["value"] for row in page_data(page)["answer"]["trials"]]
    assert values == [trial.metrics.get("loss") for trial in result.trials]
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "") and "https:" not in page
    default = output(capsys, "report", runs / "first", "--no-plots").strip()
    assert Path(default) == runs / "first" / "report.html" and Path(default).exists()


def page_data(page: str) -> Any:
    return json.loads(page.split('<script type="application/json" id="data">')[1].split("</")[0])


def html_time(result: Any) -> str:
    from cerebro.report.format import duration

    return duration(result.saved.meta["ended"] - result.saved.meta["started"])


def test_report_works_without_the_data(
    runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    moved = (runs.parent / "data").rename(runs.parent / "elsewhere")
    try:
        out = tmp_path / "run.html"
        output(capsys, "report", runs / "first", "--no-pictures", "--out", out)
    finally:
        moved.rename(runs.parent / "data")
    page = out.read_text(encoding="utf-8")
    facts = page_data(page)["about"]["data"]["Training data"]
    assert facts["checksum"] == cerebro.open(runs / "first").saved.meta["data"]["checksum"]
    assert "now" in facts


def test_help_says_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("report", "plot"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "the run's folder (default: the newest one under runs)" in text
        assert text.count("(default: ") >= 4


def test_a_summary_knows_rows_and_ranges(runs: Path) -> None:
    result = cerebro.open(runs / "first")
    assert result.saved.rows_per_epoch(0) == (48, 16)
    options = result.saved.ranges()
    assert set(options) <= set(result.best.config)
    text = result.summary()
    assert "on 16 validation rows: the noise of these rows is unknown" in text
    assert "what to try next" in text and "random trials" not in text  # it was a grid
