"""Features of a network on a GPU: computed by agents, they are those of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro.transforms import Scale, ToCHW

pytest.importorskip("zmq")
torch = pytest.importorskip("torch")
ROWS = 300


def make_net() -> Any:
    torch.manual_seed(3)
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 32),
    ).to("cuda:0")


@pytest.fixture
def images(tmp_path: Path) -> cerebro.Dataset:
    x = np.random.default_rng(0).integers(0, 255, (ROWS, 16, 16, 3), np.uint8)
    data = cerebro.shard({"x": x, "y": np.arange(ROWS)}, tmp_path / "images", shards=3)
    return data.with_transforms({"x": [Scale(1 / 255), ToCHW()]})


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_agents_compute_the_files_of_this_process(
    images: cerebro.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"layers": ["2", "5"], "batch_size": 64, "progress": False}
    net = make_net()
    here = cerebro.torch.features(images, net, path=tmp_path / "here", **options)
    executor = cerebro.cluster.Executor(2, gpus=0.5)
    made = cerebro.torch.features(images, net, path=tmp_path / "made", executor=executor, **options)
    assert files(made.path) == files(here.path)
    assert next(net.parameters()).device == torch.device("cuda:0")


def test_a_network_on_the_cpu_is_refused_for_workers_with_gpus(images: cerebro.Dataset) -> None:
    with pytest.raises(cerebro.InputError, match=r"have GPUs, but the network is on cpu"):
        cerebro.torch.features(
            images, make_net().cpu(), layers=["5"], executor=cerebro.cluster.Executor(gpus=1)
        )
