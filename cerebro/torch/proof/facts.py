"""What a proven step reads, in a form that is equal for models whose steps are the same program.

A proof (`cerebro.torch.proof.same_program`) records everything besides tensors that the step's code
reads: attributes, globals, closures, default arguments, contents of containers. If the proofs of
two models have read the same, and their tensors have the same shapes and share memory in the same
way, their steps call the same operators with the same constants. So a program that was recorded
from one model can be used for the other, without recording it again.

Objects that belong to one model, such as its modules, are described by their type and by the order
in which they were read; their attributes are among what was read. Objects that models share, such
as functions of PyTorch, classes and members of enumerations, are described by their identity. If a
step reads anything else, no other model has the same facts.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from cerebro.torch.proof.genuine import is_of_torch
from cerebro.torch.proof.unchanged import CONTAINERS, MISSING, Entries, Unchanged, is_plain

NESTED = (
    *CONTAINERS, types.FunctionType, types.MethodType, functools.partial, weakref.ReferenceType,
    property, staticmethod,
)  # fmt: skip
"""Types of objects that are described by what they contain."""

SHARED = (types.ModuleType, types.MethodDescriptorType, Entries)
"""Types of objects that are described by their identity."""

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was defined in Python


class Facts:
    """What a proof has read, and the tensors of a model.

    Parameters
    ----------
    read
        What the proof has read, of the step's code and of PyTorch.
    given
        What else decides which operators the step calls: the functions and settings that our own
        code of the step uses.
    tensors
        The tensors of the model and of its optimizers, in an order that depends only on its
        architecture.

    Attributes
    ----------
    key
        Equal for two models if their steps are the same program. Only keys whose `Facts` both exist
        may be compared, because they contain identities.
    are_shareable
        Whether another model can have the same facts.
    """

    def __init__(self, read: Sequence[Unchanged], given: Any, tensors: Sequence[Any]) -> None:
        self.are_shareable = True
        self._shared: list[Any] = []  # keeps the identities in the key unique
        self._tensors = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._numbers: dict[int, int] = {}
        self._numbered: list[Any] = [tensors]
        self._described: set[int] = set()
        memories: dict[int, int] = {}
        places = []
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            memory = memories.setdefault(address, len(memories))
            places.append((memory, address % 64, tensor.storage_offset(), *_layout(tensor)))
        described = [unchanged.described(self._form, self._place) for unchanged in read]
        self.key: Any = (places, self._form(given), described)
        # The key has no identities of these.
        self._tensors.clear()
        self._numbers.clear()
        self._numbered.clear()
        self._described.clear()

    def _form(self, value: Any) -> Any:
        """Describe a value."""
        kind = type(value)
        if is_plain(value):
            return kind, repr(value)
        if isinstance(value, torch.Tensor):
            index = self._tensors.get(id(value))
            return self._unknown() if index is None else ("tensor", index)
        if _is_shared(value):
            return self._identity(value)
        if kind in (set, frozenset) and not all(map(is_plain, value)):
            return self._unknown()  # the order of its members depends on their identities
        if kind not in NESTED and not _belongs_to_a_model(value):
            return self._unknown()
        number = self._place(value)
        if id(value) in self._described:
            return "again", number
        self._described.add(id(value))
        return kind.__name__, number, self._contents(value)

    def _contents(self, value: Any) -> Any:
        kind = type(value)
        if kind in (list, tuple):
            return [self._form(item) for item in value]
        if kind in (set, frozenset):
            return [(type(item), repr(item)) for item in value]  # in the order that a loop sees
        if kind is dict:
            return [(self._form(key), self._form(item)) for key, item in value.items()]
        if kind is types.FunctionType:
            defaults = [self._form(value.__defaults__), self._form(value.__kwdefaults__)]
            return self._identity(value.__code__), defaults, self._closure_of(value)
        if kind is types.MethodType:
            return self._form(value.__func__), self._form(value.__self__)
        if kind is weakref.ReferenceType:
            return self._form(value())
        if kind is functools.partial:
            return self._form(value.func), self._form(value.args), self._form(value.keywords)
        if kind is property:
            return self._form(value.fget)
        if kind is staticmethod:
            return self._form(value.__func__)
        return self._form(kind)

    def _closure_of(self, function: types.FunctionType) -> Any:
        found = []
        for cell in function.__closure__ or ():
            try:
                found.append((self._place(cell), self._form(cell.cell_contents)))
            except ValueError:  # the variable has no value
                found.append((self._place(cell), None))
        return found

    def _place(self, value: Any) -> int:
        """Return the number of an object in the order in which objects were read."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._numbers)
            self._numbered.append(value)  # so that its id stays unique
        return number

    def _identity(self, value: Any) -> Any:
        self._shared.append(value)
        return "shared", id(value)

    def _unknown(self) -> Any:
        self.are_shareable = False
        return None


def _is_shared(value: Any) -> bool:
    """Return whether an object is one that all models of a process share."""
    if isinstance(value, type):
        return "<locals>" not in value.__qualname__
    if type(value) is types.FunctionType:
        return is_of_torch(value) and value.__closure__ is None
    if type(value) is types.BuiltinFunctionType:  # also a bound method, as of a tensor
        owner = value.__self__
        return owner is None or isinstance(owner, (type, types.ModuleType))
    return value is MISSING or type(value) in SHARED or isinstance(value, enum.Enum)


def _belongs_to_a_model(value: Any) -> bool:
    """Return whether an object is one whose attributes a proof records when they are read.

    It has nothing besides attributes, unlike an instance of a subclass of `dict`.
    """
    are_of_python = all(
        part is object or part.__flags__ & _HEAP_TYPE for part in type(value).__mro__
    )
    return are_of_python and isinstance(getattr(value, "__dict__", None), dict)


def _layout(tensor: Any) -> Any:
    """Return a tensor's properties besides its values and its memory."""
    return (
        *(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad),
        *(tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
    )
