"""Find the numbers and arrays that the user's own objects keep, and notice when they change.

Examples are a temperature that `forward` lowers, a counter, a flag, a bank of outputs. They are in
attributes of classes that the user has written, in lists and dicts there, and in closures. Objects
of libraries are left out: they have states for what matters.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import random
import sys
import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cerebro.machine.imports import PACKAGE, find_whole_module, is_library
from cerebro.model import Part

MAX_DEPTH = 8
MAX_ENTRIES = 64  # a longer list or dict is data, such as a vocabulary
MAX_OBJECTS = 20_000  # the most objects that are searched in a model
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
ARRAYS_DEPTH = 4
MAX_HELD = 128  # of a longer container, only the first and last entries are looked at
MAX_BYTES = 1 << 16  # only some of the bytes of a larger array are looked at
_NUMBERS = (int, float, np.number, np.bool_)  # a bool is an int
_LEAVES = (str, bytes, complex, type, types.ModuleType, np.ndarray, types.NoneType, *_NUMBERS)
_CONTAINERS = (dict, list, tuple, deque, OrderedDict, defaultdict)
_WRAPPERS = (UserDict, UserList, types.SimpleNamespace)
"""Classes of Python whose objects keep what users put into their attributes."""
_PARTS = ("_parameters", "_buffers", "_modules")
_MODE = "training"  # the mode of PyTorch's modules, which is set before each use
_SKIPPED = ("cerebro.", "torch._dynamo", "numpy.random")
"""The modules of objects that are not searched, unless they are the model itself."""


class _Slots(NamedTuple):
    """An object with attributes in slots."""

    owner: Any


class _Place(NamedTuple):
    holder: Any  # a dict, such as an object's attributes, a list, a cell of a closure, or `_Slots`
    key: Any

    def read(self) -> Any:
        if isinstance(self.holder, types.CellType):
            return self.holder.cell_contents
        if isinstance(self.holder, _Slots):
            return getattr(self.holder.owner, self.key, None)
        return self.holder[self.key]

    def write(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, _Slots):
            setattr(self.holder.owner, self.key, value)
        else:
            self.holder[self.key] = value


class OwnNumbers:
    """The numbers and arrays of the user's objects in a model, by path.

    An attribute with arrays, or with a container of arrays, has one path, in `arrays`. Each path
    has a mark: the number itself, or a digest of the arrays. `built` has the marks when this object
    was made.
    """

    def __init__(self, model: Any) -> None:
        self.arrays: set[str] = set()
        self._places: dict[str, _Place] = {}
        self._generators: dict[str, Any] = {}
        try:
            self._collect(model, "model", _is_users(type(model)), MAX_DEPTH, {})
        except Exception:  # an object may fail to give its attributes
            self._places.clear()
        self.built = self.read_marks()

    def read_marks(self) -> dict[str, Any]:
        """Return the present marks; a path is left out if its place, or what was there, is gone."""
        marks = {}
        for path, place in self._places.items():
            with contextlib.suppress(Exception):
                mark = self.mark(path, place.read())
                if mark is not None:
                    marks[path] = mark
        return marks

    def mark(self, path: str, value: Any) -> Any:
        """Return the mark of a value at a path; None if it is neither a number nor has arrays."""
        if path in self.arrays:
            return digest(value)
        return value if isinstance(value, _NUMBERS) else None

    def find_changed(self) -> dict[str, Any]:
        """Return the values whose marks are not those of the model as it was built."""
        return {
            path: self._places[path].read()
            for path, mark in self.read_marks().items()
            if not are_equal(mark, self.built.get(path))
        }

    def write(self, values: Mapping[str, Any]) -> None:
        """Set numbers, or copies of attributes with arrays, by path."""
        for path, value in values.items():
            self._places[path].write(copy_value(value))

    def read_with_generators(self) -> dict[str, Any]:
        """Return the present numbers, and the states of random generators as bytes."""
        marks = self.read_marks()
        values = {path: mark for path, mark in marks.items() if path not in self.arrays}
        for path, generator in self._generators.items():
            with contextlib.suppress(Exception):
                values[path] = _state_of(generator)
        return values

    def _collect(
        self, value: Any, path: str, is_users: bool, depth: int, seen: dict[int, Any]
    ) -> None:
        if depth == 0 or id(value) in seen or len(seen) >= MAX_OBJECTS:
            return
        seen[id(value)] = value
        for part, place in places_of(value):
            try:
                child = place.read()
            except ValueError:  # the cell is still empty
                continue
            in_container = type(value) in _CONTAINERS
            if is_users and not in_container and _may_hold_arrays(child):
                self._places[path + part] = place
                self.arrays.add(path + part)
            if isinstance(child, queue.Queue):
                self._places[f"{path}{part}.queue"] = _Place(vars(child), "queue")
                self.arrays.add(f"{path}{part}.queue")
            elif isinstance(child, _NUMBERS):
                if is_users and place.key != _MODE:
                    self._places[path + part] = place
            elif is_users and _is_generator(child):
                self._generators[path + part] = child
            elif not isinstance(child, _LEAVES):
                if str(type(child).__module__).startswith(_SKIPPED):
                    continue
                of_owner = type(child) in (*_CONTAINERS, *_WRAPPERS)
                users = is_users if of_owner else _is_users(_find_owner(child))
                self._collect(child, path + part, users, depth - 1, seen)


def places_of(value: Any) -> Iterator[tuple[str, _Place]]:
    """Yield the parts of an object, each with its path and the place where it is kept."""
    if type(value) in _CONTAINERS:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, _ in list(entries) if len(value) <= MAX_ENTRIES else ():
            if isinstance(key, (str, int)):
                yield f"[{key!r}]", _Place(value, key)
        return
    if isinstance(value, types.MethodType):
        yield "", _Place((value.__self__,), 0)
        return
    if isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            yield f".{name}", _Place(cell, None)
        return
    for name in _slots_of(value):
        yield f".{name}", _Place(_Slots(value), name)
    for attributes in _dicts_of(value):
        for name in sorted(attributes, key=lambda name: (name.startswith("_"), name)):
            if name == "_modules":
                for key in attributes[name]:
                    yield f".{key}", _Place(attributes[name], key)
            elif name not in _PARTS and not name.startswith("__"):
                yield f".{name}", _Place(attributes, name)


def _slots_of(value: Any) -> list[str]:
    """Return the names of the attributes that an object of a user's class has in slots."""
    names: list[str] = []
    if not _is_users(type(value)):
        return names
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if not name.startswith("__") and hasattr(value, name):
                names.append(name)
    return names


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes: those in its ``__dict__``, and in slots of user's classes."""
    attributes = {name: getattr(value, name) for name in _slots_of(value)}
    for own in _dicts_of(value):
        attributes |= own
    return {name: child for name, child in attributes.items() if not isinstance(child, Part)}


def _dicts_of(value: Any) -> list[dict[str, Any]]:
    """Return an object's ``__dict__``, and those of the parts of a model."""
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return []
    return [own, *(vars(part) for part in own.values() if isinstance(part, Part))]


def _may_hold_arrays(value: Any) -> bool:
    if isinstance(value, _NUMBERS):
        return False
    return value is None or isinstance(value, CONTAINERS) or is_array(value)


def _find_owner(value: Any) -> Any:
    """Return the object that names the module in which an object's code was written."""
    function = getattr(value, "__func__", value)
    return function if isinstance(function, types.FunctionType) else type(value)


def _is_users(owner: Any) -> bool:
    return _is_users_module(getattr(owner, "__module__", None) or "builtins")


@cache
def _is_users_module(name: str) -> bool:
    if name in ("__main__", "__mp_main__"):
        return True
    if name.partition(".")[0] in sys.builtin_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return name not in sys.modules  # its code has been sent
    return not is_library(file) and PACKAGE not in Path(file).parents


def _is_generator(value: Any) -> bool:
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) or (
        type(value).__module__ == "torch._C" and hasattr(value, "initial_seed")
    )


def _state_of(generator: Any) -> bytes:
    if isinstance(generator, random.Random):
        return repr(generator.getstate()).encode()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state).encode()
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state(legacy=False)).encode()
    return bytes(generator.get_state().numpy().tobytes())


def are_equal(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right or (left != left and right != right))


# --- arrays --------------------------------------------------------------------


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


def find_arrays(value: Any, depth: int = ARRAYS_DEPTH) -> Iterator[Any]:
    """Yield the arrays in a value: itself, or those in a container."""
    if isinstance(value, CONTAINERS):
        for child in _list_entries(value) if depth > 0 else ():
            yield from find_arrays(child, depth - 1)
    elif _may_be_lost(value):
        yield value


def digest(value: Any, depth: int = ARRAYS_DEPTH) -> Any:
    """Return an approximate digest of a value's arrays; None if it has no array."""
    if not isinstance(value, CONTAINERS):
        if not _may_be_lost(value):
            return None
        bytes_hash = hashlib.blake2b(_read_some_bytes(value)).hexdigest()
        return tuple(value.shape), str(value.dtype), bytes_hash
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
    if len(entries) > MAX_HELD:
        half = MAX_HELD // 2
        return entries[:half] + entries[-half:]
    return entries


def _read_some_bytes(value: Any) -> bytes:
    """Return the bytes of an array, or of some of its elements if it is large."""
    flat = value.detach().reshape(-1) if hasattr(value, "detach") else value.reshape(-1)
    size = max(1, int(getattr(value, "nbytes", 0)) // max(1, flat.shape[0]))
    step = -(-flat.shape[0] * size // MAX_BYTES)
    return as_bytes(flat[:: max(1, step)])


def as_bytes(value: Any) -> bytes:
    if not hasattr(value, "detach"):  # an array of NumPy or JAX
        return np.asarray(value).tobytes()
    import torch

    tensor = value.detach().cpu().contiguous().reshape(-1)
    return bytes((tensor.view(torch.uint8) if len(tensor) else tensor).numpy().tobytes())
