"""A recorded step as a list of calls, which repeat it on the CPU without Python code.

The list leaves out views, allocations, and copies that autograd made only because the recording
keeps gradients alive. `cerebro.torch.runnable_calls` decides how each call runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from cerebro.torch.cpu_recorder import HIDDEN_WRITES, Call, Recording, find_written_tensors
from cerebro.torch.elementwise import Block, Operation, make_operations, measure_rounding
from cerebro.torch.native_calls import NativeCall, choose_draw, make_native_call
from cerebro.torch.nested_arguments import (
    address_of,
    form_of,
    map_tensors,
    pair_leaves,
    tensors_in,
)
from cerebro.torch.runnable_calls import find_binding, make_runnable, takes_number
from cerebro.torch.step_state import have_same_bits

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that allocate memory without writing to it."""

FILLS = {"ones_like", "zeros_like", "full_like", "ones", "zeros", "full", "arange", "scalar_tensor"}
"""Operators whose results depend only on shapes and numbers, not on the values of tensors."""


class Program:
    """Calls that repeat a recorded step; `kept` are the tensors of its results."""

    def __init__(self, recording: Recording, kept: Iterable[Any]) -> None:
        self.recording = recording
        """The recorded step; available until :meth:`free_recording` is called."""
        self._steps: dict[int, tuple[Any, tuple[Any, Any, Any]]] = {}
        self._items: list[tuple[Any, Any, Any] | list[Operation] | NativeCall] = []
        self._calls: list[tuple[Any, Any, Any]] = []
        self._blocks: list[Block] = []
        self._moved: dict[tuple[int, Any], tuple[Any, int]] = {}
        self._replaced = replaced = _find_needless_copies(recording, {address_of(t) for t in kept})
        substitute = partial(replaced.substitute, {})
        tensors: dict[int, Any] = {}
        self.containers: dict[int, tuple[list[Any], dict[str, Any]]] = {}
        """The arguments and keywords of each call, which may be changed before a replay."""
        for index, call in enumerate(recording.calls):
            if index in replaced.dropped or _is_left_out(call):
                continue
            args, kwargs, outs = (
                map_tensors(part, substitute) for part in (call.args, call.kwargs, call.outs)
            )
            self._steps[index] = make_runnable(call, args, kwargs, outs)
            self.containers[index] = (args, kwargs)
        for call in recording.calls:
            for tensor in map(substitute, tensors_in(call.outs)):
                if tensor.numel() and not recording.is_external(tensor):
                    tensors[address_of(tensor)] = tensor
        self._memory = tensors
        self.held_bytes = sum(t.untyped_storage().nbytes() for t in tensors.values())
        """The bytes of memory that only the program uses."""

    def free_recording(self) -> None:
        """Free the memory that only :meth:`differs_from` needs."""
        del self.recording, self._replaced, self._memory
        self._steps.clear()
        self._moved.clear()
        self.containers.clear()

    def finish(self, shared: Callable[[list[Any], Any], Any]) -> None:
        """Replace the recorded calls with faster ones that compute the same bits.

        This runs some of the calls and so changes the program's memory. ``shared(arguments,
        dtype)`` returns the tensor that replaces the number ``arguments[1]``.
        """
        constant = self._find_constants()
        items = self._items
        for index, (func, (run, args, kwargs)) in self._steps.items():
            if index in constant:
                run(*args, **kwargs)
                continue
            elementwise = None if isinstance(run, partial) else make_operations(func, args, kwargs)
            if elementwise is not None:
                if not items or not isinstance(items[-1], list):
                    items.append([])
                items[-1] += elementwise  # type: ignore[operator]
                continue
            native = make_native_call(func, run, args, kwargs)
            if native is not None:
                items.append(native)
                continue
            if takes_number(func, args, kwargs):
                args[1] = shared(args, args[0].dtype)
            drawn = choose_draw(func, args, kwargs)
            items.append((drawn or find_binding(run, args, kwargs), args, kwargs))
        self._compile_blocks()
        # Invalidate the results, to notice a result that the program fails to write.
        filled = {self._replaced.address(self.recording.calls[i].outs[0]) for i in constant}
        for address, tensor in self._memory.items():
            if address not in filled:
                _spoil(tensor)

    def _compile_blocks(self) -> None:
        """Compile the lists of elementwise operations into blocks."""
        for item in self._items:
            if isinstance(item, list):
                block = Block(item, measure_rounding())
                self._moved |= block.places
                self._calls.append((block.run, (), {}))
                self._blocks.append(block)
            elif isinstance(item, tuple):
                self._calls.append(item)
            else:
                self._calls.append((item.compute, (), {}))

    def find_place(self, container: Any, key: Any) -> tuple[Any, Any]:
        """Return the container and key from which the finished program reads a number."""
        return self._moved.get((id(container), key), (container, key))

    def _find_constants(self) -> set[int]:
        """Return the calls with constant results that no other call overwrites."""
        calls = {index: self.recording.calls[index] for index in self._steps}
        written = Counter(
            self._replaced.address(tensor)
            for call in calls.values()
            for tensor in _list_changed_tensors(call)
        )
        return {
            index
            for index, call in calls.items()
            if call.name in FILLS and written[self._replaced.address(call.outs[0])] == 1
        }

    def calls(self) -> list[tuple[Any, tuple[Any, ...], dict[str, Any] | None]]:
        """Return the functions, arguments and keywords of the calls with the current numbers."""
        return [(run, tuple(args), dict(kwargs) or None) for run, args, kwargs in self._calls]

    def run(self) -> None:
        # Autograd is off, because the calls include the backward pass.
        with torch._C._AutoDispatchBelowAutograd():
            for run, args, kwargs in self._calls:
                run(*args, **kwargs)

    def differs_from(self, other: Recording, free: set[tuple[int, int, Any]]) -> str | None:
        """Return how a recording for another batch differs; None if it is the same program.

        `free` are the numbers that may differ, each as (number of the call, 0 for arguments or 1
        for keywords, path).
        """
        ours = self.recording
        if [call.func for call in ours.calls] != [call.func for call in other.calls]:
            return "the step calls other operators than before"
        numbers: dict[int, int] = {}
        for index, (mine, its) in enumerate(zip(ours.calls, other.calls, strict=True)):
            if mine.name == "_local_scalar_dense":  # an optimizer reads its count of steps
                continue
            for which, (left, right) in enumerate(
                ((mine.args, its.args), (mine.kwargs, its.kwargs), (mine.outs, its.outs))
            ):
                for path, a, b in pair_leaves(left, right):
                    if (index, which, path) in free:
                        continue
                    if not _are_alike(a, b, ours, other, numbers, mine.section is not None):
                        return f"{mine.name}() has other arguments than before"
        return None


def _are_alike(
    one: Any, two: Any, ours: Recording, other: Recording, known: dict[int, int], known_code: bool
) -> bool:
    """Return whether an argument plays the same role in two recordings."""
    if not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)):
        return type(one) is type(two) and bool(one == two or (one != one and two != two))
    if form_of(one) != form_of(two) or ours.is_external(one) != other.is_external(two):
        return False
    mine, its = address_of(one), address_of(two)
    if ours.is_external(one):
        # A tensor that Python code makes may depend on anything, except in an optimizer.
        return mine == its or (known_code and have_same_bits(one, two))
    return known.setdefault(mine, its) == its


class _Replaced:
    """The memory that a program leaves out, and the tensors that replace it."""

    def __init__(self) -> None:
        self.dropped: set[int] = set()
        self.sources: dict[int, Any] = {}

    def address(self, tensor: Any) -> int:
        return address_of(self.sources.get(address_of(tensor), tensor))

    def substitute(self, views: dict[Any, Any], tensor: Any) -> Any:
        """Return the tensor in the program's memory; equal views are the same object."""
        source = self.sources.get(address_of(tensor))
        if source is not None:
            offset = source.storage_offset() + tensor.storage_offset()
            tensor = source.as_strided(tensor.shape, tensor.stride(), offset)
        offset = tensor.storage_offset()
        key = (address_of(tensor), offset, tensor.shape, tensor.stride(), tensor.dtype)
        return views.setdefault(key, tensor)


def _find_needless_copies(recording: Recording, kept: set[int]) -> _Replaced:
    """Return gradients that autograd copied only because the recording keeps them alive."""
    calls = recording.calls
    last = {}
    for index, call in enumerate(calls):
        for tensor in call.tensors():
            last[address_of(tensor)] = index
    replaced = _Replaced()
    allocated: dict[int, Any] = {}
    taken: set[int] = set()
    for index, call in enumerate(calls):
        if call.name == "new_empty_strided":
            allocated[address_of(call.outs[0])] = call.outs[0]
        if call.name != "copy_" or address_of(call.args[0]) not in allocated:
            continue
        copy, source = call.args[0], call.args[1]
        whole = allocated.pop(address_of(copy))
        if (
            isinstance(source, torch.Tensor)
            and form_of(copy) == form_of(whole) == form_of(source)
            and last[address_of(source)] == index
            and source.numel()
            and not recording.is_external(source)
            and address_of(source) not in replaced.sources
            and not {address_of(source), address_of(copy)} & (kept | taken)
        ):
            taken.add(address_of(source))
            replaced.sources[address_of(copy)] = source
            replaced.dropped.add(index)
    return replaced


def _is_left_out(call: Call) -> bool:
    """Return whether a call writes no memory, like a view or an allocation."""
    if call.name in ALLOCATES or call.about.is_view:
        return True
    if call.about.mutates or call.name in HIDDEN_WRITES:
        return False
    if not call.func._schema.returns:
        return False  # it raises if the data are invalid
    ins = {address_of(t) for t in tensors_in([call.args, call.kwargs])}
    return all(address_of(t) in ins for t in tensors_in(call.outs))


def _list_changed_tensors(call: Call) -> Iterable[Any]:
    return {address_of(t): t for t in find_written_tensors(call) + tensors_in(call.outs)}.values()


def _spoil(tensor: Any) -> None:
    """Fill a tensor's whole memory with an invalid value: NaN or -1."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((size,), (1,), 0)
    whole.fill_(math.nan if whole.is_floating_point() or whole.is_complex() else -1)
