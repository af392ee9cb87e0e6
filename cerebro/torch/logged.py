"""Values that a LightningModule logs: means, sums, minima and maxima over an epoch.

The arithmetic is Lightning's: in the default floating-point type, on the value's device, in the
order of the calls. A logged ``torchmetrics.Metric`` is computed and reset at the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cerebro.errors import InputError
from cerebro.torch.torchmetrics import is_metric

_START = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}


@dataclass
class Logged:
    """The values that a hook logs under a name: over the epoch so far, and in the last call."""

    name: str
    hook: str
    reduce: str
    on_step: bool
    on_epoch: bool
    metric: Any = None
    value: Any = None
    weight: Any = None
    last: Any = None

    def add(self, value: Any, weight: int) -> None:
        """Add a 0-d tensor, weighted by the number of rows that it covers."""
        if self.value is None:
            start = torch.tensor(_START[self.reduce], dtype=torch.get_default_dtype())
            self.value, self.weight = start.to(value.device), torch.tensor(0).to(value.device)
        self.last = value
        if self.reduce == "mean":
            if weight != 0:  # a mean over no rows is often NaN
                self.value = self.value + value * weight
                self.weight = self.weight + weight
        elif self.reduce == "sum":
            self.value = self.value + value
        else:
            self.value = (torch.min if self.reduce == "min" else torch.max)(self.value, value)

    def result(self) -> Any:
        if self.metric is not None:
            return self.metric.compute()
        return self.value / self.weight if self.reduce == "mean" else self.value

    def name_value(self, value: Any) -> dict[str, Any]:
        """Return the epoch's value by the names that Lightning gives it."""
        names = [self.name, *([f"{self.name}_epoch"] if self.on_step else [])]
        return dict.fromkeys(names, value) if self.on_epoch else {}


class Logs:
    """The values logged in an epoch of training, or in a validation pass.

    ``name_of(metric)`` returns the path of a torchmetrics metric in the module, or None;
    ``metric(path)`` returns the metric with this path.
    """

    def __init__(self, name_of: Callable[[Any], str | None], metric: Callable[[str], Any]) -> None:
        self._name_of = name_of
        self._metric = metric
        self._items: dict[tuple[str, str], Logged] = {}

    def add(
        self,
        hook: str,
        name: str,
        value: Any,
        weight: int,
        *,
        reduce: str,
        on_step: bool,
        on_epoch: bool,
    ) -> None:
        """Add a value: a 0-d tensor, or a metric of the module."""
        key = (hook, name)
        if key not in self._items:
            self._items[key] = Logged(name, hook, reduce, on_step, on_epoch)
        item = self._items[key]
        if is_metric(value):
            if self._name_of(value) is None:
                raise InputError(
                    f"self.log({name!r}, ...) has a {type(value).__name__} that is not a part of "
                    "the module: make it an attribute"
                )
            item.metric, item.last = value, value._forward_cache
        else:
            item.add(value, weight)

    def list_step_values(self) -> Iterator[tuple[str, Any]]:
        """Yield the values of the last step by the names that Lightning gives them."""
        for item in self._items.values():
            if item.on_step and item.last is not None:
                yield item.name, item.last
                if item.on_epoch:
                    yield f"{item.name}_step", item.last

    def results(self) -> Iterator[tuple[Logged, Any]]:
        """Yield each entry with its value over the epoch."""
        for item in self._items.values():
            yield item, item.result()

    def list_epoch_values(self) -> Iterator[tuple[str, Any]]:
        """Yield the values over the epoch so far by the names that Lightning gives them."""
        for item in self._items.values():
            if item.on_epoch:
                yield from item.name_value(item.result()).items()

    def reset(self) -> None:
        """Drop all values and reset the metrics that were logged."""
        for item in self._items.values():
            if item.metric is not None:
                item.metric.reset()
        self._items = {}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the entries in order, without the values of the last step."""
        entries = []
        for item in self._items.values():
            entry = {key: getattr(item, key) for key in _SETTINGS}
            if item.metric is not None:
                entry["metric"] = self._name_of(item.metric)
            else:
                entry.update(value=item.value, weight=item.weight)
            item.last = None
            entries.append(entry)
        return entries

    def load_state_dict(self, entries: list[Mapping[str, Any]], device: Any) -> None:
        """Load copies of entries."""
        self._items = {}
        for entry in entries:
            item = Logged(**{key: entry[key] for key in _SETTINGS})
            if "metric" in entry:
                item.metric = self._metric(entry["metric"])
            else:
                item.value = torch.as_tensor(entry["value"]).to(device, copy=True)
                item.weight = torch.as_tensor(entry["weight"]).to(device, copy=True)
            self._items[item.hook, item.name] = item


_SETTINGS = ("name", "hook", "reduce", "on_step", "on_epoch")
