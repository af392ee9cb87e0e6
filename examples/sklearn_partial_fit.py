"""Incremental scikit-learn models: `partial_fit` on handwritten digits.

    python examples/sklearn_partial_fit.py

PyTorch is not needed. The estimator's arrays move between workers like any other state.
"""

from __future__ import annotations

import argparse

from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import cerebro


def make_data(folder: str) -> cerebro.Dataset:
    digits = load_digits()
    arrays = {"x": digits.data.astype("float32"), "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=8, exist_ok=True, progress=False)


def build(config):
    classifier = SGDClassifier(
        loss=config["loss"], alpha=config["alpha"], penalty=config["penalty"]
    )
    # The scaler learns from every batch before the classifier does.
    return make_pipeline(StandardScaler(), classifier)


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

    train, valid = make_data(options.data).split(0.8, 0.2)
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
    print(cerebro.replay(result, result.best.number))


if __name__ == "__main__":
    main()
