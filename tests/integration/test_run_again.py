"""The same search again: runs that give way, and results that are copied, pickled and iterated."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro.errors import InputError, RunError
from cerebro.run import folder
from cerebro.run.folder import gives_way
from cerebro.run.owner import Owner

ROWS = {"x": np.arange(12.0, dtype="f4").reshape(6, 2), "y": np.arange(6.0, dtype="f4")}


class Line:
    framework = "numpy"

    def __init__(self, config: Any) -> None:
        if config["lr"] > 1:
            raise ValueError("too large")
        self.lr, self.w = config["lr"], np.zeros(2)

    def train_batch(self, batch: Any) -> dict[str, float]:
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.lr * batch["x"].T @ error / len(error)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch: Any) -> dict[str, float]:
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w}

    def load_state_dict(self, state: Any) -> None:
        self.w = np.array(state["w"])


def build(config: Any) -> Line:
    return Line(config)


def search(run: Path, rate: float = 0.001, data: Any = ROWS, **options: Any) -> cerebro.Result:
    given: dict[str, Any] = {
        "epochs": 2,
        "searcher": "grid",
        "validation": 0.34,
        "batch_size": 4,
        "workers": 0,
        "progress": False,
    }
    space = {"lr": [rate, rate / 2]}
    return cerebro.search(build, space, data, run=run, **{**given, **options})


class Stop:
    """Ctrl-C after some units."""

    def __init__(self, units: int) -> None:
        self.left = units

    def on_run_start(self, run: Any) -> None:
        if not self.left:
            raise KeyboardInterrupt

    def on_unit_end(self, trial: Any, metrics: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_failed_run_gives_way_and_a_trained_one_does_not(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        search(tmp_path / "run", 9.0)
    other = {**ROWS, "x": ROWS["x"] + 1}  # its rows do not stay behind either
    result = search(tmp_path / "run", data=other)
    assert result.status == "finished" and len(result) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    with pytest.raises(InputError, match="exists already"):
        search(tmp_path / "run", data=other)
    assert search(tmp_path / "run", data=other, if_exists="new").path.name == "run-2"


def test_an_interrupted_run_gives_way_and_its_units_are_kept(tmp_path: Path) -> None:
    for units, names in ((0, ["run"]), (3, ["run", "run-unfinished"])):
        with pytest.raises(KeyboardInterrupt) as caught:
            search(tmp_path / "run", callbacks=[Stop(units)])
        assert vars(caught.value)["result"].path == tmp_path / "run"
        if units:
            with pytest.warns(UserWarning, match=r"is now in .*run-unfinished"):
                search(tmp_path / "run")
        else:
            with pytest.raises(KeyboardInterrupt):
                search(tmp_path / "run", callbacks=[Stop(0)])
        assert sorted(path.name for path in tmp_path.iterdir()) == names
    moved = cerebro.resume(tmp_path / "run-unfinished", build, workers=0, progress=False)
    again = cerebro.open(tmp_path / "run")
    assert [t.state_hash for t in moved] == [t.state_hash for t in again]


def test_a_folder_with_other_content_does_not_give_way(tmp_path: Path) -> None:
    """A folder with other files, with the user's dataset, or a run in training."""
    run = tmp_path / "run"
    data = cerebro.shard(ROWS, run / "data", progress=False)
    with pytest.raises(RunError):
        search(tmp_path / "apart", 9.0, data)
    (tmp_path / "apart" / "run.sqlite").rename(run / "run.sqlite")
    assert not gives_way(run) and gives_way(tmp_path / "apart") is False
    with pytest.raises(InputError, match="exists already"):
        search(run, data=data)
    assert (run / "data" / "manifest.json").exists()

    with pytest.raises(RunError):
        search(tmp_path / "b", 9.0, data)
    with Owner.take(tmp_path / "b"), pytest.raises(InputError, match="exists already"):
        search(tmp_path / "b", data=data)
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        search(tmp_path / "b", data=data)
    assert (tmp_path / "b" / "run.sqlite").exists()
    (tmp_path / "b" / "notes.txt").unlink()
    assert gives_way(tmp_path / "b")


def test_results_are_copied_pickled_and_iterated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = search(Path("run"))
    hashes = [trial.state_hash for trial in result.trials]
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    for made in (pickle.loads(pickle.dumps(result)), pickle.loads(pickle.dumps(result.trials))):
        assert [trial.state_hash for trial in made] == hashes
        assert made[0].load().lr == 0.001
    os.chdir("..")
    for made in (copy.copy(result), copy.deepcopy(result)):
        assert [trial.state_hash for trial in made] == hashes and made is not result
        assert made.path == result.path and made.saved.known_build is build
    assert copy.deepcopy(result.best).state_hash == result.best.state_hash
    assert len(result) == 2 and result[1].number == 1
    assert [t.number for t in result[::-1]] == [1, 0] and result[-1] is list(result)[1]
    with pytest.raises(IndexError):
        result[2]


def test_attribute_names_of_other_libraries_get_a_hint(tmp_path: Path) -> None:
    result: Any = search(tmp_path / "run")
    for name, ours in (("best_params", "result.best.config"), ("best_model", "best.load()"),
                       ("best_value", "best.metrics[result.metric]")):  # fmt: skip
        with pytest.raises(AttributeError, match=name) as caught:
            getattr(result, name)
        assert ours in str(caught.value)
    with pytest.raises(AttributeError, match=r"use trial\.config"):
        result.best.params  # noqa: B018
    assert not hasattr(result, "no_such_name") and not hasattr(result.best, "shape")


def test_a_build_defined_at_a_prompt_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a prompt or in a notebook: `__main__` has no file."""
    main = ModuleType("__main__")
    main.build = lambda config: Line(config)  # type: ignore[attr-defined]
    main.build.__module__, main.build.__qualname__ = "__main__", "build"
    monkeypatch.setitem(sys.modules, "__main__", main)
    cerebro.search(main.build, {"lr": [0.001]}, ROWS, epochs=1, searcher="grid", validation=0.34,
                   batch_size=4, workers=0, progress=False, run=tmp_path / "run")  # fmt: skip
    found = cerebro.open(tmp_path / "run")
    assert found.best.load().lr == 0.001
    assert found.saved.known_build is main.build
    main.build = build  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="the source of build .* has changed"):
        cerebro.open(tmp_path / "run").best.load()
    main.__file__ = str(tmp_path / "other.py")  # a script: only the same source is taken
    with pytest.raises(InputError, match=r"was defined in .*test_run_again\.py, which cannot"):
        cerebro.open(tmp_path / "run").best.load()
    del main.__file__, main.build  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="run the cell that defines it, or pass it as build="):
        cerebro.open(tmp_path / "run").best.load()


@pytest.mark.parametrize("rows", [True, False])
def test_searches_that_begin_at_once_get_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: bool
) -> None:
    """All choose the same name before any of them takes it."""
    monkeypatch.chdir(tmp_path)
    data = ROWS if rows else cerebro.shard(ROWS, tmp_path / "data", shards=1)
    default, chosen, have_chosen = folder.default_run_path, threading.local(), threading.Barrier(3)

    def default_run_path() -> Path:
        path = default()
        if not hasattr(chosen, "path"):
            chosen.path = path
            have_chosen.wait()
        return path

    monkeypatch.setattr(folder, "default_run_path", default_run_path)

    def searched(_: int) -> tuple[Path, str]:
        result = cerebro.search(build, {"lr": 0.001}, data, epochs=1, n_trials=1, validation=0.34,
                                batch_size=4, workers=0, progress=False)  # fmt: skip
        return result.path, result.best.state_hash

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(searched, range(3)))
    assert len({path for path, _ in found}) == 3
    assert len({state_hash for _, state_hash in found}) == 1
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_a_call_that_is_refused_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in (None, "new"):
        with pytest.raises(InputError, match="epochs must be"):
            cerebro.search(build, {"lr": 0.001}, ROWS, epochs=0, validation=0.34, batch_size=4,
                           progress=False, run=run, if_exists="new")  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("beside", [True, False])
def test_workers_use_a_module_that_was_loaded_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """Also if an import would find another file of this name."""
    source = "from __future__ import annotations\nimport numpy as np\n" + inspect.getsource(Line)
    for name in ("taken", "other"):
        (tmp_path / name).mkdir()
    file = tmp_path / "taken" / "experiment.py"
    file.write_text(source + "def build(config):\n    return Line(config)\n")
    if beside:
        other = "def build(config):\n    raise ValueError('another file')\n"
        (tmp_path / "other" / "experiment.py").write_text(other)
    monkeypatch.syspath_prepend(tmp_path / "other")
    spec = importlib.util.spec_from_file_location("experiment", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "experiment", module)
    spec.loader.exec_module(module)
    hashes = [
        cerebro.search(module.build, {"lr": 0.001}, ROWS, epochs=1, n_trials=1, validation=0.34,
                       batch_size=4, workers=workers, progress=False,
                       run=tmp_path / f"run {workers}").best.state_hash
        for workers in (0, 1)
    ]  # fmt: skip
    assert hashes[0] == hashes[1] is not None
