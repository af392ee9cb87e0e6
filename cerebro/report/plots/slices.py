"""Draw the metric over each setting, one panel for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cerebro.errors import InputError
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report.plots.look import Look, clean, empty_figure, plain
from cerebro.report.plots.values import (
    axis_label,
    best_first,
    is_log,
    is_numeric,
    known_metrics,
    selected,
    varying,
)
from cerebro.report.ranges import Range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # panels side by side
MAX_LISTED = 8  # the most numbers that get one place each, without an axis
SPREAD = 0.16  # how far the trials of a category are spread
MAX_LABEL = 14  # the most characters of a category
TOO_FAR = 30  # the ratio of metrics above which the axis is logarithmic


STYLE_OF = {"stopped": "pruned", "failed": "failed", "diverged": "failed"}


def _styles(look: Look) -> dict[str, dict[str, Any]]:
    """Return the styles in which trials are drawn."""
    return {
        "finished": {
            "marker": "o",
            "s": 30,
            "linewidth": 0.7,
            "zorder": 3,
            "facecolor": look.runners_up[0],
            "edgecolor": look.page,
        },
        "pruned": {
            "marker": "o",
            "s": 26,
            "linewidth": 1.2,
            "zorder": 3,
            "facecolor": "none",
            "edgecolor": look.runners_up[3],
        },
        "failed": {"marker": "x", "s": 26, "linewidth": 1.2, "zorder": 4, "color": look.ink},
        "best": {
            "marker": "*",
            "s": 150,
            "linewidth": 0.8,
            "zorder": 6,
            "facecolor": look.accent,
            "edgecolor": look.page,
        },
    }


def draw_slices(result: Any, metric: str, trials: Sequence[Any], look: Look) -> Figure:
    """Draw the metric over each setting that varies; a star marks the best trial.

    Axes are logarithmic if the space is. Trials that ended early are hollow. Failed and diverged
    trials are crosses, on the lower edge if they have no metric.
    """
    ranked = best_first(result, metric, trials)
    if not ranked:
        raise InputError(
            f"metric={metric!r}: no trial has it yet; available: {known_metrics(trials)}"
        )
    shown = [t for t in trials if t.status in ("failed", "diverged") or t in ranked]
    configs = {t.number: flatten(t.config) for t in shown}
    names = varying(list(configs.values()))
    if not names:
        raise InputError("kind='slice': needs two finished trials that differ")
    points = {t.number: selected(result, t, metric) for t in shown}
    values = {n: math.nan if p is None else p[1] for n, p in points.items()}
    across = 2 if len(names) == 4 else min(ACROSS, len(names))
    down = -(-len(names) // across)
    figure = empty_figure(look, max(5.4, 3.2 * across), 0.9 + 2.7 * down)
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for place, name in enumerate(names):
        axes = panels[place]
        clean(look, axes)
        own = {n: config[name] for n, config in configs.items() if name in config}
        _panel(axes, name, own, shown, values, _range(result, name), ranked[0].number, look)
        if place % across == 0:
            axes.set_ylabel(plain(axis_label(ranked[0], metric)), color=look.ink)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    _scale_metric(panels[0], list(values.values()))
    _name(figure, shown, look)
    return figure


def _range(result: Any, name: str) -> Range:
    """Return a setting's range in the space; without bounds if the range was not recorded."""
    saved = getattr(result, "saved", None)
    found: Mapping[str, Range] = {} if saved is None else saved.ranges()
    return found.get(name, Range())


def _panel(
    axes: Axes,
    name: str,
    own: Mapping[int, Any],
    trials: Sequence[Any],
    values: Mapping[int, float],
    known: Range,
    best: int,
    look: Look,
) -> None:
    numbers = list(own.values())
    numeric = is_numeric(numbers)
    distinct = sorted(set(numbers)) if numeric else list(dict.fromkeys(map(_label, numbers)))
    if not numeric and known.options:  # the order of the space
        order = [_label(option) for option in known.options]
        distinct.sort(key=lambda label: order.index(label) if label in order else len(order))
    listed = not numeric or (bool(known.options) and len(distinct) <= MAX_LISTED)
    if listed:
        places = {
            n: distinct.index(v if numeric else _label(v)) + _aside(n) for n, v in own.items()
        }
        texts = [fmt.number(v, 3) if numeric else v for v in distinct]
        turned = sum(map(len, texts)) > 26
        axes.set_xticks(
            range(len(texts)),
            [plain(text) for text in texts],
            rotation=30 if turned else 0,
            ha="right" if turned else "center",
        )
        axes.set_xlim(-0.5, len(texts) - 0.5)
        axes.grid(False, axis="x")
        _medians(axes, own, values, distinct, numeric, look)
    else:
        places = {n: float(v) for n, v in own.items()}
        by_space = known.low is not None or bool(known.options)
        if known.is_log or (not by_space and is_log(np.asarray(numbers, dtype=float))):
            axes.set_xscale("log")
            _label_few(axes, [float(number) for number in numbers if number > 0])
    shown = [trial for trial in trials if trial.number in own]
    _dots(axes, shown, places, values, _styles(look), best)
    absent = len(values) - len(own)
    axes.set_xlabel(plain(name), color=look.ink)
    if absent:
        axes.set_title(f"{absent} trials without it", fontsize=8, color=look.dim, loc="right")


def _label_few(axes: Axes, numbers: Sequence[float]) -> None:
    """Label a log axis at one to three numbers of each decade.

    Matplotlib labels all nine of a short axis, over each other.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(max(numbers) / min(numbers)) if numbers else 0.0
    subs = (1, 2, 5) if decades < 1 else (1, 3) if decades < 2.5 else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: fmt.number(value, 3)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _dots(
    axes: Axes,
    trials: Sequence[Any],
    places: Mapping[int, float],
    values: Mapping[int, float],
    styles: Mapping[str, Mapping[str, Any]],
    best: int,
) -> None:
    """Draw trials; those without a finite metric on the lower edge.

    All trials of a style are drawn at once, because thousands of separate marks would take minutes.
    """
    groups: dict[tuple[str, bool], list[int]] = {}
    for trial in trials:
        style = "best" if trial.number == best else STYLE_OF.get(trial.status, "finished")
        groups.setdefault((style, math.isfinite(values[trial.number])), []).append(trial.number)
    for (style, has_metric), numbers in groups.items():
        x = [places[n] for n in numbers]
        if has_metric:
            axes.scatter(x, [values[n] for n in numbers], **styles[style])
        else:
            edge = axes.get_xaxis_transform()
            axes.scatter(x, [0.03] * len(x), transform=edge, **styles[style])


def _aside(number: int) -> float:
    """Return a trial's offset from its category's center; it depends only on the trial's number."""
    return SPREAD * (2 * ((number * 0.618034) % 1.0) - 1)


def _medians(
    axes: Axes,
    own: Mapping[int, Any],
    values: Mapping[int, float],
    distinct: Sequence[Any],
    numeric: bool,
    look: Look,
) -> None:
    """Mark the median of each category of at least three trials."""
    for place, one in enumerate(distinct):
        found = [values[n] for n, v in own.items() if (v if numeric else _label(v)) == one]
        found = [value for value in found if math.isfinite(value)]
        if len(found) > 2:
            axes.hlines(
                float(np.median(found)), place - 0.3, place + 0.3, color=look.dim, linewidth=1.2
            )


def _label(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"


def _scale_metric(axes: Axes, values: Sequence[float]) -> None:
    """Make the metric's axis logarithmic if a few very bad trials would flatten all others."""
    finite = sorted(value for value in values if math.isfinite(value))
    if finite and finite[0] > 0 and finite[-1] / finite[0] > TOO_FAR:
        axes.set_yscale("log")
    axes.margins(y=0.12)


def _name(figure: Figure, trials: Sequence[Any], look: Look) -> None:
    """Write the title, and explain the marks that occur."""
    from matplotlib.lines import Line2D

    states = {trial.status for trial in trials}
    marks: list[tuple[str, str, str, str]] = [("*", look.accent, look.accent, "best")]
    marks.append(("o", look.runners_up[0], look.runners_up[0], "finished"))
    if "stopped" in states:
        marks.append(("o", "none", look.runners_up[3], "ended early"))
    if states & {"failed", "diverged"}:
        marks.append(("x", look.ink, look.ink, "failed or diverged"))
    handles = [
        Line2D(
            [], [], linestyle="", marker=m, markerfacecolor=face, markeredgecolor=edge, label=text
        )
        for m, face, edge, text in marks
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        fontsize=8,
        frameon=False,
        labelcolor=look.ink,
    )
    figure.suptitle(
        "Metric by setting", x=0.01, ha="left", fontsize=11, fontweight="bold", color=look.ink
    )
