"""Everything that a training step may change, and what it depends on besides.

With ``graph=True``, the user promises that the step's code does the same for every batch. Between
two units, something else may change: a function of PyTorch, the class of a module, a hook, a global
setting. `Surroundings` notices this.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import sys
import types
from array import array
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import cerebro._core as _core
from cerebro.machine import generators
from cerebro.torch.graph import (
    Different,
    StateParts,
    are_equal_numbers,
    have_same_bits,
    require_equal_generators,
)
from cerebro.torch.nested_arguments import TENSORS

MT19937_BYTES = 624 * 4 + 4
"""The size of the state of NumPy's generator: its words, and the position in them."""


class Entries:
    """A copy of modules' attributes and optimizers' states, to undo changes by Python code."""

    def __init__(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> None:
        parts = (vars(part) for module in modules for part in module.modules())
        states = (optimizer.state for optimizer in optimizers)
        self._parts = [
            (
                entries,
                {k: (v, dict(v) if isinstance(v, dict) else None) for k, v in entries.items()},
            )
            for entries in (*parts, *states)
        ]

    def restore(self) -> None:
        for entries, saved in self._parts:
            for key in [key for key in entries if key not in saved]:
                del entries[key]
            for key, (value, items) in saved.items():
                entries[key] = value
                if items is not None:
                    value.clear()
                    value.update(items)


class Gradients:
    """Memory for gradients accumulated over several batches, shared by all programs."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        self._buffers: dict[int, Any] = {}

    def prepare(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._buffers:
                self._buffers[index] = torch.zeros_like(parameter, requires_grad=False)

    def move_to_buffers(self) -> None:
        """Move the current gradients into the shared memory."""
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                gradient = parameter.grad
                if gradient is not None and gradient is not self._buffers[index]:
                    parameter.grad = self._buffers[index].copy_(gradient)

    def find_present(self) -> tuple[bool, ...]:
        """Return, for each parameter, whether it has a gradient."""
        return tuple(parameter.grad is not None for parameter in self._parameters)

    def arrange(self, present: Sequence[bool]) -> None:
        """Give gradients to the parameters that had one when :meth:`find_present` was called."""
        for index, (parameter, there) in enumerate(zip(self._parameters, present, strict=True)):
            parameter.grad = self._buffers[index] if there else None

    def list_pairs(self) -> list[tuple[Any, Any]]:
        """Return pairs of the parameters and their current gradients."""
        return [(parameter, parameter.grad) for parameter in self._parameters]

    def restore(self, gradients: list[tuple[Any, Any]]) -> None:
        """Set the gradients to what :meth:`list_pairs` returned."""
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def tensors(self) -> list[tuple[str, Any]]:
        """Return the memory by name."""
        return [(f"the gradient of parameter {i}", t) for i, t in self._buffers.items()]


Tensors = tuple[Any, list[Any]]
"""A copy of tensors: one buffer, and the tensors that it does not contain."""


class Listing:
    """The tensors and numbers of a state, and where the tensors are in memory.

    The C core copies and compares all memory without gaps at once. With an operator of PyTorch for
    each tensor, this would take longer than the step of a small network.
    """

    def __init__(self, tensors: list[Any], numbers: list[tuple[Any, Any, Any]]) -> None:
        self.tensors = tensors
        # The containers and keys of the optimizers' numbers in host memory.
        self.numbers = [(entries, key) for entries, key, _ in numbers]
        self._forms = list(map(_form_of, tensors))
        are_dense = list(map(_is_dense, tensors))
        self._dense = [index for index, is_dense in enumerate(are_dense) if is_dense]
        self._others = [index for index, is_dense in enumerate(are_dense) if not is_dense]
        self._in_regions = [tensors[index] for index in self._dense]
        self._spans = list(map(_span_of, self._in_regions))
        self._regions = _core.Regions(self._spans)

    def describes(self, tensors: list[Any], numbers: list[tuple[Any, Any, Any]]) -> bool:
        """Return whether a state has these tensors, in the same memory, and these numbers."""
        return (
            list(map(_form_of, tensors)) == self._forms
            and len(numbers) == len(self.numbers)
            and all(
                entries is there and key == name
                for (entries, key, _), (there, name) in zip(numbers, self.numbers, strict=True)
            )
        )

    def is_unchanged(self, tensors: list[Any], numbers: list[tuple[Any, Any, Any]]) -> bool:
        """Return whether a new listing of the state would equal this one."""
        return (
            len(tensors) == len(self.tensors)
            and all(map(is_, tensors, self.tensors))
            and self.describes(tensors, numbers)
        )

    def copy_tensors(self) -> Tensors:
        """Return a copy of all tensors."""
        self._require_place()
        buffer = np.empty(self._regions.nbytes, np.uint8)
        self._regions.save(buffer)
        return buffer, [self.tensors[index].detach().clone() for index in self._others]

    def restore(self, saved: Tensors) -> None:
        """Copy what :meth:`copy_tensors` returned into the tensors."""
        buffer, others = saved
        pairs = list(zip(self._others, others, strict=True))
        if self._is_in_place():
            self._regions.restore(buffer)
        else:
            pairs += zip(self._dense, self._tensors_in(buffer), strict=True)
        with torch.no_grad():
            for index, value in pairs:
                self.tensors[index].copy_(value)

    def find_difference(self, saved: Tensors, other: Tensors | None = None) -> int | None:
        """Return the index of a tensor that differs between two copies; None if none does.

        Without `other`, compare a copy with the tensors.
        """
        if other is None:
            self._require_place()
            region = self._regions.differing(saved[0])
            others = [self.tensors[index] for index in self._others]
        else:
            region = self._regions.differing(saved[0], other[0])
            others = other[1]
        if region is not None:
            return self._dense[region]
        for index, before, after in zip(self._others, saved[1], others, strict=True):
            if not have_same_bits(before, after):
                return index
        return None

    def _is_in_place(self) -> bool:
        return list(map(_span_of, self._in_regions)) == self._spans

    def _require_place(self) -> None:
        # The memory that a tensor had before may belong to something else now.
        if not self._is_in_place():
            raise Different("the step replaces its tensors")

    def _tensors_in(self, buffer: Any) -> list[Any]:
        tensors, start = [], 0
        for index in self._dense:
            _, nbytes, shape, stride, dtype = self._forms[index]
            # Copy to new memory, because a view with another type must be aligned to that type.
            flat = torch.empty(nbytes, dtype=torch.uint8)
            flat.copy_(torch.from_numpy(buffer[start : start + nbytes]))
            tensors.append(flat.view(dtype).as_strided(shape, stride))
            start += nbytes
        return tensors


def _form_of(tensor: Any) -> Any:
    return tensor.data_ptr(), tensor.nbytes, tensor.shape, tensor.stride(), tensor.dtype


def _span_of(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _is_dense(tensor: Any) -> bool:
    """Return whether an ordinary tensor in host memory has no gaps."""
    return (
        type(tensor) in TENSORS
        and tensor.layout == torch.strided
        and tensor.is_cpu
        and (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))
    )


class Copied:
    """A copy of a `StepState`."""

    __slots__ = ("generators", "numbers", "tensors")

    def __init__(self, tensors: Tensors, numbers: list[Any], generators: dict[str, Any]) -> None:
        self.tensors = tensors
        self.numbers = numbers
        self.generators = generators


class StepState(StateParts):
    """The values that a step may change, including accumulated gradients.

    They can be copied, restored and compared only while they are listed (:meth:`list_once`).
    """

    def __init__(
        self, modules: Sequence[Any], optimizers: Sequence[Any], gradients: Gradients
    ) -> None:
        super().__init__(modules, optimizers)
        self._gradients = gradients
        self._listing: Listing | None = None
        self._last_listing: Listing | None = None
        self._last_drawn: dict[str, Any] = {}

    @contextlib.contextmanager
    def list_once(self) -> Iterator[None]:
        """List the tensors only once in this block; :meth:`is_as_listed` checks the list."""
        tensors, numbers = self._list_tensors(), self._numbers()
        last = self._last_listing
        if last is None or not last.is_unchanged(tensors, numbers):
            last = self._last_listing = Listing(tensors, numbers)
        self._listing = last
        self._last_drawn = {}
        _read_last.forget_unless_certain()
        try:
            yield
        finally:
            self._listing = None

    def is_as_listed(self) -> bool:
        """Return whether the state still has the listed tensors, at the same addresses."""
        return self._get_listing().describes(self._list_tensors(), self._numbers())

    def copy_values(self) -> Copied:
        return Copied(self._get_listing().copy_tensors(), self._values(), self._read_generators())

    def restore(self, copied: Copied, drawn: Copied | None = None) -> None:
        """Restore everything in place.

        If `drawn` has the present states of the generators, restore only those that differ.
        """
        listing = self._get_listing()
        listing.restore(copied.tensors)
        for (entries, key), value in zip(listing.numbers, copied.numbers, strict=True):
            entries[key] = value
        self._restore_generators(copied.generators, None if drawn is None else drawn.generators)

    def require(self, copied: Copied) -> None:
        """Raise `Different` unless all values equal those of a copy, bit for bit."""
        now = Copied(copied.tensors, self._values(), self._read_generators())
        self._require_equal(self._get_listing().find_difference(copied.tensors), now, copied)

    def require_equal(self, one: Copied, two: Copied) -> None:
        """Raise `Different` unless all values of two copies are equal, bit for bit."""
        self._require_equal(self._get_listing().find_difference(one.tensors, two.tensors), one, two)

    def _require_equal(self, differing: int | None, one: Copied, two: Copied) -> None:
        if differing is not None:
            raise Different(f"{self._tensors()[differing][0]} of the graph differs")
        if one.numbers != two.numbers:
            raise Different("the optimizer counts its steps in host memory")
        require_equal_generators(one.generators, two.generators)

    def _get_listing(self) -> Listing:
        assert self._listing is not None
        return self._listing

    def _values(self) -> list[Any]:
        return [entries[key] for entries, key in self._get_listing().numbers]

    def _read_generators(self) -> dict[str, Any]:
        if torch.cuda.is_initialized():
            return super()._read_generators()
        # This is three times as fast as `generators.capture`.
        states = {
            "python": _read_last.read_python(),
            **_read_last.read_numpy(),
            "torch": torch.get_rng_state(),
        }
        # Keep the same objects for equal states, so that the next comparison ends at once.
        for name, last in self._last_drawn.items():
            if name in states and are_equal_numbers(last, states[name]):
                states[name] = last
        self._last_drawn = states
        return states

    def _restore_generators(self, drawn: dict[str, Any], now: dict[str, Any] | None) -> None:
        """Restore the random generators whose states differ from `now`."""
        if "numpy's position" not in drawn:
            generators.restore(drawn)
            return

        def has_moved(*names: str) -> bool:
            return now is None or not all(are_equal_numbers(now[n], drawn[n]) for n in names)

        if has_moved("python"):
            random.setstate(drawn["python"])
        if has_moved("numpy", "numpy's position"):
            np.random.set_state(("MT19937", drawn["numpy"], *drawn["numpy's position"]))
        if has_moved("torch"):
            torch.set_rng_state(drawn["torch"])

    def storages(self) -> list[int]:
        """Return the addresses of the storages of all tensors."""
        return [tensor.untyped_storage().data_ptr() for tensor in self._tensors_without_names()]

    def _tensors(self) -> list[tuple[str, Any]]:
        return super()._tensors() + self._gradients.tensors()

    def _tensors_without_names(self) -> list[Any]:
        return self._list_tensors() if self._listing is None else self._listing.tensors

    def _list_tensors(self) -> list[Any]:
        return super()._tensors_without_names() + [
            tensor for _, tensor in self._gradients.tensors()
        ]


class ReadLast:
    """The last states that were read from the generators of Python and NumPy.

    Reading them is slow, so a state is read again only if the generator's memory has changed.
    """

    def __init__(self) -> None:
        self._numpy: tuple[bytes, dict[str, Any]] | None = None
        self._python: tuple[bytes, Any] | None = None

    def forget_unless_certain(self) -> None:
        """Forget NumPy's state if different states may have the same memory."""
        if not _shows_left_normal():
            self._numpy = None

    def read_python(self) -> Any:
        """Return ``random.getstate()``."""
        memory = _read_python_memory()
        if memory and self._python is not None and self._python[0] == memory:
            return self._python[1]
        state = random.getstate()
        _, words, gauss = state
        expected = words[-1].to_bytes(4, sys.byteorder) + array("I", words[:-1]).tobytes()
        # The memory does not have the normal number that is left from the last draw.
        is_known = memory.startswith(expected) and gauss is None
        self._python = (memory, state) if is_known else None
        return state

    def read_numpy(self) -> dict[str, Any]:
        """Return the words of NumPy's generator, and the rest of its state."""
        words, memory = _read_numpy_words(), b""
        if words and _shows_left_normal():
            memory = _read_memory(np.random.mtrand._rand)
        if words and self._numpy is not None and self._numpy[0] == words + memory:
            return self._numpy[1]
        numpy = np.random.get_state(legacy=False)
        assert isinstance(numpy, dict)
        key, position = numpy["state"]["key"], numpy["state"]["pos"]
        state = {
            "numpy": key,
            "numpy's position": (position, numpy["has_gauss"], numpy["gauss"]),
        }
        # A draw always changes the words or the position, unless it takes the normal number that is
        # left from the last draw.
        is_known = words == key.tobytes() + int(position).to_bytes(4, sys.byteorder)
        is_certain = bool(memory) or not numpy["has_gauss"]
        self._numpy = (words + memory, state) if is_known and is_certain else None
        return state


_read_last = ReadLast()


def _read_numpy_words() -> bytes:
    """Return the words and position of NumPy's generator; empty if it is of another type."""
    generator = get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)


def _read_python_memory() -> bytes:
    """Return the memory of Python's generator; empty if it may not have the whole state."""
    generator = getattr(random, "_inst", None)
    if type(generator) is not random.Random or getattr(generator, "gauss_next", 0) is not None:
        return b""
    return _read_memory(generator, random.Random.__base__)


def _read_memory(thing: Any, kind: Any = None) -> bytes:
    """Return the bytes of an object after its header, up to the size of `kind`."""
    header = object.__basicsize__
    return ctypes.string_at(id(thing) + header, (kind or type(thing)).__basicsize__ - header)


@functools.cache
def _shows_left_normal() -> bool:
    """Return whether the memory of NumPy's generator has the normal number left from a draw."""
    if not hasattr(np.random.mtrand, "_rand"):
        return False
    generator = np.random.RandomState(1)
    generator.standard_normal()
    memory = _read_memory(generator)
    generator.standard_normal()
    return memory != _read_memory(generator)


_NAMESPACES = (
    torch, torch.nn.functional, torch.linalg, torch.special, torch.fft, torch.nn.Module,
    torch.Tensor, torch._C.TensorBase, type(torch._C._VariableFunctions), torch._C._nn,
)  # fmt: skip
"""Namespaces of functions that users call, or replace."""

_CALLABLES = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, type,
)  # fmt: skip


class Surroundings:
    """A record of what a step may depend on, between two of its units."""

    def __init__(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._functions = [_functions_in(vars(space)) for space in _NAMESPACES]
        self._names = len(vars(torch.Tensor))  # a new name hides a name of the base class
        self._objects, self._values = self._collect()

    def are_unchanged(self) -> bool:
        """Return whether nothing has changed since."""
        objects, values = self._collect()
        return (
            values == self._values
            and len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and self._names == len(vars(torch.Tensor))
            and all(_core.has_entries(*entries) for entries in self._functions)
        )

    def _collect(self) -> tuple[list[Any], list[Any]]:
        """Return what is compared by identity, and what is compared by value."""
        objects: list[Any] = []
        values: list[Any] = [_read_switches()]
        for part in (part for module in self._modules for part in module.modules()):
            kind, entries = type(part), vars(part)
            forward = entries.get("forward", kind.forward)
            objects += (kind, forward, getattr(forward, "__code__", None), kind.__call__)
            values.append([len(value) for key, value in entries.items() if key.endswith("_hooks")])
            values.append([(key, value) for key, value in entries.items() if _is_plain(value)])
        for module in self._modules:
            values += (
                (p.requires_grad, _count_hooks(p._backward_hooks), _count_hooks(_hooks_after(p)))
                for p in module.parameters()
            )
        for optimizer in self._optimizers:
            objects += (type(optimizer), type(optimizer).step, vars(optimizer).get("step"))
            values.append(len(optimizer._optimizer_step_pre_hooks))
            values.append(len(optimizer._optimizer_step_post_hooks))
        values += (
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch_optimizer._global_optimizer_post_hooks),
            [len(v) for k, v in vars(torch_module).items() if _is_hook_list(k, v)],
        )
        return objects, values


def _functions_in(names: Any) -> tuple[Any, tuple[str, ...], tuple[Any, ...]]:
    """Return a namespace with the names and values of its functions and classes."""
    functions = {key: value for key, value in names.items() if isinstance(value, _CALLABLES)}
    return names, tuple(functions), tuple(functions.values())


def _read_switches() -> tuple[Any, ...]:
    """Return the settings of PyTorch that operators depend on."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._get_mkldnn_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),  # on the CPU, too
        torch.backends.cuda.math_sdp_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a name or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _is_hook_list(name: str, value: Any) -> bool:
    return name.startswith("_global_") and name.endswith("_hooks") and hasattr(value, "__len__")


def _count_hooks(hooks: Any) -> int:
    return len(hooks) if hooks else 0


def _hooks_after(parameter: Any) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)
