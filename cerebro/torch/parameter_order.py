"""Order the states of optimizers by the names of their parameters.

PyTorch numbers an optimizer's parameters by group and position. This order may differ between
processes, for example if it comes from a set. So a state has the parameters' names and is packed in
the order of these names. When a state is loaded, parameters are matched by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from cerebro.errors import StateError
from cerebro.model import SAME_MODEL

Name = str | None
Names = list[list[Name]]
"""The names of an optimizer's parameters, by group; None if neither network nor loss has one."""

Order = list[tuple[int, list[int]]]
"""For each group, its present position, and the present positions of its parameters."""

NAMES = "parameter_names"  # the key of `Names` in an optimizer's state, beside those of PyTorch

_OF_TORCH = {"state", "param_groups", NAMES}

_BY_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs"}
"""The attributes of PyTorch's schedulers that are lists with an item for each group."""

_SORTED = ("net", "loss", "gradients", "requires_grad")
"""The parts of a model's state that have a network's names as keys."""

_LEAVES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_USUAL = {name: place for place, name in enumerate(_LEAVES)}
"""The order in which PyTorch's layers have their parameters and buffers."""


class ParameterNames:
    """The names of a model's parameters; a parameter keeps its first name.

    If it has several names, the first in alphabetical order counts. Names in a loss begin with
    ``loss:``.
    """

    def __init__(self, net: Any, loss: Any = None) -> None:
        self._modules = {"": net, "loss:": loss}
        self._known: dict[int, tuple[Any, str]] = {}  # keeps the parameters, so that ids are unique
        self._collect_names()

    def name_of(self, parameter: Any) -> Name:
        if id(parameter) not in self._known:  # it may have been added in training
            self._collect_names()
        return self._known.get(id(parameter), (None, None))[1]

    def list_by_group(self, optimizer: Any) -> Names:
        return [
            [self.name_of(item) for item in group["params"]] for group in optimizer.param_groups
        ]

    def _collect_names(self) -> None:
        entries: dict[int, tuple[Any, str]] = {}
        for prefix, module in self._modules.items():
            if not isinstance(module, torch.nn.Module):
                continue
            named = module.named_parameters(remove_duplicate=False)
            for name, parameter in sorted(named, key=lambda pair: pair[0]):
                entries.setdefault(id(parameter), (parameter, prefix + name))
        self._known = entries | self._known


def in_fixed_order(
    state: Mapping[str, Any], optimizers: Sequence[Any], schedulers: Sequence[Any]
) -> dict[str, Any]:
    """Return a model's state in the same order in every process, as far as it has names."""
    orders = [
        _sort_by_name(part[NAMES], _schedulers_of(optimizer, optimizers, schedulers, state))
        if _can_move(part)
        else _keep_order(part[NAMES])
        for optimizer, part in split_state(optimizers, state["optimizer"])
    ]
    ordered = _reorder_state(state, optimizers, schedulers, orders)
    parts = _split_parts(ordered["optimizer"], len(optimizers))
    ordered["optimizer"] = join_parts([_sort_by_number(part) for part in parts])
    for part in _SORTED:
        if part in ordered:
            names = sorted(ordered[part], key=_make_sort_key)
            ordered[part] = {name: ordered[part][name] for name in names}
    return ordered


def in_own_order(
    state: Mapping[str, Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    names: ParameterNames,
) -> dict[str, Any]:
    """Return a model's state in the order of the optimizers that `build` made.

    Raise StateError if the parameters are others, or cannot be matched by name.
    """
    orders = []
    for optimizer, part in split_state(optimizers, state["optimizer"]):
        if NAMES not in part:
            raise StateError(f"the optimizer's state has no {NAMES!r}: {SAME_MODEL}")
        others = part[NAMES]
        order = _match_order(names.list_by_group(optimizer), others)
        if order != _keep_order(others):
            if not _can_move(part):
                raise StateError(_explain_nameless(optimizer, others))
            if not _moves_groups(_schedulers_of(optimizer, optimizers, schedulers, state), order):
                raise StateError(
                    "build made the optimizer's parameter groups in another order than in the "
                    "state, and the scheduler has lists of which only it knows the order: make "
                    "the groups in a fixed order, such as that of a sorted list"
                )
        orders.append(order)
    return _reorder_state(state, optimizers, schedulers, orders)


# --- orders -----------------------------------------------------------------------


def _keep_order(names: Names) -> Order:
    return [(place, list(range(len(group)))) for place, group in enumerate(names)]


def _sort_by_name(names: Names, schedulers: Sequence[tuple[Any, Any]]) -> Order:
    """Return the order by name; groups without names come last."""
    order = [
        (place, sorted(places, key=lambda at: _make_sort_key(names[place][at])))
        for place, places in _keep_order(names)
    ]
    by_name = sorted(
        order,
        key=lambda entry: min(map(_make_sort_key, names[entry[0]]), default=_make_sort_key(None)),
    )
    return by_name if _moves_groups(schedulers, by_name) else order


def _make_sort_key(name: Name) -> tuple[Any, ...]:
    """Return a sort key for names; most networks keep their usual order."""
    if name is None:
        return (1,)
    return 0, *(
        (0, int(p), "") if p.isdecimal() else (1, _USUAL.get(p, 9), p) for p in name.split(".")
    )


def _match_order(own: Names, saved: Names) -> Order:
    """Return the order that gives the saved groups and parameters the names in `own`."""
    if own == saved:
        return _keep_order(own)
    places_by_set: dict[tuple[Any, ...], list[int]] = {}
    for place, group in enumerate(saved):
        places_by_set.setdefault(_set_of(group), []).append(place)
    sizes, others = [len(group) for group in own], [len(group) for group in saved]
    if sorted(sizes) != sorted(others):
        raise StateError(
            f"the state's optimizer has parameter groups of {others} tensors, build's has {sizes}: "
            f"{SAME_MODEL}"
        )
    order = []
    for group in own:
        places = places_by_set.get(_set_of(group))
        if not places:
            raise StateError(
                f"build's optimizer has a parameter group of {join_names(group)}, but the state's "
                f"has no such group: {SAME_MODEL}"
            )
        place = places.pop(0)
        places_by_name: dict[Name, list[int]] = {}
        for at, name in enumerate(saved[place]):
            places_by_name.setdefault(name, []).append(at)
        order.append((place, [places_by_name[name].pop(0) for name in group]))
    return order


def _set_of(names: list[Name]) -> tuple[Any, ...]:
    return tuple(sorted(map(_make_sort_key, names)))


def join_names(names: Sequence[Name]) -> str:
    text = ", ".join(str(name or "a tensor without a name") for name in names[:3])
    return f"{text} and {len(names) - 3} more" if len(names) > 3 else text or "no parameters"


# --- what can be moved --------------------------------------------------------------


def _can_move(part: Mapping[str, Any]) -> bool:
    if part.keys() != _OF_TORCH:
        return False
    numbers = [number for group in part["param_groups"] for number in group["params"]]
    names = list(chain(*part[NAMES]))
    return numbers == list(range(len(names))) and names.count(None) < 2


def _explain_nameless(optimizer: Any, names: Names) -> str:
    nameless = list(chain(*names)).count(None)
    cause = f"the state of {type(optimizer).__name__} has a form of its own"
    if nameless > 1:
        cause = f"{nameless} of them are in neither the network nor the loss, and have no name"
    return (
        "build made the optimizer's parameters in another order than in the state, and they "
        f"cannot be told apart ({cause}): make them in a fixed order, such as that of a sorted list"
    )


def _schedulers_of(
    optimizer: Any,
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    state: Mapping[str, Any],
) -> list[tuple[Any, Any]]:
    """Return the schedulers that may be an optimizer's, with their states; None if unsure."""
    owned = []
    for scheduler, part in split_state(schedulers, state.get("scheduler")):
        its = _optimizer_of(scheduler, optimizers)
        if its is None or its is optimizer:
            owned.append((scheduler, None if its is None else part))
    return owned


def _optimizer_of(scheduler: Any, optimizers: Sequence[Any]) -> Any:
    its = getattr(scheduler, "optimizer", None)
    return optimizers[0] if its is None and len(optimizers) == 1 else its


def _moves_groups(schedulers: Sequence[tuple[Any, Any]], order: Order) -> bool:
    """Return whether the schedulers' states can follow the groups into another order."""
    if [place for place, _ in order] == list(range(len(order))):
        return True
    return all(_follows(scheduler, part, len(order)) for scheduler, part in schedulers)


def _follows(scheduler: Any, state: Any, groups: int) -> bool:
    if not isinstance(state, Mapping):
        return False
    inner, parts = getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ())
    if len(inner) != len(parts):
        return False
    if not all(_follows(item, part, groups) for item, part in zip(inner, parts, strict=True)):
        return False
    if type(scheduler).__module__.startswith("torch.optim."):
        return True
    unknown = (value for key, value in state.items() if key not in _BY_GROUP)
    return not any(isinstance(entry, (list, tuple)) and len(entry) == groups for entry in unknown)


# --- reordering ---------------------------------------------------------------------


def _split_parts(state: Any, count: int) -> list[Any]:
    """Return the states of `count` optimizers or schedulers."""
    if count == 1:
        return [state]
    try:
        return [state[str(index)] for index in range(count)]
    except (KeyError, TypeError):
        raise StateError(
            f"the state does not have {count} optimizers or schedulers: {SAME_MODEL}"
        ) from None


def split_state(objects: Sequence[Any], state: Any) -> list[tuple[Any, Any]]:
    """Return objects, each with its part of a state; raise StateError if their number differs."""
    return list(zip(objects, _split_parts(state, len(objects)), strict=True))


def join_parts(parts: list[Any]) -> Any:
    """Return the only state, or all of them by number."""
    return parts[0] if len(parts) == 1 else {str(at): part for at, part in enumerate(parts)}


def _reorder_state(
    state: Mapping[str, Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    orders: Sequence[Order],
) -> dict[str, Any]:
    """Return a model's state with the groups and parameters of its optimizers in these orders."""
    reordered = dict(state)
    parts = _split_parts(state["optimizer"], len(optimizers))
    pairs = list(zip(parts, orders, strict=True))
    if all(order == _keep_order(part[NAMES]) for part, order in pairs):
        return reordered
    reordered["optimizer"] = join_parts([_reorder_part(part, order) for part, order in pairs])
    if schedulers:
        parts = _split_parts(state["scheduler"], len(schedulers))
        for at, scheduler in enumerate(schedulers):
            for optimizer, order in zip(optimizers, orders, strict=True):
                if _optimizer_of(scheduler, optimizers) is optimizer:
                    parts[at] = _reorder_scheduler(parts[at], [place for place, _ in order])
        reordered["scheduler"] = join_parts(parts)
    return reordered


def _reorder_part(part: Mapping[str, Any], order: Order) -> Mapping[str, Any]:
    """Return an optimizer's state in an order, with the parameters renumbered."""
    names = part[NAMES]
    if order == _keep_order(names):
        return part
    numbers: dict[Any, int] = {}
    groups = []
    for place, places in order:
        group = dict(part["param_groups"][place])
        for key in ("params", "param_names"):  # param_names only with named parameters
            if key in group:
                group[key] = [group[key][at] for at in places]
        numbers |= {number: len(numbers) + at for at, number in enumerate(group["params"])}
        group["params"] = [numbers[number] for number in group["params"]]
        groups.append(group)
    return {
        "state": {numbers.get(key, key): entries for key, entries in part["state"].items()},
        "param_groups": groups,
        NAMES: [[names[place][at] for at in places] for place, places in order],
    }


def _sort_by_number(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's state with the parameters' states by ascending number."""
    states = part["state"] if part.keys() == _OF_TORCH else {}
    if not states or not all(type(key) is int for key in states):
        return part
    return {**part, "state": {key: states[key] for key in sorted(states)}}


def _reorder_scheduler(state: Mapping[str, Any], places: list[int]) -> dict[str, Any]:
    """Return a scheduler's state with its lists in the order of the groups."""
    reordered = dict(state)
    for key in _BY_GROUP & state.keys():
        if isinstance(state[key], (list, tuple)) and len(state[key]) == len(places):
            reordered[key] = type(state[key])([state[key][place] for place in places])
    if isinstance(state.get("_schedulers"), (list, tuple)):
        reordered["_schedulers"] = [
            _reorder_scheduler(part, places) if isinstance(part, Mapping) else part
            for part in state["_schedulers"]
        ]
    return reordered
