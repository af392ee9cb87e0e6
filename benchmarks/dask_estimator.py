"""Estimators for Dask-ML: scikit-learn's conventions with ``partial_fit``."""

from __future__ import annotations

from typing import Any

from sklearn.base import BaseEstimator

from benchmarks import peers


class Digits(BaseEstimator):
    """A configuration of `benchmarks.digits`; a call of ``partial_fit`` is an epoch."""

    def __init__(self, index: int = 0, data: str = "", place: str = "") -> None:
        self.index = index
        self.data = data
        self.place = place

    def fit(self, x: Any, y: Any) -> Digits:
        return self.partial_fit(x, y)

    def partial_fit(self, x: Any, y: Any) -> Digits:
        """Train for one epoch over the rows of `data`; `x` and `y` are a copy of them."""
        if not hasattr(self, "model_"):
            from benchmarks import digits  # imports PyTorch, which `Nothing` does not need

            self.model_ = digits.ByHand(digits.CONFIGURATIONS[self.index], self.data)
        peers.Log(self.place).write("begin", self.index)
        self.model_.train()
        peers.Log(self.place).write("epoch", self.index)
        return self

    def score(self, x: Any, y: Any) -> float:
        """Return the accuracy on the rows that all searches share."""
        score = self.model_.score()
        peers.Log(self.place).write("score", self.index, score)
        return score


class Nothing(BaseEstimator):
    """Learns nothing, but records its calls."""

    def __init__(self, lr: float = 0.1, place: str = "") -> None:
        self.lr = lr
        self.place = place

    def fit(self, x: Any, y: Any) -> Nothing:
        return self.partial_fit(x, y)

    def partial_fit(self, x: Any, y: Any) -> Nothing:
        self.calls_ = getattr(self, "calls_", 0) + 1
        return self

    def score(self, x: Any, y: Any) -> float:
        peers.Log(self.place).write("report")
        return 1.0 / (1 + self.calls_) + self.lr
