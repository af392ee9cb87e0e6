"""A model and its data for the tests of `cerebro.ray`: least squares in NumPy, importable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import cerebro

SPACE_LR = (1e-3, 0.3)


class Line:
    framework = "numpy"

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.w = np.random.normal(size=3).astype(np.float32)  # from the trial's seed
        self.lr_used: list[float] = []

    def train_batch(self, batch: Any) -> dict[str, float]:
        error = batch["x"] @ self.w - batch["y"]
        self.w = (self.w - self.lr * batch["x"].T @ error / len(error)).astype(np.float32)
        self.lr_used = [*self.lr_used[-7:], self.lr]
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch: Any) -> dict[str, float]:
        error = batch["x"] @ self.w - batch["y"]
        return {"loss": float((error**2).mean()), "lr_used": self.lr}

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w.copy(), "lr_used": list(self.lr_used)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = np.array(state["w"])
        self.lr_used = list(state["lr_used"])


def build(config: dict[str, Any]) -> Line:
    return Line(config["lr"])


def build_or_fail(config: dict[str, Any]) -> Line:
    if config["lr"] > 0.25:
        raise ValueError("too fast")
    return Line(config["lr"])


def line_data(folder: Path, *, rows: int = 64, shards: int = 2) -> cerebro.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    y = (x @ np.array([1, 2, 3], np.float32)).astype(np.float32)
    return cerebro.shard({"x": x, "y": y}, folder, shards=shards)


class Settings(Line):
    """A model whose metrics are the settings of the process in which it trains."""

    def eval_batch(self, batch: Any) -> dict[str, float]:
        import jax
        import torch

        return {
            **super().eval_batch(batch),
            "doubles": float(torch.get_default_dtype() is torch.float64),
            "x64": float(jax.config.jax_enable_x64),
        }


def build_settings(config: dict[str, Any]) -> Settings:
    return Settings(config["lr"])
