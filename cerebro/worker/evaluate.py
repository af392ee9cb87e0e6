"""Run a model over batches in order; metrics stay on their device and are read once.

Reading one number waits for all work submitted to a GPU, or to XLA on the CPU. So a pass keeps the
values that its steps return, and reads them with one copy. The same C code sums them in the same
order as values on the CPU. A unit that overlaps others waits for its own stream only, while they
run (`cerebro.worker.gpu`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import cerebro._core as _core
from cerebro.errors import UnitCancelled
from cerebro.machine import turns
from cerebro.model import get_whole_pass
from cerebro.worker import gpu
from cerebro.worker.messages import UnitSums
from cerebro.worker.trial_state import EpochProgress, mean_of


class BatchSource(Protocol):
    """The batches of a pass: a loader, or a part of one."""

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
    """Call `step` for every batch; return the result of `_core.run_unit`, with sums of the metrics.

    `step` is ``train_batch`` or ``eval_batch`` of a model. On a GPU the tensors that it returns are
    read at the end of the pass, so it must return new tensors each time.
    """
    model = getattr(step, "__self__", None)
    find = getattr(model, "replays_for", None)
    replays = find and find(step)
    # JAX returns before values are computed, even on the CPU.
    if device == "cpu" and getattr(model, "framework", None) != "jax":
        return _core.run_unit(source, step, beat=beat, replays=replays)
    deferred = _Deferred(source, step)
    result = _core.run_unit(source, deferred, beat=beat, replays=replays, keep=deferred.keep_run)
    if not deferred.entries:
        return result
    deferred.read_numbers()
    return _core.run_unit(deferred, lambda values: values)


class _Deferred:
    """Keeps what the steps of a pass return; once read, it replaces the batches of the pass."""

    def __init__(self, source: BatchSource, step: Callable[[Any], Any]) -> None:
        self._source = source
        self._step = step
        self.entries: list[tuple[int, Any]] = []
        self.last_rows = 0
        self._ahead = gpu.Ahead() if turns.gives_away() else None

    def __call__(self, batch: Any) -> None:
        values = self._step(batch)
        if isinstance(values, dict):  # a copy, because the model may reuse its dict
            values = values.copy()
        self.entries.append((self._source.last_rows, values))
        if self._ahead is not None:
            self._ahead.batch_queued()

    def keep_run(self, metrics: _core.RunMetrics) -> None:
        """Keep the numbers of batches that graphs have taken, in their place among the others."""
        self.entries.append((0, metrics))

    def read_numbers(self) -> None:
        """Replace tensors on a device by numbers."""
        if self._ahead is not None:
            self._ahead.finish()
        waiting: dict[int, Any] = {}

        def note(value: Any) -> None:
            if _is_scalar_elsewhere(value):
                waiting[id(value)] = value

        for _, values in self.entries:
            _map_values(values, note)
        numbers = dict(zip(waiting, _read_numbers([*waiting.values()]), strict=True))
        self.entries = [
            (rows, _map_values(values, lambda value: numbers.get(id(value), value)))
            for rows, values in self.entries
        ]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Any]:
        for rows, values in self.entries:
            self.last_rows = rows
            yield values


def _map_values(values: Any, function: Callable[[Any], Any]) -> Any:
    """Return a step's values with ``function(value)`` for each of them, also in tuples."""
    if not isinstance(values, Mapping):
        return values
    return {
        name: tuple(map(function, value)) if isinstance(value, tuple) else function(value)
        for name, value in values.items()
    }


def _is_scalar_elsewhere(value: Any) -> bool:
    return getattr(value, "is_cuda", False) is True and value.numel() == 1


def _read_numbers(tensors: Sequence[Any]) -> list[float]:
    """Read the numbers of many tensors, with one copy per device and type."""
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


class RecordedStepDiffers(Exception):
    """Raised if a unit's replayed steps differ from ordinary steps or fail, with a message."""


@contextlib.contextmanager
def replay_recorded_steps(model: Any, *, training: bool) -> Iterator[None]:
    """Let a model replay recorded steps; raise RecordedStepDiffers if the unit must run again."""
    begin = getattr(model, "begin_recorded_unit", None)
    if begin is None:
        yield
        return
    begin(training=training)
    try:
        yield
    except Exception as error:
        if not model.has_failed_replay(training=training):
            raise
        # If the ordinary step fails, too, its traceback has the user's line.
        text = " ".join(str(error).split())[:300]
        raise RecordedStepDiffers(f"it fails: {type(error).__name__}: {text}") from error
    how = model.end_recorded_unit(training=training)
    if how is not None:
        raise RecordedStepDiffers(how)


def end_training(model: Any, result: Any, progress: EpochProgress) -> UnitSums:
    """End a training unit: let the model finish, and add its metrics to the epoch's."""
    if hasattr(model, "end_unit"):
        model.end_unit()
    if not hasattr(model, "training_metrics"):
        progress.add_training(result.sums)
        return UnitSums(result.rows, result.batches, result.sums)
    sums = {name: (value, 1.0) for name, value in convert_metrics(model.training_metrics()).items()}
    progress.training = sums
    return UnitSums(result.rows, result.batches, dict(sums))


def evaluation_seed(seed: int, trial: int, epoch: int) -> int:
    return int(_core.random_doubles(1, seed, "eval", trial, epoch)[0] * 2**32)


def evaluate_model(
    model: Any, loader: BatchSource, beat: _core.BeatPage | None = None, device: str = "cpu"
) -> tuple[UnitSums, dict[str, float]]:
    """Run a model over a loader's batches; return the sums and the mean metrics."""
    evaluate = get_whole_pass(model)
    if evaluate is None:
        result = run_batches(loader, model.eval_batch, beat=beat, device=device)
        sums = UnitSums(result.rows, result.batches, result.sums)
        return sums, {name: mean_of(pair) for name, pair in sums.sums.items()}
    counter = CountedBatches(loader, beat)
    metrics = convert_metrics(evaluate(counter))
    weight = float(counter.rows_seen)
    pairs = {name: (value * weight, weight) for name, value in metrics.items()}
    return UnitSums(counter.rows_seen, counter.batches_seen, pairs), metrics


def convert_metrics(returned: Any) -> dict[str, float]:
    """Convert the metrics of a model's ``evaluate`` to floats; raise TypeError for others."""
    if not isinstance(returned, Mapping):
        raise TypeError(f"evaluate must return a dict of metrics, not {type(returned).__name__}")
    metrics = {}
    for name, value in returned.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a metric must be a str, not {name!r}")
        name.encode()  # a lone surrogate cannot be stored
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"the metric {name!r} must be a number, not {type(value).__name__}"
            ) from error
    return metrics


class CountedBatches:
    """Yields a loader's batches, counts them and their rows, and checks the cancel flag."""

    def __init__(self, loader: BatchSource, beat: _core.BeatPage | None) -> None:
        self._loader = loader
        self._beat = beat
        self.rows_seen = 0
        self.batches_seen = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if self._beat is not None and self._beat.cancelled:
                raise UnitCancelled("the unit was cancelled")
            self.rows_seen += self._loader.last_rows
            self.batches_seen += 1
            yield batch
