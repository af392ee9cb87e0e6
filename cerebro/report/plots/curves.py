"""Draw learning curves."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cerebro.report import format as fmt
from cerebro.report.plots.look import Look, escape_dollars, figure_of, wrap, write_title
from cerebro.report.plots.values import (
    axis_label,
    find_selected_point,
    missing_metric_error,
    mode_of,
    series,
    sort_best_first,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    if ranked:
        _mark_best(axes, ranked[0], result, metric, look)
    _finish_curves(axes, ranked, metric, look)
    axes.set_ylabel(wrap(axis_label(measured[0], metric), 40, 2), color=look.ink)
    _title(axes, len(ranked), len(measured) - len(ranked), look)
    return figure


def _curve_label(trial: Any) -> str:
    lines = textwrap.wrap(fmt.settings(trial.config), 40, max_lines=3, placeholder=" …")
    return escape_dollars("\n".join([f"trial {trial.number}", *lines]))


def _mark_best(axes: Axes, trial: Any, result: Any, metric: str, look: Look) -> None:
    point = find_selected_point(result, trial, metric)
    if point is None:
        return
    high = mode_of(result, metric) == "max"
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


def _title(axes: Axes, count: int, unknown: int, look: Look) -> None:
    parts = [f"{fmt.count_noun(count, 'trial')}, best first"] if count else []
    parts += [f"{fmt.count_noun(unknown, 'trial')} without a finite metric"] if unknown else []
    write_title(look, axes, "Learning curves", "; ".join(parts))


def _finish_curves(axes: Axes, ranked: Sequence[Any], metric: str, look: Look) -> None:
    from matplotlib.ticker import MaxNLocator

    values = [y for t in ranked for y in series(t, metric)[1] if math.isfinite(y)]
    if values and min(values) > 0 and max(values) / min(values) > 30:
        axes.set_yscale("log")
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
