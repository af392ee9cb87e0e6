"""A training step on the CPU as a list of operators: recorded once, replayed for every batch.

Most of a small network's step is Python code and dispatch, not arithmetic. A recorded step avoids
both. It computes the same bits as the ordinary step, because the same operators run on the same
memory. This is verified, not assumed:

- The first steps with a batch shape are ordinary steps, in which the optimizer creates its state.
- The next step is recorded as it runs (`cerebro.torch.cpu_recorder`). Then, from the same state, an
  ordinary step that is not recorded and the program must each lead to the same weights, moments,
  buffers, metrics and generators, bit for bit.
- The step after that is compared with the program in the same way, and recorded again: the
  operators, their arguments and the constants that they read must be the same, except numbers that
  the optimizer's settings explain (`cerebro.torch.optimizer_numbers`).
- One more step is compared; its ordinary step is not recorded.

After that, the user's Python code runs only once in each unit, where the program is compared with
the ordinary step once more (`RecordedStep.end_unit`). If anything differs, all further steps
are ordinary and continue from the last ordinary step, and the log gives the reason. A state
therefore does not depend on whether steps are replayed.

There is one program for each batch shape; an epoch has batches of two sizes.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
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
    cloned,
    fill,
    same,
    shape_of,
)
from cerebro.torch.kept_programs import (
    Architecture,
    KeptProgram,
    Origin,
    Signature,
    kept_programs,
)
from cerebro.torch.optimizer_numbers import Hole, Numbers, Probe, Unexplained, sections
from cerebro.torch.proof.facts import Facts
from cerebro.torch.proof.same_program import Proof
from cerebro.torch.proof.values import Unproven
from cerebro.torch.recorded_program import RecordedProgram, tensors_of
from cerebro.torch.step_state import Copied, Entries, Gradients, StepState, modes_of

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

FEWEST_BATCHES = 12
"""The minimum batches per unit for recording a proven step, which adds a step to each unit."""
LONGEST_STEP = 0.025
"""The longest step worth recording, in seconds; longer steps are mostly arithmetic and memory."""
LEAST_LEFT = 256
"""The minimum batches left in a trial, or steps taken by models like its own, for recording."""
LEAST_UNITS_LEFT = 64
"""The same for a shape that a unit has once, such as that of its shorter last batch."""
CHECK_COST = 2.5
"""The cost of the comparison at a unit's end: this many ordinary steps and this many replays."""
LATE_CHECK = 0.6
"""What a comparison after a unit costs more than one on its last full batch, in ordinary steps."""
TAKE_COST = 12.0
"""The cost of reusing a kept program, with its proof and its comparisons, in ordinary steps."""
ADOPT_COST = 5.0
"""The same for a kept program of a model whose proof has read the same."""
LEAST_SAVED = 0.05
"""The part of a unit's ordinary steps that replays must save: measured times are not exact."""
CHANGED_WITHIN = "something that the step reads was changed within a unit"
NO_GAIN = "that would not save time"

log = logging.getLogger("cerebro.torch")


@dataclasses.dataclass
class Watched:
    """A step that was recorded and undone.

    Attributes
    ----------
    recording
        The operators.
    values
        The metrics, in the memory of the recording.
    told
        A copy of the metrics.
    stepped
        The parameters that the optimizers updated.
    gradients
        Pairs of the parameters and their gradients after the step.
    after
        The state after the step; None if the step failed or replaced tensors.
    refusal
        Why the step cannot be repeated; None if it can.
    """

    recording: Recording
    values: Values = dataclasses.field(default_factory=dict)
    told: Values = dataclasses.field(default_factory=dict)
    stepped: list[Any] = dataclasses.field(default_factory=list)
    gradients: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    after: Copied | None = None
    refusal: str | None = None


class RecordedStep:
    """A step that is recorded after a few batches of the same shape.

    Parameters
    ----------
    step
        ``step(batch, phase)`` computes on a batch and returns metrics: tensors, numbers or pairs.
        `phase` is the number of earlier batches since the last update.
    what
        The name of the step in the log.
    modules
        The modules whose parameters and buffers the step changes.
    optimizers
        The optimizers whose states the step changes.
    parameters
        The parameters whose gradients are accumulated over a window of several steps; empty if
        every step makes an update.
    drop_gradients
        Called after a replay that updates the parameters, and after a failure.
    prove
        Proves that the step is the same program for every batch, or raises `Unproven`. If given,
        steps are recorded only within units (:meth:`begin_unit`) and only if this saves time. None:
        the user promises that the step is the same program.
    looks_always
        Whether unknown code runs between two steps of a unit. Everything that the step reads must
        then be compared before each step.
    """

    def __init__(
        self,
        step: Callable[[Batch, int], Values],
        what: str,
        modules: Sequence[Any],
        optimizers: Sequence[Any] = (),
        parameters: Sequence[Any] = (),
        drop_gradients: Callable[[], None] = lambda: None,
        prove: Callable[[], Proof] | None = None,
        looks_always: bool = False,
    ) -> None:
        self._step = step
        self._prove = prove
        self._looks_always = looks_always
        self._proof: Proof | None = None
        self._is_open = prove is None
        self._used: Counter[Any] = Counter()
        self._seen_in_unit: Counter[Any] = Counter()
        self._frequent: set[Any] = set()  # the keys that a unit has more than once
        self._seconds: dict[Any, list[float]] = {}
        self._batches = self._left = 0
        self._full: int | None = None
        self._passed: Counter[Any] = Counter()  # this unit's batches by shape
        self._checked_at: int | None = None  # the number of replays before the check of a batch
        self._failure: str | None = None
        self._has_failed = False
        self._what = what
        self._modules = modules
        self._optimizers = optimizers
        self._drop_gradients = drop_gradients
        self._gradients = Gradients(parameters)
        self._state = StepState(modules, optimizers, self._gradients)
        self._numbers = Numbers(optimizers)
        self._programs: dict[Any, RecordedProgram] = {}
        self._seen: dict[Any, int] = {}
        self._architectures: dict[Any, Architecture] = {}
        self._tried: dict[Any, int] = {}
        self._adopts = prove is not None
        self._settings: Any = None
        self._branches: Any = None
        self._looks_again = True
        self._places: Any = None
        self._tries = 0
        self._offered: list[tuple[Any, _core.Replay]] = []
        self.ready: list[_core.Replay] = []
        """Steps that `_core.run_unit` may replay by itself until the unit ends."""
        self.replays = 0
        """The number of steps replayed without a comparison. Those that `_core.run_unit` replays
        are counted at the end of their unit."""
        self.refusal: str | None = None
        """The reason why steps are no longer recorded; None while they are."""
        self.note: str | None = None
        """The line with `refusal` for the trial's log, if the user did not request recording."""

    def __call__(self, batch: Batch, phase: int = 0) -> Values:
        if self._failure is not None:
            return {}  # the unit will run again
        if self.refusal is not None or not self._is_open:
            return self._step(batch, phase)
        if self._numbers.take_groups():
            self.look_again()
        if (self._looks_again or self._looks_always) and not self._look_again():
            return self._step(batch, phase)
        if phase:
            self._gradients.settle()
        if not _is_aligned(batch):
            return self._step(batch, phase)
        self._take_settings()
        key = (shape_of(batch), phase, self._branches, self._gradients.present())
        recorded = self._programs.get(key)
        passed = self._has_passed(key[0])
        self._passed[key[0]] += 1
        if recorded is None:
            return self._unrecorded(batch, phase, key)
        if recorded.compared < COMPARED:
            return self._compared(batch, phase, recorded, key)
        if self._full == passed + 1 and self._may_check(key):
            return self._checked(batch, phase, recorded)
        self.replays += 1
        self._used[key] += 1
        recorded.set_numbers(self._numbers, self._settings)
        try:
            values = recorded.replay(batch)
        except Exception:
            self._has_failed = True
            raise
        self._gradients.put(recorded.gradients)
        if not recorded.gradients and not self._looks_always:
            self._offer(key, recorded)
        return values

    def _take_settings(self) -> None:
        """Store the optimizers' settings; equal settings stay the same object."""
        settings = self._numbers.settings()
        if settings != self._settings:
            self._settings, self._branches = settings, self._numbers.branches()

    def look_again(self) -> None:
        """Check the tensors' addresses again, because a state was loaded or a unit has ended."""
        self._take_back()
        self._looks_again = True

    def _offer(self, key: Any, recorded: RecordedProgram) -> None:
        """Let `_core.run_unit` replay further steps like this one."""
        replay = recorded.without_python(self._numbers)
        if replay is not None and replay not in self.ready:
            # The last full batch is left to the check.
            full = sys.maxsize if self._full is None else self._full - 1
            replay.most = max(0, full - self._passed[key[0]])
            self._offered.append((key, replay))
            self.ready.append(replay)

    def _take_back(self) -> None:
        for key, replay in self._offered:
            self.replays += replay.runs
            self._used[key] += replay.runs
            self._passed[key[0]] += replay.runs
            replay.runs = 0
        self._offered.clear()
        self.ready.clear()

    def _has_passed(self, shape: Any) -> int:
        """Return the number of the unit's batches of a shape so far."""
        runs = sum(replay.runs for key, replay in self._offered if key[0] == shape)
        return self._passed[shape] + runs

    def begin_unit(
        self, batches: int, left: int, *, full: int | None = None, at_once: bool = False
    ) -> None:
        """Begin a unit. Until the unit ends, nothing runs except its steps.

        Parameters
        ----------
        batches
            The number of batches in the unit.
        left
            The number of batches left in the trial, including those of the unit.
        full
            The number of batches of the same shape with which the unit begins. Only shorter ones
            follow. None: not known.
        at_once
            Whether `_core.run_unit` may replay the first batch, too. The modules must then be in
            the mode in which the unit's steps run.
        """
        self._take_back()
        self._used.clear()
        self._seen_in_unit.clear()
        self._looks_again = True
        self._batches, self._left = batches, left
        self._passed.clear()
        self._checked_at = self._failure = None
        self._has_failed = False
        self._full = full if full == batches or len(self._replayed_shapes()) <= 1 else None
        self._is_open = self._prove is None or (
            batches >= FEWEST_BATCHES
            and (not self._programs or any(map(self._pays, self._programs)))
        )
        if at_once and self._is_open and self._programs:
            self._offer_all()

    def _offer_all(self) -> None:
        """Make the checks that are due at a unit's first batch, and offer all compared programs."""
        self._numbers.take_groups()
        if self.refusal is not None or self._looks_always or not self._look_again():
            return
        self._take_settings()
        current = (0, self._branches, self._gradients.present())
        for key, recorded in self._programs.items():
            if key[1:] == current and recorded.compared >= COMPARED and not recorded.gradients:
                recorded.set_numbers(self._numbers, self._settings)
                self._offer(key, recorded)

    def end_unit(self) -> str | None:
        """Compare the unit's most used program with the ordinary step, if this has not been done.

        If the number of full batches is known, both have taken the last of them
        (:meth:`_checked`). Otherwise, both make one more step from the current state, on the last
        batch; then the state is restored.

        Returns
        -------
        str or None
            How they differ; None if they are equal. If they differ, the unit's states may be wrong,
            and steps are no longer recorded.
        """
        self._take_back()
        used, self._used = self._used, Counter()
        is_open, self._is_open = self._is_open, self._prove is None
        failure, self._failure = self._failure, None
        checked_at, self._checked_at, self._full = self._checked_at, None, None
        if checked_at is not None and checked_at == self.replays:
            # Nothing was replayed since.
            if not self._still_holds():
                failure = CHANGED_WITHIN
                self._refuse(failure)
            return failure
        if not used or not is_open or self.refusal is not None:
            return None
        branches = self._numbers.branches()
        keys = [key for key, _ in used.most_common() if key in self._programs]
        for key in keys:
            if key[2] == branches:
                recorded = self._programs[key]
                how = self._difference(recorded, key)
                if how is not None:
                    recorded.withdraw()
                    self._refuse(how)
                return how
        return None

    def has_failed(self) -> bool:
        """Return whether a replay has raised an exception in this unit.

        Unlike that of an ordinary step, its traceback has none of the user's lines.
        """
        return self._has_failed or any(replay.failed for _, replay in self._offered)

    def refuse(self, reason: str) -> None:
        """Take only ordinary steps from now on, without a log message."""
        self._take_back()
        self._programs.clear()
        self.refusal = reason

    def _difference(self, recorded: RecordedProgram, key: Any) -> str | None:
        with self._state.listed():
            return self._compared_once_more(recorded, key)

    def _compared_once_more(self, recorded: RecordedProgram, key: Any) -> str | None:
        if not self._still_holds():
            return CHANGED_WITHIN
        _, phase, _, present = key
        batch = {n: v.clone() if isinstance(v, torch.Tensor) else v
                 for n, v in recorded.static.items()}  # fmt: skip
        gradients, before = self._gradients.taken(), self._state.taken()
        drawn: Copied | None = None
        try:
            self._gradients.arrange(present)
            values = self._step(dict(batch), phase)
            self._gradients.settle()
            values = {name: cloned(value) for name, value in values.items()}
            if not self._state.is_as_listed():
                raise Different("the step replaces its tensors")
            after = self._state.taken()
            self._state.put(before, after)
            self._take_settings()
            recorded.set_numbers(self._numbers, self._settings)
            self._require(recorded.replay(batch), values, after)
            drawn = after
        except Exception as error:
            return _how_it_differs(error)
        finally:
            self._state.put(before, drawn)
            self._gradients.put(gradients)
        return None

    def _still_holds(self) -> bool:
        return self._proof is None or self._proof.holds()

    def _may_check(self, key: Any) -> bool:
        """Return whether the unit's last full batch may be the one for the check.

        Gradients are not gathered, and no shorter batch is replayed after it: a step that does
        something else from there on would not be found.
        """
        shape, _, _, present = key
        return (
            self._checked_at is None
            and not present
            and (self._full == self._batches or self._replayed_shapes() <= {shape})
        )

    def _replayed_shapes(self) -> set[Any]:
        """Return the shapes of batches for which there are compared programs."""
        return {key[0] for key, each in self._programs.items() if each.compared >= COMPARED}

    def _checked(self, batch: Batch, phase: int, recorded: RecordedProgram) -> Values:
        """Take an ordinary step, put the state back, and replay; :meth:`end_unit` tells the result.

        If they differ, the unit runs again. So nothing is computed until it ends.
        """
        self._take_back()
        self._checked_at = self.replays
        with self._state.listed():
            before, after = self._state.taken(), None
            fill(recorded.static, batch)  # before the step, which might change the batch
            try:
                values = self._step(batch, phase)
                values = {name: cloned(value) for name, value in values.items()}
                after = self._state.exchanged(before)
                recorded.set_numbers(self._numbers, self._settings)
                self._require(recorded.replay_filled(), values, after)
                return values
            except Exception as error:
                self._failure = _how_it_differs(error)
                recorded.withdraw()
                self._refuse(self._failure)
                self._state.put(before if after is None else after)
        return {}

    @property
    def held_bytes(self) -> int:
        """The bytes of programs that are not kept for other models, in addition to the model's."""
        return sum(
            recorded.held_bytes
            for recorded in self._programs.values()
            if recorded.kept is None or not kept_programs.has(recorded.kept)
        )

    # --- recording ---------------------------------------------------------

    def _unrecorded(self, batch: Batch, phase: int, key: Any) -> Values:
        seen = self._seen.get(key, 0)
        self._seen[key] = seen + 1
        self._seen_in_unit[key] += 1
        if self._seen_in_unit[key] > 1 or self._begins_full_batches(key):
            self._frequent.add(key)
        if len(self._programs) >= MOST_PROGRAMS:
            return self._timed(batch, phase, key)
        if seen < WARM_UP:
            adopted = self._adopted(batch, key, seen)
            if adopted is not None:
                return self._compared(batch, phase, adopted, key)
            return self._timed(batch, phase, key)
        alike = self._architecture(key)
        alike.steps += 1
        if not self._may_take_over(key, alike, seen) and (
            self._saves_too_little(key, alike) or self._is_early(key, alike)
        ):
            return self._timed(batch, phase, key)
        reason = self._numbers.refusal() or _compiles() or self._unproven(key)
        if reason is not None:
            self._refuse(reason)
            return self._step(batch, phase)
        return self._recorded(batch, phase, key)

    def _begins_full_batches(self, key: Any) -> bool:
        """Return whether this is the first of several full batches of the unit."""
        is_first = self._passed[key[0]] == self._passed.total() == 1
        return is_first and self._full is not None and self._full > 1

    def _adopted(self, batch: Batch, key: Any, seen: int) -> RecordedProgram | None:
        """Return the program of another model whose step is proven to be the same; None if none is.

        A new model's optimizer has no state before the first step.
        """
        has_state = all(optimizer.state for optimizer in self._optimizers)
        is_plain = all(isinstance(value, torch.Tensor) for value in batch.values())
        if not (self._adopts and is_plain and (has_state or seen)) or self._gradients.tensors():
            return None
        alike = self._architecture(key)
        times = [
            (kept.seconds, kept.origin.ordinary) for kept in alike.kept if kept.origin is not None
        ]
        if not times:
            return None
        self._seconds.setdefault(key, [min(ordinary for _, ordinary in times)])
        saves = any(self._saves(key, replay, cost=ADOPT_COST) for replay, _ in times)
        if not saves or self._numbers.refusal() or _compiles() or self._unproven(key):
            return None
        try:
            self._numbers.require_equal_counts()
        except Unexplained:
            return None
        facts = self._facts()
        kept = kept_programs.find_proven(alike, facts) if facts.are_shareable else None
        if kept is None or kept.origin is None:
            return None
        found = RecordedProgram.of_kept(kept, kept.origin.memories(self._state.tensors()))
        found.is_adopted = True
        found.compared = self._first_proves(key) - 1  # it has not been compared yet
        self._programs[key] = found
        self._places = (self._state.places(), self._modes())
        return found

    def _facts(self) -> Facts:
        """Return what decides which operators the proven step calls."""
        assert self._proof is not None
        states = [
            [
                [
                    (parameter, _kinds_of(optimizer.state.get(parameter)))
                    for parameter in group["params"]
                ]
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]
        given = (self._proof.given, states)
        read = (self._proof.unchanged, self._proof.of_torch)
        return Facts(read, given, self._state.tensors())

    def _is_early(self, key: Any, alike: Architecture) -> bool:
        """Return whether it is too early for recording a step to save time."""
        if self._prove is None:
            return False
        if key in self._frequent:
            left, least = self._left, LEAST_LEFT
        else:
            left, least = self._units_left(), LEAST_UNITS_LEFT
        return max(left, alike.steps) < least

    def _units_left(self) -> int:
        return self._left // max(1, self._batches)

    def _may_take_over(self, key: Any, alike: Architecture, seen: int) -> bool:
        """Return whether another model may have a program for this step that is worth reusing."""
        tried, self._tried[key] = self._tried.get(key, 0), len(alike.kept)
        if len(alike.kept) <= tried:
            return False
        if self._prove is None:
            return True
        if len(self._seconds.get(key, ())) < WARM_UP:
            self._tried[key] = tried
            return False
        return any(self._saves(key, kept.seconds, cost=TAKE_COST) for kept in alike.kept)

    def _saves_too_little(self, key: Any, alike: Architecture) -> bool:
        """Return whether programs of other models like this one would not save time here.

        If they do not save any in a unit, nothing is recorded in later units either.
        """
        if self._prove is None or not alike.kept or not self._seconds.get(key):
            return False
        if any(self._saves(key, kept.seconds, cost=TAKE_COST) for kept in alike.kept):
            return False
        if not any(self._saves(key, kept.seconds) for kept in alike.kept):
            self._refuse(NO_GAIN)
        return True

    def _architecture(self, key: Any) -> Architecture:
        """Return what this thread has recorded about the steps of models like this one."""
        found = self._architectures.get(key)
        if found is None:
            what = (
                *(self._what, self._prove is None, self._looks_always, key),
                repr(modes_of(self._modules)),
                tuple(type(part) for module in self._modules for part in module.modules()),
                tuple(type(optimizer) for optimizer in self._optimizers),
                self._state.forms(),
                torch.get_num_threads(),
            )
            found = self._architectures[key] = kept_programs.architecture(what)
        return found

    def _timed(self, batch: Batch, phase: int, key: Any) -> Values:
        """Take an ordinary step, and store its time."""
        begun = time.thread_time()
        values = self._step(batch, phase)
        self._seconds[key] = [*self._seconds.get(key, ())[-2:], time.thread_time() - begun]
        return values

    def _pays(self, key: Any) -> bool:
        """Return whether replays in a unit save more time than the comparison at its end takes."""
        recorded = self._programs[key]
        return recorded.compared < COMPARED or self._saves(key, recorded.seconds)

    def _saves(self, key: Any, seconds: float, cost: float | None = None) -> bool:
        """Return whether replays that take `seconds` each save time in a unit.

        With `cost`, they must save that many ordinary steps in the rest of the trial.
        """
        ordinary = min(self._seconds[key])
        if key not in self._frequent:  # the unit's other program is compared at its end
            if cost is None:
                return True
            saved = ordinary - seconds - self._late_check()
            return self._units_left() * saved > cost * ordinary
        saved = self._batches * (ordinary - seconds) - CHECK_COST * (ordinary + seconds)
        if cost is None:
            return saved > LEAST_SAVED * self._batches * ordinary
        return self._left * saved > self._batches * cost * ordinary

    def _late_check(self) -> float:
        """Return the seconds by which a replay of a shorter last batch makes a unit's check longer.

        Without it, the check is on the unit's last full batch (:meth:`_may_check`).
        """
        if self._full is None:
            return 0.0
        times = [min(self._seconds[key]) for key in self._frequent if self._seconds.get(key)]
        return LATE_CHECK * max(times, default=0.0)

    def _measure(self, recorded: RecordedProgram, batch: Batch, after: Copied) -> None:
        """Measure the time of three replays of a program, then restore the state."""
        for _ in range(3):
            begun = time.thread_time()
            recorded.set_numbers(self._numbers, self._settings)
            recorded.replay(batch)
            recorded.seconds = min(recorded.seconds, time.thread_time() - begun)
        self._state.put(after)

    def _unproven(self, key: Any) -> str | None:
        """Prove that the step may be recorded; return the reason if it cannot be proven, else None.

        No proof is needed if the user promises it, or if the step is already proven.
        """
        if self._prove is None or self._proof is not None:
            return None
        if min(self._seconds[key]) > LONGEST_STEP:
            return "almost all of its time is spent in operators"
        try:
            self._proof = self._prove()
        except Unproven as error:
            return f"it may do something else for another batch: {error}"
        return None

    def _recorded(self, batch: Batch, phase: int, key: Any) -> Values:
        with self._state.listed():
            return self._recorded_as_listed(batch, phase, key)

    def _recorded_as_listed(self, batch: Batch, phase: int, key: Any) -> Values:
        static = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
        before, counts = self._state.taken(), self._numbers.counts()
        watched, values = self._watched(static, batch, phase, before)
        if watched.refusal is not None:
            self._refuse(watched.refusal)
            return values
        if watched.after is None or not self._state.is_as_listed():
            self._replaced_tensors()
            return values
        after = self._state.taken()
        try:
            _require_same(watched.told, values)
            self._state.require_equal(watched.after, after)
            self._numbers.require_equal_counts()
            recording = watched.recording
            recorded = self._taken_over(recording, counts, static, watched.values, key)
            if recorded is None:
                program = Program(recording, tensors_of(watched.values.values()))
                holes, free = self._holes(recording, counts, program, watched.stepped)
                recorded = RecordedProgram(
                    program, static, watched.values, watched.gradients, holes, free
                )
            self._state.put(before)
            self._compare(recorded, batch, values, after)
            self._programs[key] = recorded
            self._places = (self._state.places(), self._modes())
        except Exception as error:
            self._give_up(error, after)
        return values

    def _watched(
        self, static: Batch, batch: Batch, phase: int, before: Copied
    ) -> tuple[Watched, Values]:
        """Record a step on `static`, undo it, and take it on `batch` without recording.

        Only the second step counts, because PyTorch computes some results by other operators while
        these are recorded, or fails then. A step that cannot be undone is not taken again.

        Parameters
        ----------
        before
            The present state.

        Returns
        -------
        tuple
            The recorded step, and the metrics of the step that counts.
        """
        entries, gradients = Entries(self._modules, self._optimizers), self._gradients.taken()
        watched = Watched(Recording(self._state.storages()))
        try:
            with sections(watched.recording, self._optimizers) as stepped, watched.recording:
                watched.values = self._step(dict(static), phase)
                self._gradients.settle()
            watched.stepped = stepped
            watched.refusal = watched.recording.refusal
            if watched.refusal is None and self._prove is not None:  # the code may read the text
                watched.refusal = watched.recording.text
            watched.told = {name: cloned(value) for name, value in watched.values.items()}
            watched.gradients = self._gradients.taken()
            if watched.recording.leaves_traces:
                return watched, watched.told
            if self._state.is_as_listed():
                watched.after = self._state.taken()
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            watched.refusal = f"it cannot be recorded: {type(error).__name__}: {text}"
            self._drop_gradients()  # a backward pass may have left some of them
        entries.put()
        self._state.put(before, watched.after)
        self._gradients.put(gradients)
        values = self._step(batch, phase)
        self._gradients.settle()
        return watched, {name: cloned(value) for name, value in values.items()}

    def _signature(self, recording: Recording, static: Batch, values: Values) -> Signature:
        return Signature(recording, static, values, set(self._state.storages()))

    def _taken_over(
        self, recording: Recording, counts: Sequence[float], static: Batch, values: Values, key: Any
    ) -> RecordedProgram | None:
        """Return another model's program bound to this model's memory; None if none fits."""
        alike = self._architecture(key)
        if not alike.kept or self._gradients.tensors():
            return None
        signature = self._signature(recording, static, values)
        kept = kept_programs.find(alike, signature)
        if kept is None or not self._numbers.explain(recording.calls, counts, kept.formulas):
            return None
        found = RecordedProgram.of_kept(kept, signature.memories)
        found.compared = 0 if self._prove is None else self._first_proves(key)
        return found

    def _first_proves(self, key: Any) -> int:
        """Return how many comparisons the first one of a program of another model counts as.

        By the proof, all further recordings are the same. A program that most batches use is
        compared again when the unit ends, any other on its next batch.
        """
        return COMPARED if key in self._frequent else COMPARED - 1

    def _keep(self, recorded: RecordedProgram, key: Any) -> None:
        """Keep a program for later models of this architecture."""
        if self._gradients.tensors() or recorded.kept is not None:
            return
        signature = self._signature(recorded.program.recording, recorded.static, recorded.values)
        recorded.kept = KeptProgram(
            *(recorded.program, signature, recorded.free, recorded.static),
            *(recorded.values, recorded.tensors, recorded.places, recorded.formulas),
            seconds=recorded.seconds,
            held_bytes=recorded.held_bytes,
            origin=self._origin(signature, key),
        )
        alike = self._architecture(key)
        kept_programs.keep(alike, recorded.kept)
        self._tried[key] = len(alike.kept)

    def _origin(self, signature: Signature, key: Any) -> Origin | None:
        """Return what a model needs to use this model's program unrecorded; None if it may not."""
        if self._proof is None or signature.has_constants:
            return None
        facts = self._facts()
        if not facts.are_shareable:
            return None
        storages = self._state.storages()
        owners = [storages.index(memory.data_ptr()) for memory in signature.memories]
        return Origin(facts, owners, min(self._seconds[key]))

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

    def _compared(self, batch: Batch, phase: int, recorded: RecordedProgram, key: Any) -> Values:
        """Take an ordinary step, and check that the program gives the same results."""
        with self._state.listed():
            return self._compared_as_listed(batch, phase, recorded, key)

    def _compared_as_listed(
        self, batch: Batch, phase: int, recorded: RecordedProgram, key: Any
    ) -> Values:
        before = self._state.taken()
        how = None
        if recorded.compared == 0 and not recorded.is_adopted:
            fill(recorded.static, batch)
            watched, values = self._watched(recorded.static, batch, phase, before)
            if watched.refusal is not None:
                recorded.withdraw()
                self._refuse(watched.refusal)
                return values
            how = self._other_program(recorded, watched.recording, watched.values)
        else:
            values = self._step(batch, phase)
            self._gradients.settle()
            values = {name: cloned(value) for name, value in values.items()}
        if not self._state.is_as_listed():
            self._refuse("it is not the ordinary step: the step replaces its tensors")
            return values
        after = self._state.taken()
        try:
            if how is not None:
                raise Different(how)
            self._state.put(before, after)
            self._compare(recorded, batch, values, after)
            recorded.compared += 1
            if recorded.compared == COMPARED:
                if recorded.kept is None:
                    self._measure(recorded, batch, after)
                    self._keep(recorded, key)
                    recorded.program.settle()
                if self._prove is not None and not self._pays(key):
                    self._refuse(NO_GAIN)
        except Exception as error:
            recorded.withdraw()
            if recorded.is_adopted:
                self._record_instead(key, after)
            else:
                self._give_up(error, after)
        return values

    def _other_program(
        self, recorded: RecordedProgram, recording: Recording, values: Values
    ) -> str | None:
        """Return how another recording of the step differs from the program."""
        if recorded.kept is None:
            return recorded.program.differs_from(recording, recorded.free)
        signature = self._signature(recording, recorded.static, values)
        if signature.key(recorded.kept.free) == recorded.kept.key:
            return None
        return "the step calls different operators or passes different arguments than before"

    def _compare(
        self, recorded: RecordedProgram, batch: Batch, values: Values, after: Copied
    ) -> None:
        """Replay from the current state; raise `Different` unless it gives `values` and `after`."""
        recorded.set_numbers(self._numbers, self._settings)
        self._require(recorded.replay(batch), values, after)

    def _require(self, found: Values, values: Values, after: Copied) -> None:
        """Check that metrics and state equal those of the ordinary step, `values` and `after`."""
        _require_same(found, values)
        self._state.require(after)

    # --- refusals ----------------------------------------------------------

    def _replaced_tensors(self) -> None:
        """Count a step that replaced tensors; give up recording at the third, see `MOST_TRIES`."""
        self._tries += 1
        if self._tries == MOST_TRIES:
            self._refuse("it replaces the model's tensors with others")

    def _record_instead(self, key: Any, after: Copied) -> None:
        """Drop an adopted program that is not the ordinary step; record this model's own."""
        self._adopts = False
        del self._programs[key]
        self._seen[key] = WARM_UP
        self._state.put(after)

    def _give_up(self, error: Exception, after: Copied) -> None:
        """Stop recording because of `error`; continue from the state `after`."""
        if isinstance(error, Different):
            self._refuse(f"it is not the ordinary step: {error}")
        elif isinstance(error, Unexplained):
            self._refuse(str(error))
        else:
            text = " ".join(str(error).split())[:300]
            self._refuse(f"it cannot be run again: {type(error).__name__}: {text}")
        self._state.put(after)

    def _refuse(self, reason: str) -> None:
        self._take_back()
        self._programs.clear()
        self._seen.clear()
        self.refusal = reason
        if self._prove is not None:
            self.note = f"the {self._what} is not recorded: {reason}"
            return
        # Log one line only: the same cause usually prevents recording of training and evaluation.
        level = logging.WARNING if self._optimizers else logging.INFO
        log.log(level, "graph=True: the %s is not recorded: %s", self._what, reason)

    def _look_again(self) -> bool:
        """Drop programs that no longer match; return whether steps may still be recorded."""
        self._take_back()
        self._gradients.prepare()
        places = (self._state.places(), self._modes())
        kept = self._programs or self._proof is not None
        if kept and (places != self._places or not self._is_proven()):
            self._changed()
        if self._programs:
            try:
                self._numbers.require_equal_counts()
            except Unexplained as error:
                self._refuse(str(error))
        self._places = places
        self._looks_again = False
        return self.refusal is None

    def _modes(self) -> Any:
        """Return the modules' properties that the user promises not to change.

        Return None if the step is proven, because the proof records what must not change.
        """
        return modes_of(self._modules) if self._prove is None else None

    def _is_proven(self) -> bool:
        if self._proof is None:
            return self._prove is None
        return self._proof.unchanged.holds() and (
            not self._looks_again or self._proof.of_torch.holds()
        )

    def _changed(self) -> None:
        """Drop the programs and the proof; give up recording if this happens often."""
        if self._prove is not None and self.replays < FEWEST_BATCHES * (self._tries + 1):
            self._tries += 1
            if self._tries == MOST_TRIES:
                self._refuse("something that the step reads changes too often")
                return
        self._programs.clear()
        self._seen.clear()
        self._architectures.clear()
        self._tried.clear()
        self._proof = None


def _kinds_of(entries: Any) -> Any:
    """Return an optimizer's state of a parameter: its tensors, and the types of other entries."""
    return [
        (name, value if isinstance(value, torch.Tensor) else type(value))
        for name, value in (entries or {}).items()
    ]


def _how_it_differs(error: Exception) -> str:
    if isinstance(error, Different):
        return f"it is not the ordinary step any more: {error}"
    text = " ".join(str(error).split())[:300]
    return f"the ordinary step fails: {type(error).__name__}: {text}"


def _require_same(found: Values, values: Values) -> None:
    """Check that metrics equal those of the ordinary step, `values`."""
    for name, value in values.items():
        if not same(value, found.get(name)):
            raise Different(f"the metric {name!r} differs")


def _is_aligned(batch: Batch) -> bool:
    """Return whether a batch has the same memory layout as the copy that a program reads.

    With a different layout, kernels may add in a different order. Batches of a loader have this
    layout.
    """
    return all(
        value.is_contiguous() and value.data_ptr() % ALIGNMENT == 0
        for value in batch.values()
        if isinstance(value, torch.Tensor)
    )


def _compiles() -> str | None:
    """Return a reason if ``torch.compile`` is in use, which does not work during recording."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["frames"]:
        return "torch.compile is in use"
    return None
