"""`cerebro.jax.Model` on a GPU: where it is, what it computes, and that it hops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.machine import devices

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import cerebro.jax  # noqa: E402

GPU = "cuda:0"


@pytest.fixture(autouse=True)
def _needs_jax_on_a_gpu() -> None:
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU: {error}")


def apply(params: Any, x: Any, *, train: bool, key: Any) -> Any:
    hidden = jax.nn.relu(x @ params["first"])
    if train:
        hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape) / 0.8
    return hidden @ params["second"]


def cross_entropy(outputs: Any, target: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, target).mean()


OPTIMIZER = optax.adamw(1e-2)


def make(device: str) -> Any:
    random = np.random.default_rng(1)
    params = {
        "first": random.normal(size=(20, 16)).astype(np.float32),
        "second": random.normal(size=(16, 3)).astype(np.float32),
    }
    with devices.set_build_device(device):
        return cerebro.jax.Model(apply, params, optimizer=OPTIMIZER, loss=cross_entropy, seed=7)


def batches(count: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(2)
    return [
        {
            "x": random.normal(size=(32, 20)).astype(np.float32),
            "y": random.integers(0, 3, 32).astype(np.int32),
        }
        for _ in range(count)
    ]


def train(model: Any, some: list[dict[str, Any]]) -> list[float]:
    return [float(model.train_batch(batch)["loss"]) for batch in some]


def test_a_jax_model_trains_on_the_gpu_as_on_the_cpu() -> None:
    x = batches(1)[0]["x"]
    with jax.default_matmul_precision("highest"):  # not by TF32
        gpu, cpu = make(GPU), make("cpu")
        np.testing.assert_allclose(train(gpu, batches(20)), train(cpu, batches(20)), rtol=0.01)
        np.testing.assert_allclose(gpu.predict(x), cpu.predict(x), rtol=0.01, atol=0.01)
    places = {place for leaf in jax.tree.leaves(gpu.params) for place in leaf.devices()}
    assert places == {jax.devices("cuda")[0]}


def test_a_hop_changes_nothing() -> None:
    straight, first = make(GPU), make(GPU)
    before, after = batches(20)[:8], batches(20)[8:]
    train(straight, before), train(first, before)
    second = make(GPU)
    packed = _core.pack_state(first.state_dict())
    second.load_state_dict(_core.unpack_state(packed, "numpy"))
    assert train(straight, after) == train(second, after)
    assert bytes(_core.pack_state(straight.state_dict())) == bytes(
        _core.pack_state(second.state_dict())
    )
