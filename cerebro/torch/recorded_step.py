"""A training step on the CPU as a list of operators: recorded once, replayed for every batch.

With ``graph=True``, the user promises that the step's Python code does the same for every batch.
The promise is checked on the first batches of each shape, before each unit and after it
(docs/design/recorded-steps.md lists the checks). If anything differs, all further steps are
ordinary, and the log gives the reason. `RecordedStep` decides what is recorded and replayed;
`StepRecorder` records and compares.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cerebro._core as _core
from cerebro.torch.cpu_program import Program, RecordedProgram
from cerebro.torch.cpu_recorder import Recording, Unavailable, Witness, find_difference, leaves_of
from cerebro.torch.optimizer_numbers import Hole, Numbers, Probe, Unexplained, mark_sections
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
    shape_of,
)

WARM_UP = 2  # ordinary steps with one batch shape before the step is recorded
COMPARED = 2  # further batches for which a program is compared with the ordinary step
MOST_PROGRAMS = 8  # of a model; then, batches of other shapes take ordinary steps
MOST_TRIES = 3  # to record a step that replaces tensors
ALIGNMENT = 64  # of PyTorch's memory and of the loader's, in bytes

log = logging.getLogger("cerebro.torch")


class UnitReplays:
    """What a unit replays: counts by key, and the steps that `_core.run_unit` may take itself."""

    def __init__(self) -> None:
        self.ready: list[_core.Replay] = []  # what `_core.run_unit` may replay by itself
        self.replays = 0  # of all units
        self._offered: list[tuple[Any, _core.Replay]] = []
        self._used: Counter[Any] = Counter()
        self._has_failed = False

    def run(self, key: Any, recorded: RecordedProgram, batch: Batch) -> Values:
        self.replays += 1
        self._used[key] += 1
        try:
            return recorded.replay(batch)
        except Exception:
            self._has_failed = True
            raise

    def offer(self, key: Any, replay: _core.Replay | None) -> None:
        """Let `_core.run_unit` replay further steps like this one."""
        if replay is not None and replay not in self.ready:
            self._offered.append((key, replay))
            self.ready.append(replay)

    def take_back(self) -> None:
        """Offer nothing any more, and count what was replayed."""
        for key, replay in self._offered:
            self.replays += replay.runs
            self._used[key] += replay.runs
            replay.runs = 0
        self._offered.clear()
        self.ready.clear()

    def has_failed(self) -> bool:
        return self._has_failed or any(replay.failed for _, replay in self._offered)

    def begin(self) -> list[Any]:
        """Begin the next unit; return the keys that this one has used, the most used first."""
        self.take_back()
        used, self._used = self._used, Counter()
        self._has_failed = False
        return [key for key, _ in used.most_common()]


class RecordedStep:
    """A step that is recorded after a few batches of the same shape.

    ``step(batch, phase)`` returns metrics: tensors, numbers or pairs. Each `phase` has its own
    programs; 0 is the first batch of an update. `what` names the step in the log. `parameters` are
    those whose gradients are accumulated over several steps. ``drop_gradients()`` removes what a
    failed step leaves. With `is_alone`, nothing else runs between two batches of a unit, so that
    the C core may replay steps by itself.
    """

    def __init__(
        self,
        step: Callable[[Batch, int], Values],
        what: str,
        modules: Sequence[Any],
        optimizers: Sequence[Any] = (),
        parameters: Sequence[Any] = (),
        drop_gradients: Callable[[], None] = lambda: None,
        *,
        is_alone: bool = True,
    ) -> None:
        self._step = step
        self._what = what
        self.is_alone = is_alone
        self._recorder = StepRecorder(step, modules, optimizers, parameters, drop_gradients)
        self._numbers = self._recorder.numbers
        self._gradients = self._recorder.gradients
        self.unit = UnitReplays()
        self._programs: dict[Any, RecordedProgram] = {}
        self._seen: Counter[Any] = Counter()
        self._looks_again = True
        self._tries = 0
        self.refusal: str | None = None  # why steps are no longer recorded

    def __call__(self, batch: Batch, phase: int = 0) -> Values:
        if self.refusal is not None:
            return self._step(batch, phase)
        if self._numbers.take_groups():
            self.request_check()
        if self._looks_again and not self._check_programs():
            return self._step(batch, phase)
        if phase:
            self._gradients.move_to_buffers()
        if not _is_aligned(batch):
            return self._step(batch, phase)
        self._numbers.take_settings()
        key = (shape_of(batch), phase, self._numbers.branches, self._gradients.find_present())
        recorded = self._programs.get(key)
        if recorded is None:
            return self._count_or_record(batch, phase, key)
        if recorded.compared < COMPARED:
            return self._compare(batch, phase, recorded)
        recorded.set_numbers(self._numbers)
        values = self.unit.run(key, recorded, batch)
        self._gradients.restore(recorded.gradients)
        self._offer(key, recorded)
        return values

    @property
    def replays(self) -> int:
        """The number of steps replayed without a comparison; `_core.run_unit`'s are added later."""
        return self.unit.replays

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that only the programs use."""
        return sum(recorded.held_bytes for recorded in self._programs.values())

    def request_check(self) -> None:
        """Check the tensors' addresses before the next step: after loading a state, or a unit."""
        self.unit.take_back()
        self._looks_again = True

    # --- units -------------------------------------------------------------

    def begin_unit(self, *, at_once: bool = False) -> None:
        """Begin a unit. Until the unit ends, nothing runs except its steps.

        With `at_once`, `_core.run_unit` may replay the first batch, too. The modules must then be
        in the mode of the unit's steps.
        """
        self.unit.begin()
        self._looks_again = True
        if at_once and self._programs:
            self._offer_all()

    def end_unit(self) -> str | None:
        """Compare the unit's most used program with the ordinary step; return how they differ.

        Both make one more step from the current state, on the last batch; then the state is
        restored. If they differ, the unit's states may be wrong, and recording ends.
        """
        used = self.unit.begin()
        if self.refusal is not None:
            return None
        self._numbers.take_settings()
        for key in used:
            if key in self._programs and key[2] == self._numbers.branches:
                with self._recorder.state.list_once():
                    how = self._recorder.compare_once_more(self._programs[key], key)
                if how is not None:
                    self._refuse(how)
                return how
        return None

    def has_failed(self) -> bool:
        """Return whether an exception in the unit is from a replayed step."""
        return self.unit.has_failed()

    def refuse(self, reason: str) -> None:
        """Take only ordinary steps from now on, without a log message."""
        self.unit.take_back()
        self._programs.clear()
        self._seen.clear()
        self.refusal = reason

    def _offer_all(self) -> None:
        """Make the checks of a unit's first batch, and offer all compared programs."""
        self._numbers.take_groups()
        if self.refusal is not None or not self._check_programs():
            return
        self._numbers.take_settings()
        current = (0, self._numbers.branches, self._gradients.find_present())
        for key, recorded in self._programs.items():
            if key[1:] == current and recorded.compared >= COMPARED:
                recorded.set_numbers(self._numbers)
                self._offer(key, recorded)

    def _offer(self, key: Any, recorded: RecordedProgram) -> None:
        if not recorded.gradients:
            self.unit.offer(key, recorded.make_replay(self._numbers))

    # --- recording ---------------------------------------------------------

    def _count_or_record(self, batch: Batch, phase: int, key: Any) -> Values:
        self._seen[key] += 1
        if len(self._programs) >= MOST_PROGRAMS or self._seen[key] <= WARM_UP:
            return self._step(batch, phase)
        reason = self._numbers.refusal() or _find_compilation()
        if reason is not None:
            self._refuse(reason)
            return self._step(batch, phase)
        if torch.autograd._profiler_enabled():  # the user's; there can be no witness beside it
            return self._step(batch, phase)
        with self._recorder.state.list_once():
            outcome = self._recorder.record(batch, phase)
        if outcome.program is not None:
            self._programs[key] = outcome.program
        elif outcome.refusal is None:  # the step has replaced tensors
            self._tries += 1
            if self._tries == MOST_TRIES:
                self._refuse("it replaces the model's tensors with others")
        return self._accept(outcome)

    def _compare(self, batch: Batch, phase: int, recorded: RecordedProgram) -> Values:
        with self._recorder.state.list_once():
            values = self._accept(self._recorder.compare(recorded, batch, phase))
        if recorded.compared == COMPARED:
            recorded.program.free_recording()
        return values

    def _accept(self, outcome: Outcome) -> Values:
        if outcome.refusal is not None:
            self._refuse(outcome.refusal)
        return outcome.values

    def _refuse(self, reason: str) -> None:
        self.refuse(reason)
        # Log one line only: the same cause usually prevents recording of training and evaluation.
        level = logging.WARNING if self._recorder.optimizers else logging.INFO
        log.log(level, "graph=True: the %s is not recorded: %s", self._what, reason)

    def _check_programs(self) -> bool:
        """Drop programs that no longer match; return whether steps may still be recorded."""
        self.unit.take_back()
        if self._recorder.has_changed() and self._programs:
            self._programs.clear()
            self._seen.clear()
        if self._programs:
            reason = self._numbers.refusal() or self._numbers.find_unequal_counts()
            if reason is not None:
                self._refuse(reason)
        self._looks_again = False
        return self.refusal is None


def _is_aligned(batch: Batch) -> bool:
    """Return whether a batch is laid out as a program's copy; the order of sums depends on it."""
    return all(
        value.is_contiguous() and value.data_ptr() % ALIGNMENT == 0
        for value in batch.values()
        if isinstance(value, torch.Tensor)
    )


def _find_compilation() -> str | None:
    """Return a reason if ``torch.compile`` is in use, which prevents recording."""
    utils = sys.modules.get("torch._dynamo.utils")
    return "torch.compile is in use" if utils is not None and utils.counters["frames"] else None


# --- recording and comparing -------------------------------------------------------


@dataclass
class Outcome:
    """The metrics of a step, and what became of its recording or comparison."""

    values: Values
    program: RecordedProgram | None = None
    refusal: str | None = None  # why further steps must be ordinary


@dataclass
class Watched:
    """A step that was recorded and undone."""

    recording: Recording
    values: Values = field(default_factory=dict)  # metrics, in the recording's memory
    told: Values = field(default_factory=dict)  # a copy of the metrics
    stepped: list[Any] = field(default_factory=list)  # the updated parameters
    gradients: list[tuple[Any, Any]] = field(default_factory=list)  # by parameter
    after: Copied | None = None  # None if the step failed or replaced tensors
    refusal: str | None = None  # why the step cannot be repeated


class StepRecorder:
    """Takes a step with and without a recording, and compares.

    Its `state` is all that the step may change; it must be listed (`StepState.list_once`). For the
    arguments, see `RecordedStep`.
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
            program = Program(watched.recording, watched.values)
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
        self, batch: Batch, phase: int, leaves: Sequence[Any]
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
        return self.numbers.find(watched.recording.calls, counts, program.containers, probe)

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
        """Return how one more ordinary step on the last batch differs; put the state back."""
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
    if isinstance(error, Unexplained):
        return str(error)
    return describe_error("it cannot be run again", error)


def _require_same_metrics(found: Values, values: Values) -> None:
    for name, value in values.items():
        if not have_same_bits(value, found.get(name)):
            raise Different(f"the metric {name!r} differs")
