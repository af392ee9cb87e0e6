"""Units that overlap on a GPU: the stream of each, the waits for it, and what units take in turn.

A worker process may run several units at once, each in a thread with its own stream; see
`cerebro.machine.turns`. The host is at most `AHEAD` batches ahead of the GPU: then the loader,
which has as many buffers, never waits while its thread has the turn.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cerebro.machine import flags, generators, turns
from cerebro.machine.devices import is_gpu
from cerebro.machine.imports import find_whole_module
from cerebro.worker.log import flush_output
from cerebro.worker.trial_warnings import forget_shown

AHEAD = 4  # the most batches of a unit whose work may wait on its stream


def record_event() -> Any:
    """Return an event behind all work on PyTorch's current stream."""
    import torch

    event = torch.cuda.Event(blocking=True)  # the host sleeps: workers share cores
    event.record()
    return event


def wait_for(event: Any) -> None:
    """Wait for an event; other units run meanwhile."""
    if not event.query():
        with turns.give_away():
            event.synchronize()


def wait_for_stream() -> None:
    """Wait for all work on PyTorch's current stream; other units run meanwhile."""
    wait_for(record_event())


class Ahead:
    """Keeps the host at most `AHEAD` batches ahead of the stream of a unit that others overlap."""

    def __init__(self) -> None:
        self._marks: deque[Any] = deque()

    def batch_queued(self) -> None:
        self._marks.append(record_event())
        if len(self._marks) > AHEAD:
            wait_for(self._marks.popleft())

    def finish(self) -> None:
        if self._marks:
            wait_for(self._marks.pop())
            self._marks.clear()


class CudaStream:
    """A PyTorch stream for one thread's units, with its own random generator.

    A captured graph reads its seed and offset from the memory of the generator's state when it
    runs. Units that share a state would overwrite each other's, unless PyTorch keeps them for each
    graph.
    """

    def __init__(self, device: str) -> None:
        import torch

        torch.cuda.init()
        self._stream = torch.cuda.Stream(device)
        self._default = torch.cuda.default_generators[torch.device(device).index]
        self._state = self._default.clone_state()

    @contextmanager
    def make_current(self) -> Iterator[None]:
        """Make this the thread's current stream, and give its state to the GPU's generator."""
        import torch

        between = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._state)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._default.graphsafe_set_state(between)


def open_stream(device: str) -> CudaStream | None:
    """Return a new stream of a GPU; None if PyTorch does not compute there."""
    with suppress(ImportError):
        import torch

        if is_gpu(device) and torch.cuda.is_available():
            return CudaStream(device)
    return None


class _Descriptors:
    """Copies of standard output and error, which point to the log of a trial."""

    def __init__(self) -> None:
        flush_output()
        self._copies: list[int] = []
        for descriptor in (1, 2):
            self._copies.append(os.dup(descriptor))

    def __call__(self) -> None:
        flush_output()
        for descriptor, copy in zip((1, 2), self._copies, strict=True):
            os.dup2(copy, descriptor)

    def __del__(self) -> None:
        for copy in self._copies:
            os.close(copy)


def _keep_cuda_generator() -> turns.PutBack:
    torch = find_whole_module("torch")
    if torch is None or not torch.cuda.is_initialized():
        return bool
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    state = default.graphsafe_get_state()
    return lambda: default.graphsafe_set_state(state)


def _keep_warnings() -> turns.PutBack:
    filters, show = warnings.filters, warnings.showwarning

    def put_back() -> None:
        warnings.filters = filters
        warnings.showwarning = show
        forget_shown()

    return put_back


KEPT: tuple[turns.Keep, ...] = (
    _Descriptors,
    lambda: generators.make_restorer("torch" in sys.modules, cuda=False),
    _keep_cuda_generator,
    _keep_warnings,
    flags.keep_choices,
)
"""All of the process's state that a unit changes while it runs."""
