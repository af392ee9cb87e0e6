"""Begin a clone: the parent's weights, moments and progress, and the clone's own settings.

What a configuration sets and what training has changed are both in a state. Settings of optimizers
and schedules are told apart by name (`state.py`), tensors by history: a buffer that training has
not moved, such as the class weights of a loss, is a setting; BatchNorm's statistics are progress.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cerebro.errors import StateError
from cerebro.torch.parameter_order import split_state

RebuildParent = Callable[[bool], Any]
"""Builds a model of the parent's configuration: with the parent's seed or, if true, the clone's."""

_OF_SCHEDULERS = {
    "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr",
}  # fmt: skip
"""What torch's schedulers add to parameter groups."""


def check_optimizers(
    optimizers: Sequence[Any], state: Mapping[str, Any], rebuild: RebuildParent | None
) -> None:
    """Raise StateError, with the classes' names, if the moments are of another optimizer."""
    for at, (optimizer, part) in enumerate(split_state(optimizers, state["optimizer"])):
        for group, saved in zip(optimizer.param_groups, part["param_groups"], strict=False):
            added = saved.keys() - group.keys() - _OF_SCHEDULERS
            missing = getattr(optimizer, "defaults", {}).keys() - saved.keys()
            if added or missing:
                own = type(optimizer).__name__
                before = "another optimizer"
                if rebuild is not None:
                    before = type(rebuild(False)._optimizers[at]).__name__
                raise StateError(
                    f"the parent's optimizer is {before}, the clone's {own}: its moments cannot "
                    "continue with it"
                )


def keep_own_buffers(
    parts: Mapping[str, Any], state: Mapping[str, Any], rebuild: RebuildParent | None
) -> dict[str, Any]:
    """Return the parent's state with the clone's own value of each buffer that is a setting.

    `parts` has the modules by their part of the state. A buffer is a setting if it has the value
    with which the parent began, unless only the trial's seed makes the clone's different.
    """
    state = dict(state)
    differing = list(_list_buffers(parts, state))
    if not differing or rebuild is None:
        return state
    began = _values_of(rebuild(False), parts)
    unmoved = [
        (part, name)
        for part, name in differing
        if name in began[part] and _is_same(began[part][name], state[part][name])
    ]
    if not unmoved:
        return state
    own = {part: module.state_dict() for part, module in parts.items()}
    seeded = _values_of(rebuild(True), parts)
    for part, name in unmoved:
        if name in seeded[part] and _is_same(seeded[part][name], own[part][name]):
            continue  # it is random: the parent's weights were trained with the parent's
        state[part] = {**state[part], name: own[part][name].detach().clone()}
    return state


def _list_buffers(parts: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the buffers, by part and name, whose values in the state are not the model's own."""
    for part, module in parts.items():
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        saved = state.get(part, {})
        for name, value in module.state_dict().items():
            is_buffer = isinstance(value, torch.Tensor) and name not in parameters
            if is_buffer and name in saved and not _is_same(value, saved[name]):
                yield part, name


def _values_of(model: Any, parts: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {
        part: module.state_dict() for part, module in zip(parts, model._network.parts, strict=False)
    }


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same bits."""
    one, other = torch.as_tensor(one).detach().cpu(), torch.as_tensor(other).detach().cpu()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return bool(torch.equal(first, second))


def check_shapes(parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise StateError, with the tensors' names, if some have other shapes than the parent's."""
    changed = []
    for part, module in parts.items():
        saved = state.get(part, {})
        for name, value in module.state_dict().items():
            before = getattr(saved.get(name), "shape", None)
            if isinstance(value, torch.Tensor) and before is not None and before != value.shape:
                sizes = ["x".join(map(str, shape)) or "a scalar" for shape in (before, value.shape)]
                changed.append(f"{name} from {sizes[0]} to {sizes[1]}")
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise StateError(f"the configuration changes {', '.join(changed[:3])}{more}")


def position_of(state: Mapping[str, Any]) -> int | None:
    """Return how many steps a scheduler with this state has taken; None if it does not say."""
    inner = state.get("_schedulers")
    if "last_epoch" not in state and isinstance(inner, (list, tuple)) and inner:
        return position_of(inner[0])
    position = state.get("last_epoch")
    return position if isinstance(position, int) else None


def advance_new(schedulers: Sequence[Any], count: int) -> None:
    """Take the first steps of new schedulers, without training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not stepped
        for _ in range(count):
            for scheduler in schedulers:
                scheduler.step()
