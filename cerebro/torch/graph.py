"""A step as CUDA graphs: captured once for each shape of batch, replayed for all further batches.

A graph launches the many short kernels of a step at once. It runs no Python code, so a step is
captured only if its Python code does the same every time. After a few ordinary steps, which create
the optimizer's state, some steps are computed twice from the same state: as ordinary steps and by
the graph. If a bit differs, or the capture fails, the model continues with ordinary steps, and its
log gives the reason.

`GraphedStep` decides what is captured and replayed, `StepCapturer` captures and compares, `Basis`
knows what graphs depend on besides the batch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cerebro.torch import graph_replay
from cerebro.torch.cpu_program import NeedsPython
from cerebro.torch.graph_rates import Rates, Schedule, Settings
from cerebro.torch.graph_recorder import Captured, CudaRecorder
from cerebro.torch.optimizer_step import are_different_objects, groups_of
from cerebro.torch.recorded_step import UnitReplays
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
from cerebro.torch.updates import Updates

WARM_UP = 3  # ordinary steps with batches of one shape before the step is captured
COMPARED = 2  # batches of each shape on which the graph is compared with the ordinary step
MOST_GRAPHS = 4  # of a step; then, batches of other shapes take ordinary steps

log = logging.getLogger("cerebro.torch")


class GraphedStep:
    """A step that is captured after a few batches of each shape.

    `capturer` takes ordinary steps, and captures and compares them. `what` names the step in the
    log, and ``set_mode()`` puts the modules into its mode. `updates` has schedulers that step after
    every batch, if any. With `is_alone`, only this step and these schedulers run between two
    batches of a unit, so that the C core may replay graphs by itself.
    """

    def __init__(
        self,
        capturer: StepCapturer,
        what: str,
        set_mode: Callable[[], None],
        updates: Updates | None,
        *,
        is_alone: bool,
    ) -> None:
        self._capturer = capturer
        self._what = what
        self._set_mode = set_mode
        self._rates = capturer.rates
        self._basis = capturer.basis
        by_batch = updates is not None and updates.by_batch
        self._schedule = Schedule(updates, self._rates) if updates and by_batch else None
        self.is_alone = is_alone
        self._seen: Counter[Any] = Counter()
        self._graphs: dict[Any, Graph] = {}
        self._offered: set[Any] = set()  # the shapes, since the last check was requested
        self._is_steady = False  # within a unit whose batches change no setting
        self._is_checked = False  # nothing can have changed since the last check
        self._prepare = self.prepare  # one object: the core tells by it what belongs together
        self.unit = UnitReplays()
        self.refusal: str | None = None  # why all further steps are ordinary

    def __call__(self, batch: Batch, phase: int = 0) -> Values:
        if self.refusal is None and self._graphs:
            self._is_ready()
        if self.refusal is not None:
            return self._capturer.step(batch)
        shape = shape_of(batch)
        graph = self._graphs.get(shape)
        if graph is not None and graph.compared >= COMPARED:
            self.unit.replays += 1
            values = graph.replay(batch)
        else:
            self._is_checked = False  # the step's Python code may change anything
            values = self._warm_up_or_compare(batch, shape, graph)
        self._offer(shape)
        return values

    @property
    def replays(self) -> int:
        """The number of steps replayed without a comparison; `_core.run_unit`'s are added later."""
        return self.unit.replays

    @property
    def held_bytes(self) -> int:
        """The bytes of device memory that were reserved for the graphs alone."""
        return sum(graph.captured.held_bytes for graph in self._graphs.values())

    @property
    def is_captured(self) -> bool:
        """Whether batches of some shape are replayed."""
        return any(graph.compared >= COMPARED for graph in self._graphs.values())

    def request_check(self) -> None:
        """Check the tensors' addresses before the next replay: after loading a state, or a unit."""
        self._take_back()
        self._basis.request_check()
        self._rates.forget_filled()
        self._is_checked = False

    def refuse(self, reason: str) -> None:
        """Take only ordinary steps from now on, without a log message."""
        self._forget()
        self.refusal = reason

    # --- units -------------------------------------------------------------

    def begin_unit(self, *, at_once: bool = False) -> None:
        """Begin a unit. With `at_once`, the core may replay its first batch, too."""
        self.unit.begin()
        self.request_check()
        self._is_steady = at_once and self._schedule is None
        if at_once and self._graphs and self._is_ready():
            for shape in self._graphs:
                self._offer(shape)

    def end_unit(self) -> str | None:
        """End a unit; see `RecordedStep.end_unit`. Graphs are compared when they are captured."""
        self._is_steady = False
        self.request_check()
        return None

    def has_failed(self) -> bool:
        """Return False: errors of a replay are the device's, and mean what they say."""
        return False

    def prepare(self, n: int) -> Any:
        """Begin a run of `n` batches that the core replays; see `_core.GraphReplay`.

        Return the learning rates before each of them, a float32 array of ``n`` rows, None if they
        are the present ones, or the smaller number of batches that can be replayed. Then nothing
        has been done, and the core asks again.
        """
        self._set_mode()
        if self.refusal is not None or not self._graphs or not self._is_ready():
            return 0
        if self._schedule is None:
            return None
        return self._schedule.step_ahead(n, self._basis.settings)

    def _offer(self, shape: Any) -> None:
        """Let the core replay further steps like this one, once its graph has been compared."""
        graph = self._graphs.get(shape)
        if shape in self._offered or graph is None or graph.compared < COMPARED:
            return
        self._offered.add(shape)
        if self.is_alone and graph.without_python is None:
            graph.without_python = self._capturer.make_replay(graph, self._prepare)
        self.unit.offer(shape, graph.without_python)

    # --- what may be replayed ----------------------------------------------

    def _is_ready(self) -> bool:
        """Return whether graphs may be replayed; if something has changed, drop or refuse them."""
        if self._is_checked:
            return True
        change = self._basis.settings.find_change()
        if change is not None:
            self._refuse(
                f"{change} changes while the model trains, and only the learning rate may (of "
                "Adam, AdamW and SGD)"
            )
            return False
        if self._basis.has_moved():
            self._forget()
            return False
        self._rates.fill()
        self._is_checked = self._is_steady
        return True

    def _warm_up_or_compare(self, batch: Batch, shape: Any, graph: Graph | None) -> Values:
        if graph is None:
            if len(self._graphs) >= MOST_GRAPHS:
                return self._capturer.step(batch)
            self._seen[shape] += 1
            if self._seen[shape] <= WARM_UP:
                return self._capturer.warm(batch)
            if not self._graphs:
                self._basis.note_settings()
        outcome = self._capturer.compare(batch, graph)
        if outcome.refusal is not None:
            self._refuse(outcome.refusal)
        elif outcome.graph is not None:
            if not self._graphs:
                self._basis.note_places()
            self._graphs[shape] = outcome.graph
            self._basis.note_surroundings()
        return outcome.values

    def _refuse(self, reason: str) -> None:
        self.refuse(reason)
        # Log one line only: the same cause usually prevents the capture of both steps.
        level = logging.WARNING if self._capturer.trains else logging.INFO
        text = "graph=True: the %s is not replayed as a CUDA graph: %s"
        log.log(level, text, self._what, reason)

    def _take_back(self) -> None:
        self.unit.take_back()
        self._offered.clear()

    def _forget(self) -> None:
        self._take_back()
        self._graphs.clear()
        self._seen.clear()
        self._capturer.forget()
        self._is_checked = False


# --- what graphs depend on ---------------------------------------------------------


class Basis:
    """What the graphs of a step depend on besides the batch: settings, addresses, surroundings."""

    def __init__(self, modules: Sequence[Any], optimizers: Sequence[Any], state: StepState) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._state = state
        self.settings = Settings(optimizers)
        self._places: Any = None
        self._groups: list[dict[str, Any]] = []
        self._surroundings: Surroundings | None = None
        self._looks_again = False

    def note_settings(self) -> None:
        self.settings = Settings(self._optimizers)

    def note_places(self) -> None:
        self._places = self._state.places()
        self._groups = groups_of(self._optimizers)
        self._looks_again = False

    def note_surroundings(self) -> None:
        self._surroundings = Surroundings(self._modules, self._optimizers)

    def request_check(self) -> None:
        self._looks_again = True

    def has_moved(self) -> bool:
        """Return whether tensors are elsewhere, or the surroundings have changed.

        This takes long, so it is looked at only if a check was requested, or if the optimizer has
        other groups, as after ``Optimizer.load_state_dict``.
        """
        groups = groups_of(self._optimizers)
        if not self._looks_again and not are_different_objects(groups, self._groups):
            return False
        self._looks_again, self._groups = False, groups
        if self._state.places() != self._places:
            return True
        return self._surroundings is not None and not self._surroundings.are_unchanged()


# --- capture and proof -------------------------------------------------------------


@dataclass
class Graph:
    """A captured step, with the batch that it reads."""

    static: Batch
    captured: Captured
    draws: bool  # random numbers, from PyTorch's generator
    compared: int = 0
    without_python: Any = None  # the `_core.GraphReplay`

    def replay(self, batch: Batch) -> Values:
        fill(self.static, batch)
        self.captured.replay()
        # The next replay overwrites the results, that of any graph with the same memory.
        return copy_values(self.captured.values)


@dataclass
class Outcome:
    """The metrics of a step, and what became of its capture or comparison."""

    values: Values
    graph: Graph | None = None
    refusal: str | None = None  # why further steps must be ordinary


class StepCapturer:
    """Takes ordinary steps, captures them, and compares.

    ``step(batch)`` returns metrics: tensors, numbers or pairs. Without `optimizers`, it must change
    nothing. ``drop_gradients()`` is called after a capture or comparison that failed.
    """

    def __init__(
        self,
        step: Callable[[Batch], Values],
        modules: Sequence[Any],
        optimizers: Sequence[Any],
        recorder: CudaRecorder,
        drop_gradients: Callable[[], None],
    ) -> None:
        self._step = step
        self._modules = modules
        self._optimizers = optimizers
        self._recorder = recorder
        self._drop_gradients = drop_gradients
        self._state = StepState(modules, optimizers, Gradients(()))
        self.basis = Basis(modules, optimizers, self._state)
        self.rates = Rates(optimizers)

    def step(self, batch: Batch) -> Values:
        """Take an ordinary step."""
        with self.rates.as_tensors():
            return self._step(batch)

    def warm(self, batch: Batch) -> Values:
        """Take an ordinary step where the capture will be."""
        return self._recorder.warm(lambda: self.step(batch))  # type: ignore[no-any-return]

    @property
    def trains(self) -> bool:
        return bool(self._optimizers)

    def forget(self) -> None:
        """Release the tensors of the last comparison."""
        self._state.forget_listing()

    def compare(self, batch: Batch, graph: Graph | None) -> Outcome:
        """Take an ordinary step, and replay it from the same state; first capture it, if needed."""
        with self._state.list_once():
            try:
                before = self._state.copy_values()
            except torch.cuda.OutOfMemoryError:
                return Outcome(self.step(batch), refusal=_NO_MEMORY)
            waits = None
            if graph is None:
                values, waits = self._recorder.run_watched(lambda: self.step(batch))
            else:
                values = self.step(batch)
            if waits is not None:
                return Outcome(values, refusal=f"it waits for the GPU at {waits}")
            return self._replay_again(batch, graph, values, before)

    def make_replay(self, graph: Graph, prepare: graph_replay.Prepare) -> Any:
        """Return what the core replays instead of `graph`; None if it cannot, or not yet."""
        captured, device = graph.captured, _device_of(self._modules)
        # PyTorch's replay() does two things before the launch: it moves its generator on by the
        # numbers that the graph draws, and writes seed and offset where the graph's kernels read
        # them (CUDAGeneratorState::replay_prologue). A graph that draws nothing has no such
        # kernels, so that the bare launch is the same. The core calls replay() in the thread of the
        # unit, whose stream is the current one there.
        launch: Any = captured.handle
        if graph.draws or launch is None:
            launch = captured.replay
        try:
            return graph_replay.make_replay(
                device, launch, graph.static, captured.values, self.rates.addresses(), prepare
            )
        except NeedsPython:
            return None

    def _replay_again(
        self, batch: Batch, graph: Graph | None, values: Values, before: Copied
    ) -> Outcome:
        """Replay the step that has just been taken, and compare."""
        state = self._state
        if not state.is_as_listed():
            return Outcome(values, refusal="it is not the ordinary step: the step replaces tensors")
        try:
            after = state.copy_values()
        except torch.cuda.OutOfMemoryError:
            return Outcome(values, refusal=_NO_MEMORY)
        changed = None if self._optimizers else state.find_changed(before, after)
        if changed is not None:
            return Outcome(values, refusal=f"it changes {changed}")
        try:
            state.restore(before)
            if graph is None:
                graph = Graph(*self._capture(batch), draws=after.has_drawn_since(before))
                state.restore(before)
            self.rates.fill()
            _require_same_metrics(values, graph.replay(batch))
            state.require(after)
        except Exception as error:
            # Continue with ordinary steps from the state after the ordinary step.
            self._drop_gradients()
            state.restore(after)
            return Outcome(values, refusal=describe_error("it cannot be captured", error))
        graph.compared += 1
        return Outcome(values, graph)

    def _capture(self, batch: Batch) -> tuple[Batch, Captured]:
        static = copy_values(batch)  # outside of the memory that the graphs share
        self.rates.fill()
        # A capture computes nothing. If the step's Python code keeps tensors of it in a module, as
        # a mask for the next batch, they would have no values until the graph runs, and be
        # overwritten by other graphs afterwards.
        entries = Entries(self._modules, self._optimizers)

        def take_step() -> Values:
            try:
                return self.step(static)
            finally:
                entries.restore()

        captured = self._recorder.capture(take_step)
        return static, captured


_NO_MEMORY = "there is not enough memory to compare it with the ordinary step"


def _require_same_metrics(ordinary: Values, replayed: Values) -> None:
    for name, value in ordinary.items():
        if not have_same_bits(value, replayed.get(name)):
            raise Different(f"the metric {name!r} of the graph differs")


def _device_of(modules: Sequence[Any]) -> torch.device:
    return next(parameter.device for module in modules for parameter in module.parameters())
