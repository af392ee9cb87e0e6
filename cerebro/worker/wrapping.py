"""Wrap what `build` returns if it is another framework's object that knows how it is trained.

A LightningModule, a compiled Keras model, a skorch net or a scikit-learn estimator says by itself
what its loss and optimizer are. Only the columns that it reads have to be found.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from cerebro.errors import InputError
from cerebro.model import TARGETS, Info, has_base, is_keras


def wrap(made: Any, info: Info) -> Any:
    """Return what `build` made as a model: itself, or the model that trains it.

    Raise InputError if the data does not tell the object's inputs from its target.
    """
    if callable(getattr(made, "train_batch", None)):
        return made
    if is_keras(made):
        if getattr(made, "optimizer", None) is None:
            return made  # an optimizer or layer, or not compiled: `check_model` says so
        return _wrap(made, info, "Keras model", "cerebro.keras", "Model", _match_keras(made, info))
    if has_base(made, "LightningModule", "lightning", "pytorch_lightning"):
        # It says by itself what it takes of a batch.
        return _wrap(made, info, "LightningModule", "cerebro.torch", "from_lightning", {})
    if has_base(made, "NeuralNet", "skorch"):
        return _wrap(made, info, "skorch net", "cerebro.torch", "from_skorch", None)
    if has_base(made, "BaseEstimator", "sklearn"):
        return _wrap(made, info, "scikit-learn estimator", "cerebro.sklearn", "Model", None)
    return made


def _wrap(
    made: Any, info: Info, kind: str, module: str, function: str, columns: dict[str, Any] | None
) -> Any:
    call = f"{module}.{function}"
    if columns is None:
        columns = _find_columns(made, info.data.columns, joins=module == "cerebro.sklearn")
    if columns is None:
        names = ", ".join(map(repr, info.data.columns))
        raise InputError(
            f"build returned a {kind}, and the data has the columns {names}: say which it reads, "
            f"return {call}({type(made).__name__}(...), inputs=..., target=...)"
        )
    model = getattr(import_module(module), function)(made, **columns)
    named = "".join(f", {name}={value!r}" for name, value in columns.items())
    model.wrapped = f"build returns a {kind}: it trains as {call}(...{named})"
    return model


def _find_columns(made: Any, columns: Iterable[str], *, joins: bool) -> dict[str, Any] | None:
    """Return the inputs and the target among `columns`; None if the names do not tell them apart.

    `joins` says that the model takes several columns as one.
    """
    names = list(columns)
    targets = [name for name in names if name in TARGETS]
    inputs = [name for name in names if name not in TARGETS]
    if len(targets) > 1 or not inputs or (len(inputs) > 1 and not joins):
        return {"inputs": "x", "target": "y"} if {"x", "y"} <= set(names) else None
    found: dict[str, Any] = {"inputs": inputs[0] if len(inputs) == 1 else inputs}
    if targets:
        return found | {"target": targets[0]}
    learns_alone = joins and (hasattr(made, "transform") or hasattr(made, "fit_predict"))
    return found if learns_alone else None


def _match_keras(net: Any, info: Info) -> dict[str, Any] | None:
    """Return the columns that are named like a functional model's inputs and outputs."""
    try:
        inputs, outputs = [item.name for item in net.inputs], list(net.output_names)
    except (AttributeError, TypeError, ValueError):  # a subclass, or not built yet
        return None
    if not set(inputs) <= set(info.data.columns):
        return None
    is_dict = isinstance(getattr(net, "_inputs_struct", None), dict)  # as Keras wants them given
    given = inputs[0] if len(inputs) == 1 and not is_dict else {name: name for name in inputs}
    columns: dict[str, Any] = {"inputs": given}
    if set(outputs) <= set(info.data.columns):
        # Keras takes no dictionary of a single target if the loss is given by its name.
        named = {name: name for name in outputs}
        return columns | {"target": outputs[0] if len(outputs) == 1 else named}
    targets = [name for name in info.data.columns if name in TARGETS]
    return columns | {"target": targets[0]} if len(targets) == 1 else None
