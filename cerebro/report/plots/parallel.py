"""Draw configurations as lines across their dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cerebro.report import format as fmt
from cerebro.report.format import ABSENT, Range
from cerebro.report.plots.look import (
    Look,
    escape_dollars,
    figure_of,
    tick_labels,
    wrap,
    write_title,
)
from cerebro.report.plots.values import (
    categories,
    column_values,
    is_log,
    is_numeric,
    mode_of,
    ranges_of,
    table_of,
    too_few_error,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_GAP = 0.05  # share of the height between two labeled values
MAX_LABEL = 22  # the most characters of a category
MAX_LISTED = 25  # the most labels of categories
NOT_USED = -0.14  # position at which an absent dimension is drawn


def _position_values(
    values: Sequence[Any], known: Range | None = None
) -> tuple[list[float], list[tuple[float, str]]]:
    """Place one dimension's values on 0..1, absent ones below; return positions and ticks."""
    present = [v for v in values if v is not ABSENT]
    if is_numeric(present):
        numbers = np.asarray(present, dtype=float)
        scale = np.log if is_log(numbers, known) else np.asarray
        low, high = float(scale(numbers.min())), float(scale(numbers.max()))
        distinct = sorted(set(present))
        gaps = np.diff(scale(np.asarray(distinct, dtype=float))) / ((high - low) or 1.0)
        if len(distinct) > 6 or (gaps < LEAST_GAP).any():
            marks = np.linspace(low, high, 5)
            distinct = [float(np.exp(m)) if scale is np.log else float(m) for m in marks]

        def place(value: Any) -> float:
            return (float(scale(float(value))) - low) / ((high - low) or 1.0)

        ticks = [(place(v), fmt.number(v, 3)) for v in distinct]
    else:
        distinct = categories(sorted(present, key=str), known or Range())
        keys = [repr(v) for v in distinct]
        step = 1.0 / max(len(distinct) - 1, 1)

        def place(value: Any) -> float:
            return keys.index(repr(value)) * step

        labels = tick_labels(distinct, MAX_LABEL)
        every = -(-len(distinct) // MAX_LISTED)
        ticks = [(place(v), text) for v, text in zip(distinct, labels, strict=True)][::every]
    if len(present) < len(values):
        ticks.append((NOT_USED, "not used"))
    return [NOT_USED if v is ABSENT else place(v) for v in values], ticks


def draw_parallel(result: Any, metric: str, trials: Sequence[Any], look: Look) -> Figure:
    """Draw each trial as a line across the dimensions and the metric, colored by the metric."""
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    configs, values = table_of(result, metric, trials)
    names = fmt.find_varying(configs)
    if not names:
        raise too_few_error("parallel")
    ranges = ranges_of(result)
    columns = [_position_values(column_values(configs, name), ranges.get(name)) for name in names]
    columns.append(_position_values(values.tolist()))
    figure, axes = figure_of(look, max(6.0, 1.7 * len(columns)), 4.6)
    axes.grid(False)
    heights = np.asarray(columns[-1][0])
    goodness = heights if mode_of(result, metric) == "max" else 1.0 - heights
    dull, bright = look.shades
    shades = colormaps["viridis"](dull + (bright - dull) * goodness)
    x = np.arange(len(columns))
    # Draw all lines at once: a thousand separate lines would take long.
    lines = [
        list(zip(x, heights_of, strict=True))
        for heights_of in zip(*(p for p, _ in columns), strict=True)
    ]
    axes.add_collection(
        LineCollection(lines[:0:-1], colors=shades[:0:-1], linewidths=1.2, alpha=0.75, zorder=2)
    )
    points = np.asarray(lines[1:]).reshape(-1, 2)
    axes.scatter(
        points[:, 0], points[:, 1], s=8, c=np.repeat(shades[1:], len(columns), axis=0), zorder=2
    )
    axes.plot(
        *zip(*lines[0], strict=True),
        color=look.accent,
        linewidth=2.6,
        marker="o",
        markersize=3,
        zorder=3,
    )
    for i, (_, ticks) in enumerate(columns):
        _draw_scale(axes, i, ticks, look)
    axes.set_xticks(x, [wrap(name, 20, 3) for name in (*names, fmt.short_name(metric))])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlim(-0.1, len(columns) - 0.55)
    write_title(
        look, axes, "Configurations", f"{fmt.count_noun(len(configs), 'trial')}, best in red"
    )
    return figure


def _draw_scale(axes: Axes, x: int, ticks: Sequence[tuple[float, str]], look: Look) -> None:
    """Draw one dimension's axis, with its values beside it."""
    axes.axvline(x, color=look.faint, linewidth=1.0, zorder=1)
    for place, label in ticks:
        axes.text(
            x + 0.04,
            place,
            escape_dollars(label),
            fontsize=8,
            color=look.ink,
            va="center",
            zorder=20,
            bbox={"facecolor": look.page, "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
        )
