"""Least squares in NumPy: a model that needs no framework, for tests of what surrounds it."""

from __future__ import annotations

from typing import Any

import numpy as np


class Line:
    framework = "numpy"

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.w = np.zeros(3, np.float32)

    def train_batch(self, batch: Any) -> dict[str, float]:
        error = batch["x"] @ self.w - batch["y"]
        self.w = (self.w - self.lr * (batch["x"] * error[:, None]).mean(0)).astype(np.float32)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch: Any) -> dict[str, float]:
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = np.array(state["w"])


def build(config: dict[str, Any]) -> Line:
    if config["lr"] > 100:
        raise ValueError("too fast")
    print(f"a rate of {config['lr']}")
    return Line(config["lr"])


SPACE = {"lr": [0.01, 0.1, 1000.0]}
