"""Tensors of other frameworks that lie about themselves: packing refuses them by their place.

The producer here is made with ctypes: a capsule that says whatever a test wants, over a block of
memory that is large enough for what is true of it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dlpack_structs import I64, DLTensor, Legacy, Versioned

import cerebro._core as _core
from cerebro.errors import StateError

FLOAT32 = (2, 32, 1)
MEMORY = np.arange(64, dtype=np.float32)


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Liar:
    """A tensor that says of itself what it was told to."""

    def __init__(
        self,
        shape: tuple[int, ...] | None,
        strides: tuple[int, ...] | None = None,
        *,
        ndim: int | None = None,
        dtype: tuple[int, int, int] = FLOAT32,
        offset: int = 0,
        data: int | None = -1,
        device: tuple[int, int] = (1, 0),
        asked: tuple[int, int] = (1, 0),
        version: tuple[int, int] | None = None,
        flags: int = 0,
        memory: np.ndarray[Any, Any] = MEMORY,
    ) -> None:
        self._dims = [
            None if dims is None else (I64 * len(dims))(*dims) for dims in (shape, strides)
        ]
        pointers = [None if d is None else ctypes.cast(d, ctypes.POINTER(I64)) for d in self._dims]
        tensor = DLTensor(
            memory.ctypes.data if data == -1 else data,
            *device,
            len(shape or ()) if ndim is None else ndim,
            *dtype,
            *pointers,
            offset,
        )
        self.asked = asked
        self.version = version
        self.requested: Any = None
        if version is None:
            self.managed: Any = Legacy(tensor)
        else:
            self.managed = Versioned(*version, flags=flags, tensor=tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.asked

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> Any:
        self.requested = max_version
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        return new_capsule(ctypes.addressof(self.managed), name, None)


def packed(liar: Any) -> Any:
    return _core.unpack_state(_core.pack_state({"t": liar}))["t"]


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3), (1, 99)])
def test_valid_tensors_are_packed(version: tuple[int, int] | None) -> None:
    liar = Liar((2, 3), (-3, 1), offset=12, version=version)
    assert packed(liar).tolist() == [[3, 4, 5], [0, 1, 2]]
    assert liar.requested == (1, 3)
    assert packed(Liar((2, 3), version=version)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert packed(Liar((), version=version)).tolist() == 0
    assert packed(Liar((2**40, 0), (7, 7), data=None, version=version)).shape == (2**40, 0)
    assert packed(Liar((1, 4), (2**62, 2), version=version)).tolist() == [[0, 2, 4, 6]]


@pytest.mark.parametrize("asked", [(1, 0), (3, 0)])
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_pinned_memory_is_the_hosts(
    asked: tuple[int, int], version: tuple[int, int] | None
) -> None:
    """Some say so of the object only, some of its tensor too."""
    for device in ((1, 0), (3, 0)):
        liar = Liar((2, 3), asked=asked, device=device, version=version)
        assert packed(liar).tolist() == [[0, 1, 2], [3, 4, 5]]


BIG = 2**62
LIES: dict[str, tuple[Callable[..., Liar], str]] = {
    "negative": (lambda **v: Liar((-1,), **v), "an impossible shape"),
    "overflow": (lambda **v: Liar((BIG, BIG), (0, 0), **v), "an impossible shape"),
    "wraps to nothing": (lambda **v: Liar((2**32, 2**32), (0, 0), **v), "an impossible shape"),
    "strides": (lambda **v: Liar((2,), (BIG,), **v), "strides that lead outside the address space"),
    "least stride": (lambda **v: Liar((2,), (-(2**63),), **v), "strides that lead out"),
    "sum of strides": (lambda **v: Liar((3, 3), (2**59, 2**59), **v), "strides that lead out"),
    "below": (lambda **v: Liar((4,), (-1,), data=8, **v), "strides that lead out"),
    "offset": (lambda **v: Liar((4,), offset=2**64 - 8, **v), "strides that lead out"),
    "too many": (lambda **v: Liar((1,) * 65, **v), "has 65 dimensions"),
    "far too many": (lambda **v: Liar((1,), ndim=2**31 - 1, **v), "has 2147483647 dimensions"),
    "less than none": (lambda **v: Liar((1,), ndim=-1, **v), "has -1 dimensions"),
    "no shape": (lambda **v: Liar(None, ndim=2, **v), "has dimensions but no shape"),
    "no memory": (lambda **v: Liar((4,), data=None, **v), "has no memory"),
    "lanes": (lambda **v: Liar((4,), dtype=(2, 32, 4), **v), "4 lanes"),
    "bits": (lambda **v: Liar((4,), dtype=(0, 4, 1), **v), "code 0 with 4 bits"),
    "code": (lambda **v: Liar((4,), dtype=(200, 32, 1), **v), "code 200 with 32 bits"),
    "device": (lambda **v: Liar((4,), device=(2, 0), **v), "on another device .DLPack type 2"),
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("version", [None, (1, 1)])
def test_invalid_tensors_are_refused_with_their_path(
    name: str, version: tuple[int, int] | None
) -> None:
    make, message = LIES[name]
    with pytest.raises(StateError, match=f"the tensor at '/t' .*{message}"):
        packed(make(version=version))


def test_versions_that_are_not_known_are_not_read() -> None:
    with pytest.raises(StateError, match=r"at '/t' uses DLPack 2\.0"):
        packed(Liar((4,), ndim=-7, version=(2, 0)))


def test_read_only_tensors_are_not_written_to() -> None:
    memory = np.zeros(4, np.float32)
    state = _core.pack_state({"t": np.ones(4, np.float32)})
    kind = _core.pack_state({"t": Liar((4,), memory=memory, version=(1, 1))})
    assert _core.load_into(kind, {"t": Liar((4,), memory=memory, version=(1, 1), flags=1)}) is None
    ones = _core.pack_state({"t": Liar((4,), memory=np.ones(4, np.float32), version=(1, 1))})
    assert _core.load_into(ones, {"t": Liar((4,), memory=memory, version=(1, 1))}) is not None
    assert memory.tolist() == [1, 1, 1, 1]
    assert _core.unpack_state(state)["t"].tolist() == [1, 1, 1, 1]


def test_invalid_capsules_are_refused() -> None:
    class Wrong(Liar):
        given: Any = None

        def __dlpack__(self, **_: Any) -> Any:
            return self.given

    for given in (None, 3, new_capsule(1, b"used_dltensor", None), new_capsule(1, None, None)):
        wrong = Wrong((1,))
        wrong.given = given
        with pytest.raises(StateError, match="the tensor at '/t'"):
            packed(wrong)
    wrong.asked = (1,)  # type: ignore[assignment]
    with pytest.raises(StateError, match="the tensor at '/t'"):
        packed(wrong)


def test_arrays_with_impossible_strides_are_refused() -> None:
    """NumPy takes any strides; it is not asked to."""
    array = np.lib.stride_tricks.as_strided(np.zeros(1), (2, 2), (2**62, 2**62))
    with pytest.raises(StateError, match="at '/t' has strides that lead outside the address space"):
        packed(array)
    with pytest.raises(StateError, match="at '/t' has an impossible shape"):
        packed(np.broadcast_to(np.zeros(1), (2**30, 2**29)))


def test_capsules_are_let_go() -> None:
    class Kept(Liar):
        def __dlpack__(self, **options: Any) -> Any:
            self.capsule = super().__dlpack__(**options)
            return self.capsule

    good, bad = Kept((4,)), Kept((-1,))
    packed(good)
    with pytest.raises(StateError):
        packed(bad)
    fresh = new_capsule(1, None, None)
    counts = [sys.getrefcount(capsule) for capsule in (good.capsule, bad.capsule, fresh)]
    assert counts[0] == counts[1] == counts[2]
