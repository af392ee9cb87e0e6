"""pack_state, unpack_state, load_into and hash_state."""

from __future__ import annotations

import numpy as np
import torch

from cerebro import _core


def test_nested_state_comes_back() -> None:
    state = {"net": {"w": torch.arange(6.0).reshape(2, 3).t()}, "step": 3, "rng": np.arange(4)}
    back = _core.unpack_state(_core.pack_state(state))
    assert torch.equal(back["net"]["w"], state["net"]["w"])
    assert back["step"] == 3
    assert np.array_equal(back["rng"], state["rng"])
