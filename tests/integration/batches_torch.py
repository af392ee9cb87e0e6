"""A small convolutional network and its search, for tests of the batches that models get."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import cerebro
from cerebro.transforms import RandomCrop, RandomHorizontalFlip, Scale, ToCHW

CHAIN = [RandomCrop((8, 7), padding=1), RandomHorizontalFlip(), ToCHW(), Scale(1 / 255)]


class Centered(nn.Module):
    """Its sums over a picture's values depend on their order in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean((2, 3), keepdim=True)


def build(config: dict[str, Any]) -> cerebro.torch.Model:
    net = nn.Sequential(
        Centered(),
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 4 * 3, 4),
    )
    if config["last"]:
        net = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=config.get("fused", False))

    def step(net: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        x = batch["x"]
        if x.is_contiguous(memory_format=torch.channels_last) is not config.get("gets"):
            raise ValueError("the batch's layout is not the expected one")
        output = net(x)
        return {
            "loss": nn.functional.cross_entropy(output, batch["y"]),
            "rows": (float(len(x)), 1.0),
        }

    return cerebro.torch.Model(net, optimizer=optimizer, step=step)


def search(folder: Any, data: Any, space: dict[str, Any], **settings: Any) -> cerebro.Result:
    settings = {"epochs": 2, "batch_size": 16, "progress": False, "workers": 0, **settings}
    return cerebro.search(
        build,
        space,
        cerebro.Dataset(data).with_transforms({"x": CHAIN}),
        searcher="grid",
        validation=0.4,
        run=folder,
        **settings,
    )
