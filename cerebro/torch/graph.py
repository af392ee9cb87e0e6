"""A training step as a CUDA graph: captured once, replayed for every batch of its shape.

A step of a small network is hundreds of kernels, each of which takes less time to run than to
launch. A graph launches them all at once. It repeats the GPU's work but not Python's, so a step
may be captured only if its Python does the same every time. This is verified:

- The first steps of a model are ordinary ones, on the stream that captures: libraries start, and
  the optimizer makes its state. This warm-up does not have to be undone.
- Then a step is computed twice on one batch, from one state of weights, moments, buffers and
  generators: as an ordinary step and by the graph. Every tensor, number and generator must end up
  with the same bits, for a few batches. If not, or if the capture fails, the model continues with
  ordinary steps from the results of the ordinary ones, and its log gives the reason.
- Batches of a different shape (the last of a shard) are ordinary steps.

A replayed step therefore equals an ordinary one, bit for bit. It makes no difference whether a
graph was captured, when in a trial, or on which worker.

Between steps the learning rate is a number, as schedulers and states require; within a step it is
a tensor, which the graph reads. Other settings of an optimizer are part of the graph; when one
changes, all further steps are ordinary.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from cerebro.machine import generators

WARM_UP = 3
"""Ordinary steps of one shape before the step is captured."""
COMPARED = 2
"""Batches on which the graph is compared with the ordinary step."""

TENSOR_RATES: tuple[type, ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers that read the learning rate from a tensor on the device."""

WAITS = "called a synchronizing"
"""The start of PyTorch's warning of an operation that waits for the GPU."""

ABOUT_WATCHING = "Synchronization debug mode"
"""The start of the warning that these warnings are incomplete."""

log = logging.getLogger("cerebro.torch")

Batch = dict[str, Any]
Values = dict[str, Any]


class Recorder(Protocol):
    """Record work on a device and repeat it: `CudaRecorder`, or a stand-in in tests."""

    def warm(self, work: Callable[[], Any]) -> Any:
        """Do the work where it will be captured, and return its result."""

    def watched(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        """Do the same; also return where the work waits for the device, which graphs cannot do."""

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record the work without doing it; return its result and a function that repeats it."""


_streams: dict[Any, Any] = {}
"""The stream of each device on which steps are captured: one for all models, because cuBLAS keeps a
workspace of some MB for every stream that it is used on."""

_failed: list[Any] = []
"""Graphs whose capture failed; the allocator queries them for the life of the process."""


class CudaRecorder:
    """Captures on a private stream, and replays on the current stream."""

    def __init__(self, device: Any) -> None:
        self._device = device

    @property
    def _stream(self) -> Any:
        if self._device not in _streams:
            _streams[self._device] = torch.cuda.Stream(self._device)
        return _streams[self._device]

    def warm(self, work: Callable[[], Any]) -> Any:
        current, stream = torch.cuda.current_stream(self._device), self._stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = work()
        current.wait_stream(stream)
        return result

    def watched(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        before = torch.cuda.get_sync_debug_mode()
        place = None
        with warnings.catch_warnings(record=True) as told:
            warnings.filterwarnings("always", message=WAITS)
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = self.warm(work)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in told:
            if str(warning.message).startswith(ABOUT_WATCHING):
                continue
            if re.match(WAITS, str(warning.message)) is None:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
            elif place is None:
                place = f"{Path(warning.filename).name}:{warning.lineno}"
        return result, place

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        try:
            # Loader threads keep running meanwhile, on their own streams.
            with torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = work()
        except BaseException:
            torch.cuda.set_stream(current)
            self._mend(graph, pool)
            raise
        return result, graph.replay

    def _mend(self, graph: Any, pool: Any) -> None:
        """Recover PyTorch from a failed capture.

        It leaves its allocator in the capture's pool, which would never be released, and its
        generator (in older versions) in capturing mode, which the end of the next capture corrects.
        The allocator of pinned memory keeps querying the graph for streams.
        """
        device = self._device
        torch.cuda.synchronize(device)
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        release = getattr(torch._C, "_cuda_releasePool", None)
        if end is not None and release is not None:
            with contextlib.suppress(RuntimeError):  # PyTorch has already done it
                end(device.index, pool)
                release(device.index, pool)
                _failed.append(graph)
        _streams[device] = torch.cuda.Stream(device)
        with torch.cuda.graph(
            torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"
        ):
            torch.zeros(1, device=device)


class Different(Exception):
    """A graph differs from the ordinary step."""


class GraphedStep:
    """A training step that is captured once its shape has occurred a few times.

    Parameters
    ----------
    step
        ``step(batch)`` trains on a batch and returns metrics: tensors, numbers or pairs.
    modules
        The modules whose parameters and buffers the step changes.
    optimizers
        The optimizers whose settings and states it uses.
    recorder
        Captures and replays.
    drop_gradients
        Called after a capture that failed in the middle of a step.
    """

    def __init__(
        self,
        step: Callable[[Batch], Values],
        modules: Sequence[Any],
        optimizers: Sequence[Any],
        recorder: Recorder,
        drop_gradients: Callable[[], None],
    ) -> None:
        self._step = step
        self._drop_gradients = drop_gradients
        self._optimizers = optimizers
        self._state = LiveState(modules, optimizers)
        self._rates = Rates(optimizers)
        self._recorder = recorder
        self._seen: dict[Any, int] = {}
        self._graph: _Graph | None = None
        self._compared = 0
        self._check_places = False
        self.refusal: str | None = None
        """Why all further steps are ordinary; None while they need not be."""

    def __call__(self, batch: Batch) -> Values:
        if self.refusal is not None:
            return self._ordinary(batch)
        shape = shape_of(batch)
        if self._graph is not None:
            if shape != self._graph.shape:
                return self._ordinary(batch)
            return self._repeated(batch, self._graph)
        seen = self._seen.get(shape, 0)
        self._seen[shape] = seen + 1
        if seen < WARM_UP:
            return self._recorder.warm(lambda: self._ordinary(batch))  # type: ignore[no-any-return]
        return self._captured(batch, shape)

    def moved(self) -> None:
        """Note that a state was loaded: check the tensors' addresses before the next replay."""
        self._check_places = True

    def _ordinary(self, batch: Batch) -> Values:
        with self._rates.as_tensors():
            return self._step(batch)

    def _repeated(self, batch: Batch, graph: _Graph) -> Values:
        settings = _settings_of(self._optimizers)
        if settings != graph.settings:
            self._refuse(
                f"{_changed(graph.settings, settings)} changes while the model trains, and only "
                "the learning rate may (of Adam, AdamW and SGD)"
            )
            return self._ordinary(batch)
        if self._check_places:
            self._check_places = False
            if self._state.places() != graph.places:
                self._forget()
                return self(batch)
        if self._compared < COMPARED:
            return self._proven(batch, graph)
        self._rates.fill()
        return graph.replay(batch)

    # --- capture and proof -------------------------------------------------

    def _captured(self, batch: Batch, shape: Any) -> Values:
        before = self._taken()
        values, waits = self._recorder.watched(lambda: self._ordinary(batch))
        if waits is not None:
            self._refuse(f"it waits for the GPU at {waits}")
        after = None if self.refusal is not None else self._taken()
        if before is None or after is None:
            return values  # type: ignore[no-any-return]
        try:
            if before.places != after.places:
                raise Different("the step replaces its tensors")
            self._state.put(before)
            self._graph = self._capture(batch, shape)
            self._state.put(before)
            self._compare(batch, self._graph, values, after)
        except Exception as error:
            self._give_up(error, after)
        return values  # type: ignore[no-any-return]

    def _capture(self, batch: Batch, shape: Any) -> _Graph:
        static = {name: _like(value) for name, value in batch.items()}
        fill(static, batch)
        self._rates.fill()
        values, replay = self._recorder.capture(lambda: self._ordinary(static))
        return _Graph(
            shape, static, values, replay, _settings_of(self._optimizers), self._state.places()
        )

    def _proven(self, batch: Batch, graph: _Graph) -> Values:
        before = self._taken()
        values = self._ordinary(batch)
        after = None if before is None else self._taken()
        if before is None or after is None:
            return values
        try:
            self._state.put(before)
            self._compare(batch, graph, values, after)
        except Exception as error:
            self._give_up(error, after)
        return values

    def _taken(self) -> Taken | None:
        """Return a copy of the state; None (and no graph) if there is not enough memory."""
        try:
            return self._state.taken()
        except torch.cuda.OutOfMemoryError:
            self._refuse("there is not enough memory to compare it with the ordinary step")
            return None

    def _compare(self, batch: Batch, graph: _Graph, values: Values, after: Taken) -> None:
        """Replay from the current state; the outcome must be `values` and `after`."""
        self._rates.fill()
        found = graph.replay(batch)
        for name, value in values.items():
            if not same(value, found.get(name)):
                raise Different(f"the metric {name!r} of the graph differs")
        self._state.require(after)
        self._compared += 1

    def _give_up(self, error: Exception, after: Taken) -> None:
        """Continue with ordinary steps, from the state after the last one."""
        if isinstance(error, Different):
            self._refuse(f"it is not the ordinary step: {error}")
        else:
            text = " ".join(str(error).split())[:300]
            self._refuse(f"it cannot be captured: {type(error).__name__}: {text}")
        self._drop_gradients()
        self._state.put(after)

    def _refuse(self, reason: str) -> None:
        self._forget()
        self.refusal = reason
        log.warning("graph=True: the training step is not replayed as a CUDA graph: %s", reason)

    def _forget(self) -> None:
        self._graph = None
        self._compared = 0
        self._seen.clear()


class _Graph:
    """A captured step with its buffers."""

    def __init__(
        self,
        shape: Any,
        static: Batch,
        values: Values,
        replay: Callable[[], None],
        settings: Any,
        places: Any,
    ) -> None:
        self.shape = shape
        self.settings = settings
        self.places = places
        self._static = static
        self._values = values
        self._replay = replay

    def replay(self, batch: Batch) -> Values:
        """Train on a batch of the captured shape."""
        fill(self._static, batch)
        self._replay()
        return {name: cloned(value) for name, value in self._values.items()}


# --- learning rates ------------------------------------------------------------


class Rates:
    """The learning rates of optimizers as tensors that a graph reads."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = [item for item in optimizers if type(item) in TENSOR_RATES]
        self._tensors: dict[int, Any] = {}
        self._filled: dict[int, float] = {}

    def fill(self) -> None:
        """Copy the current rates into their tensors."""
        for number, group in enumerate(self._groups()):
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                continue
            if number not in self._tensors:
                device = group["params"][0].device
                self._tensors[number] = torch.tensor(float(rate), device=device)
            elif self._filled[number] != rate:
                self._tensors[number].fill_(float(rate))
            self._filled[number] = rate

    @contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Run a step whose optimizers see tensors instead of numbers."""
        self.fill()
        replaced = [
            (group, group["lr"], self._tensors[number])
            for number, group in enumerate(self._groups())
            if not isinstance(group["lr"], torch.Tensor)
        ]
        for group, _, tensor in replaced:
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, rate, _ in replaced:
                group["lr"] = rate

    def _groups(self) -> list[dict[str, Any]]:
        return [group for item in self._optimizers for group in item.param_groups]


def make_capturable(optimizers: Sequence[Any]) -> None:
    """Make optimizers keep values on the device that they would otherwise read on the host."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            elif type(optimizer) is torch.optim.SGD and not group.get("differentiable"):
                # Its only way to use a learning rate in a tensor without reading it on the host.
                group["fused"], group["foreach"] = True, False


def _settings_of(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the optimizer settings that a graph has fixed."""
    found = []
    for optimizer in optimizers:
        free = {"params"} | ({"lr"} if type(optimizer) in TENSOR_RATES else set())
        free |= {"initial_lr"}
        for group in optimizer.param_groups:
            kept = {key: value for key, value in group.items() if key not in free}
            found.append({k: v for k, v in kept.items() if not isinstance(v, torch.Tensor)})
    return found


def _changed(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    for old, new in zip(before, now, strict=False):
        for key, value in new.items():
            if old.get(key) != value:
                return f"the optimizer's {key!r}"
    return "the optimizer"


# --- everything that a step may change -------------------------------------------


class Taken:
    """A copy of everything that a step may change."""

    def __init__(
        self, tensors: list[Any], numbers: list[Any], places: Any, drawn: dict[str, Any]
    ) -> None:
        self.tensors = tensors
        self.numbers = numbers
        self.places = places
        self.generators = drawn


class LiveState:
    """The tensors and numbers of modules and optimizers, and the random generators."""

    def __init__(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self._modules = modules
        self._optimizers = optimizers

    def taken(self) -> Taken:
        """Return a copy of everything."""
        tensors = [tensor.detach().clone() for _, tensor in self._tensors()]
        numbers = [value for _, _, value in self._numbers()]
        return Taken(tensors, numbers, self.places(), generators.capture(True))

    def put(self, taken: Taken) -> None:
        """Restore everything in place."""
        with torch.no_grad():
            for (_, tensor), value in zip(self._tensors(), taken.tensors, strict=True):
                tensor.copy_(value)
        for (entries, key, _), value in zip(self._numbers(), taken.numbers, strict=True):
            entries[key] = value
        generators.restore(taken.generators)

    def require(self, taken: Taken) -> None:
        """Check that everything has these values, to the bit.

        Raises
        ------
        Different
            Naming the first value that differs.
        """
        for (name, tensor), value in zip(self._tensors(), taken.tensors, strict=True):
            if not same(tensor, value):
                raise Different(f"{name} of the graph differs")
        if [value for _, _, value in self._numbers()] != taken.numbers:
            raise Different("the optimizer counts on the host")
        now = generators.capture(True)
        for name, state in taken.generators.items():
            if not _same_state(now[name], state):
                raise Different(f"the step draws from a random generator of the host ({name})")

    def places(self) -> list[int]:
        """Return the tensors' addresses."""
        return [tensor.data_ptr() for _, tensor in self._tensors()]

    def _tensors(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for module in self._modules:
            found += module.named_parameters()
            found += module.named_buffers()
        for optimizer in self._optimizers:
            for number, entries in enumerate(optimizer.state.values()):
                found += [
                    (f"the optimizer's {key!r} of parameter {number}", value)
                    for key, value in _items(entries)
                    if isinstance(value, torch.Tensor)
                ]
        return found

    def _numbers(self) -> list[tuple[Any, Any, Any]]:
        return [
            (entries, key, value)
            for optimizer in self._optimizers
            for entries in optimizer.state.values()
            for key, value in _items(entries)
            if isinstance(value, (int, float))
        ]


def _items(entries: Any) -> list[tuple[Any, Any]]:
    return list(entries.items()) if isinstance(entries, Mapping) else []


# --- batches and values ------------------------------------------------------------


def shape_of(batch: Batch) -> Any:
    """Return everything about a batch that a captured step depends on, except its values."""
    return tuple(
        (name, tuple(value.shape), value.dtype, value.stride())
        if isinstance(value, torch.Tensor)
        else (name, type(value), repr(value))
        for name, value in batch.items()
    )


def _like(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value


def fill(static: Batch, batch: Batch) -> None:
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            static[name].copy_(value, non_blocking=True)


def cloned(value: Any) -> Any:
    """Return a copy of a value: the next replay overwrites the graph's."""
    if isinstance(value, tuple):
        return tuple(cloned(item) for item in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def same(left: Any, right: Any) -> bool:
    """Whether two values have the same bits."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(torch.equal(_bits(left), _bits(right)))
    return bool(left == right)


def _bits(tensor: Any) -> Any:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def _same_state(left: Any, right: Any) -> bool:
    return bool((left == right).all() if hasattr(left, "shape") else left == right)
