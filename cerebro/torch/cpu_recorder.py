"""Record the operators of a training step on the CPU.

A `Recording` stores every ATen call below autograd: forward pass, backward pass and optimizer. It
keeps their memory allocated, so the same calls on the same memory repeat the step
(`cerebro.torch.cpu_program`).

`Recording.refusal` names something that no program can repeat: a number read back (``.item()``), a
shape that depends on data, a change to memory that belongs neither to the state nor to the step.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS_BACK = {"_nested_tensor_from_mask_left_aligned"}
"""Operators that read values back to Python but lack PyTorch's tag for it."""

HIDDEN_WRITES = {"native_batch_norm": (3, 4)}
"""Indices of arguments that an operator writes, but that its schema does not mark as written."""

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), torch.utils.__file__)


class Facts:
    """Facts from an operator's schema, which is slow to query."""

    __slots__ = (
        "is_of_profiler", "is_view", "mutates", "name", "reads_data", "shape_of_data",
        "takes_generator", "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = str(schema.name).partition("::")[2]
        self.is_of_profiler = func.namespace == "profiler"
        self.mutates = bool(schema.is_mutable)
        self.reads_data = torch.Tag.data_dependent_output in func.tags or self.name in READS_BACK
        self.shape_of_data = torch.Tag.dynamic_output_shape in func.tags
        self.is_view = torch.Tag.inplace_view in func.tags
        self.takes_generator = any("Generator" in str(a.type) for a in schema.arguments)
        self.writes = [
            (index, argument.name)
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]


facts = functools.cache(Facts)
_STRIDED = torch.strided


@dataclass(slots=True)
class Call:
    """A call of an operator, with its arguments and results at the time of the call."""

    func: Any
    about: Facts
    args: list[Any]
    kwargs: dict[str, Any]
    outs: list[Any]
    section: int | None
    has_gradients: bool = field(default_factory=torch.is_grad_enabled)

    @property
    def name(self) -> str:
        return self.about.name

    def tensors(self) -> list[Any]:
        return tensors_in([self.args, self.kwargs, self.outs])


class Recording(TorchDispatchMode):  # type: ignore[misc]
    """A context that records the operators that run in it; they compute as usual.

    `writable` are the addresses of the storages that the step may change.
    """

    def __init__(self, writable: Iterable[int]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.refusal: str | None = None
        """Why the step cannot be repeated from these calls."""
        self.leaves_traces = False
        """Whether the step changed a tensor or a generator that is not part of the state."""
        self.section: int | None = None
        """The number of the optimizer that is stepping; None outside optimizers."""
        self._writable = set(writable)
        self._made: set[int] = set()
        self._lifted: set[int] = set()
        self._addresses: dict[int, tuple[Any, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise, PyTorch keeps `torch.compile` away from the method below at each call, which is
        # needless: a step that compiles is not recorded.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        about = facts(func)
        if about.is_of_profiler:
            return func(*args, **kwargs)
        inputs: list[tuple[Any, Any]] = []
        noted_args = copy_arguments(list(args), inputs)
        noted_kwargs = copy_arguments(dict(kwargs), inputs)
        # Copy the inputs before the operator runs, because it may change their shapes.
        before = self._note_addresses(inputs)
        out = func(*args, **kwargs)
        results: list[tuple[Any, Any]] = []
        outs = copy_arguments(as_list(out), results)
        call = Call(func, about, noted_args, noted_kwargs, outs, self.section)
        self._check_call(call, inputs, results, before)
        self._made.update(self._note_addresses(results) - before)
        if about.name == "lift_fresh":  # from torch.tensor(), which makes memory without a call
            self._lifted |= before
        self.calls.append(call)
        return out

    def is_external(self, tensor: Any) -> bool:
        """Return whether a tensor's memory existed before the step."""
        return self.address_of(tensor) not in self._made

    def address_of(self, tensor: Any) -> int:
        """Return the address of a tensor's storage; fast for the tensors of :attr:`calls`."""
        entry = self._addresses.get(id(tensor))
        return address_of(tensor) if entry is None else entry[1]

    def _note_addresses(self, pairs: Iterable[tuple[Any, Any]]) -> set[int]:
        """Note the addresses of the storages of a call's strided tensors, and return them."""
        addresses = set()
        for _, copy in pairs:
            if copy.layout == _STRIDED:
                address = address_of(copy)
                self._addresses[id(copy)] = copy, address  # kept alive, so that its id is unique
                addresses.add(address)
        return addresses

    def _check_call(self, call: Call, given: list[Any], made: list[Any], before: set[int]) -> None:
        """Set `refusal` if a program cannot repeat the call; also set `leaves_traces`.

        `given` and `made` pair the call's inputs and results with their copies.
        """
        reason, about = None, call.about
        if about.name == "_local_scalar_dense":
            reason = None if self.section is not None else ".item()"
        elif about.reads_data:
            reason = f"{call.name}() reads a number back"
        elif about.shape_of_data and _depends_on_data(call):
            reason = f"{call.name}() returns a shape that depends on data"
        elif about.takes_generator and any(
            isinstance(value, torch.Generator) for value in tree_leaves([call.args, call.kwargs])
        ):
            reason = f"{call.name}() draws from a generator other than the global one"
            self.leaves_traces = True
        elif not all(type(t) in TENSORS and t.layout == _STRIDED for t, _ in given):
            reason = f"{call.name}() has a tensor of a special kind"
            self.leaves_traces |= bool(about.writes)
        elif any(t.layout != _STRIDED for t, _ in made):
            reason = f"{call.name}() returns a tensor of a special kind"
        elif about.writes or about.name in HIDDEN_WRITES:
            addresses = {self.address_of(t) for t in find_written_tensors(call) if t.numel()}
            others = addresses - self._writable - self._made
            if others:
                reason = f"{call.name}() changes a tensor that is not part of the state"
                self.leaves_traces |= bool(others - self._lifted)
            elif any(address_of(t) not in before for t, _ in given if t.numel()):
                reason = f"{call.name}() moves a tensor to other memory"
        if reason is not None and self.refusal is None:
            self.refusal = f"{reason}{_describe_user_line()}"


def find_written_tensors(call: Call) -> list[Any]:
    """Return the tensors that a call writes, except those that it creates."""
    tensors: list[Any] = []
    for index, name in call.about.writes:
        value = call.args[index] if index < len(call.args) else call.kwargs.get(name)
        tensors += tensors_in([value])
    for index in HIDDEN_WRITES.get(call.name, ()):
        tensors += tensors_in([call.args[index]])
    return tensors


def _depends_on_data(call: Call) -> bool:
    if call.name not in ("index", "index_put", "index_put_", "_unsafe_index"):
        return True
    return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in([call.args[1]]))


def _describe_user_line() -> str:
    """Return `` in FILE:LINE`` for the innermost line of the user's code that is running."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OURS) and not frame.filename.startswith("<"):
            return f" in {Path(frame.filename).name}:{frame.lineno}"
    return ""


# --- nested arguments --------------------------------------------------------------

TENSORS = (torch.Tensor, torch.nn.Parameter)
LEAVES = {
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
"""Types of most arguments that are neither tensors nor containers."""


def address_of(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def copy_arguments(value: Any, found: list[tuple[Any, Any]]) -> Any:
    """Return a copy of nested arguments with detached tensors, which keep their current shapes.

    Add all tensors, paired with their copies, to `found`.
    """

    def copy(tensor: Any) -> Any:
        is_ordinary = type(tensor) in TENSORS and tensor.layout == torch.strided
        found.append((tensor, tensor.detach() if is_ordinary else tensor))
        return found[-1][1]

    return map_tensors(value, copy)


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in LEAVES:
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def all_tensors(value: Any) -> list[Any]:
    found: list[Any] = []
    map_tensors(value, found.append)
    return found


def tensors_in(value: Any) -> list[Any]:
    """Return the strided tensors among nested arguments."""
    return [tensor for tensor in all_tensors(value) if tensor.layout == torch.strided]


def pair_leaves(left: Any, right: Any, path: Any = ()) -> Iterable[tuple[Any, Any, Any]]:
    """Yield the corresponding leaves of two nested arguments, with their paths."""
    if type(left) is type(right) and isinstance(left, (list, dict)):
        keys, theirs = (list(v) if isinstance(v, dict) else range(len(v)) for v in (left, right))
        if keys == theirs:
            for key in keys:
                yield from pair_leaves(left[key], right[key], (*path, key))
            return
    yield path, left, right


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def form_of(tensor: Any) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype
