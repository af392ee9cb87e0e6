"""The models of `benchmarks.bench_hyperband`: 64 small networks on digits.

Cerebro and its peers use the same rows, networks, initial weights, optimizer and batch size. Peers
train with a typical PyTorch loop, over rows that each of their processes reads once.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cerebro

BATCH = 32
VALID = 360  # of 1,797 rows
SIDE = 8


SPACE = {
    "index": list(range(64)),  # also the seed of the initial weights
    "channels": [4, 6, 8],
    "lr": cerebro.loguniform(10**-4.5, 10**-1.5),
    "dropout": cerebro.uniform(0.0, 0.5),
}


def _configurations(count: int) -> list[dict[str, Any]]:
    """Draw from the space; the first ones are the same for every number of draws."""
    rng = np.random.default_rng(20)
    return [
        {
            "index": index,
            "channels": int(rng.choice([4, 6, 8])),
            "lr": float(10 ** rng.uniform(-4.5, -1.5)),
            "dropout": float(rng.uniform(0, 0.5)),
        }
        for index in range(count)
    ]


CONFIGURATIONS = _configurations(64)


def save(folder: Path) -> None:
    """Write the rows: as arrays for peers, as shards for Cerebro."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    x = (bunch.images.astype("float32") / 16).reshape(-1, 1, SIDE, SIDE)[order]
    y = bunch.target.astype("int64")[order]
    for name, rows in (("valid", slice(None, VALID)), ("train", slice(VALID, None))):
        np.savez(folder / f"{name}.npz", x=x[rows], y=y[rows])
        cerebro.shard(
            {"x": x[rows], "y": y[rows]}, folder / name, shards=2, shuffle=False, progress=False
        )


@functools.cache
def rows(folder: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read rows as tensors, once per process."""
    with np.load(Path(folder, f"{name}.npz")) as arrays:
        return torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])


def network(config: dict[str, Any]) -> torch.nn.Module:
    """Make a network with the initial weights of its configuration."""
    torch.manual_seed(config["index"])
    nn, channels = torch.nn, config["channels"]
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(config["dropout"]),
        nn.Linear(2 * channels * 16, 10),
    )


def optimizer_of(net: torch.nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=config["lr"], momentum=0.9)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def build(config: dict[str, Any]) -> cerebro.torch.Model:
    """Make Cerebro's model of a configuration."""
    net = network(config)
    return cerebro.torch.Model(
        net,
        optimizer=optimizer_of(net, config),
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
    )


def build_numbered(config: dict[str, Any]) -> cerebro.torch.Model:
    """Make Cerebro's model of a configuration, given by number."""
    return build(CONFIGURATIONS[config["index"]])


def suggested(trial: Any) -> dict[str, Any]:
    """Return the configuration whose number Optuna suggests."""
    return CONFIGURATIONS[trial.suggest_int("index", 0, len(CONFIGURATIONS) - 1)]


def build_suggested(trial: Any) -> cerebro.torch.Model:
    """Make Cerebro's model of the configuration that Optuna suggests."""
    return build(suggested(trial))


class ByHand:
    """A configuration in training, as in typical PyTorch code."""

    def __init__(self, config: dict[str, Any], folder: str) -> None:
        torch.set_num_threads(1)
        self.config, self.folder = config, folder
        self.net = network(config)
        self.optimizer = optimizer_of(self.net, config)
        self.generator = torch.Generator().manual_seed(config["index"])

    def train(self) -> None:
        """Train for one epoch."""
        x, y = rows(self.folder, "train")
        self.net.train()
        order = torch.randperm(len(x), generator=self.generator)
        for start in range(0, len(x), BATCH):
            chosen = order[start : start + BATCH]
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.net(x[chosen]), y[chosen])
            loss.backward()
            self.optimizer.step()

    def score(self) -> float:
        """Return the accuracy on the validation rows."""
        x, y = rows(self.folder, "valid")
        self.net.eval()
        right = 0
        with torch.no_grad():
            for start in range(0, len(x), BATCH):
                chosen = slice(start, start + BATCH)
                right += int((self.net(x[chosen]).argmax(1) == y[chosen]).sum())
        return right / len(x)

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
