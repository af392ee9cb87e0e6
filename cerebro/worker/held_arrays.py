"""Digest, copy and compare the arrays and tensors that an attribute holds, also in containers."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cerebro.machine.imports import find_whole_module

CONTAINERS = (dict, list, tuple, deque, set, frozenset)
MAX_DEPTH = 4
MAX_ENTRIES = 128
"""Only the first and the last entries of a longer container are looked at."""
MAX_BYTES = 1 << 16
"""Only some of the bytes of a larger array are looked at."""


def is_array(value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    try:  # an object may have any attribute, such as Lightning's DummyLogger, or fail to tell
        is_shaped = isinstance(getattr(value, "shape", None), tuple)
        return is_shaped and hasattr(value, "dtype") and hasattr(value, "__dlpack__")
    except Exception:
        return False


def has_objects(value: Any) -> bool:
    """Return whether an array has references to objects, whose bytes are addresses."""
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.hasobject


def _may_be_lost(value: Any) -> bool:
    """Return whether a value is an array that may be lost; parameters are in the state."""
    torch = find_whole_module("torch")
    if torch is not None and isinstance(value, torch.nn.Parameter):
        return False
    return is_array(value) and not has_objects(value)


def find_arrays(value: Any, depth: int = MAX_DEPTH) -> Iterator[Any]:
    """Yield the arrays in a value: itself, or those in a container."""
    if isinstance(value, CONTAINERS):
        for child in _list_entries(value) if depth > 0 else ():
            yield from find_arrays(child, depth - 1)
    elif _may_be_lost(value):
        yield value


def digest(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return an approximate digest of a value's arrays; None if it has no array."""
    if not isinstance(value, CONTAINERS):
        return _hash_of(value) if _may_be_lost(value) else None
    digests = [digest(child, depth - 1) for child in _list_entries(value)] if depth > 0 else []
    if not any(digests):
        return None
    if isinstance(value, (set, frozenset)):
        digests.sort(key=repr)
    return (len(value), *digests)


def copy_value(value: Any) -> Any:
    """Return a copy of a value that shares neither arrays nor containers with it."""
    if isinstance(value, Mapping):
        changed = {key: copy_value(child) for key, child in value.items()}
        try:
            again = value.copy()  # type: ignore[attr-defined]
            again.update(changed)
        except Exception:
            return changed
        return again
    if isinstance(value, deque):
        return type(value)(map(copy_value, value), value.maxlen)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(copy_value, value))
    if is_array(value):
        return value.detach().clone() if hasattr(value, "detach") else value.copy()
    return value


def is_gathered(value: Any) -> bool:
    """Return whether a value gathers arrays, unlike a mapping, which may be a cache."""
    return isinstance(value, CONTAINERS) and not isinstance(value, Mapping)


def _list_entries(value: Any) -> list[Any]:
    entries = list(value.values() if isinstance(value, Mapping) else value)
    if len(entries) > MAX_ENTRIES:
        half = MAX_ENTRIES // 2
        return entries[:half] + entries[-half:]
    return entries


def _hash_of(value: Any) -> tuple[Any, ...]:
    return (
        tuple(value.shape),
        str(value.dtype),
        hashlib.blake2b(_read_some_bytes(value)).hexdigest(),
    )


def _read_some_bytes(value: Any) -> bytes:
    """Return the bytes of an array, or of some of its elements if it is large."""
    flat = value.detach().reshape(-1) if hasattr(value, "detach") else value.reshape(-1)
    size = max(1, int(getattr(value, "nbytes", 0)) // max(1, flat.shape[0]))
    step = -(-flat.shape[0] * size // MAX_BYTES)
    return as_bytes(flat[:: max(1, step)])


def as_bytes(value: Any) -> bytes:
    if not hasattr(value, "detach"):  # an array of NumPy or JAX
        return np.asarray(value).tobytes()
    tensor = value.detach().cpu().contiguous()
    return bytes(tensor.reshape(-1).view(_byte_type(tensor)).numpy().tobytes())


def _byte_type(tensor: Any) -> Any:
    import torch

    return torch.uint8 if tensor.numel() else tensor.dtype
