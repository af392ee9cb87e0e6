"""Register a run's best model in MLflow's model registry: `Result.register`.

The network is stored as `torch.export` writes it: loading it unpickles nothing and needs no
``build``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cerebro.data import Dataset
from cerebro.errors import InputError
from cerebro.machine.imports import import_extra
from cerebro.results.export import TORCH, cause_of, traced, traced_inputs
from cerebro.results.trial import Trial
from cerebro.run.records import class_name

FORMAT = "serialization_format"
"""The argument of MLflow's ``log_model`` that rules out pickles."""


def register(trial: Trial, name: str, alias: str | None, example: Any) -> str:
    """Register a trial's model; see `cerebro.Result.register`."""
    for what, text in (("name", name), ("alias", alias)):
        if not (isinstance(text, str) and text) and (what, text) != ("alias", None):
            raise InputError(f"{what} must be a string, not {text!r}")
    mlflow = import_extra("mlflow", "mlflow", "Result.register() needs mlflow")
    model = trial.load()
    net = _get_network(model, trial)
    flavor = import_extra("mlflow.pytorch", "mlflow", "Result.register() needs mlflow")
    if FORMAT not in inspect.signature(flavor.log_model).parameters:
        raise InputError(
            f"mlflow {mlflow.__version__} registers networks only as pickles: update mlflow"
        )
    data = trial.saved.context(None).views(trial.number)[0]
    inputs = _convert_example(example) if example is not None else _take_example(model, data)
    saved, selected = trial.saved, trial._select_epoch()
    tags = {
        "cerebro.run": str(saved.meta["id"]),
        "cerebro.path": str(saved.path.absolute()),
        "cerebro.trial": str(trial.number),
        "cerebro.epoch": str(None if selected is None else selected.epoch),
        "cerebro.state_hash": str(trial.state_hash),
        "cerebro.data_checksum": str(saved.meta["data_checksum"]),
    }
    torch = sys.modules["torch"]
    with traced():
        try:
            signature = _make_signature(net, inputs)
            arrays = [tensor.numpy() for tensor, _, _ in inputs]
            logged = flavor.log_model(
                net,
                name="model",
                registered_model_name=name,
                signature=signature,
                input_example=arrays[0] if len(arrays) == 1 else arrays,
                # Otherwise MLflow loads the network in another process to see what it imports.
                pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
                metadata=tags,
                tags=tags,
                **{FORMAT: "pt2"},
            )
        except Exception as error:  # of MLflow, its database, PyTorch or the network
            raise InputError(
                f"cannot register the {type(net).__name__} of trial {trial.number} as {name!r}: "
                f"{cause_of(error)}"
            ) from error
    version = logged.registered_model_version
    address = f"models:/{name}/{version}"
    if alias is not None:
        try:
            mlflow.MlflowClient().set_registered_model_alias(name, alias, version)
        except Exception as error:
            raise InputError(
                f"{address} is registered, but not as {alias!r}: {cause_of(error)}"
            ) from error
    return address


def _get_network(model: Any, trial: Trial) -> Any:
    """Return the model's network; raise InputError if it cannot be registered."""
    module = sys.modules.get("cerebro.torch.model")  # imported, if the model is one of its
    if module is None or not isinstance(model, module.Model):
        kind = class_name(type(model))
        raise InputError(f"register needs a {TORCH}; the model of trial {trial.number} is a {kind}")
    if isinstance(model.inputs, Mapping):
        raise InputError(
            "register needs positional inputs, because MLflow calls networks without keywords: "
            "give inputs= a column or a list of columns, or use trial.save(folder)"
        )
    return model.net.eval()


_Inputs = list[tuple[Any, "str | None", Sequence[int]]]
"""For each input a tensor of some rows, its column, and the axes whose size may vary."""


def _take_example(model: Any, data: Dataset) -> _Inputs:
    traced = traced_inputs(model, data)
    parts = zip(traced.args, traced.columns, traced.shapes, strict=True)
    return [(tensor, column, sorted(free)) for tensor, column, free in parts]


def _convert_example(example: Any) -> _Inputs:
    import torch

    parts = list(example) if isinstance(example, (list, tuple)) else [example]
    try:
        rows = [torch.as_tensor(part).detach().cpu() for part in parts]
        is_empty = not rows or any(len(part) == 0 for part in rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            "example must be rows as the network gets them, an array or a tensor, or a list of "
            f"them for several inputs: {cause_of(error)}"
        ) from error
    if is_empty:
        raise InputError("example has no rows: give at least one")
    # PyTorch takes a single row for a network of one row.
    return [(torch.cat([r, r]) if len(r) == 1 else r, None, [0]) for r in rows]


def _make_signature(net: Any, inputs: _Inputs) -> Any:
    """Return MLflow's description of a network; MLflow cannot infer it for several inputs."""
    import torch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def spec(tensor: Any, free: Sequence[int], name: str | None = None) -> Any:
        shape = tuple(-1 if axis in free else size for axis, size in enumerate(tensor.shape))
        return TensorSpec(tensor.numpy().dtype, shape, name)

    # Schemas of several inputs need names; a name would turn a single input into a mapping.
    single = len(inputs) == 1
    specs = [
        spec(tensor, free, None if single else column or f"input_{number}")
        for number, (tensor, column, free) in enumerate(inputs)
    ]
    output = net(*(tensor for tensor, _, _ in inputs))
    rows = len(inputs[0][0])
    has_rows = isinstance(output, torch.Tensor) and output.ndim > 0 and len(output) == rows
    return ModelSignature(Schema(specs), Schema([spec(output, [0])]) if has_rows else None)
