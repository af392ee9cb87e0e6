"""Copy the states of the generators of `random` and NumPy (legacy) as memory.

Both libraries return and set a state by converting its 624 words one by one, which takes longer
than the rest of a short unit. The words lie in the generators' own structs, which are not
documented. So a probe looks for them in a new generator of each kind, and compares what it finds
with that generator's state. If it fails, there is no `Memory`, and callers use the libraries'
functions.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

import cerebro._core as _core

WORDS = 624
_WORDS_BYTES = 4 * WORDS
_NUMPY_AT = _WORDS_BYTES + 4
"""Where NumPy's state begins in a copy: 624 words, then `_REST`.

Before it is Python's, in the order of ``random.getstate()``: 624 words and its position.
"""

_REST = struct.Struct("=iid")
"""NumPy's position, whether there is a spare normal number, and that number."""

_REST_AT = _NUMPY_AT + _WORDS_BYTES


class Memory:
    """The memory of the two generators; `find_memory` returns it.

    `python` and `index` are the addresses of the words of Python's generator and of its position in
    them, `spare` that of NumPy's spare number. NumPy's other words and their position are in
    `bit_generator`.
    """

    def __init__(self, python: int, index: int, spare: int, bit_generator: Any) -> None:
        self.bit_generator = bit_generator  # a reference: its memory stays
        numpy = bit_generator.ctypes.state_address
        self._regions = _core.Regions(
            [
                (python, _WORDS_BYTES),
                (index, 4),
                (numpy, _WORDS_BYTES + 4),
                (spare - 8, 4),
                (spare, 8),
            ]
        )
        self._python = _python()

    def save(self) -> tuple[bytearray, float | None]:
        copy = bytearray(self._regions.nbytes)
        self._regions.save(copy)
        return copy, self._python.gauss_next

    def restore(self, saved: tuple[bytearray, float | None]) -> None:
        self._regions.restore(saved[0])
        self._python.gauss_next = saved[1]

    def to_state(self) -> dict[str, Any]:
        """Return the present states as `cerebro.machine.generators.capture` does."""
        return self.state_of(self.save())

    @staticmethod
    def state_of(saved: tuple[bytearray, float | None]) -> dict[str, Any]:
        """Return states from `save` as `cerebro.machine.generators.capture` does."""
        copy, gauss = saved
        position, has_spare, spare = _REST.unpack_from(copy, _REST_AT)
        return {
            "python": np.frombuffer(copy, np.uint32, WORDS + 1),
            "python_gauss": gauss,
            "numpy": np.frombuffer(copy, np.uint32, WORDS, _NUMPY_AT),
            "numpy_position": position,
            "numpy_gauss": spare if has_spare else None,
        }

    def from_state(self, state: Mapping[str, Any]) -> None:
        """Set the states to those of `to_state`, which the caller has checked."""
        spare = state["numpy_gauss"]
        rest = _REST.pack(state["numpy_position"], spare is not None, spare or 0.0)
        copy = bytearray(state["python"].tobytes() + state["numpy"].tobytes() + rest)
        self.restore((copy, state["python_gauss"]))


def find_memory() -> Memory | None:
    """Return the generators' memory; None if it is not known."""
    located = _locate_memory()
    # np.random.set_bit_generator exchanges it.
    if located is None or _legacy()._bit_generator is not located.bit_generator:
        return None
    return located


def _legacy() -> Any:
    return np.random.mtrand._rand


@functools.cache
def _locate_memory() -> Memory | None:
    try:
        legacy, python = _legacy(), _python()
        kinds = type(python), type(legacy), type(legacy._bit_generator)
        if kinds != (random.Random, np.random.RandomState, np.random.MT19937):
            return None
        words, index = (id(python) + offset for offset in _python_offsets())
        located = Memory(words, index, id(legacy) + _spare_offset(), legacy._bit_generator)
        return located if _is_right(located) else None
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _python() -> Any:
    return random.getstate.__self__  # type: ignore[attr-defined]


def _bytes_of(generator: Any) -> bytes:
    return ctypes.string_at(id(generator), type(generator).__basicsize__)


def _python_offsets() -> tuple[int, int]:
    """Return the offsets of the words and the position in a generator of `random`."""
    generator = random.Random(1)
    offsets = set()
    for _ in range(2):
        generator.random()
        words = generator.getstate()[1]
        at = _bytes_of(generator).index(array("I", words[:-1]).tobytes())
        position = struct.pack("=i", words[-1])
        near = (at - 4, at + _WORDS_BYTES)
        offsets.add((at, *(i for i in near if _bytes_of(generator)[i : i + 4] == position)))
    ((at, index),) = offsets
    return at, index


def _spare_offset() -> int:
    """Return the offset of the spare number, after its flag, in NumPy's legacy generator."""
    generator = np.random.RandomState(1)
    offsets = set()
    for _ in range(2):
        generator.standard_normal()
        state: Any = generator.get_state(legacy=False)
        at = _bytes_of(generator).index(struct.pack("=d", state["gauss"]))
        has_spare = struct.unpack_from("=i", _bytes_of(generator), at - 8)[0]
        generator.standard_normal()
        if (has_spare, struct.unpack_from("=i", _bytes_of(generator), at - 8)[0]) == (1, 0):
            offsets.add(at)
    (at,) = offsets
    return at


def _is_right(made: Memory) -> bool:
    """Return whether the memory has the states that the libraries' functions return."""
    state, legacy = made.to_state(), np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    spare = legacy["gauss"] if legacy["has_gauss"] else None
    return (
        random.getstate()[1:] == (tuple(state["python"].tolist()), state["python_gauss"])
        and bool((state["numpy"] == legacy["state"]["key"]).all())
        and (state["numpy_position"], state["numpy_gauss"]) == (legacy["state"]["pos"], spare)
    )
