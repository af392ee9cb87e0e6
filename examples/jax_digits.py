"""A JAX model with dropout, trained by optax on handwritten digits.

    python examples/jax_digits.py

A model that moves to another worker is compiled again there. JAX's disk cache avoids most of that
cost, and with `optax.inject_hyperparams` all learning rates share one program.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import cerebro
from cerebro.transforms import Scale


def make_data(folder: str) -> cerebro.Dataset:
    digits = load_digits()
    arrays = {"x": digits.data.astype("float32"), "y": digits.target.astype("int32")}
    return cerebro.shard(arrays, folder, shards=8, exist_ok=True, progress=False)


def cross_entropy(outputs, target):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, target).mean()


def accuracy(outputs, target):
    return (outputs.argmax(1) == target).mean()


def build(config, info):
    def dense(key, rows, columns):
        return {"w": jax.random.normal(key, (rows, columns)) * rows**-0.5, "b": jnp.zeros(columns)}

    first, second = jax.random.split(jax.random.key(info.seed))
    width, keep = config["width"], 1 - config["dropout"]
    params = {"hidden": dense(first, 64, width), "out": dense(second, width, 10)}

    def apply(params, x, *, train, key):
        hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
        if train:
            hidden = jnp.where(jax.random.bernoulli(key, keep, hidden.shape), hidden / keep, 0.0)
        return hidden @ params["out"]["w"] + params["out"]["b"]

    return cerebro.jax.Model(
        apply,
        params,
        optimizer=optax.inject_hyperparams(optax.adam)(learning_rate=config["lr"]),
        loss=cross_entropy,
        metrics={"accuracy": accuracy},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-flat32")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--cache", default="data/jax-cache", help="compiled programs")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    # Workers inherit these.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(options.cache).absolute())
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    data = make_data(options.data).with_transforms({"x": [Scale(1 / 16)]})
    train, valid = data.split(0.8, 0.2)
    space = {
        "lr": cerebro.loguniform(1e-3, 1e-1),
        "width": [64, 128],
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
        batch_size=32,
        drop_last=True,  # a second size of batches would be compiled separately
        workers=options.workers,
        run=options.run,
    )
    print(result.summary())
    pixels = np.asarray(valid.shard(0)["x"][:5]) / np.float32(16)
    print("classes:", result.best.load().predict(pixels).argmax(1).tolist())


if __name__ == "__main__":
    main()
