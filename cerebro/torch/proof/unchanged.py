"""Check that the non-tensor values that a proven step reads have not changed.

The proof that a step is the same program every time (`cerebro.torch.proof.same_program`) is valid
as long as attributes of modules, globals, closures, default arguments and the contents of
containers stay the same.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import cerebro._core as _core

MISSING: Any = object()
"""A placeholder for the value of a name that has no value."""

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device,
    torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types whose values cannot change."""

CONTAINERS = (list, tuple, dict, set, frozenset)


class Entries:
    """Entries of a namespace, compared by identity; faster than single ones."""

    def __init__(self, names: Any, keys: Sequence[str]) -> None:
        self._names = names
        self._keys = tuple(keys)
        self.values = tuple(names[key] for key in keys)

    def hold(self) -> bool:
        """Return whether the namespace still has these values."""
        return _core.has_entries(self._names, self._keys, self.values)


class Unchanged:
    """Recorded values, and the places where they were found."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}
        self._closures: dict[int, tuple[Any, Any]] = {}
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._functions: dict[int, tuple[Any, Any]] = {}
        self._parameters: dict[int, tuple[Any, bool]] = {}
        self._kept: list[Any] = []  # keeps the ids that are compared unique
        self._entries: list[Entries] = []
        self._switches = _switches()

    def entries(self, entries: Entries) -> None:
        """Record several entries of a namespace, which others may have recorded too."""
        self._entries.append(entries)

    def cell(self, names: Any, key: Any, value: Any) -> None:
        """Record an entry of a namespace; `value` is `MISSING` if the entry does not exist."""
        self._cells[id(names), key] = (names, key, value)

    def closure(self, cell: types.CellType) -> None:
        """Record the contents of a closure's variable."""
        self._closures[id(cell)] = (cell, cell.cell_contents)

    def size(self, names: Any) -> None:
        """Record the number of entries of a namespace."""
        self._sizes[id(names)] = (names, len(names))

    def container(self, value: Any) -> None:
        """Record the contents of a list, tuple, dict or set, including nested ones."""
        self._containers[id(value)] = (value, _frozen(value))
        self._kept.append(list(value.values()) if isinstance(value, Mapping) else list(value))

    def function(self, function: types.FunctionType) -> None:
        """Record a function's code and defaults."""
        self._functions[id(function)] = (function, _parts(function))

    def tensor(self, tensor: Any) -> None:
        """Record whether a tensor requires gradients."""
        self._parameters[id(tensor)] = (tensor, tensor.requires_grad)

    def holds(self) -> bool:
        """Return whether everything is still as it was recorded."""
        for names, key, value in self._cells.values():
            now = names.get(key, MISSING)
            if now is not value and not _equal(now, value):
                return False
        return (
            all(entries.hold() for entries in self._entries)
            and all(len(names) == size for names, size in self._sizes.values())
            and all(
                tensor.requires_grad is value and not is_hooked(tensor)
                for tensor, value in self._parameters.values()
            )
            and self._switches == _switches()
            and all(_holds(cell, value) for cell, value in self._closures.values())
            and all(_frozen(value) == was for value, was in self._containers.values())
            and all(_parts(function) == was for function, was in self._functions.values())
        )

    def described(self, form: Callable[[Any], Any], place: Callable[[Any], Any]) -> Any:
        """Return everything that was recorded, in the order in which it was read.

        Parameters
        ----------
        form
            Describes a value.
        place
            Describes the place of a value: a namespace or the variable of a closure.
        """
        return (
            [(place(names), form(key), form(value)) for names, key, value in self._cells.values()],
            [(place(cell), form(value)) for cell, value in self._closures.values()],
            [(place(names), size) for names, size in self._sizes.values()],
            [form(value) for value, _ in self._containers.values()],
            [form(function) for function, _ in self._functions.values()],
            [(form(tensor), value) for tensor, value in self._parameters.values()],
            [form(entries) for entries in self._entries],
            self._switches,
        )


def is_plain(value: Any) -> bool:
    """Return whether a value cannot change: a number, a string, or a tuple of these."""
    if type(value) in (tuple, frozenset):
        return all(map(is_plain, value))
    return type(value) in PLAIN


def is_hooked(tensor: Any) -> bool:
    """Return whether Python code runs when a tensor's gradient is computed."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        now = cell.cell_contents
    except ValueError:
        return False
    return now is value or _equal(now, value)


def _equal(one: Any, two: Any) -> bool:
    """Return whether two plain values are the same; -0.0 is not 0.0."""
    return type(one) is type(two) and is_plain(one) and repr(one) == repr(two)


def _frozen(value: Any) -> Any:
    """Return a container's contents for comparison: plain values, and the ids of other values."""
    if isinstance(value, Mapping):
        return [(_frozen(key), _frozen(item)) for key, item in value.items()]
    if isinstance(value, CONTAINERS):
        return type(value), [_frozen(item) for item in value]
    return (type(value), repr(value)) if is_plain(value) else id(value)


def _parts(function: types.FunctionType) -> Any:
    return (
        id(function.__code__), id(function.__closure__), _frozen(function.__defaults__),
        _frozen(function.__kwdefaults__),
    )  # fmt: skip


def _switches() -> Any:
    """Return the PyTorch modes that operators depend on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.get_autocast_dtype("cpu"),
        torch._C._get_mkldnn_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),  # on the CPU, too
        torch.backends.cuda.math_sdp_enabled(),
    )
