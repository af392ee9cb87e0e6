"""Imbalanced classes: rows drawn by class, rows weighted in the loss, or neither.

    python examples/weighted_digits.py

Of the digits 0 to 4 only one in eight is kept, so half of the classes are rare. The test data are
balanced. Three searches differ only in what they do about it: nothing; `with_sampling`, which draws
all classes equally often; and `Model(weight=)`, which weights each row's loss.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import cerebro


def make_data(folder: Path) -> tuple[cerebro.Dataset, cerebro.Dataset, cerebro.Dataset]:
    """Write training data, in which digits below 5 are rare, and test data, in which none are."""
    x, y = load_digits(return_X_y=True)
    x, is_test = (x / 16).astype("float32"), np.arange(len(y)) % 3 == 0
    kept = ~is_test & ((y >= 5) | (np.arange(len(y)) % 8 == 1))
    counts = np.bincount(y[kept])
    weights = (kept.sum() / (10 * counts))[y]  # rows of rare classes count more
    columns = {"x": x, "y": y, "w": weights.astype("float32")}
    train = cerebro.shard(
        {name: values[kept] for name, values in columns.items()},
        folder / "train",
        shards=4,
        exist_ok=True,
        progress=False,
    )
    test = cerebro.shard(
        {"x": x[is_test], "y": y[is_test]}, folder / "test", exist_ok=True, progress=False
    )
    return (*train.split(0.8, 0.2, stratify="y"), test)


def recall(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The mean over the classes of the share that is found."""
    right = (outputs.argmax(1) == targets).float()
    return float(torch.stack([right[targets == y].mean() for y in targets.unique()]).mean())


def build(config, info):
    net = nn.Sequential(nn.Linear(64, config["hidden"]), nn.ReLU(), nn.Linear(config["hidden"], 10))
    weighted = config["weighted"]
    return cerebro.torch.Model(
        net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=config["lr"]),
        loss=partial(nn.functional.cross_entropy, reduction="none" if weighted else "mean"),
        weight="w" if weighted else None,
        epoch_metrics={"recall": recall},
    )


SPACE = {"hidden": [32], "lr": cerebro.loguniform(1e-3, 1e-1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/rare-digits"))
    parser.add_argument("--run", type=Path, default=Path("runs/weighted-digits"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    train, valid, test = make_data(options.data)
    ways = {
        "-plain": (train, False),
        "": (train.with_sampling(balance="y"), False),
        "-weighted": (train, True),
    }
    results = {}
    for name, (data, weighted) in ways.items():
        results[name] = cerebro.search(
            build,
            {**SPACE, "weighted": [weighted]},
            data,
            epochs=options.epochs,
            n_trials=options.trials,
            validation=valid,
            metric="recall",
            mode="max",
            batch_size=32,
            workers=options.workers,
            run=f"{options.run}{name}",
        )
    for name, result in results.items():
        found = result.best.evaluate(test)["recall"]
        print(f"{name or '-sampled':<10} mean recall of the classes: {found:.3f}")
    sampled = results[""]
    print(f"best: trial {sampled.best.number}, {sampled.best.config}")
    for result in results.values():
        print(cerebro.replay(result, result.best))


if __name__ == "__main__":
    main()
