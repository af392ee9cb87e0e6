"""A trial computes with PyTorch's process-wide settings that its own `build` leaves."""

from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro.machine.libraries import TORCH

torch = pytest.importorskip("torch")

MODULE = """
import torch

torch.set_default_dtype(torch.float64)
"""


@pytest.fixture(autouse=True)
def settings_of_the_process():
    """Settings of a module that a trial imports stay in the process, as after any import."""
    before = TORCH.present()
    yield
    TORCH.imported.clear()
    TORCH.apply(before)


@pytest.fixture
def data(tmp_path):
    x = np.random.default_rng(0).standard_normal((40, 4)).astype("float32")
    return cerebro.shard({"x": x, "y": (x[:, 0] > 0).astype("int64")}, tmp_path / "d", shards=2)


class Net(torch.nn.Module):
    """Makes a tensor of the default type in every step."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x.to(self.linear.weight.dtype)) + torch.full((2,), 0.1)


def build(config):
    if "dtype" in config:
        torch.set_default_dtype(getattr(torch, config["dtype"]))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return cerebro.torch.Model(net, loss=torch.nn.functional.cross_entropy, optimizer=optimizer)


def build_with_module(config):
    import module_that_sets_float64  # noqa: F401

    assert torch.get_default_dtype() is torch.float64
    return build({})


def hashes(result):
    return [trial.state_hash for trial in result]


def search(data, path, build=build, space=None, validation=None, **options):
    space = {"dtype": ["float32", "float64", "float32"]} if space is None else space
    return cerebro.search(
        build, space, data, epochs=2, validation=validation or data, batch_size=8, searcher="grid",
        progress=False, run=path, **options,
    )  # fmt: skip


def test_settings_of_build_do_not_reach_other_trials(data, tmp_path):
    straight = search(data, tmp_path / "a", workers=0)
    assert torch.get_default_dtype() is torch.float32
    dropped = search(data, tmp_path / "b", workers=0, live_models=1)
    hopped = search(data, tmp_path / "c", workers=2)
    assert hashes(straight) == hashes(dropped) == hashes(hopped)
    assert [t.load().net.linear.weight.dtype for t in straight] == [
        torch.float32, torch.float64, torch.float32,
    ]  # fmt: skip


def test_a_loaded_model_computes_with_the_settings_of_build(data, tmp_path):
    result = search(data, tmp_path / "a", workers=0, space={"dtype": ["float64"]})
    trial = result[0]
    assert trial.evaluate(data)["loss"] == trial.metrics["loss"]
    assert trial.predict(data).dtype == torch.float64
    assert torch.get_default_dtype() is torch.float32


def test_folds_predict_with_the_settings_of_build(data, tmp_path):
    space = {"dtype": ["float64"]}
    (trial,) = search(data, tmp_path / "a", validation=cerebro.KFold(2), workers=0, space=space)
    first, second = (fold.predict(data).numpy() for fold in trial.folds)
    found = trial.out_of_fold()
    # In float32, the bias of the net differs by 1e-9.
    assert np.minimum(abs(found - first), abs(found - second)).max() < 1e-12
    assert torch.get_default_dtype() is torch.float32


def build_some_wide(config):
    return build({"dtype": "float64"} if config["wide"] else {})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_records_the_settings_of_its_script(data, tmp_path, workers):
    """Not those that the first configuration's build leaves after the check of a hop."""

    def ran(name, epochs):
        return cerebro.search(
            build_some_wide, {"wide": [True, False]}, data, epochs=epochs, validation=data,
            batch_size=8, searcher="grid", workers=workers, progress=False, run=tmp_path / name,
        )  # fmt: skip

    whole, part = ran("whole", 2), ran("part", 1)
    kinds = [trial.load().net.linear.weight.dtype for trial in whole]
    assert kinds == [torch.float64, torch.float32]
    assert [t.evaluate(data)["loss"] for t in whole] == [t.metrics["loss"] for t in whole]
    resumed = cerebro.resume(part.path, build_some_wide, epochs=2, workers=0, progress=False)
    assert hashes(resumed) == hashes(whole)


def test_settings_made_by_a_module_imported_in_build_persist(data, tmp_path, monkeypatch):
    Path(tmp_path, "module_that_sets_float64.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    space = {"lr": [0.1, 0.2]}
    result = search(data, tmp_path / "a", build_with_module, space, workers=0, live_models=1)
    assert [t.status for t in result] == ["finished"] * 2
    assert torch.get_default_dtype() is torch.float64


def build_with_another_module(config):
    import module_that_is_wide

    assert torch.get_default_dtype() is torch.float64, module_that_is_wide
    return build({})


def test_a_worker_keeps_the_settings_of_modules_that_an_earlier_run_imported(
    data, tmp_path, monkeypatch
):
    """Python does not import them again in a worker that stays from one run to the next."""
    Path(tmp_path, "module_that_is_wide.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    runs = [
        search(data, tmp_path / name, build_with_another_module, {"lr": [0.1]}, workers=1)
        for name in ("a", "b")
    ]
    assert [trial.status for run in runs for trial in run] == ["finished"] * 2
    assert hashes(runs[0]) == hashes(runs[1])
