"""Frozen weights exist once per process on a GPU; results are those of weights of one's own."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

import cerebro

torch = pytest.importorskip("torch")
import small_cnns  # noqa: E402
from torch import nn  # noqa: E402

SEEN = "GPU_FROZEN_SEEN"


class Model(cerebro.torch.Model):
    writes = False

    def begin_epoch(self, epoch: int) -> None:
        if epoch == 1 and self.writes:
            self.net[1][0].weight.data.mul_(0.5)

    def end_epoch(self, epoch: int, metrics: Any) -> Any:
        with Path(os.environ[SEEN], str(os.getpid())).open("a") as file:
            places = [parameter.data_ptr() for parameter in self.net[1].parameters()]
            file.write(json.dumps(places) + "\n")
        return super().end_epoch(epoch, metrics)


def make_base() -> Any:
    return nn.Sequential(nn.Linear(3 * 16 * 16, 256), nn.ReLU(), nn.LSTM(256, 64, batch_first=True))


def build(config: dict[str, Any], info: Any) -> Any:
    base = info.shared("base", make_base)
    if config["place"] == "made on the GPU":
        base.to(info.device)
    net = nn.Sequential(nn.Flatten(), base, nn.Linear(64, 10))
    if config["place"] == "made on the GPU":
        net.to(info.device)
    if config["isolated"]:
        for parameter in base[0].parameters():
            larger = torch.zeros(parameter.numel() + 1, device=parameter.device)
            larger[:-1] = parameter.detach().flatten()
            parameter.data = larger[:-1].view(parameter.shape)

    def step(net: Any, batch: Any) -> Any:
        x = batch["x"].float().flatten(1)
        output = net[2](net[1](x)[0])
        return {"loss": nn.functional.cross_entropy(output, batch["y"])}

    optimizer = torch.optim.SGD(net[2].parameters(), lr=config["lr"])
    model = Model(net, optimizer=optimizer, step=step, state="trainable")
    model.writes = config["writes"] and config["lr"] == 0.1
    return model


def search(run: Path, data: Any, workers: int = 1, **space: Any) -> Any:
    same = {"isolated": False, "writes": False, "place": "moved", "lr": [0.1, 0.05, 0.01]}
    space = {name: v if isinstance(v, list) else [v] for name, v in (same | space).items()}
    options: dict[str, Any] = {"searcher": "grid", "epochs": 2, "batch_size": 16, "devices": "cuda"}
    options |= {"workers_per_device": workers, "progress": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no validation data")
        return cerebro.search(build, space, data, run=run, **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return small_cnns.shards(tmp_path_factory.mktemp("gpu") / "data")


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "seen"
    folder.mkdir()
    monkeypatch.setenv(SEEN, str(folder))
    return folder


def hashes(result: Any) -> list[str]:
    return [epoch["state_hash"] for trial in result.trials for epoch in trial.history]


@pytest.mark.parametrize("place", ["moved", "made on the GPU"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_has_one_copy(
    data: Any, tmp_path: Path, seen: Path, place: str, workers: int
) -> None:
    shared = search(tmp_path / "shared", data, workers, place=place)
    for file in seen.iterdir():
        noted = [json.loads(line)[:2] for line in file.read_text().splitlines()]
        assert len(noted) > 1
        assert all(places == noted[0] for places in noted)
    alone = search(tmp_path / "alone", data, isolated=True, place="made on the GPU")
    assert hashes(shared) == hashes(alone)


def test_a_write_is_undone_and_named(data: Any, tmp_path: Path, seen: Path) -> None:
    alone = search(tmp_path / "a", data, isolated=True, writes=True, place="made on the GPU")
    with pytest.warns(UserWarning, match=r"has written to weights that all trials share: '0\.w"):
        shared = search(tmp_path / "b", data, writes=True)
    assert hashes(shared) == hashes(alone)
