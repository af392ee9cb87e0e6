"""Read a metric's curves from a result, and draw them: learning curves."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cerebro.errors import InputError
from cerebro.report import format as fmt
from cerebro.report.plots.look import Look, escape_dollars, figure_of, wrap, write_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    mode = mode_of(result, metric)

    def key(trial: Any) -> tuple[float, int]:
        point = find_selected_point(result, trial, metric)
        return fmt.rank(None if point is None else point[1], mode), trial.number

    return sorted((t for t in trials if series(t, metric)[1]), key=key)


def missing_metric_error(metric: str, trials: Sequence[Any]) -> InputError:
    names = sorted({name for t in trials for e in t.history for name in e["metrics"]})
    available = ", ".join(names) or "none, because no epoch has finished"
    return InputError(f"metric={metric!r}: no trial has it yet; available: {available}")


def axis_label(trial: Any, metric: str) -> str:
    name = fmt.short_name(metric)
    keys = {key for entry in trial.history for key in entry["metrics"]}
    if metric.startswith("train_"):
        return f"training {name}"
    if metric.startswith("val_") or f"val_{name}" in keys:
        return f"validation {name}"
    return f"training {name}" if f"train_{name}" in keys else name


def scale_metric(axes: Axes, values: Sequence[float]) -> None:
    """Make the metric's axis logarithmic if a few very bad values would flatten all others."""
    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 30:
        axes.set_yscale("log")


def draw_curves(result: Any, metric: str, trials: Sequence[Any], look: Look) -> Figure:
    """Draw the metric over epochs: the best trial on top, four others labeled, the rest faint.

    A cross marks the last finite value of a trial that failed or diverged.
    """
    measured = sort_best_first(result, metric, trials)
    if not measured:
        raise missing_metric_error(metric, trials)
    ranked = [trial for trial in measured if find_selected_point(result, trial, metric) is not None]
    figure, axes = figure_of(look, 8.4, 4.6)
    colours = [look.accent, *look.runners_up]
    for rank, trial in reversed(list(enumerate(ranked))):
        named = rank < len(colours)
        x, y = series(trial, metric)
        axes.plot(
            x,
            y,
            color=colours[rank] if named else look.faint,
            linewidth=2.6 if rank == 0 else 1.5 if named else 1.1,
            zorder=10 - rank if named else 2,
            marker="o" if sum(map(math.isfinite, y)) == 1 else None,
            markersize=4,
            solid_capstyle="round",
            label=_curve_label(trial) if named else None,
        )
        if trial.status in ("diverged", "failed"):
            end = [point for point in zip(x, y, strict=True) if math.isfinite(point[1])][-1]
            axes.plot(*end, "x", color=look.ink, markersize=6, zorder=11)
    point = find_selected_point(result, measured[0], metric)
    if point is not None:
        _mark_best(axes, point, mode_of(result, metric) == "max", look)
    _finish_curves(axes, ranked, metric, look)
    axes.set_ylabel(wrap(axis_label(measured[0], metric), 40, 2), color=look.ink)
    unknown = len(measured) - len(ranked)
    parts = [f"{fmt.count_noun(len(ranked), 'trial')}, best first"] if ranked else []
    parts += [f"{fmt.count_noun(unknown, 'trial')} without a finite metric"] if unknown else []
    write_title(look, axes, "Learning curves", "; ".join(parts))
    return figure


def _curve_label(trial: Any) -> str:
    lines = textwrap.wrap(fmt.settings(trial.config), 40, max_lines=3, placeholder=" …")
    return escape_dollars("\n".join([f"trial {trial.number}", *lines]))


def _mark_best(axes: Axes, point: tuple[int, float], high: bool, look: Look) -> None:
    axes.plot(*point, "o", color=look.accent, markersize=7, markeredgecolor=look.page, zorder=12)
    axes.annotate(
        fmt.metric(point[1]),
        point,
        xytext=(0, 9 if high else -9),
        textcoords="offset points",
        ha="center",
        va="bottom" if high else "top",
        fontsize=10,
        fontweight="bold",
        color=look.accent,
        zorder=13,
        bbox=look.box(0.15, 0.8),
    )


def _finish_curves(axes: Axes, ranked: Sequence[Any], metric: str, look: Look) -> None:
    from matplotlib.ticker import MaxNLocator

    scale_metric(axes, [y for t in ranked for y in series(t, metric)[1]])
    axes.margins(x=0.03, y=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if max((x for t in ranked for x in series(t, metric)[0]), default=1) == 1:
        axes.set_xlim(0.5, 1.5)  # around a single epoch, the axis would have only fractions
    axes.set_xlabel("epochs trained", color=look.ink)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],  # drawn from the worst to the best
        labels[::-1],
        loc="upper left",
        bbox_to_anchor=(1.04, 1.0),
        fontsize=8,
        frameon=False,
        labelcolor=look.ink,
        labelspacing=0.9,
        borderaxespad=0.0,
    )
