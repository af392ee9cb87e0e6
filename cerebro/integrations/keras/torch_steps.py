"""Steps of a Keras model on the PyTorch backend: the same that `fit` and `evaluate` call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


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

    def value(self, variable: Any) -> Any:
        """Return a variable's tensor: live, not a copy."""
        return variable.value.detach()

    def copy(self, variable: Any) -> Any:
        return variable.value.detach().clone()

    def place(self, array: Any) -> Any:
        """Return an array as a tensor on the network's device."""
        variables = self._net.variables
        device = variables[0].value.device if variables else torch.device("cpu")
        # Arrays may be read-only, which PyTorch warns of.
        tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))
        return tensor.to(device)

    def device(self) -> str | None:
        """Return the type of the network's device; None before it is built."""
        variables = self._net.variables
        return str(variables[0].value.device.type) if variables else None
