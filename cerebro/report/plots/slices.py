"""Draw the metric over each setting, one panel for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report.format import Range
from cerebro.report.plots.look import (
    Look,
    clean_axes,
    empty_figure,
    escape_dollars,
    tick_labels,
    wrap,
    write_legend,
)
from cerebro.report.plots.values import (
    axis_label,
    categories,
    find_selected_point,
    is_log,
    is_numeric,
    missing_metric_error,
    ranges_of,
    sort_best_first,
    too_few_error,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # panels side by side
MAX_LISTED = 8  # the most numbers that get one place each, without an axis
SPREAD = 0.16  # how far the trials of a category are spread
MAX_LABEL = 14  # the most characters of a category
MAX_TURNED = 24  # the most labels of categories
TOO_FAR = 30  # the ratio of metrics above which the axis is logarithmic


@dataclass(frozen=True)
class _Style:
    """How the trials of a group are drawn, and its name in the legend."""

    text: str
    marker: str
    face: str
    """The color inside; ``"none"`` for a hollow mark."""
    edge: str
    size: float
    linewidth: float
    zorder: int


STYLE_OF = {"stopped": "pruned", "failed": "failed", "diverged": "failed"}


def _styles(look: Look) -> dict[str, _Style]:
    """Return the styles in which trials are drawn, in the order of the legend."""
    blue, *_, gold = look.runners_up
    return {
        "best": _Style("best", "*", look.accent, look.page, 150, 0.8, 6),
        "finished": _Style("finished", "o", blue, look.page, 30, 0.7, 3),
        "pruned": _Style("ended early", "o", "none", gold, 26, 1.2, 3),
        "failed": _Style("failed or diverged", "x", look.ink, look.ink, 26, 1.2, 4),
        "unknown": _Style("no finite metric", "x", blue, blue, 26, 1.2, 4),
    }


def draw_slices(result: Any, metric: str, trials: Sequence[Any], look: Look) -> Figure:
    """Draw the metric over each setting that varies; a star marks the best trial.

    Axes are logarithmic if the space is. Hollow marks are trials that ended early, crosses those
    that failed or diverged; crosses on the lower edge have no finite metric.
    """
    ranked = sort_best_first(result, metric, trials)
    if not ranked:
        raise missing_metric_error(metric, trials)
    shown = [t for t in trials if t.status in ("failed", "diverged") or t in ranked]
    configs = {t.number: flatten(t.config) for t in shown}
    names = fmt.find_varying(list(configs.values()))
    if not names:
        raise too_few_error("slice")
    points = {t.number: find_selected_point(result, t, metric) for t in shown}
    values = {n: math.nan if p is None else p[1] for n, p in points.items()}
    groups = _groups(shown, values, ranked[0].number)
    ranges = ranges_of(result)
    across = 2 if len(names) == 4 else min(ACROSS, len(names))
    down = -(-len(names) // across)
    figure = empty_figure(look, max(5.4, 3.2 * across), 0.9 + 2.7 * down)
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for place, name in enumerate(names):
        axes = panels[place]
        clean_axes(look, axes)
        column = {n: config[name] for n, config in configs.items() if name in config}
        _panel(axes, name, column, groups, values, ranges.get(name, Range()), look)
        if place % across == 0:
            axes.set_ylabel(wrap(axis_label(ranked[0], metric), 24, 3), color=look.ink)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    _scale_metric(panels[0], list(values.values()))
    _explain_marks(figure, groups, look)
    return figure


def _groups(
    trials: Sequence[Any], values: Mapping[int, float], best: int
) -> Mapping[str, list[int]]:
    """Return the numbers of the trials drawn in each style, for all styles that are explained."""
    groups: dict[str, list[int]] = {}
    for trial in trials:
        style = STYLE_OF.get(trial.status, "finished")
        if not math.isfinite(values[trial.number]):
            style = "failed" if style == "failed" else "unknown"
        elif trial.number == best:
            groups.setdefault(style, [])  # in the legend, even if only the best trial has it
            style = "best"
        groups.setdefault(style, []).append(trial.number)
    return groups


def _panel(
    axes: Axes,
    name: str,
    own: Mapping[int, Any],
    groups: Mapping[str, Sequence[int]],
    values: Mapping[int, float],
    known: Range,
    look: Look,
) -> None:
    numbers = list(own.values())
    numeric = is_numeric(numbers)
    distinct = sorted(set(numbers)) if numeric else categories(numbers, known)
    if not numeric or (known.options and len(distinct) <= MAX_LISTED):
        identity = float if numeric else repr
        keys = [identity(value) for value in distinct]
        columns = {n: keys.index(identity(value)) for n, value in own.items()}
        places = {n: column + _offset_trial(n) for n, column in columns.items()}
        _label_columns(axes, tick_labels(distinct, MAX_LABEL))
        _mark_medians(axes, columns, values, look)
    else:
        places = {n: float(v) for n, v in own.items()}
        if is_log(np.asarray(numbers, dtype=float), known):
            axes.set_xscale("log")
            _label_few(axes, [float(number) for number in numbers])
    styles = _styles(look)
    for style, trials in groups.items():
        _draw_dots(axes, [n for n in trials if n in own], places, values, styles[style])
    absent = len(values) - len(own)
    axes.set_xlabel(wrap(name, 30, 2), color=look.ink)
    if absent:
        without = f"{fmt.count_noun(absent, 'trial')} without it"
        axes.set_title(without, fontsize=8, color=look.dim, loc="right")


def _label_columns(axes: Axes, texts: Sequence[str]) -> None:
    """Label categories; turn the labels, or leave some out, where they would overlap."""
    step = -(-len(texts) // MAX_TURNED)
    angle = 90 if len(texts) > MAX_LISTED else 30 if sum(map(len, texts)) > 26 else 0
    axes.set_xticks(
        range(0, len(texts), step),
        [escape_dollars(text) for text in texts[::step]],
        rotation=angle,
        ha="right" if angle == 30 else "center",
    )
    axes.set_xlim(-0.5, len(texts) - 0.5)
    axes.grid(False, axis="x")


def _label_few(axes: Axes, numbers: Sequence[float]) -> None:
    """Label a log axis at one to three numbers of each decade; matplotlib's nine overlap."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(max(numbers) / min(numbers)) if numbers else 0.0
    subs = (1, 2, 5) if decades < 1 else (1, 3) if decades < 2.5 else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: fmt.number(value, 3)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_dots(
    axes: Axes,
    trials: Sequence[int],
    places: Mapping[int, float],
    values: Mapping[int, float],
    style: _Style,
) -> None:
    """Draw trials of one style; those without a finite metric on the lower edge.

    They are drawn at once: thousands of separate marks would take minutes.
    """
    marks: dict[str, Any] = {
        "marker": style.marker,
        "s": style.size,
        "linewidth": style.linewidth,
        "zorder": style.zorder,
        **(
            {"color": style.edge}
            if style.marker == "x"
            else {"facecolor": style.face, "edgecolor": style.edge}
        ),
    }
    valued = [n for n in trials if math.isfinite(values[n])]
    others = [n for n in trials if not math.isfinite(values[n])]
    if valued:
        axes.scatter([places[n] for n in valued], [values[n] for n in valued], **marks)
    if others:
        x = [places[n] for n in others]
        axes.scatter(x, [0.03] * len(x), transform=axes.get_xaxis_transform(), **marks)
        # Marks in the coordinates of the axes do not widen its limits by themselves.
        axes.update_datalim([(place, 0.0) for place in x], updatey=False)


def _offset_trial(number: int) -> float:
    """Return a trial's offset from its category's center, which depends only on its number."""
    return SPREAD * (2 * ((number * 0.618034) % 1.0) - 1)


def _mark_medians(
    axes: Axes, columns: Mapping[int, int], values: Mapping[int, float], look: Look
) -> None:
    for column in sorted(set(columns.values())):
        metrics = [values[n] for n, place in columns.items() if place == column]
        metrics = [value for value in metrics if math.isfinite(value)]
        if len(metrics) > 2:
            axes.hlines(
                float(np.median(metrics)), column - 0.3, column + 0.3, color=look.dim, linewidth=1.2
            )


def _scale_metric(axes: Axes, values: Sequence[float]) -> None:
    """Make the metric's axis logarithmic if a few very bad trials would flatten all others."""
    finite = sorted(value for value in values if math.isfinite(value))
    if finite and finite[0] > 0 and finite[-1] / finite[0] > TOO_FAR:
        axes.set_yscale("log")
    axes.margins(y=0.12)


def _explain_marks(figure: Figure, groups: Mapping[str, Sequence[int]], look: Look) -> None:
    """Write the title, and explain the marks that occur."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            linestyle="",
            marker=style.marker,
            markerfacecolor=style.face,
            markeredgecolor=style.face if style.face != "none" else style.edge,
            label=style.text,
        )
        for name, style in _styles(look).items()
        if name in groups
    ]
    write_legend(look, figure, handles, len(handles))
    figure.suptitle(
        "Metric by setting", x=0.01, ha="left", fontsize=11, fontweight="bold", color=look.ink
    )
