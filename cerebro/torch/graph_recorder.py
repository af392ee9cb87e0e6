"""Captures work as CUDA graphs, and keeps PyTorch in order if a capture fails.

The graphs that are captured for one stream of replays are never replayed at the same time. So they
share the memory for what lies between a step's beginning and its end: a replay may overwrite what
an earlier replay of another graph has left, even its results. Whoever replays a graph therefore
copies the results on the same stream, before anything else is replayed there. What must last is
made outside: inputs, parameters, moments, buffers, learning rates.
"""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from cerebro.torch.step_state import Values

# The starts of two warnings of PyTorch: an operation waits for the GPU; watching is incomplete.
WAITS = "called a synchronizing"
ABOUT_WATCHING = "Synchronization debug mode"

CAN_LOOK = "_cuda_checkPoolLiveAllocations"
"""The function of PyTorch that tells whether only the given tensors use memory of a pool."""

_streams: dict[tuple[Any, int], Any] = {}
"""The capture stream by device and stream of replays. Models that replay on the same stream share
it, because cuBLAS keeps a workspace of some MB for every stream. Models that replay on different
streams do not, because their graphs would overwrite that workspace."""

_pools: dict[tuple[Any, int], Pool] = {}
"""The memory that graphs share, by device and stream of replays."""

_failed: list[Any] = []  # failed captures, which the allocator queries until the process ends


class Captured:
    """Work that was captured: the tensors of its result, and how to fill them again.

    `held_bytes` is the memory that the allocator has reserved for this work alone. `handle` is the
    address of the cudaGraphExec_t; None if PyTorch does not tell it. It is valid as long as this
    object lives.
    """

    def __init__(
        self, values: Values, replay: Callable[[], None], held_bytes: int, handle: int | None
    ) -> None:
        self.values = values
        self.replay = replay
        self.held_bytes = held_bytes
        self.handle = handle


class Pool:
    """The memory of graphs that are never replayed at the same time.

    PyTorch frees the memory once no graph is left. It then refuses the old handle, so `use` takes a
    new one.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._alive: weakref.WeakSet[Captured] = weakref.WeakSet()

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Give the pool's handle for one capture."""
        kept = list(self._alive)  # a collection of garbage might end the last graph meanwhile
        if not kept:
            self._handle = torch.cuda.graph_pool_handle()
        yield self._handle
        del kept

    def add(self, captured: Captured) -> None:
        self._alive.add(captured)

    def holds_only_results(self, device: Any, captured: Captured) -> bool:
        """Return whether nothing of the pool is in use but the results of its graphs.

        Anything else is a tensor that the captured Python code has kept. It may be read later,
        after another graph of the pool has overwritten it.
        """
        everything = (captured, *self._alive)
        places = {t.untyped_storage().data_ptr() for one in everything for t in _tensors_in(one)}
        return bool(vars(torch._C)[CAN_LOOK](device.index, self._handle, places))


def _tensors_in(captured: Captured) -> Iterator[Any]:
    for value in captured.values.values():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, torch.Tensor) and item.is_cuda:
                yield item


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

    def capture(self, work: Callable[[], Any]) -> Captured:
        """Record `work` without running it on the device."""
        if CAN_LOOK in vars(torch._C):
            pool = _pools.setdefault(self._key, Pool())
            with pool.use() as handle:
                captured = self._capture_into(handle, work)
                if pool.holds_only_results(self._device, captured):
                    pool.add(captured)
                    return captured
            del captured
        return self._capture_into(torch.cuda.graph_pool_handle(), work)

    def _capture_into(self, pool: Any, work: Callable[[], Any]) -> Captured:
        graph = torch.cuda.CUDAGraph()
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
        find_handle = getattr(graph, "raw_cuda_graph_exec", None)  # missing in older versions
        return Captured(result, graph.replay, held, None if find_handle is None else find_handle())

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
        _pools.pop(self._key, None)  # its graphs keep it; the next ones get another
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
