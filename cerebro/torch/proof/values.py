"""The possible values of an expression in a step's code: data, or objects that exist now.

A `Value` is the set of possible values of an expression; `Arguments` are the arguments of a call.
`Row`, `Each` and `Super` represent objects that exist only while the step runs.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any


class Unproven(Exception):
    """A step cannot be proven to be the same program every time; the message says why and where."""


class Row:
    """A tuple or list whose members are known one by one."""

    def __init__(self, members: Sequence[Value]) -> None:
        self.members = tuple(members)


class Each:
    """An iterable whose members all have the same `Value`."""

    def __init__(self, member: Value) -> None:
        self.member = member


class Super:
    """``super()``: an object, and the class after which attributes are looked up."""

    def __init__(self, after: type, owner: Any) -> None:
        self.after = after
        self.owner = owner


class Value:
    """The possible results of an expression.

    Parameters
    ----------
    objects
        The objects that the result may be.
    data
        Whether the result may be data: a tensor, a plain value, or a local container of data.
    """

    def __init__(self, objects: Sequence[Any] = (), data: bool = False) -> None:
        self.objects = tuple({_identity(item): item for item in objects}.values())
        self.data = data

    def joined(self, other: Value) -> Value:
        """Return the union of two sets of possible values."""
        return Value((*self.objects, *other.objects), self.data or other.data)

    @property
    def key(self) -> Any:
        """A key that is equal for equal values."""
        return self.data, tuple(_identity(item) for item in self.objects)


def _identity(item: Any) -> Any:
    if isinstance(item, types.MethodType):
        return "method", id(item.__func__), id(item.__self__)
    if isinstance(item, Row):
        return "row", tuple(value.key for value in item.members)
    if isinstance(item, Each):
        return "each", item.member.key
    if isinstance(item, Super):
        return "super", item.after, id(item.owner)
    return id(item)


NOTHING = Value()
DATA = Value(data=True)


def known(item: Any) -> Value:
    """Return the `Value` of an expression whose only possible result is this object."""
    return Value((item,))


class Arguments:
    """The arguments of a call; there may be more of them, which have the value `rest`."""

    def __init__(
        self,
        positional: Sequence[Value] = (),
        named: Mapping[str, Value] | None = None,
        rest: Value = NOTHING,
    ) -> None:
        self.positional = list(positional)
        self.named = dict(named or {})
        self.rest = rest

    def after(self, first: Value) -> Arguments:
        """Return these arguments preceded by `first`."""
        return Arguments([first, *self.positional], self.named, self.rest)

    def all(self) -> list[Value]:
        return [*self.positional, *self.named.values()]

    @property
    def key(self) -> Any:
        """A key that is equal for equal arguments."""
        named = tuple((name, value.key) for name, value in self.named.items())
        return tuple(value.key for value in self.positional), named, self.rest.key

    @property
    def may_be_more(self) -> bool:
        """Whether there may be more arguments."""
        return self.rest.data or bool(self.rest.objects)


SOME = Arguments(rest=DATA)
"""Any number of arguments, all data."""


def name_of(item: Any) -> str:
    if isinstance(item, types.ModuleType):
        return item.__name__
    if isinstance(item, (types.FunctionType, types.BuiltinFunctionType, type)):
        space = getattr(item, "__module__", None)
        short = getattr(item, "__qualname__", "a function").replace("<locals>.", "")
        return f"{space}.{short}" if space not in (None, "builtins", "__main__") else short
    if isinstance(item, types.MethodType):
        return f"{type(item.__self__).__name__}.{item.__func__.__name__}"
    name = getattr(item, "__qualname__", None)
    return name if isinstance(name, str) and callable(item) else type(item).__name__
