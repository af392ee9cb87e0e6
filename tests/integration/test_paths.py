"""Paths are what a shell would make of them: ~ and variables are expanded in every one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import resumable

import cerebro
from cerebro.callbacks import CSV, Mirror, TensorBoard
from cerebro.cli import main
from cerebro.data.cache import cache_folder
from cerebro.machine.files import expand_path, path_of


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home; the working directory is beside it, and gets no files."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLACE", "home")
    monkeypatch.delenv("NOT_SET", raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    assert names(Path()) == set()


def test_variables_that_exist_are_expanded(tmp_path, monkeypatch, home):
    for path in (
        "~/x",
        "$HOME/x",
        "${HOME}/x",
        f"{tmp_path}/$PLACE/x",
        Path("~/x"),
        Path("$HOME/x"),
    ):
        assert path_of("run", path) == home / "x", path
    for literal in ("cost$5", "$NOT_SET/x", "a$", "${NOT_SET}", "a~", "x/~", "~no-such-user/x"):
        assert path_of("run", literal) == Path(literal)
    (tmp_path / "$HOME").mkdir()  # what exists is meant
    assert expand_path(f"{tmp_path}/$HOME") == f"{tmp_path}/$HOME"


@pytest.fixture
def tilde(home, monkeypatch):
    """A folder named ``~`` in the working directory, which is another one than that of `home`."""
    folder = home.parent / "elsewhere"
    (folder / "~").mkdir(parents=True)
    monkeypatch.chdir(folder)
    yield folder / "~"
    monkeypatch.chdir(home.parent / "here")


def test_an_existing_path_named_tilde_wins_over_the_home(home, tilde, monkeypatch):
    assert path_of("run", "~/x") == home / "x"
    (tilde / "x").mkdir()
    (tilde / "$HOME").symlink_to("nowhere")
    for path in ("~/x", Path("~/x"), "~", "~/$HOME"):
        assert expand_path(str(path)) == str(path)
        assert path_of("run", path).absolute() == tilde.parent / path
    for path in ("~/y", Path("~/y")):
        assert path_of("run", path) == home / "y"


def test_a_tilde_after_a_folder_is_never_the_home(home, tilde):
    for path in ("./~", "./~/x", "././~/x", ".//~/x", "./~/~/x", f"{tilde}/x"):
        once = path_of("run", path)
        assert once.absolute() == path_of("run", once).absolute() == tilde.parent / Path(path), path
    assert expand_path("./~/x") == "./~/x"
    data = cerebro.shard({"x": np.ones((8, 3))}, "./~/data", shards=2, progress=False)
    assert data.path.absolute() == cerebro.Dataset("./~/data").path.absolute() == tilde / "data"
    assert main(["shard", "./~/data/../rows.npz", "./~/no", "--shards", "2"]) == 1
    np.savez(tilde / "rows.npz", x=np.ones((8, 3)))
    assert main(["shard", "./~/rows.npz", "./~/again", "--shards", "2"]) == 0
    assert main(["verify", "./~/again"]) == 0
    assert names(tilde) == {"data", "rows.npz", "again"} and names(home) == set()


def test_a_run_stays_in_a_folder_named_tilde(home, tilde):
    x = np.random.default_rng(0).normal(size=(40, 3))
    cerebro.search(
        resumable.build, {"lr": [0.1]}, {"x": x, "y": x.sum(axis=1)}, epochs=1, batch_size=8,
        searcher="grid", validation=0.25, workers=0, run="./~/x", state_dir="./~/slots",
        progress=False, callbacks=[CSV("./~/m.csv")],
    )  # fmt: skip
    found = cerebro.open("./~/x", build=resumable.build)
    assert found.path.absolute() == tilde / "x"
    found.best.export("./~/best.safetensors")
    for command in (["show", "./~/x"], ["verify", "./~/x"], ["report", "./~/x", "--out=./~/r.html"],
                    ["export", "./~/x", "--out=./~/e.safetensors"]):  # fmt: skip
        assert main(command) == 0, command
    assert {"x", "m.csv", "best.safetensors", "r.html", "e.safetensors"} <= names(tilde)
    assert names(home) <= {".cache", ".config"}  # Matplotlib's


def test_every_path_argument_of_a_run_is_expanded(home, capsys):
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(home / "rows.npz", x=x, y=x.sum(axis=1))
    data = cerebro.shard("~/rows.npz", "$HOME/data", shards=resumable.SHARDS, progress=False)
    assert data.path == home / "data" == cerebro.Dataset("~/data").path
    cerebro.search(
        resumable.build, {"lr": [0.1, 0.2]}, "~/data", epochs=1, searcher="grid", batch_size=8,
        validation="$HOME/data", workers=0, run="~/runs/x", state_dir="~/slots", progress=False,
        callbacks=[CSV("~/metrics.csv")],
    )  # fmt: skip
    assert {"data", "runs", "metrics.csv"} <= names(home)
    found = cerebro.resume(
        "$HOME/runs/x", resumable.build, data="~/data", validation="~/data", epochs=2, workers=0,
        progress=False,
    )  # fmt: skip
    assert found.path == home / "runs" / "x"
    opened = cerebro.open(Path("~/runs/x"), build=resumable.build)
    assert opened.best.export("~/best.safetensors") == home / "best.safetensors"
    assert opened.best.save("$HOME/saved") == home / "saved"
    assert opened.best.evaluate("$HOME/data")["loss"] > 0
    assert cerebro.replay("~/runs/x", 0, resumable.build, data="~/data", epochs=1)
    refitted = cerebro.refit(
        "~/runs/x", data="~/data", build=resumable.build, folder="~/runs/refit", workers=0,
        progress=False,
    )  # fmt: skip
    assert refitted.path == home / "runs" / "refit"
    (home / "moved").mkdir()
    (home / "data").rename(home / "moved" / "data")
    with pytest.raises(cerebro.InputError, match=r"are not at .*home/data: give their new path"):
        cerebro.resume("~/runs/x", resumable.build, epochs=3, workers=0, progress=False)
    cerebro.resume(
        "~/runs/x", resumable.build, data="~/moved/data", epochs=3, workers=0, progress=False
    )
    for command in (
        ["show", "~/runs/x"], ["verify", "$HOME/moved/data"], ["list", "~/runs"],
        ["compare", "~/runs/x", "~/runs/refit"], ["logs", "~/runs/x"],
        ["export", "~/runs/x", "--out=~/out.safetensors"], ["report", "~/runs/x", "--out=~/r.html"],
        ["shard", "~/rows.npz", "~/again", "--shards", "4"],
    ):  # fmt: skip
        assert main(command) == 0, (command, capsys.readouterr().err)
    assert {"out.safetensors", "r.html", "again"} <= names(home)


def test_paths_of_callbacks_clusters_and_caches_are_expanded(home, monkeypatch):
    assert TensorBoard("~/logs").folder == home / "logs"
    assert CSV("$HOME/m.csv").path == home / "m.csv"
    monkeypatch.setenv("CEREBRO_CACHE", "~/cache")
    assert cache_folder() == home / "cache"
    monkeypatch.setenv("CEREBRO_CACHE", "$HOME/cache")
    assert cache_folder() == home / "cache"
    executor = cerebro.cluster.Executor(listen="127.0.0.1:7070", key="~/key", shared_path="$HOME/d")
    assert (executor._key_file, executor._shared_path) == (home / "key", home / "d")


def test_a_copy_is_made_of_a_run_in_the_home(home, tmp_path):
    pytest.importorskip("fsspec")
    data = cerebro.shard(
        {"x": np.ones((8, 3)), "y": np.ones(8)}, "~/data", shards=4, progress=False
    )
    cerebro.search(
        resumable.build, {"lr": [0.1]}, data, epochs=1, searcher="grid", batch_size=8, workers=0,
        run="~/run", progress=False,
    )  # fmt: skip
    mirror = Mirror(f"file://{tmp_path}/bucket")
    mirror.upload("~/run")
    assert mirror.has_run()
