"""Save and load exact states of PyTorch optimizers, schedulers and networks.

A saved state contains the live tensors; the caller packs it. Loading a state copies its tensors,
because they may be views of a buffer that is overwritten later.

`torch.optim.Optimizer.load_state_dict` casts a state to the parameters' type, so float32 moments of
bfloat16 parameters would lose bits. This module therefore loads ordinary optimizers itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cerebro.errors import StateError, one_line
from cerebro.model import SAME_MODEL
from cerebro.torch.parameter_order import NAMES, ParameterNames, join_parts, split_state

HOW = ("capturable", "foreach", "fused")
"""Settings that determine how an optimizer computes. They are not loaded from a state, which may
come from another device."""

_LEAVES = {torch.Tensor, torch.nn.Parameter, bool, float, int, str, type(None)}


def to_plain(value: Any) -> Any:
    """Return `value` with mappings and queues converted to dicts and lists."""
    if type(value) in _LEAVES:
        return value
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, deque)):
        return [to_plain(item) for item in value]
    return value


def copy_deeply(value: Any) -> Any:
    """Return a copy of `value` that shares no tensor and no container with it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {key: copy_deeply(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([copy_deeply(item) for item in value])
    return value


def _is_ordinary(optimizer: Any) -> bool:
    """Return whether an optimizer's state has the format of torch's base class."""
    base, kind = torch.optim.Optimizer, type(optimizer)
    if not isinstance(optimizer, base):
        return False
    return all(
        getattr(kind, method) is getattr(base, method)
        and not getattr(optimizer, f"_optimizer_{method}_pre_hooks")
        and not getattr(optimizer, f"_optimizer_{method}_post_hooks")
        for method in ("state_dict", "load_state_dict")
    )


def load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load a state without changing a tensor's type; raise StateError if the groups differ."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if sizes != saved:
        raise StateError(
            f"the state's optimizer has parameter groups of {saved} tensors, build's has {sizes}: "
            f"{SAME_MODEL}"
        )
    if not _is_ordinary(optimizer):
        ordinary = {key: value for key, value in state.items() if key != NAMES}
        optimizer.load_state_dict(copy_deeply(ordinary))
        return
    with torch.no_grad():
        for group, loaded in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for key, value in loaded.items():
                if key != "params" and not (key in HOW and key in group):
                    group[key] = _overwrite(group.get(key), value)
        _load_parameter_states(optimizer, state)


def _overwrite(current: Any, value: Any) -> Any:
    """Return `current` overwritten with `value` if it fits, else a copy of `value`.

    Call it within `torch.no_grad`, once for many tensors: to enter it takes longer than a copy.
    """
    if current is value and isinstance(value, torch.Tensor):
        return value  # a live tensor, already loaded in place
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        if current.shape == value.shape and current.dtype == value.dtype:
            return current.copy_(value)
        return value.detach().to(current.device, copy=True)
    return copy_deeply(value)


def _load_parameter_states(optimizer: Any, state: Mapping[str, Any]) -> None:
    parameters = {}
    for group, loaded in zip(optimizer.param_groups, state["param_groups"], strict=True):
        on_device = group.get("capturable") or group.get("fused")
        for index, parameter in zip(loaded["params"], group["params"], strict=True):
            parameters[index] = (parameter, on_device)
    loaded_keys = set()
    for index, entries in state["state"].items():
        if index not in parameters:  # does not belong to a parameter
            optimizer.state[index] = copy_deeply(entries)
            loaded_keys.add(index)
            continue
        parameter, on_device = parameters[index]
        loaded_keys.add(parameter)
        current = optimizer.state.get(parameter, {})
        optimizer.state[parameter] = {
            key: _parameter_state(parameter, key, current.get(key), value, on_device)
            for key, value in entries.items()
        }
    for key in [key for key in optimizer.state if key not in loaded_keys]:
        del optimizer.state[key]


def _parameter_state(parameter: Any, key: str, current: Any, value: Any, on_device: Any) -> Any:
    """Return an entry of a parameter's state, on the device that the optimizer expects."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        return copy_deeply(value)
    if isinstance(current, torch.Tensor):
        return _overwrite(current, value)
    if key == "step":  # read on the host, even if the parameter is 0-d
        return value.detach().to(parameter.device if on_device else "cpu", copy=True)
    if value.shape == parameter.shape:
        # Use the parameter's memory format, with which the optimizer's kernels are fastest.
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.detach().to(parameter.device, copy=True)


def copy_settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return a copy of the settings (learning rate, ...) of each parameter group."""
    return [
        {key: copy_deeply(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def apply_settings(optimizer: Any, settings: list[dict[str, Any]]) -> None:
    """Restore the settings of parameter groups after another trial's state was loaded."""
    for group, restored in zip(optimizer.param_groups, settings, strict=True):
        rate = restored["lr"]
        # If a scheduler has changed the loaded rate, scale the restored one by the same factor.
        if "initial_lr" in restored and group.get("initial_lr"):
            rate = restored["initial_lr"] * (group["lr"] / group["initial_lr"])
        with torch.no_grad():
            for key, value in {**restored, "lr": rate}.items():
                group[key] = _overwrite(group.get(key), value)


def restore_settings(optimizer: Any, settings: list[dict[str, Any]]) -> None:
    """Restore the settings of parameter groups as they were, learning rates as well."""
    for group, restored in zip(optimizer.param_groups, settings, strict=True):
        for key, value in restored.items():
            group[key] = _overwrite(group.get(key), value)


def load_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    loaded = copy_deeply(state)
    _convert_containers(scheduler, loaded)
    scheduler.load_state_dict(loaded)


def _convert_containers(scheduler: Any, loaded: dict[str, Any]) -> None:
    """Convert containers in place to the scheduler's types, also for schedulers inside it."""
    for key, value in loaded.items():
        current = getattr(scheduler, key, None)
        if isinstance(current, (Counter, OrderedDict, deque)):
            loaded[key] = type(current)(value)
    inner, parts = getattr(scheduler, "_schedulers", None), loaded.get("_schedulers")
    if isinstance(inner, (list, tuple)) and isinstance(parts, list):
        for item, part in zip(inner, parts, strict=False):
            if isinstance(part, dict):
                _convert_containers(item, part)


# The position of a scheduler; all other attributes of torch's schedulers are settings.
_PROGRESS = {
    "last_epoch", "_step_count", "_last_lr", "_is_initial",
    "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i",
}  # fmt: skip


def advance_state(scheduler: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's own settings with the position in `state`."""
    current = to_plain(scheduler.state_dict())
    # The position of other schedulers cannot be separated from their settings.
    if not type(scheduler).__module__.startswith("torch.optim."):
        rates = {"base_lrs": current["base_lrs"]} if "base_lrs" in current else {}
        return {**state, **rates}
    advanced = {**current, **{key: state[key] for key in _PROGRESS & state.keys() & current.keys()}}
    inner = getattr(scheduler, "_schedulers", None)
    if inner is not None and len(state.get("_schedulers", ())) == len(inner):
        pairs = zip(inner, state["_schedulers"], strict=True)
        advanced["_schedulers"] = [advance_state(item, part) for item, part in pairs]
    return advanced


def collect_updates(
    optimizers: Sequence[Any], schedulers: Sequence[Any], names: ParameterNames
) -> dict[str, Any]:
    """Return the parts ``optimizer`` and, if any, ``scheduler`` of a state, with live tensors."""
    states = [
        {**to_plain(item.state_dict()), NAMES: names.list_by_group(item)} for item in optimizers
    ]
    collected = {"optimizer": join_parts(states)}
    if schedulers:
        collected["scheduler"] = join_parts([to_plain(item.state_dict()) for item in schedulers])
    return collected


def load_updates(
    optimizers: Sequence[Any], schedulers: Sequence[Any], state: Mapping[str, Any]
) -> None:
    for optimizer, part in split_state(optimizers, state["optimizer"]):
        load_optimizer(optimizer, part)
    for scheduler, part in split_state(schedulers, state.get("scheduler")):
        load_scheduler(scheduler, part)


def require_parts(state: Mapping[str, Any], parts: Mapping[str, object]) -> None:
    """Raise StateError unless a model's state has exactly the parts that the model has."""
    for part, there in parts.items():
        if bool(there) != (part in state):
            raise StateError(
                f"the state has {'no' if there else 'a'} {part!r}, unlike the model that build "
                f"made: {SAME_MODEL}"
            )


def frozen_names(net: Any) -> set[str]:
    named = net.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def _is_live(net: Any, state: Mapping[str, Any]) -> bool:
    """Return whether all of the state's tensors are the network's own."""
    live = net.state_dict()
    return live.keys() == state.keys() and all(
        isinstance(value, torch.Tensor)
        and value.shape == live[name].shape
        and value.data_ptr() == live[name].data_ptr()
        for name, value in state.items()
    )


def load_net(net: Any, state: Mapping[str, Any], *, partial: bool) -> None:
    """Copy a state into a network's tensors in place; raise StateError if it does not fit.

    With `partial`, frozen parameters may be missing in the state.
    """
    loaded: Any = OrderedDict(
        (name, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
        for name, value in state.items()
    )
    if _is_live(net, loaded):
        return
    try:
        result = net.load_state_dict(loaded, strict=False)
    except RuntimeError as error:
        what = one_line(f"the state does not fit the network: {error}; {SAME_MODEL}")
        raise StateError(what) from error
    missing = set(result.missing_keys) - (frozen_names(net) if partial else set())
    extra = result.unexpected_keys
    for what, names in (("misses", missing), ("has, beside the network's,", extra)):
        if names:
            raise StateError(f"the state {what} {', '.join(sorted(names))}: {SAME_MODEL}")
