"""Writing a trained model where others can read it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cerebro import _core
from cerebro.errors import InputError
from cerebro.plain_files import path_of

if TYPE_CHECKING:
    from cerebro.saved_trial import Trial


def export(
    trial: Trial,
    path: str | os.PathLike[str],
    format: str,
    *,
    epoch: Any,
    build: Callable[..., Any] | None,
) -> Path:
    """Write a trial's model; see `cerebro.Trial.export`."""
    writers = {"safetensors": _safetensors, "torch": _torch, "onnx": _onnx}
    if format not in writers:
        raise InputError(f"format must be one of {', '.join(writers)}, not {format!r}")
    target = path_of("path", path)
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}")
    writers[format](trial, trial.load(epoch, build), target)
    return target


def _safetensors(trial: Trial, model: Any, target: Path) -> None:
    net = getattr(model, "net", None)
    if net is None:
        # As in the run's own files, tensors under their paths: the whole state, where the model
        # does not say what of it are weights.
        weights = getattr(model, "weights", model.state_dict)
        target.write_bytes(_core.pack_state(weights()))
        return
    try:
        import safetensors.torch
    except ImportError as error:
        raise InputError("this format needs safetensors: pip install safetensors") from error
    safetensors.torch.save_model(net, str(target))  # tied weights once


def _torch(trial: Trial, model: Any, target: Path) -> None:
    if getattr(model, "framework", None) == "jax":
        raise InputError("format 'torch' has no arrays of JAX: use format='safetensors'")
    try:
        import torch
    except ImportError as error:
        raise InputError("this format needs PyTorch: pip install torch") from error
    net = getattr(model, "net", None)
    torch.save(model.state_dict() if net is None else net.state_dict(), target)


def _onnx(trial: Trial, model: Any, target: Path) -> None:
    net = getattr(model, "net", None)
    if net is None:
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        raise InputError(f"onnx needs a cerebro.torch.Model, not a {kind}")
    try:
        importlib.import_module("onnx")
        importlib.import_module("onnxscript")
    except ImportError as error:
        raise InputError("onnx needs two packages: pip install onnx onnxscript") from error
    import torch

    batch = next(iter(trial.saved.dataset("data").batches(2, shuffle=False)))
    arguments = model.example_inputs(batch)
    torch.onnx.export(net.eval(), arguments, str(target))
