"""A recorded step as a list of calls, which repeat it on the CPU without Python code.

The list leaves out views, allocations, and copies that autograd made only because the recording
keeps gradients alive. If an operator has a variant that writes into existing memory, the program
calls this variant. A `RecordedProgram` is a program with its inputs and results, and the numbers
that are set before each replay.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cerebro._core as _core
from cerebro.torch import native_calls
from cerebro.torch.cpu_recorder import (
    ALLOCATES,
    FILLS,
    HIDDEN_WRITES,
    Call,
    Recording,
    address_of,
    all_tensors,
    as_list,
    find_written_tensors,
    form_of,
    leaves_of,
    map_tensors,
    pair_leaves,
    tensors_in,
)
from cerebro.torch.optimizer_numbers import COUNTED, Containers, Hole, Numbers
from cerebro.torch.step_state import Batch, Values, copy_values, detach_value, fill, have_same_bits

RESIZES = {
    "binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss",
}  # fmt: skip
"""Operators whose `out=` variants temporarily change the shape of `out`, mostly with a warning."""

ASKS_FOR_GRADIENTS = {"mkldnn_rnn_layer"}
"""Operators that compute differently, with different last bits, if gradients are off."""

_ARITHMETIC = {
    f"aten.{name}{overload}"
    for name in ("add", "sub", "mul", "div")
    for overload in ("_.Tensor", ".out")
}

_ABOUT_MEMORY = {"dtype", "layout", "device", "pin_memory", "memory_format"}


class Program:
    """Calls that repeat a recorded step; `results` has the tensors that it returns."""

    def __init__(self, recording: Recording, results: Any) -> None:
        self.recording = recording  # deleted by `free_recording`
        self._steps: dict[int, tuple[Any, tuple[Any, Any, Any]]] = {}
        self._items: list[Any] = []  # lists of elementwise operations, native calls, other calls
        self._calls: list[tuple[Any, Any, Any]] = []
        self._blocks: list[native_calls.Block] = []
        self._moved: dict[tuple[int, Any], tuple[Any, int]] = {}
        self._memory: dict[int, Any] = {}
        kept = {address_of(tensor) for tensor in all_tensors(results)}
        self._replaced = replaced = _find_needless_copies(recording, kept)
        substitute = replaced.substitute
        self.containers: Containers = {}  # may be changed before a replay
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
                    self._memory[address_of(tensor)] = tensor
        self.held_bytes = sum(t.untyped_storage().nbytes() for t in self._memory.values())
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
            elementwise = None
            if not isinstance(run, partial):
                elementwise = native_calls.make_operations(func, args, kwargs)
            if elementwise is not None:
                if not items or not isinstance(items[-1], list):
                    items.append([])
                items[-1] += elementwise
                continue
            native = native_calls.make_native_call(func, run, args, kwargs)
            if native is not None:
                items.append(native)
                continue
            if takes_number(func, args, kwargs):
                args[1] = shared(args, args[0].dtype)
            drawn = native_calls.choose_draw(func, args, kwargs)
            items.append((drawn or find_binding(run, args, kwargs), args, kwargs))
        self._compile_blocks()
        # Invalidate the results, to notice a result that the program fails to write.
        filled = {self._replaced.address(self.recording.calls[i].outs[0]) for i in constant}
        for address, tensor in self._memory.items():
            if address not in filled:
                _spoil(tensor)

    def _compile_blocks(self) -> None:
        for item in self._items:
            if isinstance(item, list):
                block = native_calls.Block(item, native_calls.measure_rounding())
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
        written: Counter[int] = Counter()
        for call in calls.values():
            changed = find_written_tensors(call) + tensors_in(call.outs)
            written.update({self._replaced.address(tensor) for tensor in changed})
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
        self._views: dict[Any, Any] = {}

    def address(self, tensor: Any) -> int:
        return address_of(self.sources.get(address_of(tensor), tensor))

    def substitute(self, tensor: Any) -> Any:
        """Return the tensor in the program's memory; equal views are the same object."""
        source = self.sources.get(address_of(tensor))
        if source is not None:
            offset = source.storage_offset() + tensor.storage_offset()
            tensor = source.as_strided(tensor.shape, tensor.stride(), offset)
        offset = tensor.storage_offset()
        key = (address_of(tensor), offset, tensor.shape, tensor.stride(), tensor.dtype)
        return self._views.setdefault(key, tensor)


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
    if call.about.writes or call.name in HIDDEN_WRITES:
        return False
    if not call.func._schema.returns:
        return False  # it raises if the data are invalid
    ins = {address_of(t) for t in tensors_in([call.args, call.kwargs])}
    return all(address_of(t) in ins for t in tensors_in(call.outs))


def _spoil(tensor: Any) -> None:
    """Fill a tensor's whole memory with an invalid value: NaN or -1."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((size,), (1,), 0)
    whole.fill_(math.nan if whole.is_floating_point() or whole.is_complex() else -1)


# --- how a call runs again ---------------------------------------------------------


def make_runnable(
    call: Call, args: list[Any], kwargs: dict[str, Any], outs: list[Any]
) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return an operator, and (function, arguments, keywords) that repeat a call into `outs`."""
    if call.about.writes:
        addresses = {address_of(t) for t in tensors_in([args, kwargs])}
        results = [t if _is_made(t, addresses) else None for t in outs]
        if not any(t is not None for t in results):
            return call.func, (call.func, args, kwargs)
        return call.func, (partial(_call_and_copy, call.func._op, results), args, kwargs)
    if call.name in ("clone", "_to_copy"):
        copy = torch.ops.aten.copy_.default
        return copy, (copy, [outs[0], args[0]], {})
    copying = call.func, (partial(_call_and_copy, call.func._op, outs), args, kwargs)
    if call.name in ASKS_FOR_GRADIENTS:
        mode = torch.enable_grad if call.has_gradients else torch.no_grad
        run = partial(_call_in_mode, mode, call.func._op)
        return call.func, (partial(_call_and_copy, run, outs), args, kwargs)
    overload = _find_out_variant(call.func)
    are_tensors = all(isinstance(t, torch.Tensor) for t in outs)
    if overload is None or not are_tensors or call.name in RESIZES:
        return copying
    variant, names, allowed = overload
    is_list = isinstance(call.func._schema.returns[0].type, torch.ListType)

    def name_outputs(memory: list[Any]) -> dict[str, Any]:
        rest = {key: value for key, value in kwargs.items() if key in allowed}
        return rest | ({names[0]: memory} if is_list else dict(zip(names, memory, strict=True)))

    # Some variants need an `out` of another shape than their result, so try them on other memory.
    beside = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in outs]
    expected = [(address_of(t), form_of(t)) for t in beside]
    variant(*args, **name_outputs(beside))
    if [(address_of(t), form_of(t)) for t in beside] != expected:
        return copying
    filled = name_outputs(outs)
    kwargs.clear()
    kwargs.update(filled)
    return variant, (variant, args, kwargs)


def takes_number(func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator converts the number ``args[1]`` to a tensor in every call."""
    if str(func) not in _ARITHMETIC or isinstance(args[1], (torch.Tensor, bool)):
        return False
    dtype = args[0].dtype
    are_same = all(t.dtype == dtype for t in all_tensors([args, kwargs]))
    return dtype in (torch.float32, torch.float64) and are_same


def find_binding(run: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return PyTorch's function, which parses faster, if it calls exactly this operator."""
    if isinstance(run, partial):
        return run
    name = str(run._schema.name).partition("::")[2]
    function = getattr(torch.Tensor if name.endswith("_") else torch, name, None)
    if function is not None and not hasattr(function, "__code__"):
        tried = _Tried()
        try:
            with tried:
                function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError):
            return run._op
        if [func for func, _, _ in tried.calls] == [run]:
            called = all_tensors([list(tried.calls[0][1]), dict(tried.calls[0][2])])
            if all(map(is_, called, all_tensors([args, kwargs]))):
                return function
    return run._op


class _Tried(TorchDispatchMode):  # type: ignore[misc]
    """A context that records operators and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_made(value: Any, given: set[int]) -> bool:
    """Return whether a result is a tensor in new memory."""
    return isinstance(value, torch.Tensor) and value.numel() > 0 and address_of(value) not in given


def _call_in_mode(mode: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode():
        return run(*args, **kwargs)


def _call_and_copy(run: Callable[..., Any], outs: list[Any], *args: Any, **kwargs: Any) -> None:
    for to, value in zip(outs, as_list(run(*args, **kwargs)), strict=True):
        if isinstance(to, torch.Tensor) and to.numel():
            to.copy_(value)


@functools.cache
def _find_out_variant(func: Any) -> Any:
    """Return an operator's `out=` overload and the names of its outputs and other arguments."""
    schema = func._schema
    expected = [(a.name, str(a.type)) for a in schema.arguments if a.name not in _ABOUT_MEMORY]
    names = {a.name for a in schema.arguments}
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        arguments = variant._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        fits = [pair for pair in rest if pair[0] not in _ABOUT_MEMORY] == expected
        fits = fits and names.issuperset(name for name, _ in rest)
        if outs and fits and len(outs) == len(schema.returns):
            return variant, outs, {name for name, _ in rest}
    return None


# --- a program with its memory -----------------------------------------------------


class RecordedProgram:
    def __init__(
        self,
        program: Program,
        static: Batch,
        values: Values,
        gradients: list[tuple[Any, Any]],
        holes: list[Hole],
        free: set[Any],
    ) -> None:
        self.program = program
        self.static = static
        self.gradients = gradients
        self.free = free
        self.compared = 0
        copied_bytes = sum(t.untyped_storage().nbytes() for t in all_tensors(static))
        self.held_bytes = program.held_bytes + copied_bytes
        self.leaves = leaves_of(program.recording)
        self.values = {name: detach_value(value) for name, value in values.items()}
        self._tensors: dict[Any, Any] = {}  # numbers that are tensors: by group, formula and type
        self._constants: dict[Any, Any] = {}
        self._holes = holes
        program.finish(self._share_tensor)
        placed = [
            Hole(hole.group, hole.formula, *program.find_place(hole.container, hole.key))
            for hole in holes
            if hole.key is not None
        ]
        self._holes = placed + [
            Hole(group, formula, tensor, None)
            for (group, formula, _), tensor in self._tensors.items()
        ]
        self._counted = [hole for hole in self._holes if hole.formula in COUNTED]
        self._set_for: Any = None
        self._without_python: _core.Replay | None = None
        self._is_python_needed = False

    def _share_tensor(self, args: list[Any], dtype: Any) -> Any:
        """Return a tensor with the number ``args[1]``; equal numbers share a tensor."""
        for hole in self._holes:
            if hole.container is args and hole.key == 1:
                hole.key = None  # the tensor is set instead
                key = (hole.group, hole.formula, dtype)
                if key not in self._tensors:
                    self._tensors[key] = torch.zeros((), dtype=dtype)
                return self._tensors[key]
        constant = (repr(args[1]), dtype)
        return self._constants.setdefault(constant, torch.tensor(args[1], dtype=dtype))

    def set_numbers(self, numbers: Numbers) -> None:
        """Set the numbers that come from the optimizers' settings, and from their steps."""
        holes = self._counted
        if numbers.settings is not self._set_for:
            holes, self._set_for = self._holes, numbers.settings
            self._without_python = None
        if not holes:
            return
        counts = numbers.counts()
        values = {group: numbers.values(group, counts[group]) for group in {h.group for h in holes}}
        for hole in holes:
            value = values[hole.group][hole.formula]
            if hole.key is None:
                hole.container.fill_(value)
            else:
                hole.container[hole.key] = value

    def make_replay(self, numbers: Numbers) -> _core.Replay | None:
        """Return the step with its present numbers for `_core.run_unit`, unless it needs Python."""
        if self._without_python is None and not self._is_python_needed:
            try:
                self._without_python = _core.Replay(
                    inputs=[describe_input(value) for value in self.static.values()],
                    calls=self.program.calls(),
                    numbers=[_describe_number(hole, numbers) for hole in self._counted],
                    metrics=[describe_metric(name, value) for name, value in self.values.items()],
                    context=torch._C._AutoDispatchBelowAutograd,
                )
            except NeedsPython:
                self._is_python_needed = True
        return self._without_python

    def replay(self, batch: Batch) -> Values:
        fill(self.static, batch)
        self.program.run()
        return copy_values(self.values)


class NeedsPython(Exception):
    """The C core cannot run a part of a step, or read its results."""


def describe_input(value: Any) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    """Return a tensor's address, type, shape and strides."""
    if not isinstance(value, torch.Tensor):
        raise NeedsPython
    return value.data_ptr(), _name_of(value.dtype), tuple(value.shape), value.stride()


def _describe_number(hole: Hole, numbers: Numbers) -> tuple[str, float, float, int, int, str]:
    """Return how a number is computed from the count of steps, and its address."""
    lr, beta, steps = numbers.read_inputs(hole.group, hole.formula)
    count = float(steps) + 1
    for step in (count, count + 1, 3 * count + 1000):
        expected = numbers.values(hole.group, step)[hole.formula]
        if _core.step_number(hole.formula, lr, beta, step) != expected:
            raise NeedsPython
    if isinstance(hole.container, array):
        place = hole.container.buffer_info()[0] + hole.key * hole.container.itemsize
        dtype = "float64"
    elif hole.key is None:
        place, dtype = hole.container.data_ptr(), _name_of(hole.container.dtype)
    else:
        raise NeedsPython
    if dtype not in ("float32", "float64") or steps.dtype != torch.float32:
        raise NeedsPython
    return hole.formula, lr, beta, steps.data_ptr(), place, dtype


def describe_metric(name: str, value: Any) -> tuple[str, Any, Any]:
    """Return a metric's name, value and weight: numbers, addresses and types, or no weight."""
    value, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    return name, _describe_value(value), None if weight is None else _describe_value(weight)


def _describe_value(value: Any) -> Any:
    """Return a number, or the address and type of a tensor with one number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.data_ptr(), _name_of(value.dtype)
    if isinstance(value, (int, float)):
        return float(value)
    raise NeedsPython


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
