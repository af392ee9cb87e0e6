"""A training step on the CPU as a list of operators: recorded once, replayed for every batch.

With ``graph=True``, the user promises that the step's Python code does the same for every batch. A
replayed step runs the same operators on the same memory, without Python code and dispatch. The
promise is checked:

- The first steps with a batch shape are ordinary steps, in which the optimizer creates its state.
- The next step is recorded (`cerebro.torch.cpu_recorder`), and taken again without the recorder,
  while PyTorch's profiler watches it (`cerebro.torch.witness`). Both must call the same operators.
  From the same state, both steps and the program must lead to the same state, bit for bit.
- The step after that is checked in the same way. Operators, arguments and constants must be the
  same, except numbers that the optimizer's settings explain (`cerebro.torch.optimizer_numbers`).
- One more step is compared without a recording.
- Before each unit, everything that the promise does not cover must be unchanged
  (`cerebro.torch.step_state`). After the unit, the program is compared with one more ordinary
  step.

If anything differs, all further steps are ordinary, and the log gives the reason.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

import cerebro._core as _core
from cerebro.torch.cpu_program import Program
from cerebro.torch.cpu_recorder import Recording
from cerebro.torch.graph import (
    Batch,
    Different,
    Values,
    clone_value,
    fill,
    have_same_bits,
    shape_of,
)
from cerebro.torch.optimizer_numbers import Hole, Numbers, Probe, Unexplained, mark_sections
from cerebro.torch.recorded_program import RecordedProgram, tensors_of
from cerebro.torch.step_state import Copied, Entries, Gradients, StepState, Surroundings
from cerebro.torch.witness import Leaf, Unavailable, Witness, find_difference, leaves_of

WARM_UP = 2
"""The number of ordinary steps with one batch shape before the step is recorded."""
COMPARED = 2
"""The number of further batches for which a program is compared with the ordinary step."""
MOST_PROGRAMS = 8
"""The maximum number of programs of a model; batches of other shapes take ordinary steps."""
MOST_TRIES = 3
"""How often a step that replaces tensors is recorded before recording is abandoned."""
ALIGNMENT = 64
"""The alignment of PyTorch's memory and of the loader's, in bytes."""

log = logging.getLogger("cerebro.torch")


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


class RecordedStep:
    """A step that is recorded after a few batches of the same shape.

    ``step(batch, phase)`` returns metrics: tensors, numbers or pairs. Each `phase` has its own
    programs; 0 is the first batch of an update. `what` names the step in the log. `parameters` are
    those whose gradients are accumulated over several steps. ``drop_gradients()`` removes what a
    failed step leaves.
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
        self._gradients = Gradients(parameters)
        self._state = StepState(modules, optimizers, self._gradients)
        self._numbers = Numbers(optimizers)
        self._surroundings: Surroundings | None = None
        self._programs: dict[Any, RecordedProgram] = {}
        self._seen: dict[Any, int] = {}
        self._used: Counter[Any] = Counter()  # this unit's replays by key
        self._has_failed = False
        self._settings: Any = None
        self._branches: Any = None
        self._looks_again = True
        self._places: Any = None
        self._tries = 0
        self._offered: list[tuple[Any, _core.Replay]] = []
        self.ready: list[_core.Replay] = []
        """Steps that `_core.run_unit` may replay by itself until the unit ends."""
        self.replays = 0
        """The number of steps replayed without a comparison; `_core.run_unit`'s are added later."""
        self.refusal: str | None = None
        """The reason why steps are no longer recorded; None while they are."""

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
        self._take_settings()
        key = (shape_of(batch), phase, self._branches, self._gradients.find_present())
        recorded = self._programs.get(key)
        if recorded is None:
            return self._count_or_record(batch, phase, key)
        if recorded.compared < COMPARED:
            return self._run_compared(batch, phase, recorded)
        self.replays += 1
        self._used[key] += 1
        recorded.set_numbers(self._numbers, self._settings)
        try:
            values = recorded.replay(batch)
        except Exception:
            self._has_failed = True
            raise
        self._gradients.restore(recorded.gradients)
        self._offer(key, recorded)
        return values

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that only the programs use."""
        return sum(recorded.held_bytes for recorded in self._programs.values())

    def request_check(self) -> None:
        """Check the tensors' addresses before the next step: after loading a state, or a unit."""
        self._take_back()
        self._looks_again = True

    # --- units -------------------------------------------------------------

    def begin_unit(self, *, at_once: bool = False) -> None:
        """Begin a unit. Until the unit ends, nothing runs except its steps.

        With `at_once`, `_core.run_unit` may replay the first batch, too. The modules must then be
        in the mode of the unit's steps.
        """
        self._take_back()
        self._used.clear()
        self._looks_again = True
        self._has_failed = False
        if at_once and self._programs:
            self._offer_all()

    def end_unit(self) -> str | None:
        """Compare the unit's most used program with the ordinary step; return how they differ.

        Both make one more step from the current state, on the last batch; then the state is
        restored. If they differ, the unit's states may be wrong, and recording ends.
        """
        self._take_back()
        used, self._used = self._used, Counter()
        if self.refusal is not None:
            return None
        branches = self._numbers.branches()
        for key, _ in used.most_common():
            if key in self._programs and key[2] == branches:
                with self._state.list_once():
                    how = self._compare_once_more(self._programs[key], key)
                if how is not None:
                    self._refuse(how)
                return how
        return None

    def has_failed(self) -> bool:
        """Return whether a replay has raised an exception in this unit."""
        return self._has_failed or any(replay.failed for _, replay in self._offered)

    def refuse(self, reason: str) -> None:
        """Take only ordinary steps from now on, without a log message."""
        self._take_back()
        self._programs.clear()
        self.refusal = reason

    def _take_settings(self) -> None:
        """Store the optimizers' settings; equal settings stay the same object."""
        settings = self._numbers.settings()
        if settings != self._settings:
            self._settings, self._branches = settings, self._numbers.branches()

    def _offer_all(self) -> None:
        """Make the checks of a unit's first batch, and offer all compared programs."""
        self._numbers.take_groups()
        if self.refusal is not None or not self._check_programs():
            return
        self._take_settings()
        current = (0, self._branches, self._gradients.find_present())
        for key, recorded in self._programs.items():
            if key[1:] == current and recorded.compared >= COMPARED:
                recorded.set_numbers(self._numbers, self._settings)
                self._offer(key, recorded)

    def _offer(self, key: Any, recorded: RecordedProgram) -> None:
        """Let `_core.run_unit` replay further steps like this one."""
        replay = None if recorded.gradients else recorded.make_replay(self._numbers)
        if replay is not None and replay not in self.ready:
            self._offered.append((key, replay))
            self.ready.append(replay)

    def _take_back(self) -> None:
        for key, replay in self._offered:
            self.replays += replay.runs
            self._used[key] += replay.runs
            replay.runs = 0
        self._offered.clear()
        self.ready.clear()

    # --- recording ---------------------------------------------------------

    def _count_or_record(self, batch: Batch, phase: int, key: Any) -> Values:
        seen = self._seen.get(key, 0)
        self._seen[key] = seen + 1
        if len(self._programs) >= MOST_PROGRAMS or seen < WARM_UP:
            return self._step(batch, phase)
        reason = self._numbers.refusal() or _find_compilation()
        if reason is not None:
            self._refuse(reason)
            return self._step(batch, phase)
        if torch.autograd._profiler_enabled():  # the user's; there can be no witness beside it
            return self._step(batch, phase)
        with self._state.list_once():
            return self._record(batch, phase, key)

    def _record(self, batch: Batch, phase: int, key: Any) -> Values:
        static = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
        before, counts = self._state.copy_values(), self._numbers.counts()
        watched, values = self._record_and_undo(static, batch, phase, before)
        if watched.refusal is not None:
            self._refuse(watched.refusal)
            return values
        if watched.after is None or not self._state.is_as_listed():
            self._note_replaced_tensors()
            return values
        after = self._state.copy_values()
        try:
            _require_same_metrics(watched.told, values)
            self._state.require_equal(watched.after, after)
            self._numbers.require_equal_counts()
            recording = watched.recording
            program = Program(recording, tensors_of(watched.values.values()))
            holes, free = self._find_holes(recording, counts, program, watched.stepped)
            recorded = RecordedProgram(
                program, static, watched.values, watched.gradients, holes, free
            )
            self._state.restore(before)
            self._compare(recorded, batch, values, after)
            self._programs[key] = recorded
            self._places = self._state.places()
            self._surroundings = Surroundings(self._modules, self._optimizers)
        except Exception as error:
            self._give_up(error, after)
        return values

    def _record_and_undo(
        self, static: Batch, batch: Batch, phase: int, before: Copied
    ) -> tuple[Watched, Values]:
        """Record a step on `static`, undo it, and take it on `batch` before a witness.

        `before` is the present state. Return the recorded step, and the metrics of the second step.
        Only the second one counts, because PyTorch computes some results by other operators while
        it is recorded, or fails. A step that cannot be undone is not taken again.
        """
        entries, gradients = Entries(self._modules, self._optimizers), self._gradients.list_pairs()
        watched = Watched(Recording(self._state.storages()))
        try:
            with mark_sections(watched.recording, self._optimizers) as stepped, watched.recording:
                watched.values = self._step(dict(static), phase)
                self._gradients.move_to_buffers()
            watched.stepped = stepped
            watched.refusal = watched.recording.refusal
            watched.told = {name: clone_value(value) for name, value in watched.values.items()}
            watched.gradients = self._gradients.list_pairs()
            if watched.recording.leaves_traces:
                return watched, watched.told
            if self._state.is_as_listed():
                watched.after = self._state.copy_values()
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            watched.refusal = f"it cannot be recorded: {type(error).__name__}: {text}"
            self._drop_gradients()  # a backward pass may have left some of them
        entries.restore()
        self._state.restore(before, watched.after)
        self._gradients.restore(gradients)
        values, how = self._run_witnessed(batch, phase, leaves_of(watched.recording))
        watched.refusal = watched.refusal or how
        return watched, {name: clone_value(value) for name, value in values.items()}

    def _run_witnessed(
        self, batch: Batch, phase: int, leaves: Sequence[Leaf]
    ) -> tuple[Values, str | None]:
        """Take an ordinary step; also return how its operators differ from the recorded ones."""
        try:
            with Witness() as witness:
                values = self._run_ordinary(batch, phase)
        except Unavailable as error:
            return self._run_ordinary(batch, phase), str(error)
        return values, find_difference(leaves, witness)

    def _run_ordinary(self, batch: Batch, phase: int) -> Values:
        values = self._step(batch, phase)
        self._gradients.move_to_buffers()
        return values

    def _find_holes(
        self,
        recording: Recording,
        counts: Sequence[float],
        program: Program,
        stepped: Sequence[Any],
    ) -> tuple[list[Hole], set[Any]]:
        if not stepped:
            return [], set()
        gradients = self._gradients.list_pairs()
        try:
            probe = Probe(self._numbers, stepped, Recording(self._state.storages()))
        finally:
            self._drop_gradients()
            self._gradients.restore(gradients)
        return self._numbers.find(recording.calls, counts, program, probe)

    # --- comparisons -------------------------------------------------------

    def _run_compared(self, batch: Batch, phase: int, recorded: RecordedProgram) -> Values:
        with self._state.list_once():
            return self._compare_as_listed(batch, phase, recorded)

    def _compare_as_listed(self, batch: Batch, phase: int, recorded: RecordedProgram) -> Values:
        before = self._state.copy_values()
        how = None
        if recorded.compared == 0:
            fill(recorded.static, batch)
            watched, values = self._record_and_undo(recorded.static, batch, phase, before)
            if watched.refusal is not None:
                self._refuse(watched.refusal)
                return values
            how = recorded.program.differs_from(watched.recording, recorded.free)
        else:
            values = self._run_ordinary(batch, phase)
            values = {name: clone_value(value) for name, value in values.items()}
        if not self._state.is_as_listed():
            self._refuse("it is not the ordinary step: the step replaces its tensors")
            return values
        after = self._state.copy_values()
        try:
            if how is not None:
                raise Different(how)
            self._state.restore(before, after)
            self._compare(recorded, batch, values, after)
            recorded.compared += 1
            if recorded.compared == COMPARED:
                recorded.program.free_recording()
        except Exception as error:
            self._give_up(error, after)
        return values

    def _compare_once_more(self, recorded: RecordedProgram, key: Any) -> str | None:
        _, phase, _, present = key
        batch = {n: v.clone() if isinstance(v, torch.Tensor) else v
                 for n, v in recorded.static.items()}  # fmt: skip
        gradients, before = self._gradients.list_pairs(), self._state.copy_values()
        drawn: Copied | None = None
        try:
            self._gradients.arrange(present)
            values, how = self._run_witnessed(dict(batch), phase, recorded.leaves)
            if how is not None and not torch.autograd._profiler_enabled():
                raise Different(how)
            values = {name: clone_value(value) for name, value in values.items()}
            if not self._state.is_as_listed():
                raise Different("the step replaces its tensors")
            after = self._state.copy_values()
            self._state.restore(before, after)
            self._take_settings()
            recorded.set_numbers(self._numbers, self._settings)
            self._require_equal(recorded.replay(batch), values, after)
            drawn = after
        except Exception as error:
            return _describe_difference(error)
        finally:
            self._state.restore(before, drawn)
            self._gradients.restore(gradients)
        return None

    def _compare(
        self, recorded: RecordedProgram, batch: Batch, values: Values, after: Copied
    ) -> None:
        """Replay from the current state; raise `Different` unless it gives `values` and `after`."""
        recorded.set_numbers(self._numbers, self._settings)
        self._require_equal(recorded.replay(batch), values, after)

    def _require_equal(self, found: Values, values: Values, after: Copied) -> None:
        _require_same_metrics(found, values)
        self._state.require(after)

    # --- refusals ----------------------------------------------------------

    def _note_replaced_tensors(self) -> None:
        self._tries += 1
        if self._tries == MOST_TRIES:
            self._refuse("it replaces the model's tensors with others")

    def _give_up(self, error: Exception, after: Copied) -> None:
        if isinstance(error, Different):
            self._refuse(f"it is not the ordinary step: {error}")
        elif isinstance(error, Unexplained):
            self._refuse(str(error))
        else:
            text = " ".join(str(error).split())[:300]
            self._refuse(f"it cannot be run again: {type(error).__name__}: {text}")
        self._state.restore(after)

    def _refuse(self, reason: str) -> None:
        self._take_back()
        self._programs.clear()
        self._seen.clear()
        self.refusal = reason
        # Log one line only: the same cause usually prevents recording of training and evaluation.
        level = logging.WARNING if self._optimizers else logging.INFO
        log.log(level, "graph=True: the %s is not recorded: %s", self._what, reason)

    def _check_programs(self) -> bool:
        """Drop programs that no longer match; return whether steps may still be recorded."""
        self._take_back()
        self._gradients.prepare()
        places = self._state.places()
        if self._programs:
            assert self._surroundings is not None
            if places != self._places or not self._surroundings.are_unchanged():
                self._programs.clear()
                self._seen.clear()
        if self._programs:
            reason = self._numbers.refusal()
            try:
                self._numbers.require_equal_counts()
            except Unexplained as error:
                reason = str(error)
            if reason is not None:
                self._refuse(reason)
        self._places = places
        self._looks_again = False
        return self.refusal is None


def _describe_difference(error: Exception) -> str:
    if isinstance(error, Different):
        return f"it is not the ordinary step any more: {error}"
    text = " ".join(str(error).split())[:300]
    return f"the ordinary step fails: {type(error).__name__}: {text}"


def _require_same_metrics(found: Values, values: Values) -> None:
    for name, value in values.items():
        if not have_same_bits(value, found.get(name)):
            raise Different(f"the metric {name!r} differs")


def _is_aligned(batch: Batch) -> bool:
    """Return whether a batch has the memory layout of the copy that a program reads.

    With a different layout, kernels may add in a different order.
    """
    return all(
        value.is_contiguous() and value.data_ptr() % ALIGNMENT == 0
        for value in batch.values()
        if isinstance(value, torch.Tensor)
    )


def _find_compilation() -> str | None:
    """Return a reason if ``torch.compile`` is in use, which prevents recording."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["frames"]:
        return "torch.compile is in use"
    return None
