"""Steps of a Keras model on the JAX backend: compiled as `fit` compiles them.

Between the batches of a unit, a tuple holds the values of the variables; every step replaces the
tuple, as in `fit`. The values are assigned to Keras' variables at the end of the unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from cerebro.integrations.keras.variables import variables_of


class JaxSteps:
    """Train, measure and predict with a Keras model whose variables are JAX arrays."""

    def __init__(self, net: Any) -> None:
        # The device on which Keras makes variables. JAX starts here, with the run's threads.
        self._device = next(iter(jnp.zeros(()).devices()))
        self._net = net
        self._carry: Any = None  # values newer than the variables'
        self._measured: Any = None  # the same in evaluation
        compiled = net.jit_compile and not net.run_eagerly
        self._train = jax.jit(net.train_step, donate_argnums=0) if compiled else net.train_step
        self._test = jax.jit(net.test_step) if compiled else net.test_step
        self._predict = jax.jit(net.predict_step) if compiled else net.predict_step

    def train(self, data: Any) -> Any:
        """Train on a batch in the form of `fit`; return Keras' logs."""
        if self._carry is None:
            self._carry = tuple(
                [variable.value for variable in variables] for variables in self._variables()
            )
        logs, self._carry = self._train(self._carry, data)
        return logs

    def measure(self, data: Any) -> Any:
        """Add a batch to the metrics in evaluation mode; return Keras' logs."""
        if self._measured is None:
            self._measured = tuple(
                [variable.value for variable in variables] for variables in self._read_only()
            )
        logs, self._measured = self._test(self._measured, data)
        return logs

    def predict(self, data: Any) -> Any:
        self.sync()
        net = self._net
        values = [
            [variable.value for variable in variables]
            for variables in (net.trainable_variables, net.non_trainable_variables)
        ]
        return self._predict(tuple(values), data)[0]

    def sync(self) -> None:
        """Assign the current values to Keras' variables."""
        carry, self._carry = self._carry, None
        measured, self._measured = self._measured, None
        for values, owners in ((carry, self._variables), (measured, self._read_only)):
            if values is not None:
                for variables, arrays in zip(owners(), values, strict=True):
                    for variable, array in zip(variables, arrays, strict=True):
                        variable.assign(array)

    @contextmanager
    def restore_afterwards(self, others: list[Any]) -> Iterator[None]:
        """Restore at the end what evaluation changes: statistics, generators, metrics, `others`."""
        self.sync()
        variables = [
            *self._net.non_trainable_variables,
            *variables_of(self._net, "metrics"),
            *others,
        ]
        before = [variable.value for variable in variables]
        try:
            yield
        finally:
            self._measured = None
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

    def value(self, variable: Any) -> Any:
        """Return a variable's value as a NumPy array; host memory is not copied."""
        return np.asarray(variable.value)

    def place_arrays(self, tree: Any) -> Any:
        """Return arrays on the network's device; return those already there unchanged."""
        device = self._device

        def put(array: Any) -> Any:
            there = isinstance(array, jax.Array) and array.committed
            return array if there and device.platform == "cpu" else jax.device_put(array, device)

        return keras.tree.map_structure(lambda leaf: None if leaf is None else put(leaf), tree)

    def device(self) -> str | None:
        """JAX chooses the device."""
        return None

    def _variables(self) -> tuple[list[Any], ...]:
        net = self._net
        return (
            net.trainable_variables,
            net.non_trainable_variables,
            net.optimizer.variables,
            net.metrics_variables,
        )

    def _read_only(self) -> tuple[list[Any], ...]:
        net = self._net
        return net.trainable_variables, net.non_trainable_variables, net.metrics_variables
