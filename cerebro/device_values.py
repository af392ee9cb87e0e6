"""Metrics that a GPU or JAX computes, read when a pass over batches is over.

Reading one number waits for all the work that was given to a GPU, or to XLA on the CPU. A pass
therefore keeps what its steps return, reads it all with one copy, and has it summed by the same C
code, in the same order, as values on the CPU are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from cerebro import _core


class BatchSource(Protocol):
    """What a pass goes over: a loader, or part of one."""

    @property
    def last_rows(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


def run_batches(
    source: BatchSource,
    step: Callable[[Any], Any],
    *,
    beat: _core.BeatPage | None = None,
    device: str = "cpu",
) -> Any:
    """Call `step` for every batch and sum the metrics that it returns.

    Parameters
    ----------
    source
        Batches, and ``last_rows``.
    step
        ``train_batch`` or ``eval_batch`` of a model. On a GPU the tensors that it returns are
        read at the end of the pass, so they must be new ones each time.
    beat
        Where batches are counted, and the flag is that cancels.
    device
        Where the model computes.

    Returns
    -------
    _core.UnitResult
        ``rows``, ``batches``, ``sums`` and ``not_finite``, as `_core.run_unit` returns it.
    """
    if device == "cpu" and not _computes_later(step):
        return _core.run_unit(source, step, beat=beat)
    kept = _Kept(source, step)
    result = _core.run_unit(source, kept, beat=beat)
    if not kept.entries:
        return result
    return _core.run_unit(_Told(kept.read()), _as_told)


def _computes_later(step: Callable[[Any], Any]) -> bool:
    """Whether a step returns before its numbers are computed, as JAX's do on the CPU, too."""
    return getattr(getattr(step, "__self__", None), "framework", None) == "jax"


class _Kept:
    """A step whose metrics are kept for later."""

    def __init__(self, source: BatchSource, step: Callable[[Any], Any]) -> None:
        self._source = source
        self._step = step
        self.entries: list[tuple[int, Any]] = []

    def __call__(self, batch: Any) -> None:
        values = self._step(batch)
        if isinstance(values, dict):  # a copy of it: a model may fill the same one again
            values = values.copy()
        self.entries.append((self._source.last_rows, values))

    def read(self) -> list[tuple[int, Any]]:
        """Return the entries with numbers in place of what lies on a device."""
        waiting: list[Any] = []
        for _, values in self.entries:
            waiting += [v for v in _flat(values) if _is_scalar_elsewhere(v)]
        numbers = iter(_read(waiting))
        return [(rows, _filled(values, numbers)) for rows, values in self.entries]


class _Told:
    """Batches that are over: what they returned stands for them."""

    def __init__(self, entries: Sequence[tuple[int, Any]]) -> None:
        self._entries = entries
        self.last_rows = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Any]:
        for rows, values in self._entries:
            self.last_rows = rows
            yield values


def _as_told(values: Any) -> Any:
    return values


def _flat(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, Mapping) else ():
        yield from value if isinstance(value, tuple) else (value,)


def _filled(values: Any, numbers: Iterator[float]) -> Any:
    """Put numbers in the place of what was read, in the order of `_flat`."""
    if not isinstance(values, Mapping):
        return values

    def number(value: Any) -> Any:
        return next(numbers) if _is_scalar_elsewhere(value) else value

    return {
        name: tuple(map(number, value)) if isinstance(value, tuple) else number(value)
        for name, value in values.items()
    }


def _is_scalar_elsewhere(value: Any) -> bool:
    """Whether a value is one number in a device's memory: a tensor of PyTorch's."""
    return getattr(value, "is_cuda", False) is True and value.numel() == 1


def _read(tensors: Sequence[Any]) -> list[float]:
    """Read many numbers with one copy for each type of them."""
    if not tensors:
        return []
    import torch

    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.device, tensor.dtype), []).append(place)
    numbers = [0.0] * len(tensors)
    for same in places.values():
        stacked = torch.stack([tensors[place].detach().reshape(()) for place in same])
        for place, number in zip(same, stacked.double().tolist(), strict=True):
            numbers[place] = number
    return numbers
