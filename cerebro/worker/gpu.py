"""What a worker does on a GPU: the streams of units that overlap, and the copies of model states.

A worker process may run several units at once, each in a thread with its own stream; see
`cerebro.machine.turns`. The host is at most `AHEAD` batches ahead of the GPU: then the loader,
which has as many buffers, never waits while its thread has the turn.

States are copied to and from a GPU through memory that stays pinned. A copy from pageable memory
goes through a small buffer of the driver and waits for it; a copy from pinned memory is
asynchronous and as fast as the bus. Pinning takes longer than copying, so a worker pins one arena
and reuses it. All tensors of a state are copied into the arena after the work that was submitted to
the GPU; after one wait, the slot is packed from the arena. The small tensors are put together on
the GPU by a few kernels and leave in one copy; a large one leaves by itself, which takes the bus
longer than the call, and needs no second place on the GPU. Loading goes in the opposite direction,
with one copy for the whole state. The wait is for the current stream: a unit that overlaps others
has its own stream and arena, and does not wait for their work.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from cerebro.errors import one_line
from cerebro.machine import cuda, flags, generators, turns
from cerebro.machine.devices import is_gpu
from cerebro.machine.imports import find_whole_module
from cerebro.worker.log import SavedDescriptors
from cerebro.worker.trial_warnings import forget_shown

AHEAD = 4  # the most batches of a unit whose work may wait on its stream
ALIGNMENT = 256  # bytes, of a tensor in the arena
LARGE = 1 << 20  # bytes; the bus takes as long to copy them as the host to ask for the copy


def record_event() -> Any:
    """Return an event behind all work on PyTorch's current stream."""
    import torch

    event = torch.cuda.Event(blocking=True)  # the host sleeps: workers share cores
    event.record()
    return event


def wait_for(event: Any) -> None:
    """Wait for an event; other units run meanwhile."""
    if not event.query():
        with turns.give_away():
            event.synchronize()


class Ahead:
    """Keeps the host at most `AHEAD` batches ahead of the stream of a unit that others overlap."""

    def __init__(self) -> None:
        self._marks: deque[Any] = deque()

    def batch_queued(self) -> None:
        self._marks.append(record_event())
        if len(self._marks) > AHEAD:
            wait_for(self._marks.popleft())

    def finish(self) -> None:
        if self._marks:
            wait_for(self._marks.pop())
            self._marks.clear()


def _find_cuda(device: str) -> Any:
    """Return ``torch.cuda`` if PyTorch computes on `device`, else None."""
    torch = find_whole_module("torch") if is_gpu(device) else None
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def allocated_bytes(device: str) -> int:
    """Return the bytes of PyTorch's tensors on a GPU; 0 if it does not compute there."""
    return 0 if (found := _find_cuda(device)) is None else int(found.memory_allocated())


def usable_bytes(device: str) -> int:
    """Return the bytes of a GPU that this process has or could get; 0 if unknown."""
    found = _find_cuda(device)
    return 0 if found is None else int(found.mem_get_info()[0] + found.memory_reserved())


def measure_peak(device: str, work: Callable[[], object]) -> int:
    """Return how many bytes more PyTorch's tensors had, at most, while `work` ran; 0 if unknown."""
    before = allocated_bytes(device)
    if (found := _find_cuda(device)) is not None:
        found.reset_peak_memory_stats()
    work()
    return 0 if found is None else int(found.max_memory_allocated()) - before


class CudaStream:
    """A PyTorch stream for one thread's units, with its own random generator.

    A captured graph reads its seed and offset from the memory of the generator's state when it
    runs. Units that share a state would overwrite each other's, unless PyTorch keeps them for each
    graph.
    """

    def __init__(self, device: str) -> None:
        import torch

        torch.cuda.init()
        self._stream = torch.cuda.Stream(device)
        self._default = torch.cuda.default_generators[torch.device(device).index]
        self._state = self._default.clone_state()

    @contextmanager
    def make_current(self) -> Iterator[None]:
        """Make this the thread's current stream, and give its state to the GPU's generator."""
        import torch

        between = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._state)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._default.graphsafe_set_state(between)


def open_stream(device: str) -> CudaStream | None:
    """Return a new stream of a GPU; None if PyTorch does not compute there."""
    with suppress(ImportError):
        import torch

        if is_gpu(device) and torch.cuda.is_available():
            return CudaStream(device)
    return None


def _keep_cuda_generator() -> turns.PutBack:
    torch = find_whole_module("torch")
    if torch is None or not torch.cuda.is_initialized():
        return bool
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    state = default.graphsafe_get_state()
    return lambda: default.graphsafe_set_state(state)


def _keep_warnings() -> turns.PutBack:
    filters, show = warnings.filters, warnings.showwarning

    def put_back() -> None:
        warnings.filters = filters
        warnings.showwarning = show
        forget_shown()

    return put_back


KEPT: tuple[turns.Keep, ...] = (
    SavedDescriptors,
    lambda: generators.make_restorer("torch" in sys.modules, cuda=False),
    _keep_cuda_generator,
    _keep_warnings,
    flags.keep_choices,
)
"""All of the process's state that a unit changes while it runs."""


# --- states --------------------------------------------------------------------


class StateArena:
    """Host memory for one state at a time, pinned if `pin` is true and the system can pin more."""

    def __init__(self, pin: bool = True) -> None:
        self._pin = pin
        self._memory: Any = None
        self._reader: Any = None  # the device that may still be copying from the arena

    @property
    def nbytes(self) -> int:
        """The arena's size in bytes: the largest state so far, rounded up to a power of two."""
        return 0 if self._memory is None else int(self._memory.numel())

    def to_host(self, tree: Any) -> Any:
        """Copy a nested state's tensors from devices into the arena; return the new nested state.

        The copies stay valid until the arena is used again. Tensors in host memory stay unchanged.
        """
        import torch

        away = _find_leaves(tree, lambda value: _is_away(torch, value))
        if not away:
            return tree
        small = {key: tensor for key, tensor in away.items() if _size_of(tensor) < LARGE}
        places = self._make_places(torch, small | away)  # the small ones first
        packed = _pack(torch, small)
        if packed is not None:
            _copy_out(self._memory[: packed.numel()], packed)
        for key, tensor in away.items():
            if packed is None or key not in small:
                _copy_out(places[key], tensor)
        _await_devices(torch, {tensor.device for tensor in away.values()})
        return _replace_tensors(tree, places)

    def to_device(self, tree: Any, device: str) -> Any:
        """Move a nested state's tensors to a device by one copy; return the new nested state.

        Single numbers stay in host memory, where optimizers read their step counts. The result
        shares no memory with `tree` or with the arena, which the next state overwrites.
        """
        import torch

        here = _find_leaves(tree, lambda value: isinstance(value, torch.Tensor))
        if self._reader is not None:
            _await_devices(torch, {self._reader})
            self._reader = None
        if not here:
            return _replace_tensors(tree, here)
        places = self._make_places(torch, here)
        torch._foreach_copy_(list(places.values()), list(here.values()))
        flat = _copy_in(self._memory[: _room_for(here)], device)
        self._reader = torch.device(device)
        for key, there in _lay_out(flat, here).items():
            # PyTorch's optimizers keep single numbers in host memory.
            places[key] = there if there.numel() > 1 else places[key].clone()
        return _replace_tensors(tree, places)

    def _make_places(self, torch: Any, tensors: Mapping[int, Any]) -> dict[int, Any]:
        """Return C-contiguous views of the arena that have the tensors' types and shapes."""
        self._reserve(torch, _room_for(tensors))
        return _lay_out(self._memory, tensors)

    def _reserve(self, torch: Any, size: int) -> None:
        if self.nbytes >= size and self._memory is not None:
            return
        self._memory = None  # free the old memory before allocating more
        size = 1 << max(12, (size - 1).bit_length())
        if self._pin:
            try:
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                return
            except RuntimeError as error:  # the system cannot pin more
                self._pin = False
                cuda.tell_unpinned(one_line(str(error), 200))
        self._memory = torch.empty(size, dtype=torch.uint8)


def _await_devices(torch: Any, devices: Set[Any]) -> None:
    if turns.gives_away():
        wait_for(record_event())
    else:
        _synchronize(torch, devices)


def _synchronize(torch: Any, devices: Set[Any]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _copy_out(place: Any, tensor: Any) -> None:
    """Copy from a device to the arena on the current stream, asynchronously."""
    place.copy_(tensor.detach(), non_blocking=True)


def _copy_in(memory: Any, device: str) -> Any:
    """Copy the arena to a device on the current stream, asynchronously; return the new memory."""
    return memory.to(device, non_blocking=True, copy=True)


def _pack(torch: Any, tensors: Mapping[int, Any]) -> Any:
    """Copy tensors to one piece of their device's memory, on the current stream.

    Return None if there are too few, they are of several devices, or memory is short.
    """
    devices = {tensor.device for tensor in tensors.values()}
    if len(tensors) < 2 or len(devices) > 1:
        return None
    try:
        flat = _allocate(torch, _room_for(tensors), devices.pop())
    except torch.cuda.OutOfMemoryError:
        return None
    _copy_together(torch, list(_lay_out(flat, tensors).values()), list(tensors.values()))
    return flat


def _allocate(torch: Any, size: int, device: Any) -> Any:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _copy_together(torch: Any, places: Sequence[Any], tensors: Sequence[Any]) -> None:
    """Copy within a device, asynchronously, up to 64 tensors by one kernel.

    PyTorch has such a kernel for lists of one type whose pairs have equal strides. As integers of
    their size, numbers of other types keep every bit, and need no kernels of their own.
    """
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    groups: dict[int, list[tuple[Any, Any]]] = {}
    for place, tensor in zip(places, tensors, strict=True):
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            kind = kinds[tensor.element_size()]
            pair = (place.view(-1).view(kind), tensor.detach().view(-1).view(kind))
            groups.setdefault(tensor.element_size(), []).append(pair)
        else:
            place.copy_(tensor.detach(), non_blocking=True)
    for group in groups.values():
        torch._foreach_copy_(*map(list, zip(*group, strict=True)), non_blocking=True)


def _size_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _room_for(tensors: Mapping[int, Any]) -> int:
    """Return the bytes that tensors take, each from a multiple of `ALIGNMENT`."""
    return sum(size + -size % ALIGNMENT for size in map(_size_of, tensors.values()))


def _lay_out(memory: Any, tensors: Mapping[int, Any]) -> dict[int, Any]:
    """Return C-contiguous views of flat memory, in turn, of the tensors' types and shapes."""
    sizes = [part for size in map(_size_of, tensors.values()) for part in (size, -size % ALIGNMENT)]
    parts = memory[: sum(sizes)].split(sizes)[::2]
    return {
        key: part.view(like.dtype).view(like.shape)
        for (key, like), part in zip(tensors.items(), parts, strict=True)
    }


def _is_away(torch: Any, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _find_leaves(tree: Any, is_searched: Callable[[Any], bool]) -> dict[int, Any]:
    """Return the values for which ``is_searched(value)`` is true, at any depth, by id."""
    leaves: dict[int, Any] = {}

    def note(value: Any) -> Any:
        if is_searched(value):
            leaves[id(value)] = value
        return value

    _map_leaves(tree, note)
    return leaves


def _replace_tensors(tree: Any, places: Mapping[int, Any]) -> Any:
    def replace(value: Any) -> Any:
        if id(value) in places:
            return places[id(value)]
        return value.copy() if isinstance(value, np.ndarray) else value

    return _map_leaves(tree, replace)


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested containers of the same types, with ``function(leaf)`` for each leaf."""
    if isinstance(value, Mapping):
        items = {key: _map_leaves(item, function) for key, item in value.items()}
        return items if type(value) is dict else _make_like(value, items)
    if isinstance(value, (list, tuple)):
        parts = [_map_leaves(item, function) for item in value]
        return parts if type(value) is list else _make_like(value, tuple(parts))
    return function(value)


def _make_like(container: Any, items: Any) -> Any:
    try:
        return type(container)(items)
    except TypeError:  # packing refuses such a container, and names the allowed types
        return container if isinstance(container, tuple) else items
