"""What pages of the guide take as given: little data, a network, and a space of configurations."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import cerebro

images = load_digits().images[:400].astype("uint8")[..., None]
labels = load_digits().target[:400].astype("int64")


def digits(folder: str = "data/digits", shards: int = 2) -> cerebro.Dataset:
    """400 digits: 64 floats in ``x``, a class in ``y``."""
    x = images.reshape(400, 64).astype("float32") / 16
    return cerebro.shard({"x": x, "y": labels}, folder, shards=shards, exist_ok=True)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def build(config):
    hidden = config["hidden"]
    net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
        inputs="x",
        target="y",
    )


space = {"lr": cerebro.loguniform(1e-3, 1e-1), "hidden": [8, 16], "batch_size": 64}
