"""Save and restore the global random generators of `random`, NumPy (legacy) and torch.

Their states are part of a trial's state, saved and restored around every unit. So trials that share
a process do not affect each other's random numbers, and evaluation does not change the generators.
The states of `random` and NumPy are copied as memory where possible (`Memory`), because both
libraries return and set a state by converting its 624 words one by one, which takes longer
than the rest of a short unit. The words lie in the generators' own structs, which are not
documented. So a probe looks for them in a new generator of each kind, and compares what it finds
with that generator's state. If it fails, there is no `Memory`, and callers use the libraries'
functions.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

import cerebro._core as _core
from cerebro.errors import StateError
from cerebro.machine.imports import find_whole_module

# random.getstate() is (version, 624 words and a position, the spare normal number).
_PYTHON_VERSION = 3
DEEPEST = 64
"""The deepest nesting of containers in a `state_dict`."""


def seed_all(seed: int, torch: bool) -> None:
    """Seed `random`, NumPy and, if `torch`, torch on every device, with 0 <= `seed` < 2**32."""
    random.seed(seed)
    np.random.seed(seed)
    if torch:
        _seed_everywhere(_torch(), seed)


def seed_anew() -> None:
    """Seed the generators of a forked process from the system, as in a newly started program."""
    random.seed()
    np.random.seed()
    torch = find_whole_module("torch")
    if torch is not None:
        torch.default_generator.seed()


def capture(torch: bool, cuda: bool = True) -> dict[str, Any]:
    """Return the states of the generators as arrays and numbers, about 10 KB.

    `torch` includes torch's generators, `cuda` those of CUDA, if this process uses it. `cuda` must
    be False for a trial on the CPU: its states would depend on other work in the process.
    """
    generators = find_memory()
    state = _state_of_both() if generators is None else generators.state_of(generators.save())
    if torch:
        module = _torch()
        state["torch"] = module.get_rng_state().numpy()
        if cuda and module.cuda.is_initialized():
            state["torch_cuda"] = module.cuda.get_rng_state().numpy()
    return state


def _state_of_both() -> dict[str, Any]:
    _, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    return {
        "python": np.frombuffer(array("I", words), dtype=np.uint32),
        "python_gauss": gauss,
        "numpy": legacy["state"]["key"],
        "numpy_position": int(legacy["state"]["pos"]),
        "numpy_gauss": float(legacy["gauss"]) if legacy["has_gauss"] else None,
    }


def restore(state: Mapping[str, Any]) -> None:
    """Restore a state that `capture` returned; raise StateError if it is not such a state."""
    try:
        states = _check_state(state)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is not a state of the random generators: {error}") from error
    generators = find_memory()
    if generators is None:
        _restore_both(states)
    else:
        generators.from_state(states)
    if "torch" in state:
        module = _torch()
        module.set_rng_state(_bytes(state["torch"]))
        if "torch_cuda" in state and module.cuda.is_initialized():
            module.cuda.set_rng_state(_bytes(state["torch_cuda"]))


def _check_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of `random` and NumPy: a wrong position would be an address."""
    checked: dict[str, Any] = {
        "python": _check_words(state["python"], WORDS + 1),
        "numpy": _check_words(state["numpy"], WORDS),
        "numpy_position": state["numpy_position"],
    }
    for position in (int(checked["python"][-1]), checked["numpy_position"]):
        if type(position) is not int or not 0 <= position <= WORDS:
            raise ValueError(f"{position!r} is no position in {WORDS} words")
    for name in ("python_gauss", "numpy_gauss"):
        spare = checked[name] = state[name]
        if not (spare is None or isinstance(spare, float)):
            raise TypeError(f"{name} is {spare!r}, not a float or None")
    return checked


def _check_words(value: Any, count: int) -> Any:
    words = np.asarray(value)
    if words.shape != (count,) or words.dtype.kind not in "iu":
        raise ValueError(f"{words.dtype} of shape {words.shape} instead of {count} words")
    if words.dtype != np.uint32 and not 0 <= words.min() <= words.max() < 2**32:
        raise ValueError("a word does not have 32 bits")
    return words.astype(np.uint32, copy=False)


def _restore_both(state: Mapping[str, Any]) -> None:
    words = tuple(state["python"].tolist())
    random.setstate((_PYTHON_VERSION, words, state["python_gauss"]))
    gauss = state["numpy_gauss"]
    np.random.set_state(
        ("MT19937", state["numpy"], state["numpy_position"], int(gauss is not None), gauss or 0.0)
    )


@contextmanager
def preserve_generators(torch: bool, seed: int | None = None) -> Iterator[None]:
    """Restore the generators after the block, torch's too if `torch`; before it, apply a `seed`."""
    put_back = make_restorer(torch)
    try:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
            if torch:
                _seed_started(_torch(), seed)
        yield
    finally:
        put_back()


_held = threading.RLock()


def _renew_lock() -> None:
    """Let a forked process begin with a free lock: its holder may be a thread of the parent."""
    global _held
    _held = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def reserve_generators(torch: bool, seed: int | None = None) -> Iterator[None]:
    """Like `preserve_generators`, but only one thread at a time is in such a block; others wait.

    Threads share the generators. So units of searches in several threads of a process that trains
    itself take turns; otherwise they would draw one another's numbers.
    """
    with _held, preserve_generators(torch, seed):
        yield


def make_restorer(torch: bool, *, cuda: bool = True) -> Callable[[], None]:
    """Return a function that restores the present state; faster than `capture` and `restore`.

    `cuda` says whether CUDA's generator is part of it, if it has started.
    """
    put_both_back = _make_restorer_of_both()
    module = _torch() if torch else None
    numbers = None if module is None else module.get_rng_state()
    on_gpu = cuda and module is not None and module.cuda.is_initialized()
    drawn = module.cuda.get_rng_state() if module is not None and on_gpu else None

    def put_back() -> None:
        put_both_back()
        if module is not None:
            module.set_rng_state(numbers)
            if drawn is not None:
                module.cuda.set_rng_state(drawn)

    return put_back


def _make_restorer_of_both() -> Callable[[], None]:
    generators = find_memory()
    if generators is None:
        python, legacy = random.getstate(), np.random.get_state(legacy=False)

        def put_back() -> None:
            random.setstate(python)
            np.random.set_state(legacy)

        return put_back
    saved = generators.save()

    def copy_back() -> None:
        if find_memory() is generators:
            generators.restore(saved)
        else:  # NumPy has another bit generator since
            _restore_both(generators.state_of(saved))

    return copy_back


def _seed_everywhere(module: Any, seed: int) -> None:
    """Seed torch as `torch.manual_seed` does.

    That function keeps the seed with a formatted stack for each kind of device that has not
    started, even if this build of PyTorch cannot use it. This takes longer than building a small
    network.
    """
    accelerator = getattr(module, "accelerator", None)  # absent in older releases
    if accelerator is None or accelerator.current_accelerator() is not None:
        module.manual_seed(seed)
    else:
        module.default_generator.manual_seed(seed)


def _seed_started(module: Any, seed: int) -> None:
    """Seed torch as `torch.manual_seed` does, but only the devices that have started."""
    others = [getattr(module, name, None) for name in ("mps", "xpu", "mtia")]
    if module.cuda.is_initialized() or any(map(_may_have_started, others)):
        module.manual_seed(seed)
    else:
        module.default_generator.manual_seed(seed)


def _may_have_started(device: Any) -> bool:
    if device is None:
        return False
    started = getattr(device, "is_initialized", None)
    return bool(device.is_available() if started is None else started())


def uses_torch(model: object) -> bool:
    """Return whether a model uses torch; call this once, after `build`."""
    if getattr(model, "framework", None) == "torch":
        return True
    module: Any = find_whole_module("torch")
    if module is None or not hasattr(module, "Tensor"):
        return False
    kinds = (module.Tensor, module.nn.Module, module.optim.Optimizer)

    def of_torch(value: object) -> bool:
        return isinstance(value, kinds)

    return _holds(getattr(model, "__dict__", {}), of_torch) or _holds(_state_of(model), of_torch)


def uses_cuda(model: object) -> bool:
    """Return whether a model that uses torch has tensors on a GPU; call this after `build`."""
    module = _torch()
    return bool(module.cuda.is_initialized()) and _holds(
        _state_of(model), lambda value: isinstance(value, module.Tensor) and value.is_cuda, DEEPEST
    )


def _state_of(model: object) -> object:
    take = getattr(model, "state_dict", None)
    return take() if callable(take) else None


def _holds(value: object, wanted: Callable[[Any], bool], depth: int = 4) -> bool:
    if wanted(value):
        return True
    items: Any = value.values() if isinstance(value, Mapping) else value
    has_items = isinstance(value, (Mapping, list, tuple)) and depth > 0
    return has_items and any(_holds(item, wanted, depth - 1) for item in items)


def _torch() -> Any:
    import torch

    return torch


def _bytes(state: Any) -> Any:
    """Return a copy of a generator's state as the byte tensor that torch requires."""
    module = _torch()
    if isinstance(state, module.Tensor):
        return state.to(module.uint8).clone()
    return module.from_numpy(np.array(state, dtype=np.uint8))


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
        of_python, of_numpy = (python, _WORDS_BYTES), (numpy, _WORDS_BYTES + 4)
        regions = [of_python, (index, 4), of_numpy, (spare - 8, 4), (spare, 8)]
        self._regions = _core.Regions(regions)
        self._python = _python()

    def save(self) -> tuple[bytearray, float | None]:
        copy = bytearray(self._regions.nbytes)
        self._regions.save(copy)
        return copy, self._python.gauss_next

    def restore(self, saved: tuple[bytearray, float | None]) -> None:
        self._regions.restore(saved[0])
        self._python.gauss_next = saved[1]

    @staticmethod
    def state_of(saved: tuple[bytearray, float | None]) -> dict[str, Any]:
        """Return what `capture` returns of Python's and NumPy's generators."""
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
        """Set the states to those of `state_of`, which the caller has checked."""
        spare = state["numpy_gauss"]
        rest = _REST.pack(state["numpy_position"], spare is not None, spare or 0.0)
        copy = bytearray(state["python"].tobytes() + state["numpy"].tobytes() + rest)
        self.restore((copy, state["python_gauss"]))


def find_memory() -> Memory | None:
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
    state, wanted = made.state_of(made.save()), _state_of_both()
    return all(np.array_equal(state[name], wanted[name]) for name in wanted)
