"""Steps of a Keras model on each backend: the same that `fit` and `evaluate` call.

PyTorch and JAX are imported with the backend that uses them.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class TorchSteps:
    """Train, measure and predict with a Keras model whose variables are PyTorch tensors."""

    def __init__(self, net: Any) -> None:
        self._net = net

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
        import torch

        if self._net.training:
            self._net.eval()
        with torch.no_grad():
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
        import torch

        variables = self._net.variables
        device = variables[0].value.device if variables else torch.device("cpu")
        # Arrays may be read-only, which PyTorch warns of.
        tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))
        return tensor.to(device)

    def device(self) -> str | None:
        """Return the type of the network's device; None before it is built."""
        variables = self._net.variables
        return str(variables[0].value.device.type) if variables else None


class JaxSteps:
    """Train, measure and predict with a Keras model whose variables are JAX arrays.

    Between the batches of a unit, a tuple holds the values of the variables; every step replaces
    the tuple, as in `fit`. The values are assigned to Keras' variables at the end of the unit.
    """

    def __init__(self, net: Any) -> None:
        import jax

        # The device on which Keras makes variables. JAX starts here, with the run's threads.
        self._device = next(iter(jax.numpy.zeros(()).devices()))
        self._net = net
        self._carry: Any = None  # values newer than the variables'
        self._measured: Any = None  # the same in evaluation
        compiled = net.jit_compile and not net.run_eagerly
        self._train = jax.jit(net.train_step, donate_argnums=0) if compiled else net.train_step
        self._test = jax.jit(net.test_step) if compiled else net.test_step
        self._predict = jax.jit(net.predict_step) if compiled else net.predict_step

    def train(self, data: Any) -> Any:
        if self._carry is None:
            self._carry = _read_values(self._trained())
        logs, self._carry = self._train(self._carry, data)
        return logs

    def measure(self, data: Any) -> Any:
        if self._measured is None:
            self._measured = _read_values(self._evaluated())
        logs, self._measured = self._test(self._measured, data)
        return logs

    def predict(self, data: Any) -> Any:
        self.sync()
        return self._predict(_read_values(self._evaluated()[:2]), data)[0]

    def sync(self) -> None:
        """Assign the current values to Keras' variables."""
        carry, self._carry = self._carry, None
        measured, self._measured = self._measured, None
        for values, list_variables in ((carry, self._trained), (measured, self._evaluated)):
            if values is not None:
                for variables, arrays in zip(list_variables(), values, strict=True):
                    for variable, array in zip(variables, arrays, strict=True):
                        variable.assign(array)

    def value(self, variable: Any) -> Any:
        """Return a variable's value as a NumPy array; host memory is not copied."""
        return np.asarray(variable.value)

    def copy(self, variable: Any) -> Any:
        """Return a variable's value, which no step changes."""
        return variable.value

    def place(self, array: Any) -> Any:
        """Return an array on the network's device; return it unchanged if it is there already."""
        import jax

        there = isinstance(array, jax.Array) and array.committed
        if there and self._device.platform == "cpu":
            return array
        return jax.device_put(array, self._device)

    def device(self) -> str | None:
        """JAX chooses the device."""
        return None

    def _trained(self) -> tuple[list[Any], ...]:
        """Return the variables that Keras' ``train_step`` changes, in the order of its state."""
        net = self._net
        variables = (net.trainable_variables, net.non_trainable_variables)
        return *variables, net.optimizer.variables, net.metrics_variables

    def _evaluated(self) -> tuple[list[Any], ...]:
        """Return the variables of ``test_step``; those of ``predict_step`` are the first two."""
        net = self._net
        return net.trainable_variables, net.non_trainable_variables, net.metrics_variables


def _read_values(owners: tuple[list[Any], ...]) -> tuple[list[Any], ...]:
    return tuple([variable.value for variable in variables] for variables in owners)
