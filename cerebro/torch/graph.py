"""A training step as a CUDA graph: captured once, replayed for every batch of the same shape.

A graph launches the many short kernels of a step at once. It runs no Python code, so a step is
captured only if its Python code does the same every time. After a few ordinary steps, which create
the optimizer's state, some steps are computed twice from the same state: as ordinary steps and by
the graph. If a bit differs, or the capture fails, the model continues with ordinary steps, and its
log gives the reason. Batches of a different shape take ordinary steps, too.

Between steps, the learning rate is a number, as schedulers and states require; within a step, it is
a tensor that the graph reads. If another setting changes, all further steps are ordinary.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cerebro.torch.optimizer_step import are_different_objects, groups_of
from cerebro.torch.step_state import (
    Batch,
    Copied,
    Different,
    Gradients,
    StepState,
    Values,
    copy_values,
    describe_error,
    fill,
    have_same_bits,
    shape_of,
)

WARM_UP = 3  # ordinary steps with batches of one shape before the step is captured
COMPARED = 2  # batches on which the graph is compared with the ordinary step

TENSOR_RATES: tuple[type, ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers that read the learning rate from a tensor on the device."""

# The starts of two warnings of PyTorch: an operation waits for the GPU; watching is incomplete.
WAITS = "called a synchronizing"
ABOUT_WATCHING = "Synchronization debug mode"

log = logging.getLogger("cerebro.torch")

_streams: dict[tuple[Any, int], Any] = {}
"""The capture stream by device and stream of replays. Models that replay on the same stream share
it, because cuBLAS keeps a workspace of some MB for every stream. Models that replay on different
streams do not, because their graphs would overwrite that workspace."""

_failed: list[Any] = []  # failed captures, which the allocator queries until the process ends


class CudaRecorder:
    """Records work on a private stream, and repeats it on the current stream."""

    def __init__(self, device: Any) -> None:
        self._device = device

    @property
    def _stream(self) -> Any:
        if self._key not in _streams:
            _streams[self._key] = torch.cuda.Stream(self._device)
        return _streams[self._key]

    @property
    def _key(self) -> tuple[Any, int]:
        return self._device, torch.cuda.current_stream(self._device).cuda_stream

    def warm(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the capture stream."""
        current, stream = torch.cuda.current_stream(self._device), self._stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = work()
        current.wait_stream(stream)
        return result

    def run_watched(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        """Run `work` as `warm` does; return its result and the first line that waits, or None."""
        before = torch.cuda.get_sync_debug_mode()
        place = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", message=WAITS)
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = self.warm(work)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if str(warning.message).startswith(ABOUT_WATCHING):
                continue
            if re.match(WAITS, str(warning.message)) is None:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
            elif place is None:
                place = f"{Path(warning.filename).name}:{warning.lineno}"
        return result, place

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None], int]:
        """Record `work` without running it on the device.

        Return the tensors of its result, a function that replays the work and fills them, and the
        bytes of memory that only this work uses.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        try:
            with self._capturing(graph, pool):
                # What is reserved from here on belongs to the graph.
                reserved = torch.cuda.memory_reserved(self._device)
                result = work()
        except BaseException:
            torch.cuda.set_stream(current)
            self._mend(graph, pool)
            raise
        held = max(0, torch.cuda.memory_reserved(self._device) - reserved)
        return result, graph.replay, held

    def _mend(self, graph: Any, pool: Any) -> None:
        """Recover PyTorch from a failed capture."""
        device = self._device
        torch.cuda.synchronize(device)
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        release = getattr(torch._C, "_cuda_releasePool", None)
        # PyTorch leaves its allocator in the capture's pool, which would never be released.
        if end is not None and release is not None:
            with contextlib.suppress(RuntimeError):  # PyTorch has already done it
                end(device.index, pool)
                release(device.index, pool)
                _failed.append(graph)
        _streams[self._key] = torch.cuda.Stream(device)
        # Older versions leave the generator in capturing mode. The end of a capture corrects this.
        with self._capturing(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device)

    @contextlib.contextmanager
    def _capturing(self, graph: Any, pool: Any = None) -> Iterator[None]:
        # The garbage collector would destroy graphs of dropped models, which invalidates a capture.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            # Loader threads keep running during the capture, on their own streams.
            with torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                yield
        finally:
            if was_enabled:
                gc.enable()


class GraphedStep:
    """A training step that is captured after a few batches of the same shape.

    ``step(batch)`` returns metrics: tensors, numbers or pairs. ``drop_gradients()`` is called after
    a capture or comparison that failed.
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
        self._drop_gradients = drop_gradients
        self._optimizers = optimizers
        self._state = StepState(modules, optimizers, Gradients(()))
        self._rates = Rates(optimizers)
        self._recorder = recorder
        self._seen: dict[Any, int] = {}
        self._graph: _Graph | None = None
        self._compared = 0
        self._check_places = False
        self._groups = groups_of(optimizers)
        self.refusal: str | None = None  # why all further steps are ordinary

    def __call__(self, batch: Batch) -> Values:
        if self.refusal is not None:
            return self._run_ordinary(batch)
        shape = shape_of(batch)
        if self._graph is not None:
            if shape != self._graph.shape:
                return self._run_ordinary(batch)
            return self._replay_or_compare(batch, self._graph)
        seen = self._seen.get(shape, 0)
        self._seen[shape] = seen + 1
        if seen < WARM_UP:
            return self._recorder.warm(lambda: self._run_ordinary(batch))  # type: ignore[no-any-return]
        return self._run_compared(batch, None)

    @property
    def held_bytes(self) -> int:
        """The bytes of device memory that only the graph uses."""
        return 0 if self._graph is None else self._graph.held_bytes

    def request_check(self) -> None:
        """Check the tensors' addresses before the next replay; call this after loading a state."""
        self._check_places = True

    def _run_ordinary(self, batch: Batch) -> Values:
        with self._rates.as_tensors():
            return self._step(batch)

    def _replay_or_compare(self, batch: Batch, graph: _Graph) -> Values:
        settings = _settings_of(self._optimizers)
        if settings != graph.settings:
            self._refuse(
                f"{_describe_change(graph.settings, settings)} changes while the model trains, and "
                "only the learning rate may (of Adam, AdamW and SGD)"
            )
            return self._run_ordinary(batch)
        groups = groups_of(self._optimizers)
        if self._check_places or are_different_objects(groups, self._groups):
            self._check_places, self._groups = False, groups
            if self._state.places() != graph.places:
                self._forget()
                return self(batch)
        if self._compared < COMPARED:
            return self._run_compared(batch, graph)
        self._rates.fill()
        return graph.replay(batch)

    # --- capture and proof -------------------------------------------------

    def _run_compared(self, batch: Batch, graph: _Graph | None) -> Values:
        """Take an ordinary step, and replay it from the same state; first capture it, if needed."""
        with self._state.list_once():
            before = self._copy_state()
            if graph is None:
                values, waits = self._recorder.run_watched(lambda: self._run_ordinary(batch))
                if waits is not None:
                    self._refuse(f"it waits for the GPU at {waits}")
            else:
                values = self._run_ordinary(batch)
            if self.refusal is None and not self._state.is_as_listed():
                self._refuse("it is not the ordinary step: the step replaces its tensors")
            after = None if self.refusal is not None else self._copy_state()
            if before is None or after is None:
                return values  # type: ignore[no-any-return]
            try:
                self._state.restore(before)
                if graph is None:
                    graph = self._graph = self._capture(batch)
                    self._state.restore(before)
                self._compare(batch, graph, values, after)
            except Exception as error:
                # Continue with ordinary steps from the state after the last ordinary step.
                self._refuse(describe_error("it cannot be captured", error))
                self._drop_gradients()
                self._state.restore(after)
            return values  # type: ignore[no-any-return]

    def _capture(self, batch: Batch) -> _Graph:
        static = copy_values(batch)
        self._rates.fill()
        values, replay, held = self._recorder.capture(lambda: self._run_ordinary(static))
        settings, places = _settings_of(self._optimizers), self._state.places()
        return _Graph(shape_of(batch), settings, places, held, static, values, replay)

    def _copy_state(self) -> Copied | None:
        """Return a copy of the state; if memory is short, refuse the graph and return None."""
        try:
            return self._state.copy_values()
        except torch.cuda.OutOfMemoryError:
            self._refuse("there is not enough memory to compare it with the ordinary step")
            return None

    def _compare(self, batch: Batch, graph: _Graph, values: Values, after: Copied) -> None:
        """Replay from the current state; raise `Different` unless it gives `values` and `after`."""
        self._rates.fill()
        replayed = graph.replay(batch)
        for name, value in values.items():
            if not have_same_bits(value, replayed.get(name)):
                raise Different(f"the metric {name!r} of the graph differs")
        self._state.require(after)
        self._compared += 1

    def _refuse(self, reason: str) -> None:
        self._forget()
        self.refusal = reason
        log.warning("graph=True: the training step is not replayed as a CUDA graph: %s", reason)

    def _forget(self) -> None:
        self._graph = None
        self._state.forget_listing()
        self._compared = 0
        self._seen.clear()


@dataclass
class _Graph:
    shape: Any
    settings: Any
    places: Any
    held_bytes: int
    static: Batch
    values: Values
    run: Callable[[], None]

    def replay(self, batch: Batch) -> Values:
        fill(self.static, batch)
        self.run()
        return copy_values(self.values)


# --- learning rates ------------------------------------------------------------


class Rates:
    """The learning rates of optimizers as tensors that a graph reads."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = [item for item in optimizers if type(item) in TENSOR_RATES]
        self._tensors: dict[int, Any] = {}
        self._filled: dict[int, float] = {}

    def fill(self) -> None:
        for number, group in enumerate(groups_of(self._optimizers)):
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                continue
            if number not in self._tensors:
                device = group["params"][0].device
                self._tensors[number] = torch.tensor(float(rate), device=device)
            elif self._filled[number] != rate:
                self._tensors[number].fill_(float(rate))
            self._filled[number] = rate

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Replace the optimizers' learning rates with tensors during the block."""
        self.fill()
        replaced = []
        for number, group in enumerate(groups_of(self._optimizers)):
            if not isinstance(group["lr"], torch.Tensor):
                replaced.append((group, group["lr"]))
                group["lr"] = self._tensors[number]
        try:
            yield
        finally:
            for group, rate in replaced:
                group["lr"] = rate


def make_capturable(optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            elif type(optimizer) is torch.optim.SGD and not group.get("differentiable"):
                # Otherwise, SGD reads the learning rate's tensor on the host.
                group["fused"], group["foreach"] = True, False


def _settings_of(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the settings that are constants in a graph."""
    settings = []
    for optimizer in optimizers:
        free = {"params", "initial_lr"} | ({"lr"} if type(optimizer) in TENSOR_RATES else set())
        for group in optimizer.param_groups:
            constants = {key: value for key, value in group.items() if key not in free}
            settings.append({k: v for k, v in constants.items() if not isinstance(v, torch.Tensor)})
    return settings


def _describe_change(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    for old, new in zip(before, now, strict=False):
        for key, value in new.items():
            if old.get(key) != value:
                return f"the optimizer's {key!r}"
    return "the optimizer"
