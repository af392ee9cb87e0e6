"""Record a step on the CPU, undo it, and compare programs with the ordinary step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cerebro.torch.cpu_program import Program
from cerebro.torch.cpu_recorder import Recording
from cerebro.torch.optimizer_numbers import Hole, Numbers, Probe, Unexplained, mark_sections
from cerebro.torch.recorded_program import RecordedProgram, tensors_of
from cerebro.torch.step_state import (
    Batch,
    Copied,
    Different,
    Entries,
    Gradients,
    StepState,
    Surroundings,
    Values,
    copy_values,
    describe_error,
    fill,
    have_same_bits,
)
from cerebro.torch.witness import Leaf, Unavailable, Witness, find_difference, leaves_of


@dataclasses.dataclass
class Outcome:
    """The metrics of a step, and what became of its recording or comparison."""

    values: Values
    program: RecordedProgram | None = None
    refusal: str | None = None  # why further steps must be ordinary


@dataclasses.dataclass
class Watched:
    """A step that was recorded and undone."""

    recording: Recording
    values: Values = dataclasses.field(default_factory=dict)  # metrics, in the recording's memory
    told: Values = dataclasses.field(default_factory=dict)  # a copy of the metrics
    stepped: list[Any] = dataclasses.field(default_factory=list)  # the updated parameters
    gradients: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)  # by parameter
    after: Copied | None = None  # None if the step failed or replaced tensors
    refusal: str | None = None  # why the step cannot be repeated


class StepRecorder:
    """Takes a step with and without a recording, and compares.

    Its `state` is all that the step may change; it must be listed (`StepState.list_once`). For the
    arguments, see `cerebro.torch.recorded_step.RecordedStep`.
    """

    def __init__(
        self,
        step: Callable[[Batch, int], Values],
        modules: Sequence[Any],
        optimizers: Sequence[Any],
        parameters: Sequence[Any],
        drop_gradients: Callable[[], None],
    ) -> None:
        self._step = step
        self._modules = modules
        self.optimizers = optimizers
        self._drop_gradients = drop_gradients
        self.gradients = Gradients(parameters)
        self.numbers = Numbers(optimizers)
        self.state = StepState(modules, optimizers, self.gradients)
        self._places: Any = None
        self._surroundings: Surroundings | None = None

    def has_changed(self) -> bool:
        """Return whether programs do not match the tensors and surroundings any more."""
        self.gradients.prepare()
        before, self._places = self._places, self.state.places()
        if self._surroundings is None or self._places != before:
            return True
        return not self._surroundings.are_unchanged()

    # --- recording ---------------------------------------------------------

    def record(self, batch: Batch, phase: int) -> Outcome:
        """Take a step and make its program, unless the step replaces tensors."""
        state, static = self.state, copy_values(batch)
        before, counts = state.copy_values(), self.numbers.counts()
        watched, values = self._record_and_undo(static, batch, phase, before)
        if watched.refusal is not None:
            return Outcome(values, refusal=watched.refusal)
        if watched.after is None or not state.is_as_listed():
            return Outcome(values)
        after = state.copy_values()
        try:
            _require_same_metrics(watched.told, values)
            state.require_equal(watched.after, after)
            reason = self.numbers.find_unequal_counts()
            if reason is not None:
                raise Unexplained(reason)
            program = Program(watched.recording, tensors_of(watched.values.values()))
            holes, free = self._find_holes(watched, counts, program)
            recorded = RecordedProgram(
                program, static, watched.values, watched.gradients, holes, free
            )
            state.restore(before)
            self._replay_and_compare(recorded, batch, values, after)
            self._places = state.places()
            self._surroundings = Surroundings(self._modules, self.optimizers)
        except Exception as error:
            state.restore(after)
            return Outcome(values, refusal=_explain(error))
        return Outcome(values, recorded)

    def _record_and_undo(
        self, static: Batch, batch: Batch, phase: int, before: Copied
    ) -> tuple[Watched, Values]:
        """Record a step on `static`, undo it, and take it on `batch` before a witness.

        `before` is the present state. Return the recorded step, and the metrics of the second step.
        Only the second one counts, because PyTorch computes some results by other operators while
        it is recorded, or fails. A step that cannot be undone is not taken again.
        """
        entries, gradients = Entries(self._modules, self.optimizers), self.gradients.list_pairs()
        watched = Watched(Recording(self.state.storages()))
        try:
            with mark_sections(watched.recording, self.optimizers) as stepped, watched.recording:
                watched.values = self._take_step(dict(static), phase)
            watched.stepped = stepped
            watched.refusal = watched.recording.refusal
            watched.told = copy_values(watched.values)
            watched.gradients = self.gradients.list_pairs()
            if watched.recording.leaves_traces:
                return watched, watched.told
            if self.state.is_as_listed():
                watched.after = self.state.copy_values()
        except Exception as error:
            watched.refusal = describe_error("it cannot be recorded", error)
            self._drop_gradients()  # a backward pass may have left some of them
        entries.restore()
        self.state.restore(before, watched.after)
        self.gradients.restore(gradients)
        values, how = self._take_witnessed_step(batch, phase, leaves_of(watched.recording))
        watched.refusal = watched.refusal or how
        return watched, copy_values(values)

    def _take_witnessed_step(
        self, batch: Batch, phase: int, leaves: Sequence[Leaf]
    ) -> tuple[Values, str | None]:
        """Take an ordinary step; also return how its operators differ from the recorded ones."""
        try:
            with Witness() as witness:
                values = self._take_step(batch, phase)
        except Unavailable as error:
            return self._take_step(batch, phase), str(error)
        return values, find_difference(leaves, witness)

    def _take_step(self, batch: Batch, phase: int) -> Values:
        values = self._step(batch, phase)
        self.gradients.move_to_buffers()
        return values

    def _find_holes(
        self, watched: Watched, counts: Sequence[float], program: Program
    ) -> tuple[list[Hole], set[Any]]:
        if not watched.stepped:
            return [], set()
        gradients = self.gradients.list_pairs()
        try:
            probe = Probe(self.numbers, watched.stepped, Recording(self.state.storages()))
        finally:
            self._drop_gradients()
            self.gradients.restore(gradients)
        return self.numbers.find(watched.recording.calls, counts, program, probe)

    # --- comparisons -------------------------------------------------------

    def compare(self, recorded: RecordedProgram, batch: Batch, phase: int) -> Outcome:
        """Take a step, and compare a program with it; the first time, compare a recording, too."""
        state, how = self.state, None
        before = state.copy_values()
        if recorded.compared == 0:
            fill(recorded.static, batch)
            watched, values = self._record_and_undo(recorded.static, batch, phase, before)
            if watched.refusal is not None:
                return Outcome(values, refusal=watched.refusal)
            how = recorded.program.differs_from(watched.recording, recorded.free)
        else:
            values = copy_values(self._take_step(batch, phase))
        if not state.is_as_listed():
            reason = "it is not the ordinary step: the step replaces its tensors"
            return Outcome(values, refusal=reason)
        after = state.copy_values()
        try:
            if how is not None:
                raise Different(how)
            state.restore(before, after)
            self._replay_and_compare(recorded, batch, values, after)
        except Exception as error:
            state.restore(after)
            return Outcome(values, refusal=_explain(error))
        recorded.compared += 1
        return Outcome(values)

    def compare_once_more(self, recorded: RecordedProgram, key: Any) -> str | None:
        """Compare a program with one more ordinary step on its last batch; return how they differ.

        Both begin in the current state, which is restored.
        """
        _, phase, _, present = key
        state, batch = self.state, copy_values(recorded.static)
        gradients, before = self.gradients.list_pairs(), state.copy_values()
        drawn: Copied | None = None
        try:
            self.gradients.arrange(present)
            values, how = self._take_witnessed_step(dict(batch), phase, recorded.leaves)
            if how is not None and not torch.autograd._profiler_enabled():
                raise Different(how)
            values = copy_values(values)
            if not state.is_as_listed():
                raise Different("the step replaces its tensors")
            after = state.copy_values()
            state.restore(before, after)
            self.numbers.take_settings()
            self._replay_and_compare(recorded, batch, values, after)
            drawn = after
        except Different as error:
            return f"it is not the ordinary step any more: {error}"
        except Exception as error:
            return describe_error("the ordinary step fails", error)
        finally:
            state.restore(before, drawn)
            self.gradients.restore(gradients)
        return None

    def _replay_and_compare(
        self, recorded: RecordedProgram, batch: Batch, values: Values, after: Copied
    ) -> None:
        """Replay from the current state; raise `Different` unless it gives `values` and `after`."""
        recorded.set_numbers(self.numbers)
        _require_same_metrics(recorded.replay(batch), values)
        self.state.require(after)


def _explain(error: Exception) -> str:
    """Return why a program cannot replace the ordinary step."""
    if isinstance(error, Different):
        return f"it is not the ordinary step: {error}"
    if isinstance(error, Unexplained):
        return str(error)
    return describe_error("it cannot be run again", error)


def _require_same_metrics(found: Values, values: Values) -> None:
    for name, value in values.items():
        if not have_same_bits(value, found.get(name)):
            raise Different(f"the metric {name!r} differs")
