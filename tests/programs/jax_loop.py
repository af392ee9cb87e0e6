"""A network of plain functions and a loop over batches, as in JAX's tutorials with optax."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import cerebro

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target


def init_network(sizes, key):
    layers = []
    for m, n in pairwise(sizes):
        key, w_key = jax.random.split(key)
        layers.append((jax.random.normal(w_key, (m, n)) / jnp.sqrt(m), jnp.zeros(n)))
    return layers


def predict(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def loss(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def build(config):
    params = init_network([64, config["hidden"], 10], jax.random.key(0))
    optimizer = optax.adam(config["lr"])
    return cerebro.jax.Model(predict, params, optimizer=optimizer, loss=loss)  # Cerebro


if __name__ == "__main__":
    # Instead of the function update, and the loop over epochs and batches that calls it:
    space = {"hidden": [16, 32], "lr": [1e-2, 1e-3], "batch_size": 64}
    result = cerebro.search(
        build, space, (images, labels), epochs=3, validation=0.2, searcher="grid"
    )  # Cerebro
    print(result)
