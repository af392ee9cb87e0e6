"""A skorch classifier in a search: its module, criterion and optimizer, without its loop.

    python examples/skorch_digits.py

Afterwards the best trial is trained once more, and its states are compared.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from torch import nn

import cerebro
from cerebro.transforms import Scale


def make_data(folder: str) -> cerebro.Dataset:
    digits = load_digits()
    arrays = {"x": digits.data.astype("float32"), "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=8, exist_ok=True, progress=False)


class Digits(nn.Module):
    def __init__(self, hidden: int = 32, dropout: float = 0.2):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10)
        )

    def forward(self, x):
        return torch.softmax(self.layers(x), dim=-1)  # skorch's default criterion takes its log


def build(config):
    return NeuralNetClassifier(
        Digits,
        module__hidden=config["hidden"],
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=config["lr"],
    )


SPACE = {"hidden": [32, 128], "lr": cerebro.loguniform(1e-2, 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-flat")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    data = make_data(options.data).with_transforms({"x": [Scale(1 / 16)]})
    train, valid = data.split(0.8, 0.2)
    result = cerebro.search(
        build,
        SPACE,
        train,
        epochs=options.epochs,
        validation=valid,
        n_trials=options.trials,
        metric="accuracy",
        batch_size=64,
        workers=options.workers,
        run=options.run,
    )
    print(result.summary())
    print(cerebro.replay(result, result.best))


if __name__ == "__main__":
    main()
