"""Find what a model contains: its arrays and numbers, and those that the user's own objects keep.

`walk` yields every array and number of an object, such as a model or its state. `OwnNumbers` has
those of the user's own objects, and notices when they change. Examples are a temperature that
`forward` lowers, a counter, a flag, a bank of outputs. They are in attributes of classes that the
user has written, in lists and dicts there, and in closures. Objects of libraries are left out: they
have states for what matters.
"""

from __future__ import annotations

import array
import contextlib
import functools
import hashlib
import queue
import random
import sys
import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cerebro.machine.imports import PACKAGE, find_whole_module, is_library
from cerebro.model import Part, Unchecked

WALK_DEPTH = 6
OWN_DEPTH = 8
MAX_ENTRIES = 64  # a longer list or dict is data, such as a vocabulary
MAX_OBJECTS = 20_000  # the most objects that are searched in a model
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
ARRAYS_DEPTH = 4
MAX_HELD = 128  # of a longer container, only the first and last entries are looked at
MAX_BYTES = 1 << 16  # only some of the bytes of a larger array are looked at
_NUMBERS = (int, float, np.number, np.bool_)  # a bool is an int
_LEAVES = (str, bytes, complex, type, types.ModuleType, np.ndarray, types.NoneType, *_NUMBERS)
_SEARCHED = (dict, list, tuple, deque, OrderedDict, defaultdict)
_WRAPPERS = (UserDict, UserList, types.SimpleNamespace)
"""Classes of Python whose objects keep what users put into their attributes."""
_PARTS = ("_parameters", "_buffers", "_modules")
_MODE = "training"  # the mode of PyTorch's modules, which is set before each use
_SKIPPED = ("cerebro.", "torch._dynamo", "numpy.random")
"""The modules of objects that are not searched, unless they are the model itself."""


class _Place(NamedTuple):
    holder: Any  # a dict, such as an object's attributes, a list, a cell, an object with slots
    key: Any
    is_attribute: bool = False  # of the holder: the contents of a cell, or an attribute in a slot

    def read(self) -> Any:
        if self.is_attribute:
            return getattr(self.holder, self.key, None)
        return self.holder[self.key]

    def write(self, value: Any) -> None:
        if self.is_attribute:
            setattr(self.holder, self.key, value)
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
            self._collect(model, "model", _is_users(type(model)), OWN_DEPTH, {})
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
            child = place.read()
            in_container = type(value) in _SEARCHED
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
                of_owner = type(child) in (*_SEARCHED, *_WRAPPERS)
                users = is_users if of_owner else _is_users(_find_owner(child))
                self._collect(child, path + part, users, depth - 1, seen)


def places_of(value: Any) -> Iterator[tuple[str, _Place]]:
    """Yield the parts of an object, each with its path and the place where it is kept."""
    if type(value) in _SEARCHED:
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
            if cell != types.CellType():  # cells are equal if both are still empty
                yield f".{name}", _Place(cell, "cell_contents", is_attribute=True)
        return
    for name in _slots_of(value):
        yield f".{name}", _Place(value, name, is_attribute=True)
    for attributes in _dicts_of(value):
        for name in sorted(attributes, key=lambda name: (name.startswith("_"), name)):
            if name == "_modules":
                for key in attributes[name]:
                    yield f".{key}", _Place(attributes[name], key)
            elif name not in _PARTS and not name.startswith("__"):
                yield f".{name}", _Place(attributes, name)


def _slots_of(value: Any) -> list[str]:
    """Return the names of the attributes that an object of a user's class has in slots."""
    if not _is_users(type(value)):
        return []
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


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


@functools.cache
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


# --- every array and number ----------------------------------------------------


def walk(
    value: Any, path: str, depth: int = WALK_DEPTH, seen: dict[int, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every array, tensor and number in an object, each object once."""
    seen = {} if seen is None else seen
    if isinstance(value, (bool, int, float, complex)):
        yield path, value
        return
    if isinstance(value, (bytearray, array.array)):
        value = np.frombuffer(bytes(value), np.uint8)
    if isinstance(value, (str, bytes, type, types.ModuleType)) or value is None:
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # keeps the object alive, so that its id is not reused
    if is_array(value) and not has_objects(value):
        yield path, value
    elif depth > 0:
        for part, child in _children_of(value):
            yield from walk(child, path + part, depth - 1, seen)


def _children_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object that can hold state."""
    if has_objects(value):
        value = value.ravel().tolist()
    if isinstance(value, Mapping):
        for index, (key, child) in enumerate(list(value.items())):
            yield f"[{_format_key(key, index)}]", child
        return
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        entries = _sort_elements(value) if isinstance(value, (set, frozenset)) else value
        for index, child in enumerate(list(entries)):
            yield f"[{index}]", child
        return
    if isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield f".{name}", getattr(value, name)
        return
    if isinstance(value, (types.MethodType, types.FunctionType)):
        for part, place in places_of(value):
            yield part, place.read()
        return
    module = type(value).__module__
    # Objects that only run a step are not state: a captured graph, a recorded or compiled program.
    steps = ("cerebro.torch.graph", "cerebro.torch.recorded_step")
    ours = ("cerebro._core", "cerebro.torch.parameter_order", *steps)
    numbered = ("flax.ids",)  # every flax module has a unique number
    modes = ("torch.autograd.grad_mode",)  # has the mode before its last use
    skipped = (*ours, *numbered, *modes, "builtins", "numpy.random")
    if isinstance(value, Unchecked) or module.startswith(skipped):
        return
    # A compiled network is a module of TorchDynamo; all its other objects only run a step.
    if module.startswith("torch._dynamo") and not hasattr(value, "_modules"):
        return
    for attribute, child in sorted(attributes_of(value).items()):
        # PyTorch keeps a module's parts in three mappings; users know each part by its own name.
        if attribute in _PARTS and isinstance(child, Mapping):
            yield "", child if attribute == "_modules" else dict(child)
        elif not attribute.startswith(("__", "_torchdynamo")):
            yield f".{attribute}", child


def _sort_elements(entries: Collection[Any]) -> list[Any]:
    """Return a set's elements in the same order in two models, as far as possible."""

    def key(value: Any) -> tuple[str, Any]:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if is_array(value) and not has_objects(value):
            return kind, as_bytes(value)
        return kind, repr(value).encode() if isinstance(value, (str, bytes, int, float)) else b""

    return sorted(entries, key=key)


def _format_key(key: Any, index: int) -> str:
    """Return a mapping's key as it is in a path; a tensor is given by its place and shape."""
    if isinstance(key, np.generic) or not is_array(key):
        return repr(key)
    return f"<{index}: {type(key).__name__} {'x'.join(map(str, key.shape))}>"


def id_of(value: Any) -> Any:
    """Return the identity of a tensor's memory, or of any other object."""
    pointer = getattr(value, "data_ptr", None)
    return ("memory", pointer()) if callable(pointer) else id(value)


def are_same(left: Any, right: Any) -> bool:
    """Return whether two leaves of nested values are equal bit for bit."""
    if is_array(left) != is_array(right):
        return False
    if not is_array(left):
        return are_equal(left, right)
    if tuple(left.shape) != tuple(right.shape) or str(left.dtype) != str(right.dtype):
        return False
    return as_bytes(left) == as_bytes(right)
