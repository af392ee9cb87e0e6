"""Save and load states of JAX models: trees of arrays as nested dictionaries of named arrays.

Saving a state does not copy arrays in host memory: the state has NumPy views, which keep the memory
alive, and no compiled step writes to it. Loading a state copies its arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cerebro.errors import InputError, StateError

Path = tuple[str, ...]
HINT = "build must make the same model from the same configuration"


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


# --- states ---------------------------------------------------------------------


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
        raise StateError(f"the state has no {what}/{'/'.join(missing[0])}: {HINT}")
    unknown = stored.keys() - {path for path, _ in named}
    if unknown:
        raise StateError(
            f"the state has {what}/{'/'.join(min(unknown))}, which the model lacks: {HINT}"
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
            f"of shape {words.shape}: {HINT}"
        )
    return _Key(array, jax.random.key_impl(leaf)) if is_key(leaf) else array
