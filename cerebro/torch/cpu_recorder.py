"""Records the operators of a training step on the CPU and runs them again without Python code.

A `Recording` notes every ATen call below autograd: forward pass, backward pass and optimizer. All
memory that the calls used stays allocated, so the same calls on the same memory repeat the step.
A `Program` is the list of these calls. Where an operator has a variant that writes into given
memory, the program calls that; views, allocations and the copies that autograd makes of gradients
only because the recording holds them are left out.

A program repeats the operators and nothing that Python decided. `Recording.refusal` names what no
program can repeat: a number read back (``.item()``), a shape that depends on data, a change to
memory that belongs neither to the state nor to the step.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cerebro.torch.graph import same

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that return memory without writing it."""

FILLS = {"ones_like", "zeros_like", "full_like", "ones", "zeros", "full", "arange", "scalar_tensor"}
"""Operators whose results depend on shapes and numbers alone."""

RESIZES = {"huber_loss"}
"""Operators whose `out=` variants change the shape of the given memory meanwhile."""

HIDDEN_WRITES = {"native_batch_norm": (3, 4)}
"""Arguments that operators write although their schemas do not mark them as written."""

_TYPES = (torch.Tensor, torch.nn.Parameter)
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), torch.utils.__file__)
_ABOUT_MEMORY = {"dtype", "layout", "device", "pin_memory", "memory_format"}


class Call:
    """One operator with its arguments and results, as they were when it was called."""

    __slots__ = ("args", "func", "kwargs", "outs", "section")

    def __init__(
        self,
        func: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        outs: list[Any],
        section: int | None,
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.outs = outs
        self.section = section

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return str(self.func._schema.name).partition("::")[2]

    def tensors(self) -> Iterable[Any]:
        """Return all tensors among arguments and results."""
        yield from _tensors_in([self.args, list(self.kwargs.values()), self.outs])

    def places(self) -> Iterable[tuple[Any, Any]]:
        """Return the containers and keys of all arguments that are not containers themselves."""
        yield from _places_in(self.args)
        yield from _places_in(self.kwargs)


class Recording(TorchDispatchMode):  # type: ignore[misc]
    """Records the operators that run within it; they compute as usual.

    Parameters
    ----------
    writable
        Addresses of the storages that the step may change: weights, moments, buffers.
    """

    def __init__(self, writable: Iterable[int]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.refusal: str | None = None
        """Why the step cannot be repeated from these calls."""
        self.section: int | None = None
        """The optimizer that is stepping."""
        self._writable = set(writable)
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        noted_args, noted_kwargs = _noted(list(args)), _noted(dict(kwargs))
        # Its inputs as they are before the operator: it may change their shapes.
        before = {_address(t) for t in _tensors_in([noted_args, noted_kwargs])}
        out = func(*args, **kwargs)
        call = Call(func, noted_args, noted_kwargs, _noted(_listed(out)), self.section)
        self._check(call, [list(args), list(kwargs.values())], before)
        self._made.update(_address(t) for t in _tensors_in(call.outs) if _address(t) not in before)
        self.calls.append(call)
        return out

    def external(self, tensor: Any) -> bool:
        """Return whether a tensor's memory existed before the step."""
        return _address(tensor) not in self._made

    def _check(self, call: Call, given: Any, before: set[int]) -> None:
        if self.refusal is not None:
            return
        tags = call.func.tags
        reason = None
        if call.name == "_local_scalar_dense":
            reason = None if self.section is not None else ".item()"
        elif torch.Tag.data_dependent_output in tags:
            reason = f"{call.name}() reads a number back"
        elif torch.Tag.dynamic_output_shape in tags and _depends_on_data(call):
            reason = f"{call.name}() returns a shape that depends on data"
        elif any(isinstance(value, torch.Generator) for _, value in call.places()):
            reason = f"{call.name}() draws from a generator other than the global one"
        elif not all(type(t) in _TYPES and t.layout == torch.strided for t in _all(given)):
            reason = f"{call.name}() has a tensor of a special kind"
        elif any(t.layout != torch.strided for t in _tensors_in(call.outs)):
            reason = f"{call.name}() returns a tensor of a special kind"
        else:
            written = written_by(call)
            known = self._writable | self._made
            if any(t.numel() and _address(t) not in known for t in written):
                reason = f"{call.name}() changes a tensor that is not part of the state"
            elif any(_address(t) not in before for t in _tensors_in(given) if t.numel()):
                reason = f"{call.name}() moves a tensor to other memory"
        if reason is not None:
            self.refusal = f"{reason}{_where()}"


def written_by(call: Call) -> list[Any]:
    """Return the tensors that a call writes, except those that it makes."""
    found: list[Any] = []
    for index, argument in enumerate(call.func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            value = call.args[index] if index < len(call.args) else call.kwargs.get(argument.name)
            found += _tensors_in([value])
    for index in HIDDEN_WRITES.get(call.name, ()):
        found += _tensors_in([call.args[index]])
    return found


class Program:
    """Calls that repeat a recorded step.

    Parameters
    ----------
    recording
        The step.
    kept
        Tensors that are read when the program has run: the step's results.
    """

    def __init__(self, recording: Recording, kept: Iterable[Any]) -> None:
        self._recording = recording
        self._steps: dict[int, tuple[Any, tuple[Any, Any, Any]]] = {}
        self._calls: list[tuple[Any, Any, Any]] = []
        self._replaced = replaced = _needless_copies(recording, {_address(t) for t in kept})
        views: dict[Any, Any] = {}
        made: dict[int, Any] = {}
        self.containers: dict[int, tuple[list[Any], dict[str, Any]]] = {}
        """Of each call: its arguments, to be changed before a replay."""
        for index, call in enumerate(recording.calls):
            if index in replaced.dropped or _is_left_out(call):
                continue
            args = _mapped(call.args, partial(replaced.of, views))
            kwargs = _mapped(call.kwargs, partial(replaced.of, views))
            outs = _mapped(call.outs, partial(replaced.of, views))
            self._steps[index] = _runnable(call, args, kwargs, outs)
            self.containers[index] = (args, kwargs)
        for call in recording.calls:
            for tensor in _tensors_in(_mapped(call.outs, partial(replaced.of, views))):
                if tensor.numel() and not recording.external(tensor):
                    made[_address(tensor)] = tensor
        self._memory = made
        self.held_bytes = sum(t.untyped_storage().nbytes() for t in made.values())
        """The memory that the program keeps in addition to the model's."""

    def __len__(self) -> int:
        return len(self._calls)

    def settle(self) -> None:
        """Free the memory that only :meth:`differs_from` needs."""
        del self._recording, self._replaced, self._memory
        self._steps.clear()
        self.containers.clear()

    def finish(self, shared: Callable[[list[Any], Any], Any]) -> None:
        """Make the calls faster; they compute on the program's memory meanwhile.

        Parameters
        ----------
        shared
            ``shared(arguments, dtype)`` returns the tensor that stands for the number
            ``arguments[1]``.
        """
        constant = self._constants()
        steps = []
        for index, (func, (run, args, kwargs)) in self._steps.items():
            if index in constant:
                run(*args, **kwargs)
                continue
            if _takes_number(func, args, kwargs):
                args[1] = shared(args, args[0].dtype)
            steps.append((_binding(run, args, kwargs), args, kwargs))
        self._calls = steps
        # What the program does not write itself must not look as if it did.
        kept = {self._replaced.address(self._recording.calls[i].outs[0]) for i in constant}
        for address, tensor in self._memory.items():
            if address not in kept:
                _spoil(tensor)

    def _constants(self) -> set[int]:
        """Find calls that always give the same result, in memory that no other call writes."""
        calls = {index: self._recording.calls[index] for index in self._steps}
        written = Counter(
            self._replaced.address(tensor)
            for call in calls.values()
            for tensor in _written_or_made(call)
        )
        return {
            index
            for index, call in calls.items()
            if call.name in FILLS and written[self._replaced.address(call.outs[0])] == 1
        }

    def run(self) -> None:
        """Repeat the step."""
        # Autograd has nothing to do here: its operators are among the calls.
        with torch._C._AutoDispatchBelowAutograd():
            for run, args, kwargs in self._calls:
                run(*args, **kwargs)

    def differs_from(self, other: Recording, free: set[tuple[int, int, Any]]) -> str | None:
        """Return how another recording of the step differs, None if it is the same program.

        Parameters
        ----------
        other
            A recording of the same step for another batch.
        free
            Numbers that may differ: number of the call, container (0: arguments, 1: keywords) and
            key.
        """
        ours = self._recording
        if [call.func for call in ours.calls] != [call.func for call in other.calls]:
            return "the step calls other operators than before"
        numbers: dict[int, int] = {}
        for index, (mine, its) in enumerate(zip(ours.calls, other.calls, strict=True)):
            if mine.name == "_local_scalar_dense":  # an optimizer reads its count of steps
                continue
            for which, (left, right) in enumerate(
                ((mine.args, its.args), (mine.kwargs, its.kwargs), (mine.outs, its.outs))
            ):
                for path, one, two in _pairs(left, right):
                    if (index, which, path) in free:
                        continue
                    if not _alike(one, two, ours, other, numbers, mine.section is not None):
                        return f"{mine.name}() has other arguments than before"
        return None


def _alike(
    one: Any, two: Any, ours: Recording, other: Recording, known: dict[int, int], known_code: bool
) -> bool:
    """Return whether an argument plays the same role in two recordings."""
    if not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)):
        return type(one) is type(two) and bool(one == two or (one != one and two != two))
    if _form(one) != _form(two) or ours.external(one) != other.external(two):
        return False
    mine, its = _address(one), _address(two)
    if ours.external(one):
        # What Python makes anew for every step may depend on anything, except in an optimizer.
        return mine == its or (known_code and same(one, two))
    return known.setdefault(mine, its) == its


class _Replaced:
    """Memory that is left out of a program, and its replacement."""

    def __init__(self) -> None:
        self.dropped: set[int] = set()
        self.sources: dict[int, Any] = {}

    def address(self, tensor: Any) -> int:
        """Return where the program has a tensor's memory."""
        return _address(self.sources.get(_address(tensor), tensor))

    def of(self, views: dict[Any, Any], tensor: Any) -> Any:
        """Return the tensor over the memory that the program uses; equal ones are one object."""
        source = self.sources.get(_address(tensor))
        if source is not None:
            offset = source.storage_offset() + tensor.storage_offset()
            tensor = source.as_strided(tensor.shape, tensor.stride(), offset)
        offset = tensor.storage_offset()
        key = (_address(tensor), offset, tensor.shape, tensor.stride(), tensor.dtype)
        return views.setdefault(key, tensor)


def _needless_copies(recording: Recording, kept: set[int]) -> _Replaced:
    """Find gradients that autograd copied only because the recording holds the original."""
    calls = recording.calls
    last = {}
    for index, call in enumerate(calls):
        for tensor in call.tensors():
            last[_address(tensor)] = index
    found = _Replaced()
    made: dict[int, Any] = {}
    taken: set[int] = set()
    for index, call in enumerate(calls):
        if call.name == "new_empty_strided":
            made[_address(call.outs[0])] = call.outs[0]
        if call.name != "copy_" or _address(call.args[0]) not in made:
            continue
        copy, source = call.args[0], call.args[1]
        whole = made.pop(_address(copy))
        if (
            isinstance(source, torch.Tensor)
            and _form(copy) == _form(whole) == _form(source)
            and last[_address(source)] == index
            and source.numel()
            and not recording.external(source)
            and _address(source) not in found.sources
            and not {_address(source), _address(copy)} & (kept | taken)
        ):
            taken.add(_address(source))
            found.sources[_address(copy)] = source
            found.dropped.add(index)
    return found


def _form(tensor: Any) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype


def _is_left_out(call: Call) -> bool:
    """Return whether a call leaves memory unchanged: a view, an allocation, reading a number."""
    if call.name in ALLOCATES or torch.Tag.inplace_view in call.func.tags:
        return True
    if call.func._schema.is_mutable or call.name in HIDDEN_WRITES:
        return False
    outs = list(_tensors_in(call.outs))
    ins = {_address(t) for t in _tensors_in([call.args, call.kwargs])}
    return all(_address(t) in ins for t in outs)


def _runnable(
    call: Call, args: list[Any], kwargs: dict[str, Any], outs: list[Any]
) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return operator, function, arguments and keywords that repeat a call on its memory."""
    if call.func._schema.is_mutable:
        given = {_address(t) for t in _tensors_in([args, kwargs])}
        made = [t if _is_made(t, given) else None for t in outs]
        if not any(t is not None for t in made):
            return call.func, (call.func, args, kwargs)
        return call.func, (partial(_call_and_copy, call.func._op, made), args, kwargs)
    if call.name in ("clone", "_to_copy"):
        copy = torch.ops.aten.copy_.default
        return copy, (copy, [outs[0], args[0]], {})
    found = _out_variant(call.func)
    several = len(call.func._schema.returns) == 1 and len(outs) != 1
    if (
        found is None
        or any(not isinstance(t, torch.Tensor) for t in outs)
        or (call.name in RESIZES)
    ):
        return call.func, (partial(_call_and_copy, call.func._op, outs), args, kwargs)
    variant, names, allowed = found
    is_list = several or "[]" in str(call.func._schema.returns[0].type)

    def into(memory: list[Any]) -> dict[str, Any]:
        given = {key: value for key, value in kwargs.items() if key in allowed}
        return given | ({names[0]: memory} if is_list else dict(zip(names, memory, strict=True)))

    # Some write into memory of another shape than their result has: tried beside it first.
    beside = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in outs]
    places = [_address(t) for t in beside]
    variant(*args, **into(beside))
    if [_form(t) for t in beside] != [_form(t) for t in outs] or places != [
        _address(t) for t in beside
    ]:
        return call.func, (partial(_call_and_copy, call.func._op, outs), args, kwargs)
    filled = into(outs)
    kwargs.clear()
    kwargs.update(filled)
    return variant, (variant, args, kwargs)


def _takes_number(func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator makes a tensor of the number ``args[1]`` in every call.

    One made beforehand, of the type in which it computes, gives the same bits.
    """
    if func not in _arithmetic() or isinstance(args[1], (torch.Tensor, bool)):
        return False
    tensors = _all([args, kwargs])
    dtype = args[0].dtype
    return dtype in (torch.float32, torch.float64) and all(t.dtype == dtype for t in tensors)


def _arithmetic() -> tuple[Any, ...]:
    aten = torch.ops.aten
    within = (aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor)
    return (*within, aten.add.out, aten.sub.out, aten.mul.out, aten.div.out)


def _binding(run: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return PyTorch's own function for an operator if it calls exactly that operator.

    Its parser of arguments takes half of the time of the operator's.
    """
    if isinstance(run, partial):
        return run
    name = str(run._schema.name).partition("::")[2]
    place = torch.Tensor if name.endswith("_") else torch
    function = getattr(place, name, None)
    if function is not None and not hasattr(function, "__code__"):
        tried = _Tried()
        try:
            with tried:
                function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError):
            return run._op
        if [func for func, _, _ in tried.calls] == [run] and all(
            one is two
            for made, given in (
                (tried.calls[0][1], args),
                (list(tried.calls[0][2].items()), list(kwargs.items())),
            )
            for one, two in zip(_all(list(made)), _all(list(given)), strict=False)
        ):
            return function
    return run._op


class _Tried(TorchDispatchMode):  # type: ignore[misc]
    """Records operators and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _written_or_made(call: Call) -> list[Any]:
    found = {_address(t): t for t in written_by(call) + _tensors_in(call.outs)}
    return list(found.values())


def _is_made(value: Any, given: set[int]) -> bool:
    """Return whether a result is a tensor in memory that no argument shares."""
    return isinstance(value, torch.Tensor) and value.numel() > 0 and _address(value) not in given


def _call_and_copy(run: Callable[..., Any], outs: list[Any], *args: Any, **kwargs: Any) -> None:
    for to, value in zip(outs, _listed(run(*args, **kwargs)), strict=True):
        if isinstance(to, torch.Tensor) and to.numel():
            to.copy_(value)


_variants: dict[Any, Any] = {}


def _out_variant(func: Any) -> Any:
    """Return an operator's `out=` overload, the names of its output arguments and of the others.

    None where the operator has none.
    """
    if func not in _variants:
        _variants[func] = _find_out_variant(func)
    return _variants[func]


def _find_out_variant(func: Any) -> Any:
    schema = func._schema
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in _ABOUT_MEMORY]
    known = {a.name for a in schema.arguments}
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        arguments = variant._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        fits = [pair for pair in rest if pair[0] not in _ABOUT_MEMORY] == wanted
        fits = fits and known.issuperset(name for name, _ in rest)
        if outs and fits and len(outs) == len(schema.returns):
            return variant, outs, {name for name, _ in rest}
    return None


def _depends_on_data(call: Call) -> bool:
    if call.name not in ("index", "index_put", "index_put_", "_unsafe_index"):
        return True
    return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors_in([call.args[1]]))


def _where() -> str:
    """Return `` in FILE:LINE`` of the user's line that is running, innermost."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OURS) and not frame.filename.startswith("<"):
            return f" in {Path(frame.filename).name}:{frame.lineno}"
    return ""


def _spoil(tensor: Any) -> None:
    """Fill a tensor's whole memory with NaN, which no step computes."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((size,), (1,), 0)
    whole.fill_(math.nan if whole.is_floating_point() or whole.is_complex() else -1)


# --- nested arguments ----------------------------------------------------------


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _listed(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _noted(value: Any) -> Any:
    """Return a copy of nested arguments; its tensors keep their shapes, without gradients."""
    return _mapped(value, lambda tensor: tensor.detach() if _is_plain(tensor) else tensor)


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in _TYPES and tensor.layout == torch.strided


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def _all(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _all(item)]
    return []


def _tensors_in(value: Any) -> list[Any]:
    """Return the strided tensors among nested arguments."""
    return [tensor for tensor in _all(value) if tensor.layout == torch.strided]


def _places_in(container: Any) -> Iterable[tuple[Any, Any]]:
    keys: Sequence[Any] = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        if isinstance(container[key], (list, dict)):
            yield from _places_in(container[key])
        else:
            yield (container, key), container[key]


def _pairs(left: Any, right: Any, path: Any = ()) -> Iterable[tuple[Any, Any, Any]]:
    """Return the leaves of two nested arguments side by side, with their paths."""
    if type(left) is type(right) and isinstance(left, (list, dict)):
        keys = list(left) if isinstance(left, dict) else list(range(len(left)))
        theirs = list(right) if isinstance(right, dict) else list(range(len(right)))
        if keys == theirs:
            for key in keys:
                yield from _pairs(left[key], right[key], (*path, key))
            return
    yield path, left, right
