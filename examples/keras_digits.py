"""A Keras convolutional network with dropout and a learning-rate schedule on handwritten digits.

    KERAS_BACKEND=torch python examples/keras_digits.py

The model is compiled as for `fit`. `replay` trains the best trial again and compares its states.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from sklearn.datasets import load_digits

import cerebro
from cerebro.transforms import Scale


def make_data(folder: str) -> cerebro.Dataset:
    digits = load_digits()
    arrays = {"x": digits.images[..., None].astype("uint8"), "y": digits.target}
    return cerebro.shard(arrays, folder, shards=4, exist_ok=True, progress=False)


def build(config, info):
    layers = keras.layers
    net = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(config["filters"], 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(config["dropout"]),
            layers.Dense(10),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(config["lr"], info.total_steps)
    net.compile(
        optimizer=keras.optimizers.AdamW(rate, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-keras")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    data = make_data(options.data).with_transforms({"x": [Scale(1 / 16)]})
    train, valid = data.split(0.8, 0.2)
    space = {
        "lr": cerebro.loguniform(1e-3, 3e-2),
        "filters": [8, 16],
        "dropout": [0.0, 0.3],
    }
    result = cerebro.search(
        build,
        space,
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
    result.best.load().net.save("best.keras")


if __name__ == "__main__":
    main()
