"""Metrics of torchmetrics: their states move with the trial; they are computed once per pass.

A ``torchmetrics.Metric`` accumulates batches in its own state, which a module's ``state_dict``
leaves out. This module finds, saves and loads the metrics of a model. A validation pass sets the
states of training aside. The package is not imported: classes are recognized by their names.

A wrapper, such as ``BootStrapper``, accumulates in the metrics inside it and does not count
batches itself.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cerebro.errors import InputError, StateError
from cerebro.model import SAME_MODEL

_METRIC = ("torchmetrics.metric", "Metric")
_COLLECTION = ("torchmetrics.collections", "MetricCollection")
_WRAPPER = ("torchmetrics.wrappers.abstract", "WrapperMetric")

_NUMBERS: dict[tuple[str, str], dict[str, float]] = {
    ("torchmetrics.wrappers.minmax", "MinMaxMetric"): {"min_val": math.inf, "max_val": -math.inf},
    ("torchmetrics.wrappers.running", "Running"): {"_num_vals_seen": 0},
}
"""Wrappers' attributes that change but are not states, with their first values."""


def is_metric(value: object) -> bool:
    return _METRIC in _list_kinds(value)


def is_collection(value: object) -> bool:
    return _COLLECTION in _list_kinds(value)


def accumulates(value: object) -> bool:
    """Return whether an object is a metric or a collection."""
    return not _list_kinds(value).isdisjoint((_METRIC, _COLLECTION))


def is_updated(value: Any) -> bool:
    """Return whether a metric, or a metric of a collection, has accumulated batches."""
    return any(_has_batches(part) for part in value.modules() if is_metric(part))


def _has_batches(metric: Any) -> bool:
    if _WRAPPER in _list_kinds(metric):  # the metrics inside count
        return getattr(metric, "_num_vals_seen", 0) > 0
    return bool(metric.update_called)


def last_value(metric: Any) -> Any:
    """Return what a metric has computed for its last batch, or None."""
    return metric._forward_cache


def reset(value: Any) -> None:
    """Reset a metric or a collection, including what a wrapper's own ``reset`` leaves."""
    value.reset()
    for part in value.modules():
        for name, first in _numbers_of(part).items():
            _set_number(part, name, first)


def flatten_collections(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items of a mapping; those of a collection in it are named ``name_key``."""
    for name, value in values.items():
        if not is_collection(value):
            yield name, value
            continue
        for key, metric in value.items(copy_state=False):
            yield f"{name}_{key}", metric


def _list_kinds(value: object) -> set[tuple[str, str]]:
    return {(kind.__module__, kind.__name__) for kind in type(value).__mro__}


class Metrics:
    """All metrics in the modules among `roots`."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._metrics: dict[str, Any] = {}
        self._collections: list[Any] = []
        seen: set[int] = set()
        for root, module in roots.items():
            parts = module.named_modules() if isinstance(module, torch.nn.Module) else ()
            for name, part in parts:
                if id(part) in seen or not accumulates(part):
                    continue
                seen.add(id(part))
                if is_collection(part):
                    self._collections.append(part)
                else:
                    self._metrics[f"{root}.{name}" if name else root] = part

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def __str__(self) -> str:
        return ", ".join(self._metrics)

    def name_of(self, metric: Any) -> str | None:
        """Return the path of a metric; None if it is not among these metrics."""
        return next((name for name, item in self._metrics.items() if item is metric), None)

    def metric(self, name: str) -> Any:
        """Return the metric at a path; raise StateError if the network has none there."""
        if name not in self._metrics:
            raise StateError(f"the state has a metric {name}, which the model lacks: {SAME_MODEL}")
        return self._metrics[name]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all metrics by path, with live tensors."""
        self._share()
        for metric in self._metrics.values():
            metric._computed = metric._forward_cache = None  # cached values are outdated
        return {name: _state_of(metric) for name, metric in self._metrics.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load copies of states; raise StateError if they are from different metrics."""
        for name in sorted(self._metrics.keys() ^ state.keys()):
            raise StateError(
                f"the metric {name} is only in the {'state' if name in state else 'model'}: "
                f"{SAME_MODEL}"
            )
        for name, metric in self._metrics.items():
            values = state[name]["state"].items()
            copies = {key: _copy_to_device(value, metric.device) for key, value in values}
            _set_state(metric, {**state[name], "state": copies})

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Reset all metrics in this block; restore their states at the end."""
        self._share()
        saved = [(metric, _state_of(metric)) for metric in self._metrics.values()]
        self.reset()
        try:
            yield
        finally:
            self.reset()
            for metric, state in saved:
                _set_state(metric, state)

    def reset(self) -> None:
        for metric in self._metrics.values():
            reset(metric)

    def _share(self) -> None:
        # Metrics of a collection with equal states share one, which only the first of them has
        # after an update. Reading the items sets it in all of them.
        for collection in self._collections:
            collection.items(copy_state=False)


def _state_of(metric: Any) -> dict[str, Any]:
    """Return a metric's state, with copies of lists, which ``reset`` empties, and its numbers."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    copies = {name: list(v) if isinstance(v, list) else v for name, v in values.items()}
    numbers = {
        name: getattr(metric, name)
        for name, first in _numbers_of(metric).items()
        if getattr(metric, name) != first
    }
    state = {"updates": metric._update_count, "state": copies}
    return {**state, "numbers": numbers} if numbers else state


def _set_state(metric: Any, state: Mapping[str, Any]) -> None:
    metric._update_count = state["updates"]
    metric._computed = metric._forward_cache = None
    for name, value in state["state"].items():
        setattr(metric, name, value)
    for name, number in {**_numbers_of(metric), **state.get("numbers", {})}.items():
        _set_number(metric, name, number)


def _numbers_of(metric: Any) -> dict[str, float]:
    """Return the numbers that a wrapper changes, with their first values."""
    firsts: dict[str, float] = {}
    for kind in _list_kinds(metric) & _NUMBERS.keys():
        firsts |= _NUMBERS[kind]
    return firsts


def _set_number(metric: Any, name: str, value: Any) -> None:
    """Set a wrapper's number, which is a tensor in some wrappers."""
    if isinstance(getattr(metric, name), torch.Tensor):
        value = _copy_to_device(value, metric.device)
    setattr(metric, name, value)


def _copy_to_device(value: Any, device: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copy_to_device(item, device) for item in value]
    return torch.as_tensor(value).detach().to(device, copy=True)


_SECOND = {
    r"^RetrievalRecallAtFixedPrecision$": "k",
    r"At(Fixed|Specificity|Sensitivity)": "threshold",
    r"^(InceptionScore|KernelInceptionDistance)$": "deviation",
}
"""The meaning of a metric's second number, by a pattern of its class's name."""


def extract_numbers(name: str, value: Any, metric: Any = None) -> dict[str, float]:
    """Return the numbers in `value`, which a metric has computed, by name.

    `value` is a number, a mapping of keys to numbers (named ``name_key``, or ``key`` if the name is
    empty), or a number and its weight, or its threshold (``name_threshold``). Raise InputError for
    any other value.
    """
    if isinstance(value, Mapping):
        parts = dict(metric.items(copy_state=False)) if is_collection(metric) else {}
        by_name: dict[str, float] = {}
        for key, item in value.items():
            of_key = parts.get(key, metric)
            by_name.update(extract_numbers(f"{name}_{key}" if name else str(key), item, of_key))
        return by_name
    if isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value)):
        first = {name: float(value[0])}
        if not is_metric(metric):  # a mean and its weight
            return first
        kind = type(metric).__name__
        second = next((word for how, word in _SECOND.items() if re.search(how, kind)), "second")
        return {**first, f"{name}_{second}": float(value[1])}
    if not _is_number(value):
        raise InputError(
            f"the metric {name!r} computes {_describe_shape(value)}, which is not a number: "
            f"{_advise(metric)}"
        )
    return {name: float(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.numel() == 1)
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _describe_shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)} parts"
    return f"a {type(value).__name__}"


def _advise(metric: Any) -> str:
    """Return advice on what to report in place of several numbers."""
    advice = "report one of its numbers, by a function that returns it"
    if not is_metric(metric):
        return advice
    kind = type(metric).__name__
    if kind.endswith(("Curve", "ROC")):
        return "report a summary of the curve, such as AUROC or AveragePrecision"
    if kind.endswith("ConfusionMatrix"):
        return "report a summary of the matrix, such as MatthewsCorrCoef or CohenKappa"
    if kind.endswith("StatScores"):
        return "report what they are counted for, such as Accuracy, Precision or Recall"
    if "average" in inspect.signature(type(metric)).parameters:
        return "choose one that averages, such as average='macro'"
    return advice
