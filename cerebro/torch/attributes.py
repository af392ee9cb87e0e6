"""Attributes of a LightningModule that training changes: counters, lists of outputs, frozen parts.

A state contains only the attributes that differ from those of the module that `build` made. A
module that changes none adds nothing to the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cerebro.torch.state import owned

_DEPTH = 6

_PLAIN = (bool, int, float, str)

_THEIRS = {
    "training",
    "prepare_data_per_node",
    "allow_zero_length_dataloader_with_multiple_devices",
}


class Attributes:
    """The plain attributes of modules, and the modes of all submodules, as `build` made them.

    Parameters
    ----------
    root
        The root module: the modes of its submodules and the frozen flags of its parameters are part
        of the state.
    modules
        The modules, by path, whose attributes are part of the state.
    """

    def __init__(self, root: Any, modules: Mapping[str, Any]) -> None:
        self._root = root
        self._modules = modules
        self._made = {name: owned(_plain(module)) for name, module in modules.items()}
        self._modes = {name: part.training for name, part in root.named_modules()}
        self._trained = {name: item.requires_grad for name, item in root.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes, modes and flags that differ from those that `build` made."""
        changed: dict[str, Any] = {}
        for name, module in self._modules.items():
            made = self._made[name]
            now = {
                key: _packable(value)
                for key, value in _plain(module).items()
                if key not in made or not _equal(value, made[key])
            }
            if now:
                changed[name] = now
        modes = {
            name: part.training
            for name, part in self._root.named_modules()
            if part.training != self._modes.get(name, True)
        }
        trained = {
            name: item.requires_grad
            for name, item in self._root.named_parameters()
            if item.requires_grad != self._trained.get(name, True)
        }
        return {"attributes": changed, "modes": modes, "requires_grad": trained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes, modes and flags in `state`; reset all others to what `build` made."""
        for name, module in self._modules.items():
            now = {**owned(self._made[name]), **owned(state["attributes"].get(name, {}))}
            for key in _plain(module).keys() - now.keys():
                delattr(module, key)
            for key, value in now.items():
                _set(module, key, value, self._made[name].get(key))
        for name, part in self._root.named_modules():
            part.training = state["modes"].get(name, self._modes.get(name, True))
        for name, item in self._root.named_parameters():
            trained = state["requires_grad"].get(name, self._trained.get(name, True))
            if item.requires_grad != trained:
                item.requires_grad = trained


def _plain(module: Any) -> dict[str, Any]:
    """Return a module's own attributes that are numbers, strings, tensors or containers of them."""
    found = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and key not in _THEIRS and _is_plain(value)
    }
    hparams = vars(module).get("_hparams")
    for key, value in (hparams or {}).items():
        if isinstance(key, str) and _is_plain(value):
            found[f"hparams.{key}"] = value
    return found


def _set(module: Any, key: str, value: Any, made: Any) -> None:
    if isinstance(made, tuple) and isinstance(value, list):
        value = tuple(value)
    if key.startswith("hparams."):
        vars(module)["_hparams"][key.removeprefix("hparams.")] = value
    elif key in vars(module) or not isinstance(value, torch.Tensor):
        vars(module)[key] = value
    else:
        setattr(module, key, value)


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    if value is None or isinstance(value, (*_PLAIN, np.ndarray)):
        return True
    if isinstance(value, torch.Tensor):
        return not isinstance(value, torch.nn.Parameter)
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            isinstance(key, str) and _is_plain(item, depth - 1) for key, item in value.items()
        )
    return type(value) in (list, tuple) and all(_is_plain(item, depth - 1) for item in value)


def _packable(value: Any) -> Any:
    """Return a value with its tensors detached, and with lists in place of tuples."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _packable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_packable(item) for item in value]
    return value


def _equal(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return bool(one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two))
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(_equal(one[key], two[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(two) and all(map(_equal, one, two))
    return bool(one == two) or (one != one and two != two)
