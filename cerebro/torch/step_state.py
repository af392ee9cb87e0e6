"""Everything that a training step may change, and what it depends on besides.

With ``graph=True``, the user promises that the step's code does the same for every batch. Between
two units, something else may change: a function of PyTorch, the class of a module, a hook, a global
setting. `Surroundings` notices this.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import cerebro._core as _core
from cerebro.machine import generators
from cerebro.torch.cpu_recorder import TENSORS

Batch = dict[str, Any]
Values = dict[str, Any]


class Different(Exception):
    """A replayed step differs from the ordinary step."""


def describe_error(what: str, error: Exception) -> str:
    """Return why steps are not recorded: `what`, unless a replay differs, and the error."""
    if isinstance(error, Different):
        return f"it is not the ordinary step: {error}"
    return f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


# --- batches and values ------------------------------------------------------------


def shape_of(batch: Batch) -> Any:
    """Return the properties of a batch, apart from values, that a recorded step depends on."""
    return tuple(
        (name, tuple(value.shape), value.dtype, value.stride())
        if isinstance(value, torch.Tensor)
        else (name, type(value), repr(value))
        for name, value in batch.items()
    )


def fill(static: Batch, batch: Batch) -> None:
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            static[name].copy_(value, non_blocking=True)


def clone_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(clone_value(item) for item in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def detach_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(detach_value(item) for item in value)
    return value.detach() if isinstance(value, torch.Tensor) else value


def copy_values(values: Mapping[str, Any]) -> Values:
    """Return a copy of metrics, or of a batch."""
    return {name: clone_value(value) for name, value in values.items()}


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""The type of integers that has the bits of an element, by the element's size in bytes."""


def have_same_bits(left: Any, right: Any) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(have_same_bits, left, right))
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        alike = left.shape == right.shape and left.element_size() == right.element_size()
        return alike and bool(torch.equal(_bits(left), _bits(right)))
    return bool(left == right)


def _bits(tensor: Any) -> Any:
    flat = tensor.detach().contiguous().reshape(-1)
    # Whole words compare several times as fast as bytes.
    return flat.view(_WORDS[flat.element_size()]) if flat.numel() else flat


# --- what Python code may change ---------------------------------------------------


class Entries:
    """A copy of modules' attributes and optimizers' states, to undo changes by Python code."""

    def __init__(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> None:
        parts = (vars(part) for module in modules for part in module.modules())
        states = (optimizer.state for optimizer in optimizers)
        self._parts: list[tuple[Any, dict[Any, tuple[Any, Any]]]] = []
        for entries in (*parts, *states):
            saved = {k: (v, dict(v) if isinstance(v, dict) else None) for k, v in entries.items()}
            self._parts.append((entries, saved))

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
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def tensors(self) -> list[tuple[str, Any]]:
        return [(f"the gradient of parameter {i}", t) for i, t in self._buffers.items()]


# --- values ------------------------------------------------------------------------

Tensors = tuple[Any, list[Any]]
"""A copy of tensors: one buffer, and the tensors that it does not contain."""


class Listing:
    """The tensors and numbers of a state, and where the tensors are in memory."""

    def __init__(self, tensors: list[Any], numbers: list[tuple[Any, Any]]) -> None:
        self.tensors = tensors
        self.numbers = numbers
        self._forms = list(map(_form_of, tensors))
        are_dense = list(map(_is_dense, tensors))
        self._dense = [index for index, is_dense in enumerate(are_dense) if is_dense]
        self._others = [index for index, is_dense in enumerate(are_dense) if not is_dense]
        self._in_regions = [tensors[index] for index in self._dense]
        self._spans = [self._forms[index][:2] for index in self._dense]
        # The C core copies and compares all host memory without gaps at once. With an operator of
        # PyTorch for each tensor, this would take longer than the step of a small network.
        self._regions = _core.Regions(self._spans)

    def describes(self, tensors: list[Any], numbers: list[tuple[Any, Any]]) -> bool:
        """Return whether a state has these tensors, in the same memory, and these numbers."""
        return (
            list(map(_form_of, tensors)) == self._forms
            and len(numbers) == len(self.numbers)
            and all(
                entries is there and key == name
                for (entries, key), (there, name) in zip(numbers, self.numbers, strict=True)
            )
        )

    def is_unchanged(self, tensors: list[Any], numbers: list[tuple[Any, Any]]) -> bool:
        """Return whether a new listing of the state would equal this one."""
        return (
            len(tensors) == len(self.tensors)
            and all(map(is_, tensors, self.tensors))
            and self.describes(tensors, numbers)
        )

    def copy_tensors(self) -> Tensors:
        self._require_place()
        buffer = np.empty(self._regions.nbytes, np.uint8)
        self._regions.save(buffer)
        return buffer, [self.tensors[index].detach().clone() for index in self._others]

    def restore(self, saved: Tensors) -> None:
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
        """Return the index of a tensor that differs from a copy, or between two copies, or None."""
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
        return [(t.data_ptr(), t.nbytes) for t in self._in_regions] == self._spans

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


def _is_dense(tensor: Any) -> bool:
    """Return whether an ordinary tensor in host memory has no gaps."""
    return (
        type(tensor) in TENSORS
        and tensor.layout == torch.strided
        and tensor.is_cpu
        and (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))
    )


@dataclass
class Copied:
    """A copy of a `StepState`."""

    tensors: Tensors
    numbers: list[Any]
    generators: dict[str, Any]

    def has_drawn_since(self, before: Copied) -> bool:
        """Return whether a random generator differs from that of an earlier copy."""
        return _find_drawn(self.generators, before.generators) is not None


class StepState:
    """The values that a step may change: of modules, optimizers, gradients and generators.

    They can be copied, restored and compared only while they are listed (:meth:`list_once`).
    """

    def __init__(
        self, modules: Sequence[Any], optimizers: Sequence[Any], gradients: Gradients
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._gradients = gradients
        self._listing: Listing | None = None
        self._last_listing: Listing | None = None

    @contextlib.contextmanager
    def list_once(self) -> Iterator[None]:
        """List the tensors only once in this block; :meth:`is_as_listed` checks the list."""
        tensors, numbers = self._list_tensors(), self._numbers()
        last = self._last_listing
        if last is None or not last.is_unchanged(tensors, numbers):
            last = self._last_listing = Listing(tensors, numbers)
        self._listing = last
        try:
            yield
        finally:
            self._listing = None

    def forget_listing(self) -> None:
        """Release the tensors of the last listing."""
        self._last_listing = None

    def is_as_listed(self) -> bool:
        """Return whether the state still has the listed tensors, at the same addresses."""
        return self._get_listing().describes(self._list_tensors(), self._numbers())

    def copy_values(self) -> Copied:
        return Copied(self._get_listing().copy_tensors(), self._values(), generators.capture(True))

    def restore(self, copied: Copied, drawn: Copied | None = None) -> None:
        """Restore everything in place.

        If `drawn` has the present states of the generators, and they are equal, leave them alone.
        """
        listing = self._get_listing()
        listing.restore(copied.tensors)
        for (entries, key), value in zip(listing.numbers, copied.numbers, strict=True):
            entries[key] = value
        if drawn is None or _find_drawn(drawn.generators, copied.generators) is not None:
            generators.restore(copied.generators)

    def require(self, copied: Copied) -> None:
        """Raise `Different` unless all values equal those of a copy, bit for bit."""
        now = Copied(copied.tensors, self._values(), generators.capture(True))
        self._require_equal(self._get_listing().find_difference(copied.tensors), now, copied)

    def require_equal(self, one: Copied, two: Copied) -> None:
        """Raise `Different` unless all values of two copies are equal, bit for bit."""
        self._require_equal(self._get_listing().find_difference(one.tensors, two.tensors), one, two)

    def find_changed(self, one: Copied, two: Copied) -> str | None:
        """Return the name of a tensor that differs between two copies; None if none does."""
        index = self._get_listing().find_difference(one.tensors, two.tensors)
        return None if index is None else self._tensors()[index][0]

    def _require_equal(self, differing: int | None, one: Copied, two: Copied) -> None:
        if differing is not None:
            raise Different(f"{self._tensors()[differing][0]} of the graph differs")
        if one.numbers != two.numbers:
            raise Different("the optimizer counts its steps in host memory")
        name = _find_drawn(one.generators, two.generators)
        if name is not None:
            raise Different(f"the step draws from a random generator of the host ({name})")

    def _get_listing(self) -> Listing:
        assert self._listing is not None
        return self._listing

    def _values(self) -> list[Any]:
        return [entries[key] for entries, key in self._get_listing().numbers]

    def places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors_without_names()]

    def storages(self) -> list[int]:
        return [tensor.untyped_storage().data_ptr() for tensor in self._tensors_without_names()]

    def _tensors(self) -> list[tuple[str, Any]]:
        tensors: list[tuple[str, Any]] = []
        for module in self._modules:
            tensors += module.named_parameters()
            tensors += module.named_buffers()
        for optimizer in self._optimizers:
            for number, entries in enumerate(optimizer.state.values()):
                tensors += [
                    (f"the optimizer's {key!r} of parameter {number}", value)
                    for key, value in _list_items(entries)
                    if isinstance(value, torch.Tensor)
                ]
        return tensors + self._gradients.tensors()

    def _tensors_without_names(self) -> list[Any]:
        """Return the tensors of `_tensors` in the same order, but faster: names take time."""
        return self._list_tensors() if self._listing is None else self._listing.tensors

    def _list_tensors(self) -> list[Any]:
        tensors: list[Any] = []
        for module in self._modules:
            tensors += _tensors_of(module)
        for optimizer in self._optimizers:
            for entries in optimizer.state.values():
                if isinstance(entries, Mapping):
                    tensors += [v for v in entries.values() if isinstance(v, torch.Tensor)]
        return tensors + [tensor for _, tensor in self._gradients.tensors()]

    def _numbers(self) -> list[tuple[Any, Any]]:
        """Return the containers and keys of the numbers that optimizers keep in host memory."""
        return [
            (entries, key)
            for optimizer in self._optimizers
            for entries in optimizer.state.values()
            for key, value in _list_items(entries)
            if isinstance(value, (int, float))
        ]


def _find_drawn(now: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    """Return the name of a random generator whose state differs; None if none does."""
    return next((name for name in before if not np.array_equal(now[name], before[name])), None)


def _list_items(entries: Any) -> list[tuple[Any, Any]]:
    return list(entries.items()) if isinstance(entries, Mapping) else []


_LISTS_TENSORS = ("named_parameters", "named_buffers", "_named_members", "named_modules")
"""Methods of a module that decide which tensors it has."""


def _tensors_of(module: Any) -> list[Any]:
    kind, base = type(module), torch.nn.Module
    if any(getattr(kind, name, None) is not getattr(base, name, None) for name in _LISTS_TENSORS):
        named = [*module.named_parameters(), *module.named_buffers()]
        return [tensor for _, tensor in named]
    parts: dict[int, Any] = {}
    if not _add_parts(module, parts):
        parts = {id(part): part for part in module.modules()}
    parameters: dict[int, Any] = {}
    buffers: dict[int, Any] = {}
    for part in parts.values():
        parameters |= {id(t): t for t in part._parameters.values() if t is not None}
        buffers |= {id(t): t for t in part._buffers.values() if t is not None}
    return [*parameters.values(), *buffers.values()]


_NAMED_MODULES = torch.nn.Module.named_modules


def _add_parts(module: Any, parts: dict[int, Any]) -> bool:
    """Add ``module.modules()`` in its order, but faster; return whether no module overrides it."""
    parts[id(module)] = module
    for child in module._modules.values():
        if child is not None and id(child) not in parts and not _add_parts(child, parts):
            return False
    return type(module).named_modules is _NAMED_MODULES


# --- surroundings ------------------------------------------------------------------

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
            for p in module.parameters():
                hooks = (p._backward_hooks or (), p._post_accumulate_grad_hooks or ())
                values.append((p.requires_grad, *map(len, hooks)))
        for optimizer in self._optimizers:
            objects += (type(optimizer), type(optimizer).step, vars(optimizer).get("step"))
            values.append(len(optimizer._optimizer_step_pre_hooks))
            values.append(len(optimizer._optimizer_step_post_hooks))
        shared = [
            hooks
            for name, hooks in vars(torch_module).items()
            if name.startswith("_global_") and name.endswith("_hooks")
        ]
        shared.append(torch_optimizer._global_optimizer_pre_hooks)
        shared.append(torch_optimizer._global_optimizer_post_hooks)
        values.append(list(map(len, shared)))
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
