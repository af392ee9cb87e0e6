"""Find out when the structure of a model's state changes in training.

A state can be loaded if ``build``, and ``begin_epoch`` after it, make a model of its structure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

Structure = frozenset[tuple[str, tuple[int, ...]]]
"""The paths of a state's arrays with their shapes, and of the parameters of its optimizers."""

_NAMES = "parameter_names"
"""See `cerebro.torch.parameter_order`."""

_VARYING = ("gradients", "lightning", "metrics")
"""The parts of a model's state that every batch may change, as if they were numbers."""


def describe_structure(state: Any) -> Structure:
    """Return the structure of a model's state, which is made of dicts, lists and arrays."""
    if isinstance(state, Mapping):
        state = {key: part for key, part in state.items() if key not in _VARYING}
    return frozenset(_list_parts(state, ""))


def hash_parameter_order(model: Any) -> str:
    """Return a hash of the order of a network's parameters; empty if the model has no network.

    It differs if ``build`` makes layers in the order of a set, in a process with another hash seed.
    """
    net: Any = getattr(model, "net", None)
    if not hasattr(net, "named_parameters"):
        return ""
    names = "\n".join(name for name, _ in net.named_parameters())
    return hashlib.sha256(names.encode(errors="surrogatepass")).hexdigest()[:32]


def _list_parts(value: Any, path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            if key == _NAMES:
                yield f"{path}: {sorted(sorted(map(str, names)) for names in child)}", ()
            elif isinstance(child, (Mapping, list, tuple)) or hasattr(child, "shape"):
                yield from _list_parts(child, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for place, child in enumerate(value):
            if isinstance(child, (Mapping, list, tuple)) or hasattr(child, "shape"):
                yield from _list_parts(child, f"{path}/{place}")
    elif hasattr(value, "shape"):
        yield path, tuple(value.shape)
