"""A loader's batches, moved to a device by PyTorch.

This module is used if the loader cannot make batches on the device itself, as a `_core.Loader` with
a depot does. Each tensor is copied through pinned memory, so the copy is asynchronous, in order
with PyTorch's current stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cerebro.errors import one_line
from cerebro.machine import cuda


class MovedBatches:
    """A `_core.Loader` whose batches PyTorch moves to a device.

    `loader` yields batches of torch tensors in host memory. `why` tells why it cannot make them on
    the device; see `cerebro.data.depots.find_problem`.
    """

    def __init__(self, loader: Any, device: str, why: str = "") -> None:
        self._loader = loader
        self._device = device
        self.why = why

    @property
    def last_rows(self) -> int:
        """The number of rows of the latest batch."""
        return int(self._loader.last_rows)

    def begin(
        self,
        mixes: Iterable[Iterable[int]],
        epoch: int,
        start: int = 0,
        count: int | None = None,
    ) -> None:
        """Start a pass; see `_core.Loader`."""
        self._loader.begin(mixes, epoch, start, count)

    def close(self) -> None:
        """Free the loader's buffers."""
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
    if to_gpu:
        value = _pin_tensor(value)
    return value.to(device, non_blocking=to_gpu and value.is_pinned())


def _pin_tensor(value: Any) -> Any:
    """Return the tensor in pinned memory, or unchanged if memory cannot be pinned."""
    if value.is_pinned():
        return value
    try:
        return value.pin_memory()
    except RuntimeError as error:
        cuda.tell_unpinned(one_line(str(error), 200))
        return value
