"""Extract from a result the values to draw: each trial's metric and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cerebro.errors import InputError
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report.format import ABSENT, Range

_SMALL_IS_GOOD = ("loss", "error", "mse", "mae", "rmse", "perplexity", "nll", "brier", "entropy")


def mode_of(result: Any, metric: str) -> str:
    """Return a metric's mode, ``"min"`` or ``"max"``, by its name if it is not the search's."""
    if fmt.short_name(metric) == fmt.short_name(result.metric):
        return str(result.mode)
    return "min" if any(word in metric.lower() for word in _SMALL_IS_GOOD) else "max"


def series(trial: Any, metric: str) -> tuple[list[int], list[float]]:
    """Return the numbers of epochs trained (from 1), and the metric after each."""
    points = [(e["epoch"] + 1, fmt.metric_value(e["metrics"], metric)) for e in trial.history]
    pairs = [(x, y) for x, y in points if y is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def find_selected_point(result: Any, trial: Any, metric: str) -> tuple[int, float] | None:
    """Return the number of epochs and the metric at the epoch that represents a trial.

    If the metric is not finite at that epoch, use the trial's best epoch.
    """
    points = [(x, y) for x, y in zip(*series(trial, metric), strict=True) if math.isfinite(y)]
    if not points:
        return None
    by_last = result.select == "last" or trial.best_epoch is None
    epoch = trial.history[-1]["epoch"] if by_last else trial.best_epoch
    pick = max if mode_of(result, metric) == "max" else min
    there = [point for point in points if point[0] == epoch + 1]
    return there[0] if there else pick(points, key=lambda point: point[1])


def sort_best_first(result: Any, metric: str, trials: Sequence[Any]) -> list[Any]:
    """Sort the trials that have the metric by its value at their selected epoch, best first."""
    sign = -1.0 if mode_of(result, metric) == "max" else 1.0

    def key(trial: Any) -> tuple[float, int]:
        point = find_selected_point(result, trial, metric)
        return (math.inf if point is None else sign * point[1]), trial.number

    return sorted((t for t in trials if series(t, metric)[1]), key=key)


def missing_metric_error(metric: str, trials: Sequence[Any]) -> InputError:
    names = sorted({name for t in trials for e in t.history for name in e["metrics"]})
    available = ", ".join(names) or "none, because no epoch has finished"
    return InputError(f"metric={metric!r}: no trial has it yet; available: {available}")


def too_few_error(kind: str) -> InputError:
    return InputError(f"kind={kind!r}: needs two finished trials that differ")


def axis_label(trial: Any, metric: str) -> str:
    name = fmt.short_name(metric)
    keys = {key for entry in trial.history for key in entry["metrics"]}
    if metric.startswith("train_"):
        return f"training {name}"
    if metric.startswith("val_") or f"val_{name}" in keys:
        return f"validation {name}"
    return f"training {name}" if f"train_{name}" in keys else name


def table_of(result: Any, metric: str, trials: Sequence[Any]) -> tuple[list[dict[str, Any]], Any]:
    """Return the flat configurations of the trials that have the metric, and its values."""
    configs, values = [], []
    for trial in sort_best_first(result, metric, trials):
        point = find_selected_point(result, trial, metric)
        if point is not None:
            configs.append(flatten(trial.config))
            values.append(point[1])
    return configs, np.asarray(values, dtype=float)


def column_values(configs: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return a dimension's value in each configuration, or `ABSENT`."""
    return [config.get(name, ABSENT) for config in configs]


def ranges_of(result: Any) -> Mapping[str, Range]:
    """Return the range of each setting in the space; empty if the space was not recorded."""
    saved = getattr(result, "saved", None)
    ranges: Mapping[str, Range] = {} if saved is None else saved.ranges()
    return ranges


def is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(v, (int, float, np.number)) and not isinstance(v, bool) for v in values)


def is_log(numbers: Any, known: Range | None = None) -> bool:
    """Return whether a dimension's axis is logarithmic: if the space is, else by its numbers."""
    if not numbers.min() > 0:
        return False
    if known is not None and (known.low is not None or known.options):
        return known.is_log
    return bool(numbers.max() / numbers.min() > 50)


def categories(values: Sequence[Any], known: Range) -> list[Any]:
    """List distinct values in the order of the space, else as they come; ``1`` is not ``True``."""
    distinct = {repr(value): value for value in values}
    order = {repr(option): place for place, option in enumerate(known.options)}
    return [distinct[key] for key in sorted(distinct, key=lambda key: order.get(key, len(order)))]
