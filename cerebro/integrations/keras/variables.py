"""The variables of a compiled Keras model by name, as part of the state that hops.

Names are Keras' paths, such as ``dense/kernel``. Keras numbers layers without a name in the order
of their creation. Cerebro resets the numbers before every `build`, so equal models have equal
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from cerebro.errors import StateError

HINT = "build must make the same model from the same configuration"

SEED = "seed_generator_state"
"""The name of the variable that holds the state of a Keras random generator."""


def variables_of(net: Any) -> dict[str, dict[str, Any]]:
    """Return the variables of a model by part of its state, and by name."""
    optimizers = optimizers_of(net).values()
    parts = {
        "net": [*net.trainable_variables, *net.non_trainable_variables, *buffers_of(net)],
        "optimizer": [variable for each in optimizers for variable in each.variables],
        "metrics": net.metrics_variables,
    }
    return {part: _name_variables(variables) for part, variables in parts.items()}


class Buffer:
    """A buffer of a PyTorch module, such as a batch norm's statistics, as a Keras variable."""

    def __init__(self, path: str, module: Any, name: str) -> None:
        self.path, self.name = path, name
        self._module = module

    @property
    def value(self) -> Any:
        return getattr(self._module, self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        return _dtype_name(self.value)

    def assign(self, value: Any) -> None:
        self.value.copy_(keras.ops.convert_to_tensor(value, dtype=self.dtype))


def buffers_of(net: Any) -> list[Any]:
    """Return the buffers of all PyTorch modules inside a model, in a fixed order."""
    buffers = []
    for layer in net._flatten_layers():
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            for place, module in layer.module.named_modules():
                path = "/".join([str(layer.path), *filter(None, place.split("."))])
                for name, _ in module.named_buffers(recurse=False):
                    buffers.append(Buffer(f"{path}/{name}", module, name))
    return buffers


def optimizers_of(net: Any) -> dict[str, Any]:
    """Return the optimizers of a model by attribute; a custom ``train_step`` may use several."""
    others = {
        name: value
        for name, value in sorted(vars(net).items())
        if isinstance(value, keras.optimizers.Optimizer) and value is not net.optimizer
    }
    return {"optimizer": net.optimizer, **others}


def _name_variables(variables: Iterable[Any]) -> dict[str, Any]:
    """Return variables by path; repetitions of a path become ``path#1``, ``path#2``, ..."""
    by_path: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for variable in variables:
        path = str(variable.path)
        count = counts.get(path, 0)
        counts[path] = count + 1
        by_path[f"{path}#{count}" if count else path] = variable
    return by_path


def load(part: str, variables: Mapping[str, Any], state: Any) -> None:
    """Copy a state's part into variables; raise StateError, before any change, if they differ."""
    values = state if isinstance(state, Mapping) else {}
    for name in sorted(variables.keys() ^ values.keys()):
        has, lacks = ("model", "state") if name in variables else ("state", "model")
        raise StateError(f"the {has} has the variable {part}/{name}, the {lacks} does not: {HINT}")
    for name, variable in variables.items():
        shape, dtype = tuple(values[name].shape), _dtype_name(values[name])
        if shape != tuple(variable.shape) or dtype != variable.dtype:
            raise StateError(
                f"{part}/{name} is {dtype} of shape {shape} in the state and {variable.dtype} of "
                f"shape {tuple(variable.shape)} in the model: {HINT}"
            )
    for name, variable in variables.items():
        value = values[name]
        if value is not variable.value:  # otherwise a live tensor, already loaded
            variable.assign(np.array(value) if isinstance(value, np.ndarray) else value)


def _dtype_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def rates_in(optimizer: Any) -> Iterator[Any]:
    """Yield the learning rates of an optimizer and of those that it wraps."""
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, keras.Variable):  # not a schedule
        yield rate
    # The rate of a LossScaleOptimizer or a MultiOptimizer itself is not used, only those inside.
    inner = getattr(optimizer, "inner_optimizer", None)
    for wrapped in getattr(optimizer, "optimizers", ()) if inner is None else (inner,):
        yield from rates_in(wrapped)
