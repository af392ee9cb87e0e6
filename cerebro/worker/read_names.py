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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cerebro.machine.mappings import flatten


@dataclass(frozen=True)
class ReadNames:
    """What one call of ``build`` has read; nested names are joined by dots."""

    unread: tuple[str, ...] = ()  # the configuration's names that it has not read
    sought: tuple[str, ...] = ()  # missing names, as in ``config.get("lr", 0.1)``


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

    def note_reads(self, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """Return a configuration as a dict that notes what is read from it, also nested."""
        noted = dict.__new__(_Noted)
        noted.update(
            (name, self.note_reads(value, f"{prefix}{name}.") if type(value) is dict else value)
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
        if self._list_alive():
            gc.collect()  # build's inner functions may refer to it and to each other
        return bool(self._list_alive())

    def _list_alive(self) -> list[_Noted]:
        return [noted for reference in self._given if (noted := reference()) is not None]

    def may_have_caused(self, error: BaseException) -> bool:
        """Return whether ``build`` may have raised an error because its dict is not a plain one.

        Code that takes only plain dicts, such as ``jax.jit`` and ``yaml.safe_dump``, raises a
        TypeError or AssertionError, or shows the dict or its class in the message.
        """
        shown = [_Noted.__name__, *map(repr, self._list_alive())]
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


def _note_key(method: Any) -> Any:
    """Return a method of dict that first notes the key."""

    def note_and_call(self: _Noted, key: Any, *rest: Any) -> Any:
        self.note(key)
        return method(self, key, *rest)

    return note_and_call


def _note_all(method: Any) -> Any:

    def note_and_call(self: _Noted, *arguments: Any) -> Any:
        for key in dict.keys(self):
            self.note(key)
        return method(self, *arguments)

    return note_and_call


class _Noted(dict[str, Any]):
    """A dict that notes what is read from it; its copies and pickles are plain dicts."""

    __slots__ = ("__weakref__", "prefix", "reads")  # no other attributes, as a plain dict

    prefix: str
    reads: Reads

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain dict: the reads of a dict made by ``type(config)(...)`` are not noted."""
        return dict(*args, **kwargs)

    def note(self, key: Any) -> None:
        self.reads.add(f"{self.prefix}{key}", found=dict.__contains__(self, key))

    __getitem__ = _note_key(dict.__getitem__)
    get = _note_key(dict.get)
    __contains__ = _note_key(dict.__contains__)
    pop = _note_key(dict.pop)
    setdefault = _note_key(dict.setdefault)
    __delitem__ = _note_key(dict.__delitem__)
    # Because this class defines `__iter__`, C code such as ``f(**config)`` also calls these
    # methods.
    __iter__ = _note_all(dict.__iter__)
    __reversed__ = _note_all(dict.__reversed__)
    keys = _note_all(dict.keys)
    values = _note_all(dict.values)
    items = _note_all(dict.items)
    popitem = _note_all(dict.popitem)
    copy = __copy__ = _note_all(dict.copy)
    __eq__ = _note_all(dict.__eq__)
    __or__ = _note_all(dict.__or__)
    __ror__ = _note_all(dict.__ror__)
    __hash__ = None

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(_make_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (_make_plain(self),)


def _make_plain(value: Any) -> Any:
    """Return nested dicts as plain ones, which counts as reading them."""
    if not isinstance(value, _Noted):
        return value
    return {key: _make_plain(item) for key, item in value.items()}
