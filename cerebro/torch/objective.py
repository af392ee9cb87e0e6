"""The loss and the metrics of a batch, with weighted rows, and the metrics of a whole pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from cerebro.data.order import require_weights
from cerebro.data.rows import part_index
from cerebro.errors import CerebroError, InputError
from cerebro.model import Batch, Columns, Part, loss_of, make_getter
from cerebro.torch import torchmetrics
from cerebro.torch.step_state import detach_value

Function = Callable[..., Any]


class Meters(Part):
    """The metrics of a whole pass: torchmetrics metrics, and functions of all outputs and targets.

    `metrics` are all torchmetrics metrics of the model, `accumulating` those that the user has
    named, `whole` the functions by name.
    """

    def __init__(
        self,
        metrics: torchmetrics.Metrics,
        accumulating: Mapping[str, Any],
        whole: Mapping[str, Function],
    ) -> None:
        self._meters = metrics
        self._accumulating = accumulating
        self._epoch_metrics = whole
        self.needs_updates, self.needs_outputs = bool(accumulating), bool(whole)
        self._returned: dict[str, str] = {}  # metrics that step returned: their paths by name

    def __bool__(self) -> bool:
        return bool(self._meters)

    def update(self, *given: Any) -> None:
        """Update the named torchmetrics metrics with a batch's output and target."""
        for metric in self._accumulating.values():
            metric.update(*given)

    def keep_returned(self, returned: Mapping[str, Any]) -> dict[str, Any]:
        """Return a step's values, detached; keep torchmetrics metrics for the end of the epoch."""
        if not self._meters:
            return {name: detach_value(value) for name, value in returned.items()}
        values = {}
        for name, value in torchmetrics.flatten_collections(returned):
            if not torchmetrics.is_metric(value):
                values[name] = detach_value(value)
                continue
            path = self._meters.name_of(value)
            if path is None:
                raise InputError(
                    f"the step returned a {type(value).__name__} as {name!r}, which is not a part "
                    "of net: make it an attribute of the network"
                )
            self._returned[name] = path
        return values

    def compute(self) -> dict[str, float]:
        """Return the values of the torchmetrics metrics that have accumulated batches."""
        metrics = {n: m for n, m in self._accumulating.items() if torchmetrics.is_updated(m)}
        metrics |= {name: self._meters.metric(path) for name, path in self._returned.items()}
        values: dict[str, float] = {}
        with torch.no_grad():
            for name, metric in metrics.items():
                values.update(torchmetrics.extract_numbers(name, metric.compute(), metric))
        return values

    def compute_whole(self, *given: Any) -> dict[str, float]:
        """Return the values of the functions of all outputs, and of all targets if given."""
        values: dict[str, float] = {}
        for name, metric in self._epoch_metrics.items():
            with torch.no_grad():
                value = metric(*given)
            if torchmetrics.accumulates(metric):
                torchmetrics.reset(metric)  # it would keep all passes
            values.update(torchmetrics.extract_numbers(name, value, metric))
        return values

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Reset torchmetrics metrics for this block, and restore their states at the end."""
        returned, self._returned = self._returned, {}
        try:
            with self._meters.set_aside():
                yield
        finally:
            self._returned = returned

    def reset(self) -> None:
        self._meters.reset()
        self._returned = {}

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": self._meters.state_dict(), "returned": dict(self._returned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._meters.load_state_dict(state["metrics"])
        self._returned = dict(state["returned"])


class Objective(Part):
    """Computes the loss and the metrics of a batch: by the user's step, or from the output."""

    def __init__(
        self,
        net: Any,
        forward: Callable[[Batch], Any],
        *,
        loss: Function | None,
        metrics: Mapping[str, Function],
        meters: Meters,
        step: Function | None,
        target: Columns | None,
        weight: str | None,
        autocast: Any,
    ) -> None:
        self.net = net
        self._forward = forward
        self._loss, self.has_loss = loss, loss is not None
        self._metrics = metrics
        self.meters = meters
        self._step = step
        self.weight = weight
        self.autocast = autocast
        # If the network computes the loss by itself, batches may lack the target.
        needed = (loss is not None, metrics, meters.needs_outputs, meters.needs_updates)
        self._get_target = None if target is None or not any(needed) else make_getter(target)
        self._no_grad = torch.no_grad()

    def __call__(self, batch: Batch) -> tuple[dict[str, Any], Any, Any, Any]:
        """Return metrics, the loss with its graph, output and target; both are None with `step`."""
        compute = self._compute if self._step is None else self._call_step
        if self.autocast is None:
            return compute(batch)
        with self.autocast:
            return compute(batch)

    def predict(self, batch: Batch) -> Any:
        if self.autocast is None:
            return self._forward(batch)
        with self.autocast:
            return self._forward(batch)

    def _compute(self, batch: Batch) -> tuple[dict[str, Any], Any, Any, Any]:
        output, target = self._forward(batch), None
        given: tuple[Any, ...] = (output,)
        if self._get_target is not None:
            target = self._get_target(batch)
            given = (output, target)
        loss = loss_of(output) if self._loss is None else self._loss(*given)
        if self.weight is None:
            _check_loss(loss, self._loss)
            values: dict[str, Any] = {"loss": loss.detach()}
        else:
            loss, total = weighted_mean(loss, batch, self.weight, required=self.net.training)
            values = {"loss": (loss.detach(), total)}
        if self._metrics or self.meters.needs_updates:
            with self._no_grad:
                for name, metric in self._metrics.items():
                    values[name] = metric(*given)
                self.meters.update(*given)
        return values, loss, output, target

    def _call_step(self, batch: Batch) -> tuple[dict[str, Any], Any, None, None]:
        assert self._step is not None
        returned = self._step(self.net, batch)
        if not isinstance(returned, Mapping) or "loss" not in returned:
            raise InputError(f"step must return a dict with 'loss', not {returned!r}")
        loss = returned["loss"]
        loss = loss[0] if isinstance(loss, tuple) else loss
        if self.net.training and not isinstance(loss, torch.Tensor):
            raise InputError(
                f"step returned a loss of type {type(loss).__name__}, with which Cerebro cannot "
                "call backward(): return the tensor itself, without .item(), float() or .numpy()"
            )
        return self.meters.keep_returned(returned), loss, None, None


def _check_loss(loss: Any, function: Any) -> None:
    """Raise InputError unless a loss is a tensor; `function` is None if the network computed it."""
    if isinstance(loss, torch.Tensor):
        return
    kind = type(loss).__name__
    if function is None:
        raise InputError(
            "loss=None takes the loss from the network's output, where it must be one tensor, not "
            f"a value of type {kind}: give loss=, or for several values step="
        )
    if isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    raise InputError(
        f"loss must return one tensor, the mean over the batch's rows, but {name} returned a value "
        f"of type {kind}: return the tensor itself; for several values use step="
    )


# --- the weights of rows, for ``Model(weight=)`` ------------------------------------


def check_weight(weight: Any, loss: Any, step: Any) -> None:
    """Raise InputError unless `weight` can weight the loss; `step` is step= or train_step=."""
    if not isinstance(weight, str):
        raise InputError(f"weight must be a column's name, not {weight!r}")
    if step is not None:
        raise InputError(
            "step= and train_step= compute the loss by themselves: leave out weight, and return "
            "the loss as (weighted mean, sum of weights)"
        )
    if loss is None:
        raise InputError(
            "weight needs loss=, a function with one value for each row: the loss in the network's "
            "output is a mean already"
        )
    if getattr(loss, "reduction", "none") != "none":
        kind = type(loss).__name__
        raise InputError(
            f"weight needs a loss for each row, and {kind} gives the batch's "
            f"{loss.reduction}: use {kind}(reduction='none')"
        )


# Passed checks by (checksum of the data, column, shards), because each build in a worker checks.
_checked: set[tuple[str, str, tuple[int, ...]]] = set()


def check_column(data: Any, weight: str) -> None:
    """Raise InputError unless a dataset's weights are finite, at least 0, and not all 0.

    The training step checks a column that is missing, or that transforms change. Shards on another
    node are checked there; damaged shards are reported by the unit that reads them.
    """
    column = data.columns.get(weight)
    if column is None or column.ragged or weight in data.transforms:
        return
    if column.dtype in ("bfloat16", "complex64"):
        return
    try:
        parts = data.shards.map_parts(data.view.parts)
        here = tuple(shard for shard, (_, part) in enumerate(parts) if len(part))
        for shard in here:
            data.shards.check_sizes(shard)
    except CerebroError:
        return
    key = (f"{data.path}:{data.checksum}", weight, here)
    if key in _checked:
        return
    total = 0.0
    for shard, (reader, part) in enumerate(parts):
        values = reader.column(weight)[part_index(part)]
        require_weights(values, weight, shard)
        total += float(values.sum(dtype="float64"))
    all_here = sum(len(part) for _, part in parts) == data.num_rows
    if total == 0 and all_here:
        raise InputError(f"column {weight!r}: all weights are 0, so there is nothing to learn")
    _checked.add(key)


def weighted_mean(losses: Any, batch: Batch, weight: str, *, required: bool) -> tuple[Any, Any]:
    """Return ``sum(weight * loss) / sum(weight)`` and the sum of the weights, 0-d tensors.

    `losses` have the shape ``(rows, ...)`` and are averaged per row; weights have the shape
    ``(rows,)`` or ``(rows, 1)``. Without the column `weight`, all rows have the weight 1, unless it
    is `required`. Raise InputError if a shape is wrong or the column is missing.
    """
    rows = len(next(iter(batch.values())))
    if not isinstance(losses, torch.Tensor) or losses.dim() == 0 or len(losses) != rows:
        shape = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise InputError(
            f"weight needs a loss for each of the batch's {rows} rows, but the loss is "
            f"{shape or 'one number'}: use reduction='none', for a function as in "
            "functools.partial(torch.nn.functional.cross_entropy, reduction='none')"
        )
    if losses.dim() > 1:
        losses = losses.flatten(1).mean(1)
    kind = losses.dtype if losses.dtype in (torch.float32, torch.float64) else torch.float32
    if weight not in batch:
        if required:
            raise InputError(
                f"weight names the column {weight!r}, but the data has {', '.join(batch)}"
            )
        weights = losses.new_ones(rows, dtype=kind)
    else:
        column = batch[weight]
        if column.numel() != rows:
            raise InputError(
                f"the column {weight!r} must have one weight for each row, not rows of shape "
                f"{tuple(column.shape[1:])}"
            )
        weights = column.reshape(-1).to(kind)
    total = weights.sum()
    # If all weights are 0, 0 / 0 would turn the network into NaN.
    return (losses * weights).sum() / total.clamp(min=torch.finfo(kind).tiny), total
