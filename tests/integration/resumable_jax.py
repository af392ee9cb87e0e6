"""A JAX search that is killed at a unit; as a program, it is the victim."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import optax
import resumable

import cerebro

SPACE = {"lr": cerebro.loguniform(1e-3, 3e-2), "dropout": cerebro.uniform(0.1, 0.5)}


def build(config, info):
    first, second = jax.random.split(jax.random.key(info.seed))
    params = {
        "hidden": jax.random.normal(first, (3, 16)),
        "out": jax.random.normal(second, (16,)).astype("bfloat16"),
    }

    def apply(params, x, *, train, key, variables):
        mean = x.mean(0) if train else variables["mean"]
        hidden = jax.nn.relu((x - mean) @ params["hidden"])
        if train:
            hidden *= jax.random.bernoulli(key, 1 - config["dropout"], hidden.shape)
        outputs = hidden @ params["out"].astype("float32")
        return (outputs, {"mean": 0.9 * variables["mean"] + 0.1 * mean}) if train else outputs

    return cerebro.jax.Model(
        apply,
        params,
        optimizer=optax.inject_hyperparams(optax.adamw)(learning_rate=config["lr"]),
        loss=lambda outputs, y: ((outputs - y) ** 2).mean(),
        metrics={"bias": lambda outputs, y: (outputs - y).mean()},
        variables={"mean": jnp.zeros(3)},
    )


def search(folder, data, callbacks=(), **settings):
    # Batches of one shape: every further shape would be compiled separately.
    settings = {"workers": 2, "epochs": 2, "n_trials": 3, "batch_size": 20} | settings
    return resumable.search(folder, data, build=build, space=SPACE, callbacks=callbacks, **settings)


if __name__ == "__main__":
    import resumable_jax

    resumable_jax.search(
        sys.argv[1], sys.argv[2], [resumable.Strike(int(sys.argv[3]))], if_exists="resume"
    )
