"""Programs that outlive their model, for later models of the same architecture.

Recording a step takes as long as many ordinary steps. The trials of a search mostly differ only in
their numbers, so a worker keeps each program without the tensors of the model that it was recorded
from (`KeptProgram`). Another model can use it in two ways:

- Its step was proven to be the same program every time, and the proof has read the same as that of
  the program's model (`Origin`). Then nothing is recorded.
- Otherwise it also records an ordinary step. It reuses the program if its recording has the same
  operators, shapes, constants and sharing of memory (`Signature`).

The program is then bound to that model's weights and moments, and compared with the ordinary step
like every program. A step that differs, for example in the probability of dropout, gets its own
program.

All models share the memory of a program's intermediate results, because their steps run one after
the other. Each thread keeps its own programs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cerebro.torch.cpu_program import Program
from cerebro.torch.cpu_recorder import Recording
from cerebro.torch.nested_arguments import LEAVES
from cerebro.torch.optimizer_numbers import Hole
from cerebro.torch.proof.facts import Facts

MOST_KEPT = 16
"""The maximum number of programs that are kept; the least recently used one is dropped."""
MOST_CONSTANTS = 16
"""The maximum number of elements of an optimizer's constant that is compared by its values."""
MOST_ARCHITECTURES = 256
"""The maximum number of architectures whose steps are counted."""


class Outside:
    """A placeholder for a tensor in memory that belongs to the model."""

    __slots__ = ("dtype", "memory", "offset", "shape", "stride")

    def __init__(self, memory: int, tensor: Any) -> None:
        self.memory = memory
        self.offset = tensor.storage_offset()
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype

    def of(self, memories: Sequence[Any]) -> Any:
        """Return the tensor in the memory of a model, whose storages are `memories`."""
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(memories[self.memory], self.offset, self.shape, self.stride)


class Number:
    """A placeholder for a tensor with a number that each model sets before its steps."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


class Signature:
    """A recording without the memory that it ran on; equal signatures mean the same program.

    Attributes
    ----------
    key
        Everything that must be equal in two recordings.
    memories
        The model's storages that the recording uses, in order of first use.
    has_constants
        Whether the program depends on the values of other tensors, such as constants that the
        optimizer makes in its step.
    """

    def __init__(
        self, recording: Recording, inputs: Mapping[str, Any], values: Any, state: set[int]
    ) -> None:
        self.memories: list[Any] = []
        self.has_constants = False
        self._recording = recording
        self._state = state
        self._inputs = {_address(value): name for name, value in inputs.items()
                        if isinstance(value, torch.Tensor)}  # fmt: skip
        self._known: dict[int, Any] = {}
        self._numbers: list[tuple[tuple[int, int, Any], float]] = []
        calls = []
        for index, call in enumerate(recording.calls):
            self._is_of_optimizer = call.section is not None
            is_read = call.name == "_local_scalar_dense"  # an optimizer reads its count of steps
            calls.append((
                call.func,
                self._form(call.args, (index, 0)),
                self._form(call.kwargs, (index, 1)),
                None if is_read else self._form(call.outs, (index, 2)),
                (call.section, call.has_gradients),
            ))  # fmt: skip
        self._calls = calls
        self._is_of_optimizer = False
        self._values = self._form(values, (-1, 0))

    def key(self, free: set[tuple[int, int, Any]]) -> Any:
        """Return everything that must be equal; the numbers at the places `free` may differ."""
        constants = [(place, type(value), repr(value)) for place, value in self._numbers
                     if place not in free]  # fmt: skip
        return self._calls, constants, self._values

    def number_of(self, address: int) -> int | None:
        """Return a storage's index in :attr:`memories`."""
        role = self._known.get(address)
        return role[1] if role is not None and role[0] == "model" else None

    def _form(self, value: Any, at: Any, path: Any = ()) -> Any:
        kind = type(value)
        if kind is int or kind is float:
            self._numbers.append(((*at, path), value))
            return "number"
        if kind in LEAVES:
            return kind, value
        if isinstance(value, torch.Tensor):
            return ("tensor", self._role(value), value.storage_offset(), value.shape,
                    value.stride(), value.dtype)  # fmt: skip
        if isinstance(value, (list, tuple)):
            return [self._form(item, at, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, dict):
            return [(key, self._form(item, at, (*path, key))) for key, item in value.items()]
        if isinstance(value, (int, float)):
            self._numbers.append(((*at, path), value))
            return "number"
        return kind, repr(value)

    def _role(self, tensor: Any) -> Any:
        address = self._recording.address_of(tensor)
        role = self._known.get(address)
        if role is None:
            if not self._recording.external(tensor):
                role = ("made", len(self._known))
            elif address in self._inputs:
                role = ("input", self._inputs[address])
            elif address in self._state:
                role = ("model", len(self.memories), address % 64)
                self.memories.append(tensor.untyped_storage())
            elif self._is_of_optimizer and tensor.numel() <= MOST_CONSTANTS:
                # PyTorch's optimizers create some constants in every step.
                role = ("number", repr(tensor.flatten().tolist()))
                self.has_constants = True
            else:
                role = ("constant", address)  # the program is reused only for the same memory
                self.has_constants = True
            self._known[address] = role
        return role


class Origin:
    """What another model must have in common with a program's model to use it unrecorded.

    Parameters
    ----------
    facts
        What the step of the program's model was proven to read.
    owners
        For each of the program's memories, the index of a tensor of the model that lies in it.
    ordinary
        The seconds of an ordinary step.
    """

    def __init__(self, facts: Facts, owners: Sequence[int], ordinary: float) -> None:
        self.facts = facts
        self.owners = owners
        self.ordinary = ordinary

    def memories(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the program's memories among those of another model with the same facts."""
        return [tensors[owner].untyped_storage() for owner in self.owners]


class KeptProgram:
    """A program without the tensors of the model that it was recorded from.

    Parameters
    ----------
    program
        The program, already compared with the ordinary step.
    signature
        The signature of its recording.
    free
        The places of the numbers that come from settings.
    static
        The tensors into which a batch is copied.
    values
        The program's results.
    numbers
        The numbers that each model sets and that are tensors, by group, formula and type.
    holes
        The places of the other numbers that each model sets.
    formulas
        The group and formula of each of the recording's numbers, by place.
    seconds
        The time of a replay.
    held_bytes
        The bytes of memory of the program and its inputs.
    origin
        What a model needs to use the program unrecorded; None if every model must be recorded.
    """

    def __init__(
        self,
        program: Program,
        signature: Signature,
        free: set[tuple[int, int, Any]],
        static: dict[str, Any],
        values: dict[str, Any],
        numbers: Mapping[Any, Any],
        holes: Sequence[Hole],
        formulas: Mapping[Any, tuple[int, str]],
        *,
        seconds: float,
        held_bytes: int,
        origin: Origin | None = None,
    ) -> None:
        self.free = free
        self.origin = origin
        self.formulas = formulas
        self.seconds = seconds
        self.held_bytes = held_bytes
        self.key = signature.key(free)
        self.static = static
        self._numbers = {id(tensor): Number(key) for key, tensor in numbers.items()}
        self._outside: dict[int, tuple[Any, Outside]] = {}
        self._signature: Signature | None = signature
        self._kept_numbers: list[Any] = list(numbers.values())  # keeps their ids unique
        self.program, containers = program.changed(self._without_model, runs=False)
        self.values = {name: _mapped(value, self._without_model) for name, value in values.items()}
        self.holes = [
            Hole(hole.group, hole.formula, containers[id(hole.container)], hole.key)
            for hole in holes
        ]
        self.numbers = list(numbers)
        self._signature = None
        self._kept_numbers.clear()
        self._numbers.clear()
        self._outside.clear()

    def _without_model(self, tensor: Any) -> Any:
        """Return a placeholder for a tensor of the model, or the tensor itself."""
        if not isinstance(tensor, torch.Tensor) or self._signature is None:
            return tensor
        if id(tensor) in self._numbers:
            return self._numbers[id(tensor)]
        if id(tensor) in self._outside:
            return self._outside[id(tensor)][1]
        number = self._signature.number_of(_address(tensor))
        if number is None:
            return tensor
        found = Outside(number, tensor)
        self._outside[id(tensor)] = tensor, found  # with the tensor, so that its id is unique
        return found

    def bound(
        self, memories: Sequence[Any]
    ) -> tuple[Program, dict[str, Any], dict[Any, Any], list[Hole]]:
        """Return the program bound to a model's memory.

        Returns
        -------
        tuple
            The program, its results, the numbers that the model sets in tensors, by group, formula
            and type, and the places of the other numbers that it sets.
        """
        numbers = {key: torch.zeros((), dtype=key[2]) for key in self.numbers}
        made: dict[Outside, Any] = {}

        def own(value: Any) -> Any:
            if isinstance(value, Outside):
                if value not in made:
                    made[value] = value.of(memories)
                return made[value]
            return numbers[value.key] if isinstance(value, Number) else value

        program, containers = self.program.changed(own)
        program.spoil()
        holes = []
        for hole in self.holes:
            container, key = program.place(containers[id(hole.container)], hole.key)
            holes.append(Hole(hole.group, hole.formula, container, key))
        return program, {n: _mapped(v, own) for n, v in self.values.items()}, numbers, holes


class Architecture:
    """Facts about the steps of all models with the same architecture.

    Attributes
    ----------
    steps
        The number of ordinary steps that all of these models have taken.
    kept
        The programs of these models, which differ in constants.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.kept: list[KeptProgram] = []


class KeptPrograms(threading.local):
    """The programs of one thread."""

    def __init__(self) -> None:
        self._architectures: OrderedDict[Any, Architecture] = OrderedDict()
        self._order: OrderedDict[int, tuple[Architecture, KeptProgram]] = OrderedDict()

    def architecture(self, key: Any) -> Architecture:
        """Return the facts about the architecture with this key."""
        found = self._architectures.pop(key, None) or Architecture()
        self._architectures[key] = found
        if len(self._architectures) > MOST_ARCHITECTURES:
            _, dropped = self._architectures.popitem(last=False)
            for kept in dropped.kept:
                self._order.pop(id(kept), None)
            dropped.kept.clear()
        return found

    def keep(self, architecture: Architecture, program: KeptProgram) -> None:
        """Keep a program for later models of the architecture."""
        architecture.kept.append(program)
        self._order[id(program)] = (architecture, program)
        if len(self._order) > MOST_KEPT:
            _, (owner, dropped) = self._order.popitem(last=False)
            owner.kept.remove(dropped)

    def find(self, architecture: Architecture, signature: Signature) -> KeptProgram | None:
        """Return the kept program with this signature, or None."""
        for kept in architecture.kept:
            if kept.key == signature.key(kept.free):
                self._used(kept)
                return kept
        return None

    def find_proven(self, architecture: Architecture, facts: Facts) -> KeptProgram | None:
        """Return the kept program of a model with the same facts, or None."""
        for kept in architecture.kept:
            if kept.origin is not None and kept.origin.facts.key == facts.key:
                self._used(kept)
                return kept
        return None

    def _used(self, kept: KeptProgram) -> None:
        if id(kept) in self._order:
            self._order.move_to_end(id(kept))

    def has(self, program: KeptProgram) -> bool:
        """Return whether a program is kept; :attr:`held_bytes` then includes its memory."""
        return id(program) in self._order

    @property
    def held_bytes(self) -> int:
        """The bytes of memory of all kept programs."""
        return sum(program.held_bytes for _, program in self._order.values())

    def clear(self) -> None:
        """Drop all programs and counts."""
        for found in self._architectures.values():
            found.kept.clear()
        self._architectures.clear()
        self._order.clear()


kept_programs = KeptPrograms()


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    return change(value) if isinstance(value, (torch.Tensor, Outside, Number)) else value
