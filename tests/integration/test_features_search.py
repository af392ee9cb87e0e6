"""Heads on stored features train as behind the frozen network itself, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from cerebro.transforms import RandomCrop, Scale, ToCHW  # noqa: E402

SPACE = {"layer": ["block", "pool"], "lr": [0.05]}
WIDTH = {"block": 4 * 16, "pool": 4}


def make_trunk() -> Any:
    before = torch.get_rng_state()
    torch.manual_seed(5)
    trunk = nn.Sequential()
    trunk.add_module("block", nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)))
    trunk.add_module("pool", nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    torch.set_rng_state(before)
    return trunk.eval().requires_grad_(False)


def make_head(layer: str) -> Any:
    return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH[layer], 3))


def model_of(net: Any, head: Any, config: dict[str, Any], inputs: str) -> Any:
    return cerebro.torch.Model(
        net,
        optimizer=torch.optim.SGD(head.parameters(), lr=config["lr"]),
        loss=nn.functional.cross_entropy,
        inputs=inputs,
        state="trainable",
    )


def build_head(config: dict[str, Any], info: Any) -> Any:
    assert info.columns[config["layer"]].shape  # info and config choose the column
    head = make_head(config["layer"])
    return model_of(head, head, config, config["layer"])


def build_whole(config: dict[str, Any], info: Any) -> Any:
    head, trunk = make_head(config["layer"]), make_trunk()
    part = trunk if config["layer"] == "pool" else trunk.block
    return model_of(nn.Sequential(part, head), head, config, "x")


def search(build: Any, data: Any, run: Path, epochs: int) -> Any:
    train, valid = data.split(0.75, 0.25)
    return cerebro.search(
        *(build, SPACE, train),
        validation=valid,
        searcher="grid",
        epochs=epochs,
        batch_size=8,
        workers=0,
        run=run,
        progress=False,
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> cerebro.Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (80, 6, 6, 3), np.uint8)
    folder = tmp_path_factory.mktemp("images")
    # Shards of 20, parts of 15 and 5: batches of 8, 7 and 5 rows.
    return cerebro.shard({"x": x, "y": rng.integers(0, 3, 80)}, folder / "images", shards=4)


def test_heads_on_augmented_features_match_the_whole_network(
    images: cerebro.Dataset, tmp_path: Path
) -> None:
    """Each epoch has its copy; the other layer is a hyper-parameter."""
    epochs = 2
    view = images.with_transforms({"x": [RandomCrop(4), Scale(1 / 255), ToCHW()]})
    made = cerebro.torch.features(
        view, make_trunk(), layers=list(WIDTH), path=tmp_path / "features", copies=epochs
    )
    heads = search(build_head, made, tmp_path / "heads", epochs)
    whole = search(build_whole, view, tmp_path / "whole", epochs)
    assert [trial.config for trial in heads.trials] == [trial.config for trial in whole.trials]
    for ours, theirs in zip(heads.trials, whole.trials, strict=True):
        histories = [[entry["metrics"] for entry in trial.history] for trial in (ours, theirs)]
        assert histories[0] == histories[1] and len(histories[0]) == epochs
    best = heads.best.load()
    _, valid = view.split(0.75, 0.25)
    pixels = torch.cat([batch["x"].clone() for batch in valid.in_order(100, "torch")])
    _, stored = made.split(0.75, 0.25)
    # All rows in one batch, as the whole network has them: a matrix product may depend on it.
    layer = heads.best.config["layer"]
    outputs = torch.cat([batch[layer].clone() for batch in stored.in_order(100, "torch")])
    with torch.no_grad():
        assert torch.equal(
            made.complete(best)(pixels), best.predict({layer: outputs}, batch_size=len(outputs))
        )
    assert cerebro.replay(heads.path, heads.best.number, build_head, data=None).identical
