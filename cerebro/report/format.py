"""Format numbers, times, ranges, configurations and metrics in the same way for all outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from cerebro.machine.mappings import flatten

PREFIXES = ("val_", "train_")
BEST_AT = "best at"  # heads the column with the number of epochs after which a trial was best


def number(value: Any, digits: int = 4) -> str:
    """Write a number in at most about eight characters: ``0.9812``, ``3.1e-5``, ``1,024``.

    Other values become text in one line.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return " ".join(str(value).splitlines())
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 100_000 else str(value)
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}"
    if abs(value) >= 10**digits:
        return f"{value:.0f}"  # "g" would write an exponent
    return f"{value:.{digits}g}"


def metric(value: float | None, digits: int = 4) -> str:
    """Write a metric with fixed decimals, so that columns line up; ``-`` for None.

    Very small and large metrics have as many digits: ``5.0001e-4``, ``123462``, ``1.2346e7``.
    """
    if value is None:
        return "-"
    if (math.isfinite(value) and 1e-3 <= abs(value) < 1e4) or value == 0:
        return f"{value:.{digits}f}"
    if 1e4 <= abs(value) < 1e7:
        return f"{value:.0f}"
    return number(float(value), digits + 2)


def width(text: str) -> int:
    """Return the number of columns that text takes in a terminal; some characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def pad(text: str, columns: int, *, right: bool = False) -> str:
    """Fill text with spaces up to `columns` columns of a terminal; `right`: align it there."""
    space = " " * (columns - width(text))
    return space + text if right else text + space


def count_noun(count: int, what: str) -> str:
    """Write a count with its noun: ``1 epoch``, ``2 epochs``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def describe_tie(trials: Iterable[Any], best: Any, metric: str) -> str:
    """Return a note on the trials that tie with the best one; empty if none does."""
    value = metric_value(best.metrics, metric)
    numbers = [t.number for t in trials if metric_value(t.metrics, metric) == value]
    if len(numbers) < 2:
        return ""
    first, *others = map(str, sorted(numbers))
    if len(others) > 4:
        others = [*others[:3], f"{len(others) - 3} others"]
    tying = f"trials {', '.join([first, *others[:-1]])} and {others[-1]} tie"
    return f"{tying}: the lowest number is taken"


def duration(seconds: float | None) -> str:
    """Write a time: ``850 ms``, ``4.2 s``, ``1:05``, ``2:03:00``; ``-`` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def rough_duration(seconds: float | None) -> str:
    """Write an estimated time in whole seconds: ``4 s``, ``1:05``; ``-`` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = math.ceil(seconds)
    return f"{whole} s" if whole < 60 else duration(whole)


def percent(share: float | None) -> str:
    """Write a share in whole percent, with 100% only for the whole; ``?%`` for None."""
    return "?%" if share is None else f"{math.floor(100 * min(max(share, 0.0), 1.0) + 1e-9)}%"


def states(counts: Mapping[str, int]) -> str:
    """Write the number of trials by status: ``12 finished, 4 failed``."""
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""Stands for a setting that a configuration does not have; None can be a setting's value."""


def find_varying(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the settings that differ between configurations, in the order of the space."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [n for n in names if len({repr(c.get(n, ABSENT)) for c in configs}) > 1]


def choose_settings(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the settings to show: those that differ between configurations, or all if none does."""
    return find_varying(configs) or list(dict.fromkeys(name for c in configs for name in c))


def size(nbytes: float) -> str:
    """Write a size in bytes with a unit: ``1.2 MB`` (1 MB is 10^6 bytes)."""
    units = ["bytes", "kB", "MB", "GB", "TB", "PB"]
    power = 0
    while nbytes >= 999.5 and power < len(units) - 1:
        nbytes /= 1000
        power += 1
    return f"{nbytes:.0f} bytes" if power == 0 else f"{nbytes:.3g} {units[power]}"


def settings(config: Mapping[str, Any], width: int | None = None) -> str:
    """Write a configuration on one line: ``lr=0.01 batch_size=32``; cut to `width` characters."""
    parts = (f"{k}={number(v, 3)}" for k, v in flatten(config).items())
    text = " ".join(parts)
    return text if width is None else cut_end(text, width)


def cut_end(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def short_name(name: str) -> str:
    """Return a metric's name without ``val_`` or ``train_``."""
    prefix = next(filter(name.startswith, PREFIXES), "")
    return name.removeprefix(prefix)


def metric_value(metrics: Mapping[str, float], name: str) -> float | None:
    """Look up a metric under its own name, else in validation, else in training."""
    for key in (name, f"val_{name}", f"train_{name}"):
        if key in metrics:
            return metrics[key]
    return None


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return whether a metric is known and finite."""
    return value is not None and math.isfinite(value)


def rank(value: float | None, mode: str) -> float:
    """Return the number by which a metric is sorted: best first, last without a finite one."""
    if not is_finite(value):
        return math.inf
    return -value if mode == "max" else value


def mean_metric(metrics: Mapping[str, float], name: str) -> str:
    """Write a metric; if it is a mean over folds, add its standard deviation."""
    text = metric(metric_value(metrics, name))
    spread = metric_value(metrics, f"{name}_std")
    return text if spread is None else f"{text} ± {metric(spread)}"


def drop_spreads(names: Iterable[str]) -> list[str]:
    """Omit standard deviations: ``loss_std`` beside ``loss``."""
    distinct = dict.fromkeys(names)
    return [n for n in distinct if not (n.endswith("_std") and n[:-4] in distinct)]


def full_names(names: Iterable[str]) -> list[str]:
    """Omit short names whose full name is present: ``loss`` beside ``val_loss``."""
    means = drop_spreads(names)
    full = {short_name(name) for name in means if name.startswith(PREFIXES)}
    return [name for name in means if name not in full]


def metric_columns(rows: Iterable[Mapping[str, float]], ranked_by: str) -> list[str]:
    """Choose the metric columns of a table: both losses, then the metric that ranks trials.

    If trials are ranked by the loss, the first other metric (such as accuracy) comes third.
    """
    seen = dict.fromkeys(name for metrics in rows for name in drop_spreads(metrics))
    columns: list[str] = [name for name in ("train_loss", "val_loss") if name in seen]
    if short_name(ranked_by) != "loss":
        return [*columns, ranked_by]
    if ranked_by in seen and not columns:
        columns = [ranked_by]
    others = [name for name in seen if short_name(name) != "loss"]
    others.sort(key=lambda name: name.startswith("train_"))
    return [*columns, *(short_name(name) for name in others[:1])]


def heading(name: str) -> str:
    """Return a metric's column heading: ``train_loss`` becomes ``train loss``."""
    return name.replace("_", " ")


@dataclass(frozen=True)
class Range:
    """The values from which a search draws a setting."""

    low: float | None = None  # the ends, for a number between them
    high: float | None = None
    is_log: bool = False  # the logarithm is drawn
    options: Sequence[Any] = ()  # the values, if they are listed

    def place(self, value: float) -> float | None:
        low, high = self.low, self.high
        if low is None or high is None or not low < high:
            return None
        if self.is_log:
            if value <= 0 or low <= 0:
                return None
            return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        return (value - low) / (high - low)

    @property
    def steps(self) -> list[float]:
        """The listed values in ascending order, if all are numbers; else empty."""
        numbers = [o for o in self.options if is_number(o)]
        return sorted(set(numbers)) if len(numbers) == len(self.options) else []

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """The lowest and the highest value."""
        return (self.steps[0], self.steps[-1]) if self.steps else (self.low, self.high)


def is_number(value: Any) -> bool:
    """Return whether a setting's value is a number and not a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
