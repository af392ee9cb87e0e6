"""The native network on a GPU, by cuDNN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.cli import doctor as proof
from cerebro.machine import cuda
from cerebro.native import Model

BATCH = 64
# Float32 sums of some hundred terms in another order, and exp in CUDA's bits; of losses near 1 and
# of gradients relative to the largest.
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _needs_cudnn() -> None:
    if cuda.cudnn_path() is None:
        pytest.skip("cuDNN 9 is not here: pip install nvidia-cudnn-cu13, or -cu12")


def make_model(device: str, **settings: Any) -> Model:
    return Model((1, 16, 16), 4, filters=(8, 16), seed=3, device=device, **settings)


def make_batches(rows: int = 5 * BATCH + 7) -> list[dict[str, Any]]:
    """Batches of two lengths."""
    data = proof.draw_pictures(rows)
    x = data["x"] / np.float32(255)
    return [
        {"x": x[start : start + BATCH], "y": data["y"][start : start + BATCH]}
        for start in range(0, rows, BATCH)
    ]


def state_bytes(model: Model) -> bytes:
    return bytes(_core.pack_state(model.state_dict()))


def assert_near(ours: Any, theirs: Any) -> None:
    assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


def test_scores_and_gradients_are_those_of_the_host() -> None:
    """At a learning rate of 0 the first momenta are the gradients."""
    for batch in make_batches():
        host, gpu = make_model("cpu", lr=0.0), make_model("cuda", lr=0.0)
        assert_near(gpu.predict_batch(batch), host.predict_batch(batch))
        ours, theirs = gpu.train_batch(batch), host.train_batch(batch)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE)
        gradients = host.state_dict()["momenta"]
        for name, gradient in gpu.state_dict()["momenta"].items():
            assert_near(gradient, gradients[name])


def test_bits_are_reproduced() -> None:
    first, second = make_model("cuda", lr=0.05), make_model("cuda", lr=0.05)
    for _ in range(3):
        for batch in make_batches():
            assert first.train_batch(batch) == second.train_batch(batch)
    assert state_bytes(first) == state_bytes(second)


def test_a_state_hops() -> None:
    straight, before = make_model("cuda", lr=0.05), make_model("cuda", lr=0.05)
    batches = make_batches()
    for batch in batches[:3]:
        straight.train_batch(batch)
        before.train_batch(batch)
    after = make_model("cuda", lr=0.05)
    after.load_state_dict(_core.unpack_state(_core.pack_state(before.state_dict()), "numpy"))
    for batch in batches[3:]:
        straight.train_batch(batch)
        after.train_batch(batch)
    assert state_bytes(straight) == state_bytes(after)


def test_the_native_network_learns() -> None:
    model = make_model("cuda", lr=0.05)
    batches = make_batches()
    for _ in range(20):
        for batch in batches:
            model.train_batch(batch)
    assert np.mean([model.eval_batch(batch)["accuracy"] for batch in batches]) > 0.9


def test_doctor_trains_on_every_gpu() -> None:
    lines: list[str] = []
    assert proof.self_test(lines.append) == 0
    for index in range(len(cuda.describe_devices())):
        line = f"reproduces its bits: yes, all 16 states on cuda:{index} are the same"
        assert line in lines
