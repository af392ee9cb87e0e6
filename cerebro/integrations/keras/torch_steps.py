"""Steps of a Keras model on the PyTorch backend: the same that `fit` and `evaluate` call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import torch

from cerebro.integrations.keras.variables import buffers_of, variables_of


class TorchSteps:
    """Train, measure and predict with a Keras model whose variables are PyTorch tensors."""

    def __init__(self, net: Any) -> None:
        self._net = net
        self._no_grad = torch.no_grad()

    def train(self, data: Any) -> Any:
        """Train on a batch in the form of `fit`; return Keras' logs."""
        net = self._net
        if net.train_function is None:
            net.make_train_function()
        if not net.training:
            net.train()
        return net.train_function([data])

    def measure(self, data: Any) -> Any:
        """Add a batch to the metrics in evaluation mode; return Keras' logs."""
        net = self._net
        if net.test_function is None:
            net.make_test_function()
        if net.training:
            net.eval()
        return net.test_function([data])

    def predict(self, data: Any) -> Any:
        if self._net.training:
            self._net.eval()
        with self._no_grad:
            return self._net.predict_step(data)

    def sync(self) -> None:
        """Do nothing: here, Keras' variables are always up to date."""

    @contextmanager
    def restore_afterwards(self, others: list[Any]) -> Iterator[None]:
        """Restore at the end what evaluation changes: statistics, generators, metrics, `others`."""
        variables = [
            *self._net.non_trainable_variables,
            *buffers_of(self._net),
            *variables_of(self._net, "metrics"),
            *others,
        ]
        before = [variable.value.detach().clone() for variable in variables]
        try:
            yield
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

    def value(self, variable: Any) -> Any:
        """Return a variable's tensor: live, not a copy."""
        return variable.value.detach()

    def place_arrays(self, tree: Any) -> Any:
        variables = self._net.variables
        device = variables[0].value.device if variables else torch.device("cpu")

        def put(value: Any) -> Any:
            # Arrays may be read-only, which PyTorch warns of.
            copied = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
            return copied.to(device)

        return keras.tree.map_structure(lambda leaf: None if leaf is None else put(leaf), tree)

    def device(self) -> str | None:
        """Return the type of the network's device; None before it is built."""
        variables = self._net.variables
        return str(variables[0].value.device.type) if variables else None
