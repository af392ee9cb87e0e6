"""Whether a run's states fit: what is needed, what is free, what is said."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

import cerebro
from cerebro.coordinator.before_training import StateDemand
from cerebro.errors import InputError
from cerebro.machine import files as files_module
from cerebro.machine import resources
from cerebro.machine.disk import Disk

MB = 10**6


def plan(**changes):
    values = {
        "state_bytes": 100 * MB,
        "trials": 10,
        "live": 6,
        "workers": 2,
        "epochs": 5,
        "keep": "best",
        "may_end_early": False,
    }
    return StateDemand(**values | changes)


@pytest.mark.parametrize(
    ("changes", "least", "likely"),
    [
        # Two slots for every trial under way; in flight 1 at least, 2 a worker likely.
        ({}, 4 + 10 + 1, 12 + 20 + 4),
        ({"keep": "last"}, 4 + 10 + 1, 12 + 10 + 4),
        ({"keep": "all"}, 4 + 50 + 1, 12 + 50 + 4),
        ({"keep": "all", "may_end_early": True}, 4 + 10 + 1, 12 + 50 + 4),
        ({"epochs": 1}, 4 + 10 + 1, 12 + 10 + 4),
        ({"trials": 1, "live": 1}, 2 + 1 + 1, 2 + 2 + 4),
        ({"trials": None}, 4 + 1 + 1, 12 + 2 + 4),
    ],
)
def test_estimated_disk_space_of_a_run(changes, least, likely):
    needed = plan(**changes).estimate_slots() + plan(**changes).estimate_kept()
    assert (needed.least, needed.likely) == (least * 100 * MB, likely * 100 * MB)


# --- through a search --------------------------------------------------------


class Wide:
    """A model whose state is 1 MB, or as much as its configuration says."""

    framework = "numpy"

    def __init__(self, config):
        self.w = np.zeros(125_000)

    def train_batch(self, batch):
        return {"loss": 1.0}

    def eval_batch(self, batch):
        return {"loss": 1.0}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    return cerebro.shard({"x": np.zeros((8, 2)), "y": np.zeros(8)}, folder, shards=2)


def search(data, folder, **options):
    return cerebro.search(
        lambda config: Wide(config),
        {"lr": [0.1, 0.2, 0.3]},
        data,
        **{"searcher": "grid", "epochs": 2, "batch_size": 4, "validation": 0.5, "workers": 0}
        | options,
        run=folder,
        progress=False,
    )


def files(folder):
    return sorted(path.name for path in folder.rglob("*.safetensors*"))


def free(monkeypatch, amounts):
    """Let folders have so many bytes free, by a part of their names."""

    def found(folder):
        return next(n for part, n in amounts.items() if part in str(folder))

    monkeypatch.setattr(Disk, "free_bytes", lambda disk, folder: found(folder))
    monkeypatch.setattr(files_module, "file_system", lambda folder: "ext4")


def test_a_run_that_cannot_fit_is_refused_before_anything_is_trained(data, tmp_path, monkeypatch):
    free(monkeypatch, {"": 5 * MB})
    with pytest.raises(InputError) as refused:
        search(data, tmp_path / "run")
    text = str(refused.value)
    # 3 trials, 2 slots, 1 in flight; a state has some 10 KB beside the array.
    assert re.search(r"needs at least 6\.\d MB for states in .*run.states", text)
    assert "5.0 MB are free" in text
    assert "states of 1.0 MB, 3 trials" in text
    assert "state_dir=" in text
    assert "run=" in text
    assert "keep='last'" not in text  # would not help: every trial keeps one state anyway
    assert files(tmp_path) == []


def test_a_run_that_may_not_fit_warns_and_trains(data, tmp_path, monkeypatch):
    free(monkeypatch, {"": 8 * MB})
    with pytest.warns(UserWarning, match=r"is likely to need .* 8\.0 MB are free.*keep='last'"):
        result = search(data, tmp_path / "run")
    assert [trial.status for trial in result.trials] == ["finished"] * 3


def test_a_run_that_fits_says_nothing(data, tmp_path, monkeypatch):
    free(monkeypatch, {"": 100 * MB})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(data, tmp_path / "run")


def test_folders_on_two_disks_are_checked_separately(data, tmp_path, monkeypatch):
    monkeypatch.setattr(Disk, "device", lambda disk, folder: hash(str(folder)))
    free(monkeypatch, {"fast": 1 * MB, "run": 100 * MB})
    with pytest.raises(InputError, match=r"needs at least 2\.\d MB for states in .*fast") as no:
        search(data, tmp_path / "run", state_dir=tmp_path / "fast")
    assert "choose a larger state_dir=" in str(no.value)
    free(monkeypatch, {"fast": 100 * MB, "other": 1 * MB})
    with pytest.raises(InputError, match=r"needs at least 4\.\d MB for states in .*other") as no:
        search(data, tmp_path / "other", state_dir=tmp_path / "fast2")
    assert "choose a run=" in str(no.value)


def test_a_memory_file_system_has_no_more_room_than_there_is_memory(tmp_path, monkeypatch):
    on_disk = files_module.free_bytes(tmp_path)
    monkeypatch.setattr(files_module, "file_system", lambda folder: "tmpfs")
    monkeypatch.setattr(files_module, "available_memory", lambda: 12_345)
    assert files_module.free_bytes(tmp_path) == 12_345 < on_disk


def test_the_error_says_that_states_take_memory(data, tmp_path, monkeypatch):
    free(monkeypatch, {"": 1 * MB})
    monkeypatch.setattr(Disk, "is_memory", lambda disk, folder: True)
    with pytest.raises(InputError, match="of memory, which is the disk there"):
        search(data, tmp_path / "run")


def test_the_free_bytes_of_a_folder_are_those_of_its_disk(tmp_path):
    assert 0 < files_module.free_bytes(tmp_path) < 1 << 60
    assert 0 < resources.available_memory() < 1 << 60
