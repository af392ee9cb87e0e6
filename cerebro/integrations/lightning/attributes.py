"""Attributes of a LightningModule that training changes: counters, lists of outputs, frozen parts.

A state contains only the attributes that differ from those that `build` made, also of submodules,
and also those whose names begin with an underscore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cerebro.torch.state import copy_deeply
from cerebro.torch.torchmetrics import accumulates

_DEPTH = 6

_PLAIN = (bool, int, float, str)

_HPARAMS = {"_hparams", "_hparams_initial", "_hparams_name"}
"""Lightning's own attributes of a module that has called ``save_hyperparameters``."""


class Attributes:
    """The plain attributes, modes and frozen flags of a module, as `build` made them.

    The attributes of `base`, the class ``LightningModule``, are left out.
    """

    def __init__(self, root: Any, base: Any) -> None:
        self._root = root
        self._theirs = {*vars(base()), *_HPARAMS, "log"}
        copies: dict[int, Any] = {}  # modules may share a large tensor
        self._made: dict[str, dict[str, Any]] = {}
        for name, module in self._modules():
            plain = self._made[name] = self._plain_attributes(module)
            for key, value in plain.items():
                if id(value) not in copies:
                    copies[id(value)] = _copy_value(value)
                plain[key] = copies[id(value)]
        self._modes, self._trained = self._read_flags()

    def _modules(self) -> Iterator[tuple[str, Any]]:
        """Yield the modules by path, except metrics."""
        metrics: list[str] = []
        for name, module in self._root.named_modules():
            if name.startswith(tuple(metrics)):
                continue
            if accumulates(module):
                metrics.append(f"{name}.")
            else:
                yield name, module

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes, modes and flags that differ from those that `build` made."""
        changed: dict[str, Any] = {}
        for name, module in self._modules():
            built = self._made.get(name, {})
            now = {
                key: _make_packable(value)
                for key, value in self._plain_attributes(module).items()
                if key not in built or not _are_equal(value, built[key])
            }
            if now:
                changed[name] = now
        modes, trained = self._read_flags()
        return {
            "attributes": changed,
            "modes": {k: mode for k, mode in modes.items() if mode != self._modes.get(k, True)},
            "requires_grad": {k: v for k, v in trained.items() if v != self._trained.get(k, True)},
        }

    def _read_flags(self) -> tuple[dict[str, bool], dict[str, bool]]:
        """Return whether modules are in training mode, and whether parameters are trained."""
        return (
            {name: part.training for name, part in self._root.named_modules()},
            {name: item.requires_grad for name, item in self._root.named_parameters()},
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes, modes and flags in `state`; reset all others."""
        for name, module in self._modules():
            built, current = self._made.get(name, {}), self._plain_attributes(module)
            now = {**built, **state["attributes"].get(name, {})}
            for key in current.keys() - now.keys():
                _remove_attribute(module, key)
            for key, value in now.items():
                loaded = _restore_tuples(value, built.get(key))
                if key not in current or not _are_equal(current[key], loaded):
                    _set_attribute(module, key, _copy_value(loaded))
        for name, part in self._root.named_modules():
            part.training = state["modes"].get(name, self._modes.get(name, True))
        for name, item in self._root.named_parameters():
            trained = state["requires_grad"].get(name, self._trained.get(name, True))
            if item.requires_grad != trained:
                item.requires_grad = trained

    def _plain_attributes(self, module: Any) -> dict[str, Any]:
        """Return a module's own attributes that are numbers, strings, tensors or lists of them."""
        # In PyTorch's layers, names with an underscore are derived from the parameters.
        hidden = "_" if type(module).__module__.split(".")[0] == "torch" else "__"
        derived = _find_derived_names(module)
        values = {
            key: value
            for key, value in vars(module).items()
            if key not in self._theirs
            and key not in derived
            and not key.startswith(hidden)
            and _is_plain(value)
        }
        for key, value in (vars(module).get("_hparams") or {}).items():
            if isinstance(key, str) and _is_plain(value):
                values[f"hparams.{key}"] = value
        return values


def _find_derived_names(module: Any) -> set[Any]:
    """Return the names of tensors that weight norm or pruning computes before each forward."""
    hooks = module._forward_pre_hooks.values()
    names = {getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks}
    return {name for name in names if isinstance(name, str)}


def _set_attribute(module: Any, key: str, value: Any) -> None:
    if key.startswith("hparams."):
        vars(module)["_hparams"][key.removeprefix("hparams.")] = value
    elif key in vars(module) or not isinstance(value, torch.Tensor):
        vars(module)[key] = value
    else:
        setattr(module, key, value)


def _remove_attribute(module: Any, key: str) -> None:
    if key.startswith("hparams."):
        del vars(module)["_hparams"][key.removeprefix("hparams.")]
    else:
        delattr(module, key)


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    if value is None or isinstance(value, _PLAIN):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    if isinstance(value, torch.Tensor):
        is_dense = value.layout is torch.strided and not value.is_meta and not value.is_quantized
        return is_dense and not isinstance(value, torch.nn.Parameter)
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            isinstance(key, str) and _is_plain(item, depth - 1) for key, item in value.items()
        )
    return type(value) in (list, tuple) and all(_is_plain(item, depth - 1) for item in value)


def _copy_value(value: Any) -> Any:
    """Return a copy of a plain value; unlike `copy_deeply`, keep NumPy's arrays."""
    if isinstance(value, dict):
        return {key: _copy_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_copy_value(item) for item in value])
    return value.copy() if isinstance(value, np.ndarray) else copy_deeply(value)


def _restore_tuples(value: Any, made: Any) -> Any:
    """Return a state's value with tuples where `build` made tuples, because states have lists."""
    if isinstance(made, (list, tuple)) and isinstance(value, list):
        examples = [*made, *[None] * len(value)]
        return type(made)(
            [_restore_tuples(item, like) for item, like in zip(value, examples, strict=False)]
        )
    if isinstance(made, dict) and isinstance(value, dict):
        return {key: _restore_tuples(item, made.get(key)) for key, item in value.items()}
    return value


def _make_packable(value: Any) -> Any:
    """Return a value with tensors detached, and with lists in place of tuples."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _make_packable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_packable(item) for item in value]
    return value


def _are_equal(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        return alike and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(_are_equal(one[key], two[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(two) and all(map(_are_equal, one, two))
    return bool(one == two) or (one != one and two != two)
