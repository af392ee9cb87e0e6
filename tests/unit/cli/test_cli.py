"""The command line without a search: parsing, errors, exit statuses."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
import cerebro.cli as cli
from cerebro.cli import demo, shard
from cerebro.cli import doctor as diagnosis
from cerebro.errors import CerebroError, CorruptDataError, InputError
from cerebro.searchers import _BY_NAME


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("arguments", [["frobnicate"], ["show", "--frob"], ["replay", "x"]])
def test_mistakes_are_one_line_and_status_1(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    assert "--help" in error_of(capsys)


def test_help_and_version_are_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--help", "--version"):
        with pytest.raises(SystemExit) as caught:
            cli.main([option])
        assert caught.value.code == 0
    assert "cerebro" in capsys.readouterr().out


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith("usage: python -m cerebro")
    assert "demo" in captured.out


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    names = (
        "demo shard plan run resume stop pause continue list show logs compare plot replay verify "
    )
    names += "export agent doctor completion"
    for command in names.split():
        with pytest.raises(SystemExit) as caught:
            cli.main([command, "--help"])
        assert caught.value.code == 0
        assert f"python -m cerebro {command}" in capsys.readouterr().out


def test_help_names_every_searcher(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert set(_BY_NAME) <= words


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("python", "numpy", "cpu", "cores", "disk", "free", "extras", "gpu"):
        assert word in out


def test_doctor_knows_every_extra() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    extras = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    names = set(re.findall(r"^(\w+) = ", extras, re.MULTILINE))
    assert set(diagnosis.EXTRAS) == names - {"comparison", "demo", "dev", "docs"}  # made of others


def test_doctor_does_not_ask_for_pyarrow_where_pandas_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    frame = pandas.DataFrame({"x": [0.5, 1.5], "y": [0, 1]})
    assert len(cerebro.shard(frame, tmp_path / "data")) == 2
    assert "pandas" not in diagnosis.EXTRAS["parquet"][0]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("lr: bounds\nare reversed"), "lr: bounds are reversed"),
        (CorruptDataError("x.npy is damaged"), "x.npy is damaged"),
        (FileNotFoundError(2, "No such file", "a/b"), "a/b: No such file"),
        (OSError(28, "cannot write x.npy: No space left on device"),
         "cannot write x.npy: No space left on device"),
        (KeyError("x"), "KeyError: 'x'"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (CerebroError(), "CerebroError"),
    ],
)  # fmt: skip
def test_one_line(error: BaseException, line: str) -> None:
    assert cli.one_line(error) == line


def test_run_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "no_such_file.py"]) == 1
    assert error_of(capsys) == "error: no_such_file.py: there is no such file"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_run_names_the_definitions_the_file_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "lacking.py", "space = {}\n")
    assert cli.main(["run", file]) == 1
    assert error_of(capsys) == f"error: {file} does not define build and data"


def test_run_names_the_line_that_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "raising.py", "import math\n\nvalue = math.no_such_thing\n")
    assert cli.main(["run", file]) == 1
    assert f"{file}, line 3: AttributeError" in error_of(capsys)


def test_traceback_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    file = write(tmp_path / "raising_too.py", "raise ValueError('on purpose')\n")
    assert cli.main(["run", file, "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("CEREBRO_TRACEBACK", "1")
    assert cli.main(["run", file]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].endswith("ValueError: on purpose")


GOOD = """
def build(config, info):
    raise AssertionError("not called here")

space = {"lr": [0.1]}
data = "somewhere"
settings = dict(epochs=3, seed=7, n_trials=4, validation=0.5)
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces search and Dataset; gives what search was called with."""
    import cerebro

    seen: dict[str, Any] = {}
    result = argparse.Namespace(status="finished", path="runs/x", summary=lambda: "the summary")

    def search(build: Any, space: Any, data: Any, **settings: Any) -> Any:
        seen.update(settings, build=build, space=space, data=data)
        if "raises" in seen:
            raise seen["raises"]
        result.status = seen.get("status", "finished")
        return result

    monkeypatch.setattr(cerebro, "search", search, raising=False)
    monkeypatch.setattr(cerebro, "Dataset", lambda path: f"dataset {path}", raising=False)
    return seen


def test_run_takes_settings_and_options_override(
    tmp_path: Path, fake: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "good_one.py", GOOD)
    arguments = "--epochs 5 --n-trials 2 --workers 0 --run r --metric accuracy --threads 2"
    assert cli.main(["run", file, *arguments.split()]) == 0
    assert (fake["epochs"], fake["n_trials"], fake["workers"], fake["threads"]) == (5, 2, 0, 2)
    assert (fake["seed"], fake["validation"], fake["metric"]) == (7, 0.5, "accuracy")
    assert (fake["run"], fake["data"]) == ("r", "dataset somewhere")
    assert fake["build"].__module__ == "good_one"
    out = capsys.readouterr().out
    assert "the summary" in out
    assert "python -m cerebro show runs/x" in out


def test_run_validation_is_a_fraction_or_a_folder(tmp_path: Path, fake: dict[str, Any]) -> None:
    file = write(tmp_path / "good_two.py", GOOD)
    assert cli.main(["run", file, "--run", "r", "--validation", "0.25"]) == 0
    assert fake["validation"] == 0.25
    assert cli.main(["run", file, "--run", "r", "--validation", "data/valid"]) == 0
    assert fake["validation"] == "dataset data/valid"


def test_run_needs_epochs(
    tmp_path: Path, fake: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "no_epochs.py", GOOD.replace("epochs=3, ", ""))
    assert cli.main(["run", file, "--run", "r"]) == 1
    assert "--epochs" in error_of(capsys)


@pytest.mark.parametrize(
    ("options", "epochs"), [([], 12), (["--quick"], 2), (["--quick", "--epochs", "0"], 0)]
)
def test_epochs_of_the_demo(
    options: list[str], epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(demo, "demonstrate", lambda options, epochs: asked.append(epochs) or 0)
    assert cli.main(["demo", *options]) == 0
    assert asked == [epochs]  # cerebro.search refuses 0


def test_a_broken_pipe_other_than_stdout_is_an_error(
    tmp_path: Path, fake: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "good_four.py", GOOD)
    fake["raises"] = BrokenPipeError(32, "Broken pipe")
    assert cli.main(["run", file, "--run", "r"]) == 1
    assert error_of(capsys).endswith("Broken pipe")


def test_run_that_does_not_finish_is_status_1(
    tmp_path: Path, fake: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "good_three.py", GOOD)
    fake["status"] = "stopped"
    assert cli.main(["run", file, "--run", "r"]) == 1
    assert "stopped, not finished" in error_of(capsys)


@pytest.mark.parametrize("command", ["run", "resume"])
def test_ctrl_c_is_130_and_says_what_was_kept(
    tmp_path: Path,
    fake: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    import cerebro

    def resume(*arguments: Any, **options: Any) -> None:
        raise fake["raises"]

    monkeypatch.setattr(cerebro, "resume", resume)
    file = write(tmp_path / "good_four.py", GOOD)
    arguments = [command, file, *(["--run", "r"] if command == "run" else [])]
    # The search knows what it has kept, and says so with the exception.
    for error, text in (
        (KeyboardInterrupt("3 trials are kept in runs/x"), "3 trials are kept in runs/x"),
        (KeyboardInterrupt(), "nothing was kept"),
    ):
        fake["raises"] = error
        assert cli.main(arguments) == 130
        assert text in capsys.readouterr().err


def test_columns() -> None:
    assert shard._parse_columns(None) is None
    assert shard._parse_columns(["x", "y"]) == ["x", "y"]
    assert shard._parse_columns(["x=age,fare", "y=label", "z"]) == {
        "x": ["age", "fare"],
        "y": "label",
        "z": "z",
    }


def test_dtypes_and_image_size() -> None:
    assert shard._parse_dtypes(["x=float32"]) == {"x": "float32"}
    with pytest.raises(InputError, match="x=float32"):
        shard._parse_dtypes(["x"])
    assert shard._image_size("224x112") == (112, 224)
    assert shard._image_size("64") == (64, 64)
    with pytest.raises(InputError, match="--size big"):
        shard._image_size("big")


def test_verify_refuses_a_missing_or_empty_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(tmp_path / "gone")]) == 1
    assert "no such folder" in error_of(capsys)
    assert cli.main(["verify", str(tmp_path)]) == 1
    assert "neither a data folder" in error_of(capsys)


def test_shard_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "arrays.npz"
    np.savez(source, a=np.arange(40, dtype=np.float32), b=np.arange(40, dtype=np.int64))
    folder = tmp_path / "data"
    arguments = ["shard", str(source), str(folder), "--shards", "4", "--columns", "x=a", "y=b"]
    assert cli.main([*arguments, "--progress", "bar"]) == 0
    assert "40 rows" in capsys.readouterr().out
    assert cli.main(["verify", str(folder)]) == 0
    assert "4 shards" in capsys.readouterr().out
    assert cli.main(arguments) == 1
    assert str(folder) in error_of(capsys)

    damaged = folder / "shard-00002" / "x.npy"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert cli.main(["verify", str(folder)]) == 1
    assert "shard-00002/x.npy" in error_of(capsys)


MODEL = """
import numpy as np
import cerebro

class Model:
    framework = "numpy"
    def train_batch(self, batch): return {"loss": 0.0}
    def eval_batch(self, batch): return {"loss": 0.0}
    def state_dict(self): return {"w": np.zeros(2)}
    def load_state_dict(self, state): pass

def build(config):
    return Model()

space = {"lr": [0.1]}
data = "data"
settings = dict(epochs=1, n_trials=1, batch_size=4, workers=0, validation=0.5, progress=False)
"""


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({'"data"': '"no_such_folder"'}, "no_such_folder"),
        ({"[0.1]": "[]"}, "lr"),
        ({"[0.1]": "cerebro.uniform(1.0, 0.5)"}, "low is above high"),
        ({"batch_size=4, ": ""}, "batch_size"),
        ({'"lr": [0.1]': '"batch_size": [2]'}, "batch_size"),
        ({"epochs=1": "epochs=0"}, "epochs"),
        ({"n_trials=1, ": ""}, "n_trials"),
        ({"epochs=1": 'epochs=1, metric="weirdness"'}, "mode"),
        ({"epochs=1": 'epochs=1, frobnicate=3'}, "frobnicate"),
        ({"validation=0.5": "validation=1.5"}, "validation"),
        ({"workers=0": "workers=-1"}, "workers"),
        ({"return Model()": "return None"}, "build returned None"),
        ({"return Model()": "raise ValueError('no such layer')"}, "no such layer"),
        ({"def state_dict": "def other"}, "state_dict"),
        ({'"w": np.zeros(2)': '"w": object()'}, "w"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(
    change: dict[str, str],
    cause: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import cerebro

    monkeypatch.chdir(tmp_path)
    cerebro.shard({"x": np.zeros((16, 2))}, "data", shards=2, progress=False)
    text = MODEL
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    file = write(tmp_path / "search_wrong.py", text)
    assert cli.main(["run", file]) == 1
    assert cause in error_of(capsys)


@pytest.mark.parametrize(
    ("arrays", "options", "cause"),
    [
        ({"x": np.zeros(4), "y": np.zeros(5)}, [], "y"),
        ({"x": np.zeros((0, 3))}, [], "rows"),
        ({"x": np.zeros(3)}, ["--shards", "8"], "shards"),
        ({"x": np.zeros(3)}, ["--columns", "z"], "z"),
        ({"x": np.zeros(3)}, ["--dtypes", "x=float99"], "float99"),
        ({"x": np.array([{}, []], dtype=object)}, [], "x"),
    ],
)
def test_wrong_arrays_are_one_line(
    arrays: dict[str, Any],
    options: list[str],
    cause: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.savez(tmp_path / "in.npz", **arrays)
    folder = tmp_path / "out"
    assert cli.main(["shard", str(tmp_path / "in.npz"), str(folder), *options]) == 1
    assert cause in error_of(capsys)
    assert not folder.exists()


def test_shard_of_a_folder_of_parquet_files(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    import cerebro

    (tmp_path / "parts").mkdir()
    for part in range(2):
        table = pa.table({"x": [part, part + 0.5]})
        parquet.write_table(table, tmp_path / "parts" / f"{part}.parquet")
    folder = tmp_path / "data"
    arguments = ["shard", str(tmp_path / "parts"), str(folder), "--shards", "1", "--no-shuffle"]
    assert cli.main(arguments) == 0
    assert cerebro.Dataset(folder).shard(0)["x"].tolist() == [0, 0.5, 1, 1.5]


def test_shard_of_an_image_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    import cerebro

    for kind in ("cat", "dog"):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for i in range(4):
            picture = image.new("RGB", (10, 6), color=(i, 0, 0))
            picture.save(tmp_path / "pictures" / kind / f"{i}.png")
    (tmp_path / "pictures" / "metadata.parquet").touch()  # as in datasets of Hugging Face
    folder = tmp_path / "data"
    arguments = ["shard", str(tmp_path / "pictures"), str(folder), "--shards", "2"]
    assert cli.main([*arguments, "--size", "5x3", "--mode", "L", "--seed", "1"]) == 0
    assert "8 rows" in capsys.readouterr().out
    data = cerebro.Dataset(folder)
    assert data.columns["x"].shape == (3, 5, 1)
    assert data.classes["y"] == ["cat", "dog"]
