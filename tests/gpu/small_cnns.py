"""A search of small convolutional networks; as a program, it is killed after a number of units.

python small_cnns.py FOLDER DATA UNITS
"""

from __future__ import annotations

import os
import signal
import sys
import warnings

import numpy as np
import torch
from torch.nn import functional

import cerebro

EPOCHS, SHARDS, ROWS = 2, 4, 512
SPACE = {"lr": [1e-3, 3e-3], "dropout": [0.1, 0.4], "batch_size": 32}


class Net(torch.nn.Module):
    """Convolutions, batch norm and dropout: everything that could differ from run to run."""

    def __init__(self, dropout):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(32 * 8 * 8, 10),
        )

    def forward(self, x):
        return self.layers(x)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def augment(batch):
    flip = torch.rand(len(batch["x"]), 1, 1, 1, device=batch["x"].device) < 0.5
    return {**batch, "x": torch.where(flip, batch["x"].flip(3), batch["x"])}


def make(config, info, *, graph=False, refuse=False):
    net = Net(config["dropout"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])

    def loss(output, target):
        if refuse:  # a wait, which graphs do not support
            float(output.detach().sum())
        return functional.cross_entropy(output, target)

    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=loss,
        metrics={"accuracy": accuracy},
        augment=augment,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, info.total_steps),
        scheduler_step="batch",
        graph=graph,
    )


def build(config, info):
    return make(config, info)


def build_graph(config, info):
    return make(config, info, graph=True)


def build_refused(config, info):
    return make(config, info, graph=True, refuse=True)


def dying(flag):
    """Return a build whose worker is killed once, in the middle of a unit of trial 1."""

    def build(config, info):
        model = make(config, info)
        train_batch = model.train_batch

        def train_or_die(batch):
            global seen
            seen += info.trial == 1
            if seen == 2 and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return train_batch(batch)

        model.train_batch = train_or_die
        return model

    return build


seen = 0  # batches of trial 1 in this process


def shards(folder):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3, 16, 16)).astype(np.float32)
    y = rng.integers(0, 10, size=ROWS)
    x[np.arange(ROWS), 0, 0, y] += 5.0
    return cerebro.shard({"x": x, "y": y}, folder, shards=SHARDS, exist_ok=True, progress=False)


def search(run, data, build=build, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is resumed in a different environment")
        return cerebro.search(
            build, SPACE, data, epochs=EPOCHS, validation=0.25, searcher="grid", run=run,
            progress=False, **{"devices": "cuda:0", **options},
        )  # fmt: skip


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


class Strike:
    """Kills this process after a number of units."""

    def __init__(self, units):
        self.left = units

    def on_unit_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    import small_cnns

    small_cnns.search(
        sys.argv[1],
        cerebro.Dataset(sys.argv[2]),
        callbacks=[Strike(int(sys.argv[3]))],
        workers_per_device=2,
        if_exists="resume",
    )
