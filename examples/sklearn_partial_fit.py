"""Incremental scikit-learn models: `partial_fit` on handwritten digits.

    python examples/sklearn_partial_fit.py

PyTorch is not needed. The estimator's arrays move between workers like any other state.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

import cerebro
from cerebro.transforms import Scale


def make_data(folder: str) -> cerebro.Dataset:
    digits = load_digits()
    arrays = {"x": digits.data.astype("float32"), "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=8, exist_ok=True, progress=False)


def build(config):
    return cerebro.sklearn.Model(
        SGDClassifier(loss=config["loss"], alpha=config["alpha"], penalty=config["penalty"]),
        classes=np.arange(10),
    )


SPACE = {
    "loss": ["log_loss", "hinge", "modified_huber"],
    "penalty": ["l2", "elasticnet"],
    "alpha": cerebro.loguniform(1e-6, 1e-2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-flat")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--trials", type=int, default=12)
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


if __name__ == "__main__":
    main()
