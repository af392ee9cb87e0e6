"""Count which values of a configuration ``build`` reads: one that nobody reads is often a typo.

In the hop check, and in the first unit of trials that have an unread name, ``build`` gets a dict
that notes each read; elsewhere it gets a plain dict. A configuration that ``build`` iterates over
or copies counts as read. If the model keeps the dict, or ``build`` fails because of it, the model
is built again with a plain dict, and everything counts as read. So no model is trained, checked or
packed with a dict that notes.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cerebro.machine.mappings import flatten


@dataclass(frozen=True)
class ReadNames:
    """What one call of ``build`` has read; nested names are joined by dots."""

    unread: tuple[str, ...] = ()
    """The configuration's names that it has not read."""
    sought: tuple[str, ...] = ()
    """The missing names that it has looked for, as in ``config.get("lr", 0.1)``."""


def names_of(config: Mapping[str, Any]) -> list[str]:
    """Return the names that only ``build`` can read; `batch_size` is read by the loader."""
    return [name for name in flatten(config) if name != "batch_size"]


class Reads:
    """The reads of one configuration."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self._sought: set[str] = set()
        self._given: list[weakref.ref[_Noted]] = []
        self._gave_up = False

    def note_reads(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration as a dict that notes what is read from it."""
        return self._wrap_nested(config, "")

    def _wrap_nested(self, values: Mapping[str, Any], prefix: str) -> _Noted:
        noted = dict.__new__(_Noted)
        noted.update(
            (name, self._wrap_nested(value, f"{prefix}{name}.") if type(value) is dict else value)
            for name, value in values.items()
        )
        noted.prefix, noted.reads = prefix, self
        self._given.append(weakref.ref(noted))
        return noted

    def add(self, name: str, *, found: bool) -> None:
        """Note that a name was read, or looked for although it is missing."""
        (self._read if found else self._sought).add(name)

    def is_held(self) -> bool:
        """Return whether something still has a dict that was given to ``build``."""
        if self._is_alive():
            gc.collect()  # build's inner functions may refer to it and to each other
        return self._is_alive()

    def _is_alive(self) -> bool:
        return any(reference() is not None for reference in self._given)

    def may_have_caused(self, error: BaseException) -> bool:
        """Return whether ``build`` may have raised an error because its dict is not a plain one.

        Code that takes only plain dicts, such as ``jax.jit`` and ``yaml.safe_dump``, raises a
        TypeError or AssertionError, or shows the dict or its class in the message.
        """
        alive = [noted for reference in self._given if (noted := reference()) is not None]
        shown = [_Noted.__name__, *map(repr, alive)]
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, (TypeError, AssertionError)):
                return True
            if any(text in str(cause) for text in shown):
                return True
            cause = cause.__cause__ or cause.__context__
        return False

    def give_up(self) -> None:
        self._gave_up = True

    def list_names(self, config: Mapping[str, Any]) -> ReadNames:
        if self._gave_up:
            return ReadNames()
        unread = tuple(name for name in names_of(config) if name not in self._read)
        return ReadNames(unread, tuple(sorted(self._sought)))


class _Noted(dict[str, Any]):
    """A dict that notes what is read from it; its copies and pickles are plain dicts."""

    __slots__ = ("__weakref__", "prefix", "reads")  # no other attributes, as a plain dict

    prefix: str
    reads: Reads

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain dict: ``type(config)(...)`` makes a dict that nobody notes."""
        return dict(*args, **kwargs)

    def _note(self, key: Any) -> None:
        self.reads.add(f"{self.prefix}{key}", found=dict.__contains__(self, key))

    def note_all(self) -> None:
        for key in dict.keys(self):
            self._note(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self._note(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().setdefault(key, default)

    def __delitem__(self, key: str) -> None:
        self._note(key)
        super().__delitem__(key)

    def popitem(self) -> tuple[str, Any]:
        self.note_all()
        return super().popitem()

    # Because this class defines `__iter__`, C code such as ``f(**config)`` also calls these
    # methods.
    def __iter__(self) -> Iterator[str]:
        self.note_all()
        return super().__iter__()

    def __reversed__(self) -> Iterator[str]:
        self.note_all()
        return super().__reversed__()

    def keys(self) -> Any:
        self.note_all()
        return super().keys()

    def values(self) -> Any:
        self.note_all()
        return super().values()

    def items(self) -> Any:
        self.note_all()
        return super().items()

    def __eq__(self, other: object) -> bool:
        self.note_all()
        return super().__eq__(other)

    __hash__ = None

    def copy(self) -> dict[str, Any]:
        self.note_all()
        return super().copy()

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(_make_plain(self), memo)

    def __or__(self, other: Any) -> Any:
        self.note_all()
        return super().__or__(other)

    def __ror__(self, other: Any) -> Any:
        self.note_all()
        return super().__ror__(other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (_make_plain(self),)


def _make_plain(value: Any) -> Any:
    """Return nested dicts as plain ones, which counts as reading them."""
    if not isinstance(value, _Noted):
        return value
    return {key: _make_plain(item) for key, item in value.items()}
