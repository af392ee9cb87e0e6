"""A trained model's outputs as classes and probabilities.

The work is done by `cerebro.data.recipe`, of which saved models have a copy.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from cerebro.data import Dataset, recipe
from cerebro.data.manifest import Column
from cerebro.errors import InputError
from cerebro.model import is_keras

_MOST_CLASSES = 32
"""For how many classes a loss is called with each of them, as the largest output and as target."""


def describe_target(model: Any, data: Dataset | None, outputs: Any) -> dict[str, Any] | None:
    """Return how outputs become classes, for `cerebro.data.recipe.decode`; None: no one target.

    `outputs` are those of some rows; only their shape counts.
    """
    name = getattr(model, "_target", None)
    if not isinstance(name, str) or data is None or name not in data.columns:
        return None
    column = data.columns[name]
    kind = "f" if "float" in column.dtype else "i"
    if column.shape:
        kind = "labels"
    classes = None if column.classes is None else list(column.classes)
    activation: str | None = None
    if hasattr(model, "estimator"):
        activation = "codes" if hasattr(model.estimator, "classes_") else None
    elif is_keras(getattr(model, "net", None)):
        activation = _find_keras_activation(model.net.loss, column.shape)
    elif hasattr(outputs, "shape"):
        activation = _activation_of(model, tuple(outputs.shape[1:]), column)
    return {"column": name, "classes": classes, "kind": kind, "activation": activation}


def _activation_of(model: Any, shape: tuple[int, ...], column: Column) -> str | None:
    """Return what makes probabilities of a model's outputs, with rows of `shape`; None: unknown."""
    objective = getattr(model, "_objective", None)
    loss = getattr(model if objective is None else objective, "_loss", None)
    if loss is None:
        return None
    if objective is not None:
        from cerebro.torch.loss_calls import find_activation

        activation = find_activation(loss, shape, column)
        if activation is not None:
            return activation
    is_label = not column.shape and "float" not in column.dtype
    fits = len(shape) == 1 and len(column.classes or ()) in (0, *shape)
    with contextlib.suppress(Exception):  # the loss takes something else
        if is_label and fits and _prefers_largest(loss, shape[0], objective is not None):
            return "largest"
    return None


def _prefers_largest(loss: Any, count: int, is_torch: bool) -> bool:
    """Return whether a loss is least for the class whose output is by far the largest."""
    if not 1 < count <= _MOST_CLASSES:
        return False
    wrap = sys.modules["torch"].as_tensor if is_torch else np.asarray
    for largest in range(count):
        outputs = np.zeros((1, count), np.float32)
        outputs[0, largest] = 8
        values = [float(loss(wrap(outputs), wrap(np.array([c])))) for c in range(count)]
        others = values[:largest] + values[largest + 1 :]
        if not values[largest] < min(others):
            return False
    return True


_KERAS_LOSSES = {
    **dict.fromkeys(("SparseCategoricalCrossentropy", "CategoricalCrossentropy"),
                    ("softmax", "shares")),
    "BinaryCrossentropy": ("sigmoid", "none"),
}  # fmt: skip
"""What makes probabilities of the outputs: with ``from_logits``, and without it."""


def _find_keras_activation(loss: Any, row_shape: tuple[int, ...]) -> str | None:
    """Return what makes probabilities of outputs by the loss of a compiled model."""
    import keras

    if isinstance(loss, (list, tuple)) and len(loss) == 1:
        loss = loss[0]
    try:
        loss = keras.losses.get(loss)
    except (TypeError, ValueError):  # several losses
        return None
    name = "".join(map(str.capitalize, getattr(loss, "__name__", "").split("_")))
    name = name or type(loss).__name__
    module = getattr(loss, "__module__", type(loss).__module__)
    is_sparse = name.startswith("Sparse")
    if name not in _KERAS_LOSSES or not module.startswith("keras."):
        return None
    if len(row_shape) > (0 if is_sparse else 1):
        return None  # the classes are in the last dimension, and not in the second
    config = loss.get_config() if hasattr(loss, "get_config") else {}
    return _KERAS_LOSSES[name][0 if config.get("from_logits") else 1]


def decode(outputs: Any, output: str, model: Any, data: Dataset | None) -> Any:
    """Return a model's outputs in the form ``output=``; raise InputError if there is no such."""
    if output == "raw":
        return outputs
    try:
        return recipe.decode(outputs, output, describe_target(model, data, outputs))
    except recipe.RowsError as error:
        raise InputError(str(error)) from None
