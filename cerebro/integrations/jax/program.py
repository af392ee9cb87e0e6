"""The compiled steps of a JAX model, one program each, and the trees of arrays that they change.

Programs are not part of a model's state; a rebuilt model compiles its own. Within a process, models
with the same function and optimizer objects share programs, compiled once per batch shape.

In a state, a tree is nested dictionaries of named arrays. Saving does not copy arrays in host
memory: the state has NumPy views, which keep the memory alive, and no compiled step writes to it.
Loading copies arrays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cerebro.errors import InputError, StateError
from cerebro.model import (
    SAME_MODEL,
    Batch,
    Columns,
    Unchecked,
    check_batch,
    column_names,
    loss_of,
    make_forward,
    make_getter,
)

FOR_OPTIMIZERS = ("value", "grad", "value_fn")
"""Keywords of optax that an optimizer's `update` may take: the loss, the gradients, and the loss as
a function of the parameters, for `reduce_on_plateau` and the line searches of `lbfgs`.
"""

MAX_PROGRAMS = 16  # the number of programs that are kept for later models

Path = tuple[str, ...]


@dataclass(frozen=True)
class ProgramParts:
    """The parts that a program is compiled from. Models with equal parts share a program."""

    apply: Callable[..., Any] | None
    step: Callable[..., Any] | None
    loss: Callable[..., Any] | None
    metrics: tuple[tuple[str, Callable[..., Any]], ...]
    optimizer: Any
    inputs: Any  # see `freeze_columns`
    target: Any
    has_variables: bool
    keeps_outputs: bool  # whether evaluation returns outputs and targets as well


def freeze_columns(what: str, columns: Columns | None) -> Any:
    """Return the columns in an argument, hashable; raise InputError if they are invalid."""
    column_names(what, columns)
    if columns is None or isinstance(columns, str):
        return columns
    return tuple(columns.items() if isinstance(columns, Mapping) else columns)


def _thaw_columns(frozen: Any) -> Any:
    return dict(frozen) if frozen and isinstance(frozen[0], tuple) else frozen


def _list_parameters(function: Callable[..., Any] | None) -> list[inspect.Parameter]:
    try:
        return [] if function is None else [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return []


def _find_extra_arguments(function: Callable[..., Any] | None, filled: int) -> frozenset[str]:
    """Return which of train, key and variables may follow `filled` positional arguments."""
    parameters = _list_parameters(function)
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    free = [*by_position[filled:], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]
    names = {p.name for p in free if p.kind is not p.POSITIONAL_ONLY}
    return frozenset(names & {"train", "key", "variables"})


class Carry(Unchecked):
    """The values that training replaces: (parameters, optimizer's state, variables, steps).

    A training step consumes the arrays of the carry, except those marked by `lend`.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._is_lent = False

    def lend(self, part: int) -> Any:
        """Return a part, by index, that no step may consume from now on."""
        self._is_lent = True
        return self.tree[part]

    def take(self, device: Any) -> Any:
        """Return the tree for a step that consumes it; it is a copy if a part was lent."""
        return copy_tree("the model", self.tree, device) if self._is_lent else self.tree


class Program(Unchecked):
    """The compiled steps of models with the same parts.

    ``train(tree, key, batch)`` consumes the tree of a `Carry`, and returns the new one and the
    metrics. The others are called with (parameters, variables, key, batch); ``measure`` returns
    metrics, outputs and targets.
    """

    def __init__(self, parts: ProgramParts) -> None:
        self._parts = parts
        self._optimizer_takes = _find_update_arguments(parts.optimizer.update)
        self._inputs, self._target = map(_thaw_columns, (parts.inputs, parts.target))
        self._get_target = None if self._target is None else make_getter(self._target)
        keywords = set(self._inputs) if isinstance(self._inputs, dict) else set()
        positional = 0 if keywords else len(column_names("inputs", self._inputs))
        self._apply_takes = _find_extra_arguments(parts.apply, 1 + positional) - keywords
        self._step_takes = _find_extra_arguments(parts.step, 2)
        takes = self._apply_takes if parts.step is None else self._step_takes
        if parts.has_variables and "variables" not in takes:
            name = "apply" if parts.step is None else "step"
            raise InputError(f"variables= is given, but {name} has no argument of that name")
        self.train = jax.jit(self._train, donate_argnums=0)
        self.evaluate = jax.jit(lambda *arguments: self._measure(*arguments)[0])
        self.measure = jax.jit(self._measure)
        self.predict = jax.jit(self._predict)

    def _train(self, carry: Any, key: Any, batch: Batch) -> Any:
        params, state, variables, steps = carry
        step_key = jax.random.fold_in(key, steps)

        def objective(params: Any) -> tuple[Any, Any]:
            loss, *rest = self._compute_loss(params, variables, step_key, batch, True)
            return loss[0] if isinstance(loss, tuple) else loss, (loss, *rest)

        (value, rest), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        loss, more, outputs, target, new_variables = rest
        available = {"value": value, "grad": gradients, "value_fn": lambda at: objective(at)[0]}
        extra = {name: available[name] for name in self._optimizer_takes}
        updates, new_state = self._parts.optimizer.update(gradients, state, params, **extra)
        carry = (
            _match_leaves("the optimizer changes params", _apply_updates(params, updates), params),
            _match_leaves("the optimizer changes its state", new_state, state, retyped=True),
            _match_leaves("training changes variables", new_variables, variables),
            steps + 1,
        )
        return carry, self._compute_metrics(loss, more, outputs, target)

    def _measure(self, params: Any, variables: Any, key: Any, batch: Batch) -> Any:
        loss, more, outputs, target, _ = self._compute_loss(params, variables, key, batch, False)
        values = self._compute_metrics(loss, more, outputs, target)
        return (values, outputs, target) if self._parts.keeps_outputs else (values, None, None)

    def _predict(self, params: Any, variables: Any, key: Any, batch: Batch) -> Any:
        check_batch(batch, self._inputs, None)
        return self._compute_outputs(params, variables, key, batch, False)[0]

    # --- one pass forward -------------------------------------------------------

    def _compute_loss(
        self, params: Any, variables: Any, key: Any, batch: Batch, train: bool
    ) -> tuple[Any, dict[str, Any], Any, Any, Any]:
        """Return loss, other metrics, outputs, target and new variables."""
        parts = self._parts
        if parts.step is not None:
            extra = _choose_arguments(self._step_takes, variables, key, train)
            returned, variables = self._split_returned(
                parts.step(params, batch, **extra), variables, train, "step", "metrics"
            )
            if not isinstance(returned, Mapping) or "loss" not in returned:
                raise InputError(f"step must return a dict with 'loss', not {returned!r}")
            more = {name: value for name, value in returned.items() if name != "loss"}
            return _as_loss("step's loss", returned["loss"]), more, None, None, variables
        check_batch(batch, self._inputs, self._target)
        outputs, variables = self._compute_outputs(params, variables, key, batch, train)
        target = None if self._get_target is None else self._get_target(batch)
        if parts.loss is None:
            loss = _as_loss("the outputs' loss", loss_of(outputs))
        else:
            loss = _as_loss("loss", self._call_function(parts.loss, outputs, target))
        return loss, {}, outputs, target, variables

    def _compute_outputs(
        self, params: Any, variables: Any, key: Any, batch: Batch, train: bool
    ) -> Any:
        parts = self._parts
        assert parts.apply is not None
        extra = _choose_arguments(self._apply_takes, variables, key, train)
        apply = functools.partial(parts.apply, params, **extra)
        returned = make_forward(apply, self._inputs)(batch)
        return self._split_returned(returned, variables, train, "apply", "outputs")

    def _split_returned(
        self, returned: Any, variables: Any, train: bool, who: str, what: str
    ) -> Any:
        """Split a return value into outputs and variables; evaluation ignores new variables."""
        if not self._parts.has_variables:
            return returned, variables
        if isinstance(returned, tuple) and len(returned) == 2:
            if train or _list_paths(returned[1]) == _list_paths(variables):
                return returned
        elif train:
            raise InputError(
                f"with variables= {who} must return ({what}, new variables) in training, not a "
                f"{type(returned).__name__}"
            )
        return returned, variables

    def _call_function(self, function: Callable[..., Any], outputs: Any, target: Any) -> Any:
        return function(outputs) if self._target is None else function(outputs, target)

    def _compute_metrics(
        self, loss: Any, more: Mapping[str, Any], outputs: Any, target: Any
    ) -> Any:
        """Return the metrics by name: 0-d arrays, or pairs of them."""
        values = {"loss": loss}
        values |= {name: _as_metric(f"the metric {name!r}", v) for name, v in more.items()}
        for name, metric in self._parts.metrics:
            value = self._call_function(metric, outputs, target)
            values[name] = _as_metric(f"the metric {name!r}", value)
        return values


_program_of = functools.lru_cache(MAX_PROGRAMS)(Program)


def program_of(parts: ProgramParts) -> Program:
    """Return the program of these parts; reuse an existing program if possible."""
    try:
        hash(parts)
    except TypeError:  # cannot be looked up again
        return Program(parts)
    return _program_of(parts)


def _choose_arguments(
    names: frozenset[str], variables: Any, key: Any, train: bool
) -> dict[str, Any]:
    available = {"train": train, "key": key, "variables": variables}
    return {name: value for name, value in available.items() if name in names}


def _list_paths(tree: Any) -> list[Any]:
    return [path for path, _ in name_leaves(tree)]


def _find_update_arguments(update: Callable[..., Any]) -> tuple[str, ...]:
    """Return which of `FOR_OPTIMIZERS` an `update` takes; raise InputError if it needs others."""
    parameters = _list_parameters(update)
    required = (p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)
    unknown = [p.name for p in required if p.name not in FOR_OPTIMIZERS]
    if unknown:
        raise InputError(
            f"optimizer: its update requires {unknown[0]}=, but it is called with "
            f"(gradients, state, params) and, if it takes them, {', '.join(FOR_OPTIMIZERS)}: use "
            "an optimizer that needs no more"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return FOR_OPTIMIZERS
    names = {p.name for p in parameters}
    return tuple(name for name in FOR_OPTIMIZERS if name in names)


def _apply_updates(params: Any, updates: Any) -> Any:
    """Return the parameters plus their updates, in the parameters' types."""
    if jax.tree.structure(params) != jax.tree.structure(updates):
        raise InputError("optimizer: update must return updates with the structure of params")
    return jax.tree.map(lambda p, u: jnp.asarray(p + u).astype(p.dtype), params, updates)


def _match_leaves(what: str, new: Any, old: Any, *, retyped: bool = False) -> Any:
    """Return `new`; its names, shapes and (unless `retyped`) types must be those of `old`."""
    fresh = dict(name_leaves(new))
    named = name_leaves(old)
    differ = fresh.keys() ^ {path for path, _ in named}
    if differ:
        raise InputError(f"{what}: {'/'.join(min(differ))} must exist both before and after a step")
    leaves = []
    for path, before in named:
        after = fresh[path]
        if not is_key(before):
            after = jnp.asarray(after)
        # Some of optax's optimizers turn bfloat16 moments into float32 in their first step.
        if after.shape != before.shape or not (retyped or after.dtype == before.dtype):
            raise InputError(
                f"{what}: {'/'.join(path)} is {before.dtype} of shape {before.shape} before a "
                f"step and {after.dtype} of shape {after.shape} after it"
            )
        # JAX's weak types become ordinary types, as after a hop.
        leaves.append(after if is_key(before) else jax.lax.convert_element_type(after, after.dtype))
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


def _as_loss(what: str, value: Any) -> Any:
    loss = _as_metric(what, value)
    dtype = (loss[0] if isinstance(loss, tuple) else loss).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(f"{what} must be a floating-point number, not {dtype}")
    return loss


def _as_metric(what: str, value: Any) -> Any:
    """Return a metric as a 0-d array, or as a pair of them: mean and weight."""
    if isinstance(value, tuple) and len(value) == 2:
        return tuple(_as_metric(what, item) for item in value)
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        raise InputError(f"{what} must be a number, not a {type(value).__name__}") from None
    if array.shape != ():
        raise InputError(
            f"{what} must be one number, the mean over the batch's rows, not an array of shape "
            f"{array.shape}"
        )
    return array


# --- trees of arrays, and states ------------------------------------------------


def name_leaves(tree: Any) -> list[tuple[Path, Any]]:
    """Return a tree's leaves with readable paths, such as ``("layers", "0", "kernel")``."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(tuple(map(_name_part, path)) or ("value",), leaf) for path, leaf in leaves]


def _name_part(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def copy_tree(what: str, tree: Any, device: Any) -> Any:
    """Return a copy of a tree on a device that shares no memory with other arrays."""
    named = name_leaves(tree)
    paths = [path for path, _ in named]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise InputError(f"{what} has two arrays named {'/'.join(twice)}: rename one")
    arrays = [_copy_leaf(what, path, leaf) for path, leaf in named]
    return jax.tree.unflatten(jax.tree.structure(tree), _put(arrays, device))


def _copy_leaf(what: str, path: Path, leaf: Any) -> Any:
    """Return a copy of a leaf in host memory; a random key becomes a `_Key`."""
    if is_key(leaf):
        return _Key(np.array(jax.random.key_data(leaf)), jax.random.key_impl(leaf))
    array = None if callable(leaf) else np.array(leaf)
    if array is None or array.dtype.kind in "OUSMm":
        raise InputError(
            f"{what} has a {type(leaf).__name__} at {'/'.join(path)}, which is not an array: leave "
            "it out (with equinox: equinox.partition)"
        )
    return array


class _Key(NamedTuple):
    """A random key's data in host memory, and the kind of the key."""

    words: Any
    kind: Any


def _put(arrays: list[Any], device: Any) -> list[Any]:
    """Copy arrays from host memory to a device in one transfer."""
    words = [array.words if isinstance(array, _Key) else array for array in arrays]
    placed = jax.device_put(words, device)
    return [
        jax.random.wrap_key_data(there, impl=array.kind) if isinstance(array, _Key) else there
        for array, there in zip(arrays, placed, strict=True)
    ]


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is a typed random key, as from `jax.random.key`."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_state(tree: Any) -> dict[str, Any]:
    """Return a tree as nested dictionaries of NumPy arrays."""
    state: dict[str, Any] = {}
    for path, leaf in name_leaves(tree):
        inner = state
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = to_host(leaf)
    return state


def to_host(leaf: Any) -> Any:
    """Return a NumPy array; random keys become integers, float8 (invalid in states) bytes."""
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return array if _is_held(array.dtype) else array.view(np.uint8)


def _is_held(dtype: Any) -> bool:
    return dtype.kind in "biufc" or dtype == jnp.bfloat16


def from_state(what: str, tree: Any, state: Any, device: Any, *, retyped: bool = False) -> Any:
    """Return a copy of `tree` with a state's arrays; raise StateError if they do not fit."""
    stored = dict(_walk(state if isinstance(state, Mapping) else {}, ()))
    named = name_leaves(tree)
    missing = [path for path, _ in named if path not in stored]
    if missing:
        raise StateError(f"the state has no {what}/{'/'.join(missing[0])}: {SAME_MODEL}")
    unknown = stored.keys() - {path for path, _ in named}
    if unknown:
        raise StateError(
            f"the state has {what}/{'/'.join(min(unknown))}, which the model lacks: {SAME_MODEL}"
        )
    arrays = [
        _copy_matching(f"{what}/{'/'.join(path)}", leaf, stored[path], retyped)
        for path, leaf in named
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), _put(arrays, device))


def _walk(state: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _walk(value, (*path, name))
        else:
            yield (*path, name), value


def _copy_matching(name: str, leaf: Any, value: Any, retyped: bool) -> Any:
    """Return a copy of a state's array, which must match the model's."""
    words = jax.random.key_data(leaf) if is_key(leaf) else leaf
    array = np.array(value)
    if not _is_held(words.dtype) and array.dtype == np.uint8:
        array = array.view(words.dtype)
    if array.shape != words.shape or not (retyped or array.dtype == words.dtype):
        raise StateError(
            f"{name}: the state has {array.dtype} of shape {array.shape}, the model {words.dtype} "
            f"of shape {words.shape}: {SAME_MODEL}"
        )
    return _Key(array, jax.random.key_impl(leaf)) if is_key(leaf) else array
