"""Batches on a device: its name, the depot that its loaders share, batches moved by PyTorch.

`MovedBatches` is used if the loader cannot make batches on the device itself, as a `_core.Loader`
with a depot does. Each tensor is copied through pinned memory, so the copy is asynchronous, in
order with PyTorch's current stream.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import cerebro._core as _core
from cerebro.errors import DeviceError, InputError, one_line
from cerebro.machine import cuda
from cerebro.machine.imports import find_whole_module

RESIDENCES = ("auto", "resident", "streamed")

_log = logging.getLogger("cerebro.data")


def device_name(device: Any) -> str:
    """Return ``"cpu"``, ``"cuda:0"`` and so on for a name, a PyTorch device or ``"cuda"``."""
    name = str(device)
    if name == "cpu" or re.fullmatch(r"cuda:\d{1,4}", name):
        return name
    if name == "cuda":
        torch: Any = find_whole_module("torch")
        started = torch is not None and torch.cuda.is_initialized()
        return f"cuda:{torch.cuda.current_device() if started else 0}"
    raise InputError(f"device must be 'cpu', 'cuda' or 'cuda:0' and so on, not {device!r}")


@functools.cache
def depot(name: str) -> _core.Depot:
    """Return the depot of a device, which all loaders of the process share; one per device name.

    It holds the resident shards: each column of a shard is in the device's memory once, regardless
    of how many loaders, trials and views use it. Its ``limit`` in bytes is initially half of the
    device's memory.
    """
    return _core.Depot(cuda.open_device(name))


@functools.cache
def find_problem(name: str) -> str:
    """Return, in one line, why this process cannot make batches on a device; empty if it can.

    The first call tests the device: in a separate process, unless the result is already known, and
    then in this process, where it compiles the kernels. Out of memory, the next call tries again.
    """
    try:
        reason = cuda.find_problem(name)
        if not reason:
            depot(name).device.check()
    except DeviceError as error:
        reason = one_line(str(error))
    return reason


def explain_moving(why: str) -> str:
    """Return the warning that PyTorch moves batches to a GPU, with the cause `why` and a fix."""
    return (
        f"PyTorch moves batches to the GPU, which is slower and gives the same results: {why}. "
        "`python -m cerebro doctor` tries the GPU again"
    )


def set_limit(loader: Any, nbytes: int) -> None:
    """Set the maximum bytes of shards resident on a loader's device; 0: keep the current limit."""
    where = getattr(loader, "depot", None)
    if where is not None and nbytes:
        where.limit = nbytes


def drop(name: str) -> int:
    """Free the resident shards of a device that are not in use; return the bytes freed."""
    return depot(name).drop() if depot.cache_info().currsize else 0


@functools.cache
def warn_once(text: str) -> None:
    _log.warning(text)


def tell_note(loader: Any) -> None:
    if note := getattr(loader, "note", ""):
        warn_once(note)
    if why := getattr(loader, "why", ""):
        warn_once(explain_moving(why))
    _tell_unpinned(loader)


def _tell_unpinned(loader: Any) -> None:
    depot_of = getattr(loader, "depot", None)
    why = None if depot_of is None else depot_of.device.unpinned
    if why is not None:
        cuda.tell_unpinned(why)


def tell_first_note(loader: Any) -> None:
    """Log why a loader is slower than it could be: one reason per worker, not one per shard."""
    _tell_unpinned(loader)
    note = getattr(loader, "note", "")
    if note and not _noted:
        _noted.append(note)
        warn_once(note)


_noted: list[str] = []


class MovedBatches:
    """A `_core.Loader` of batches in host memory, which PyTorch moves to a device.

    `why` tells why they cannot be made there; see `find_problem`.
    """

    def __init__(self, loader: Any, device: str, why: str = "") -> None:
        self._loader = loader
        self._device = device
        self.why = why

    @property
    def last_rows(self) -> int:
        return int(self._loader.last_rows)

    def begin(
        self, mixes: Iterable[Iterable[int]], epoch: int, start: int = 0, count: int | None = None
    ) -> None:
        self._loader.begin(mixes, epoch, start, count)

    def close(self) -> None:
        self._loader.close()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> MovedBatches:
        return self

    def __next__(self) -> dict[str, Any]:
        return move_batch(next(self._loader), self._device)


def move_batch(batch: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Return a batch with its tensors on a device; values that are not torch tensors are kept.

    PyTorch owns the pinned buffers and reuses them when the copies to the device are finished. If
    the system refuses to pin more memory, each copy blocks.
    """
    return {name: _move_value(value, device) for name, value in batch.items()}


def _move_value(value: Any, device: Any) -> Any:
    if not hasattr(value, "is_pinned"):
        return value
    to_gpu = str(device).startswith("cuda") and value.device.type == "cpu"
    if to_gpu and not value.is_pinned():
        try:
            value = value.pin_memory()
        except RuntimeError as error:
            cuda.tell_unpinned(one_line(str(error), 200))
    return value.to(device, non_blocking=to_gpu and value.is_pinned())
