"""A training step on the CPU as a list of operators: recorded once, run again for every batch.

Most of a small network's step is Python code and dispatch, not arithmetic. A recorded step leaves
these out and has the bits of the ordinary one, because the same operators run on the same memory.
That is not assumed but compared:

- The first steps of a shape are ordinary ones: the optimizer makes its state.
- The next one is recorded as it runs (`cerebro.torch.cpu_recorder`). Then the state is put back
  twice: an ordinary step that nothing watches, and the program, must lead to the same weights,
  moments, buffers, metrics and generators, to the bit.
- The next one is compared with the program in the same way, and recorded again: the operators,
  their arguments and the constants they read must be the same, except the numbers that the
  optimizer's settings explain (`cerebro.torch.optimizer_numbers`).
- One more is compared, whose ordinary step nothing watches.

The user's Python code does not run after that. Where anything differs, steps are ordinary ones for
good, from where the last one has come to, and the log says why. Whether a step is replayed
therefore changes nothing in a state.

There is one program for each shape of a batch, so the last batch of a shard has one too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cerebro.torch.cpu_recorder import Program, Recording
from cerebro.torch.graph import (
    Batch,
    Different,
    LiveState,
    Taken,
    Values,
    cloned,
    fill,
    same,
    shape_of,
)
from cerebro.torch.optimizer_numbers import COUNTED, Hole, Numbers, Probe, Unexplained, sections

WARM_UP = 2
"""Ordinary steps of a shape before its step is recorded."""
COMPARED = 2
"""Further batches for which a program is compared with the ordinary step."""
MOST_PROGRAMS = 8
"""Programs that one model has at a time; batches of further shapes take ordinary steps."""
MOST_TRIES = 3
"""Recordings of a step that replaces tensors before recording is given up."""
ALIGNMENT = 64
"""The alignment of PyTorch's memory and of the loader's, in bytes."""

log = logging.getLogger("cerebro.torch")


class RecordedStep:
    """A step that is recorded when its shape has been seen a few times.

    Parameters
    ----------
    step
        ``step(batch, phase)`` computes on a batch and returns metrics: tensors, numbers or pairs.
        `phase` counts the batches before it since the last update.
    what
        What it is called in the log.
    modules
        Whose parameters and buffers the step changes.
    optimizers
        Whose states it changes.
    parameters
        Whose gradients outlive a step that is not the last of a window; none where each step
        updates.
    drop_gradients
        Called after a replay that updates the parameters, and after a failure.
    """

    def __init__(
        self,
        step: Callable[[Batch, int], Values],
        what: str,
        modules: Sequence[Any],
        optimizers: Sequence[Any] = (),
        parameters: Sequence[Any] = (),
        drop_gradients: Callable[[], None] = lambda: None,
    ) -> None:
        self._step = step
        self._what = what
        self._modules = modules
        self._optimizers = optimizers
        self._drop_gradients = drop_gradients
        self._gradients = _Gradients(parameters)
        self._state = _State(modules, optimizers, self._gradients)
        self._numbers = Numbers(optimizers)
        self._programs: dict[Any, _Recorded] = {}
        self._seen: dict[Any, int] = {}
        self._settings: Any = None
        self._branches: Any = None
        self._looks_again = True
        self._places: Any = None
        self._tries = 0
        self.replays = 0
        """Steps that were replayed without a comparison."""
        self.refusal: str | None = None
        """The reason why no step is recorded any more."""

    def __call__(self, batch: Batch, phase: int = 0) -> Values:
        if self.refusal is not None:
            return self._step(batch, phase)
        if self._looks_again:
            self._look_again()
        if phase:
            self._gradients.settle()
        if not _is_aligned(batch):
            return self._step(batch, phase)
        settings = self._numbers.settings()
        if settings != self._settings:
            self._settings, self._branches = settings, self._numbers.branches()
        key = (shape_of(batch), phase, self._branches, self._gradients.present())
        recorded = self._programs.get(key)
        if recorded is None:
            return self._unrecorded(batch, phase, key)
        if recorded.compared < COMPARED:
            return self._compared(batch, phase, recorded)
        self.replays += 1
        recorded.set_numbers(self._numbers, self._settings)
        values = recorded.replay(batch)
        self._gradients.put(recorded.gradients)
        return values

    def look_again(self) -> None:
        """Check the tensors' addresses again: a state was loaded, or a unit has ended."""
        self._looks_again = True

    @property
    def held_bytes(self) -> int:
        """The memory of all programs, in addition to the model's."""
        return sum(recorded.held_bytes for recorded in self._programs.values())

    # --- recording ---------------------------------------------------------

    def _unrecorded(self, batch: Batch, phase: int, key: Any) -> Values:
        seen = self._seen.get(key, 0)
        self._seen[key] = seen + 1
        if seen < WARM_UP or len(self._programs) >= MOST_PROGRAMS:
            return self._step(batch, phase)
        reason = self._numbers.refusal() or _compiles()
        if reason is not None:
            self._refuse(reason)
            return self._step(batch, phase)
        return self._recorded(batch, phase, key)

    def _recorded(self, batch: Batch, phase: int, key: Any) -> Values:
        static = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
        before, counts = self._state.taken(), self._numbers.counts()
        attributes = _Attributes(self._modules)
        gradients = self._gradients.taken()
        recording, watched, stepped = self._watch(static, phase)
        if recording.refusal is not None:
            self._refuse(recording.refusal)
            return {name: cloned(value) for name, value in watched.items()}
        after_watched = self._state.taken()
        if before.places != after_watched.places:
            self._replaced_tensors()
            return {name: cloned(value) for name, value in watched.items()}
        # The step that counts is one that nothing watched.
        told = {name: cloned(value) for name, value in watched.items()}
        afterwards = self._gradients.taken()
        self._state.put(before)
        attributes.put()
        self._gradients.put(gradients)
        values = self._step(batch, phase)
        self._gradients.settle()
        values = {name: cloned(value) for name, value in values.items()}
        after = self._state.taken()
        try:
            self._require(told, values, after_watched, after)
            self._numbers.require_equal_counts()
            program = Program(recording, _tensors_of(watched.values()))
            holes, free = self._holes(recording, counts, program, stepped)
            recorded = _Recorded(program, static, watched, afterwards, holes, free)
            self._state.put(before)
            self._compare(recorded, batch, values, after)
            self._programs[key] = recorded
            self._places = (self._state.places(), _modes(self._modules))
        except Exception as error:
            self._give_up(error, after)
        return values

    def _watch(self, batch: Batch, phase: int) -> tuple[Recording, Values, list[Any]]:
        """Take an ordinary step and record its operators."""
        recording = Recording(self._state.storages())
        with sections(recording, self._optimizers) as stepped, recording:
            values = self._step(dict(batch), phase)
            self._gradients.settle()
        return recording, values, stepped

    def _holes(
        self,
        recording: Recording,
        counts: Sequence[float],
        program: Program,
        stepped: Sequence[Any],
    ) -> tuple[list[Hole], set[Any]]:
        if not stepped:
            return [], set()
        kept = self._gradients.taken()
        try:
            probe = Probe(self._numbers, stepped, Recording(self._state.storages()))
        finally:
            self._drop_gradients()
            self._gradients.put(kept)
        return self._numbers.find(recording.calls, counts, program, probe)

    def _compared(self, batch: Batch, phase: int, recorded: _Recorded) -> Values:
        """Take an ordinary step, and check that the program does the same."""
        before = self._state.taken()
        recording = None
        if recorded.compared == 0:
            fill(recorded.static, batch)
            recording, values, _ = self._watch(recorded.static, phase)
        else:
            values = self._step(batch, phase)
            self._gradients.settle()
        after = self._state.taken()
        values = {name: cloned(value) for name, value in values.items()}
        try:
            if before.places != after.places:
                raise Different("the step puts other tensors in the place of its own")
            how = recording and recorded.program.differs_from(recording, recorded.free)
            if how:
                raise Different(how)
            self._state.put(before)
            self._compare(recorded, batch, values, after)
            recorded.compared += 1
            if recorded.compared == COMPARED:
                recorded.program.settle()
        except Exception as error:
            self._give_up(error, after)
        return values

    def _compare(self, recorded: _Recorded, batch: Batch, values: Values, after: Taken) -> None:
        """Replay from the current state; the results must be `values` and `after`."""
        recorded.set_numbers(self._numbers, self._settings)
        self._require(recorded.replay(batch), values, None, after)

    def _require(self, found: Values, values: Values, state: Taken | None, after: Taken) -> None:
        """Check that metrics and state are those of the ordinary step.

        `state` is None for the state at hand.
        """
        for name, value in values.items():
            if not same(value, found.get(name)):
                raise Different(f"the metric {name!r} differs")
        if state is not None:
            current = self._state.taken()
            self._state.put(state)
            try:
                self._state.require(after)
            finally:
                self._state.put(current)
        else:
            self._state.require(after)

    # --- refusals ----------------------------------------------------------

    def _replaced_tensors(self) -> None:
        """Handle replaced tensors: of an optimizer's new state, or made anew by every step."""
        self._tries += 1
        if self._tries == MOST_TRIES:
            self._refuse("it puts other tensors in the place of the model's")

    def _give_up(self, error: Exception, after: Taken) -> None:
        """Continue with ordinary steps after the last one."""
        if isinstance(error, Different):
            self._refuse(f"it is not the ordinary step: {error}")
        elif isinstance(error, Unexplained):
            self._refuse(str(error))
        else:
            text = " ".join(str(error).split())[:300]
            self._refuse(f"it cannot be run again: {type(error).__name__}: {text}")
        self._state.put(after)

    def _refuse(self, reason: str) -> None:
        self._programs.clear()
        self._seen.clear()
        self.refusal = reason
        # One line says enough: what keeps a step from being recorded mostly keeps both.
        level = logging.WARNING if self._optimizers else logging.INFO
        log.log(level, "graph=True: the %s is not recorded: %s", self._what, reason)

    def _look_again(self) -> None:
        """Forget programs over memory that no longer belongs to the model."""
        self._looks_again = False
        self._gradients.prepare()
        places = (self._state.places(), _modes(self._modules))
        if self._programs and places != self._places:
            self._programs.clear()
            self._seen.clear()
        if self._programs:
            try:
                self._numbers.require_equal_counts()
            except Unexplained as error:
                self._refuse(str(error))
        self._places = places


class _Recorded:
    """A program with its memory."""

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
        self.held_bytes = program.held_bytes + sum(
            value.untyped_storage().nbytes() for value in _tensors_of(static.values())
        )
        self._values = {name: _detached(value) for name, value in values.items()}
        self._constants: dict[Any, Any] = {}
        self._tensors: dict[Any, Any] = {}
        self._holes = holes
        program.finish(self._shared)
        self._holes = [hole for hole in holes if hole.key is not None]
        self._holes += [
            Hole(group, formula, tensor, None)
            for (group, formula, _), tensor in self._tensors.items()
        ]
        self._counted = [hole for hole in self._holes if hole.formula in COUNTED]
        self._set_for: Any = None

    def _shared(self, args: list[Any], dtype: Any) -> Any:
        """Return a tensor for the number ``args[1]``: one for all calls that take the same."""
        for hole in self._holes:
            if hole.container is args and hole.key == 1:
                hole.key = None  # the tensor is set in its place
                key = (hole.group, hole.formula, dtype)
                if key not in self._tensors:
                    self._tensors[key] = torch.zeros((), dtype=dtype)
                return self._tensors[key]
        constant = (repr(args[1]), dtype)
        return self._constants.setdefault(constant, torch.tensor(args[1], dtype=dtype))

    def set_numbers(self, numbers: Numbers, settings: Any) -> None:
        """Set the program's numbers for the next step."""
        holes = self._counted if settings is self._set_for else self._holes
        self._set_for = settings
        if not holes:
            return
        counts = numbers.counts()
        found = {group: numbers.values(group, counts[group]) for group in {h.group for h in holes}}
        for hole in holes:
            value = found[hole.group][hole.formula]
            if hole.key is None:
                hole.container.fill_(value)
            else:
                hole.container[hole.key] = value

    def replay(self, batch: Batch) -> Values:
        """Compute on a batch of the recorded shape."""
        fill(self.static, batch)
        self.program.run()
        return {name: cloned(value) for name, value in self._values.items()}


class _Attributes:
    """The attributes of modules, to undo changes by a step's Python code."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._parts = [
            (
                vars(part),
                {k: (v, dict(v) if isinstance(v, dict) else None) for k, v in vars(part).items()},
            )
            for module in modules
            for part in module.modules()
        ]

    def put(self) -> None:
        """Restore the modules' attributes."""
        for attributes, saved in self._parts:
            for key in [key for key in attributes if key not in saved]:
                del attributes[key]
            for key, (value, items) in saved.items():
                attributes[key] = value
                if items is not None:
                    value.clear()
                    value.update(items)


class _Gradients:
    """Memory for gradients accumulated over several batches, shared by all programs."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        self._buffers: dict[int, Any] = {}

    def prepare(self) -> None:
        """Make the memory."""
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._buffers:
                self._buffers[index] = torch.zeros_like(parameter, requires_grad=False)

    def settle(self) -> None:
        """Move the current gradients into it."""
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                gradient = parameter.grad
                if gradient is not None and gradient is not self._buffers[index]:
                    parameter.grad = self._buffers[index].copy_(gradient)

    def present(self) -> tuple[bool, ...]:
        """Return which parameters have gradients."""
        return tuple(parameter.grad is not None for parameter in self._parameters)

    def taken(self) -> list[tuple[Any, Any]]:
        """Return parameters and gradients as they are."""
        return [(parameter, parameter.grad) for parameter in self._parameters]

    def put(self, gradients: list[tuple[Any, Any]]) -> None:
        """Give parameters these gradients."""
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def tensors(self) -> list[tuple[str, Any]]:
        """Return the memory by name."""
        return [(f"the gradient of parameter {i}", t) for i, t in self._buffers.items()]


class _State(LiveState):
    """The values that a step may change, with accumulated gradients."""

    def __init__(
        self, modules: Sequence[Any], optimizers: Sequence[Any], gradients: _Gradients
    ) -> None:
        super().__init__(modules, optimizers)
        self._gradients = gradients

    def storages(self) -> list[int]:
        """Return the addresses of all memory."""
        return [tensor.untyped_storage().data_ptr() for _, tensor in self._tensors()]

    def _tensors(self) -> list[tuple[str, Any]]:
        return super()._tensors() + self._gradients.tensors()


def _modes(modules: Sequence[Any]) -> Any:
    """Return the properties of modules, besides tensors, that a step may depend on.

    Their types, hooks and attributes that are numbers, names or tuples of them: the probability of
    dropout, for example, which a schedule of the user's may change between units.
    """
    found: list[Any] = []
    for module in modules:
        for part in module.modules():
            hooks = [len(value) for key, value in vars(part).items() if key.endswith("_hooks")]
            plain = [(k, v) for k, v in vars(part).items() if _is_plain(v)]
            found.append((type(part), hooks, plain))
        found.append([parameter.requires_grad for parameter in module.parameters()])
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _is_aligned(batch: Batch) -> bool:
    """Return whether a batch has the memory layout of the copy that a program reads.

    Kernels may add in another order where it does not. Batches of a loader do.
    """
    return all(
        value.is_contiguous() and value.data_ptr() % ALIGNMENT == 0
        for value in batch.values()
        if isinstance(value, torch.Tensor)
    )


def _compiles() -> str | None:
    """Return a reason if ``torch.compile`` is in use: it does not run while a step is recorded."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["frames"]:
        return "torch.compile is in use"
    return None


def _tensors_of(values: Any) -> list[Any]:
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return [item for item in flat if isinstance(item, torch.Tensor)]


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_detached, value))
    return value.detach() if isinstance(value, torch.Tensor) else value
