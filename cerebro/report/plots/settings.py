"""Draw the metric by settings: over each one, across all of them, and how much each one matters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cerebro.errors import InputError
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report.format import ABSENT, Range, is_number
from cerebro.report.plots.curves import (
    axis_label,
    find_selected_point,
    missing_metric_error,
    mode_of,
    scale_metric,
    sort_best_first,
)
from cerebro.report.plots.look import (
    Look,
    clean_axes,
    cut_middle,
    empty_figure,
    escape_dollars,
    figure_of,
    tick_labels,
    wrap,
    write_legend,
    write_title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _list_varying(configs: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    names = fmt.find_varying(configs)
    if not names:
        raise InputError(f"kind={kind!r}: needs two finished trials that differ")
    return names


def table_of(result: Any, metric: str, trials: Sequence[Any]) -> tuple[list[dict[str, Any]], Any]:
    """Return the flat configurations of the trials that have the metric, and its values."""
    configs, values = [], []
    for trial in sort_best_first(result, metric, trials):
        point = find_selected_point(result, trial, metric)
        if point is not None:
            configs.append(flatten(trial.config))
            values.append(point[1])
    return configs, np.asarray(values, dtype=float)


def _list_values(configs: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [config.get(name, ABSENT) for config in configs]


def _ranges_of(result: Any) -> Mapping[str, Range]:
    """Return the range of each setting in the space; empty if the space was not recorded."""
    saved = getattr(result, "saved", None)
    return {} if saved is None else saved.ranges()


def _is_log(numbers: Any, known: Range | None = None) -> bool:
    """Return whether a dimension's axis is logarithmic: if the space is, else by its numbers."""
    if not numbers.min() > 0:
        return False
    if known is not None and (known.low is not None or known.options):
        return known.is_log
    return bool(numbers.max() / numbers.min() > 50)


def _list_categories(values: Sequence[Any], known: Range) -> list[Any]:
    """List distinct values in the order of the space, else as they come; ``1`` is not ``True``."""
    distinct = {repr(value): value for value in values}
    order = {repr(option): place for place, option in enumerate(known.options)}
    return [distinct[key] for key in sorted(distinct, key=lambda key: order.get(key, len(order)))]


# --- across all settings -------------------------------------------------------

LEAST_GAP = 0.05  # share of the height between two labeled values
MAX_SCALE_LABEL = 22  # the most characters of a category
MAX_ON_SCALE = 25  # the most labels of categories
NOT_USED = -0.14  # position at which an absent dimension is drawn


def _position_values(
    values: Sequence[Any], known: Range | None = None
) -> tuple[list[float], list[tuple[float, str]]]:
    """Place one dimension's values on 0..1, absent ones below; return positions and ticks."""
    present = [v for v in values if v is not ABSENT]
    if all(map(is_number, present)):
        numbers = np.asarray(present, dtype=float)
        scale = np.log if _is_log(numbers, known) else np.asarray
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
        distinct = _list_categories(sorted(present, key=str), known or Range())
        keys = [repr(v) for v in distinct]
        step = 1.0 / max(len(distinct) - 1, 1)

        def place(value: Any) -> float:
            return keys.index(repr(value)) * step

        labels = tick_labels(distinct, MAX_SCALE_LABEL)
        every = -(-len(distinct) // MAX_ON_SCALE)
        ticks = [(place(v), text) for v, text in zip(distinct, labels, strict=True)][::every]
    if len(present) < len(values):
        ticks.append((NOT_USED, "not used"))
    return [NOT_USED if v is ABSENT else place(v) for v in values], ticks


def draw_parallel(result: Any, metric: str, trials: Sequence[Any], look: Look) -> Figure:
    """Draw each trial as a line across the dimensions and the metric, colored by the metric."""
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    configs, values = table_of(result, metric, trials)
    names = _list_varying(configs, "parallel")
    ranges = _ranges_of(result)
    columns = [_position_values(_list_values(configs, name), ranges.get(name)) for name in names]
    columns.append(_position_values(values.tolist()))
    figure, axes = figure_of(look, max(6.0, 1.7 * len(columns)), 4.6)
    axes.grid(False)
    heights = np.asarray([places for places, _ in columns]).T  # a row for each trial
    goodness = heights[:, -1] if mode_of(result, metric) == "max" else 1.0 - heights[:, -1]
    dull, bright = look.shades
    shades = colormaps["viridis"](dull + (bright - dull) * goodness)
    x = np.arange(len(columns))
    # Draw all lines at once: a thousand separate lines would take long.
    lines: Any = np.dstack(np.broadcast_arrays(x, heights))
    axes.add_collection(
        LineCollection(lines[:0:-1], colors=shades[:0:-1], linewidths=1.2, alpha=0.75, zorder=2)
    )
    points = lines[1:].reshape(-1, 2).T
    colors = np.repeat(shades[1:], len(columns), axis=0)
    axes.scatter(points[0], points[1], s=8, c=colors, zorder=2)
    axes.plot(x, heights[0], color=look.accent, linewidth=2.6, marker="o", markersize=3, zorder=3)
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


# --- what mattered -------------------------------------------------------------

TRIALS_PER_DIMENSION = 10  # the fewest that show the importance of dimensions
_DRAWS = 1000


@dataclass(frozen=True)
class Importance:
    """The share of a metric's variance that one dimension alone explains, and its uncertainty."""

    share: float
    low: float  # with a probability of 90%, the share is from `low` to `high`
    high: float
    by_chance: float  # the average share of a dimension that has no influence


def explained_variance(values: Sequence[Any], metric: Any) -> Importance | None:
    """Estimate the share of the metric's variance that one dimension alone explains.

    The share is the variance between groups divided by the total variance (eta squared). Groups are
    categories or, for a number, up to four ranges with equally many trials. The range, from the 5th
    to the 95th percentile over a bootstrap with fixed draws, shows the uncertainty: with few trials
    the share is large by chance. Interactions are not measured. None if there is one group, one
    group per trial, or a constant metric. A value is `ABSENT` where the trial has none.
    """
    numbers = np.asarray(metric, dtype=float)
    kinds, groups = np.unique(np.asarray(_group_values(values)), return_inverse=True)
    count = len(numbers)
    if len(kinds) < 2 or count <= len(kinds) or not np.ptp(numbers):
        return None
    draws = max(100, min(_DRAWS, 10**6 // count))
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), draws)
    centred = (numbers - numbers.mean()) / np.ptp(numbers)
    belongs = (groups[:, None] == np.arange(len(kinds))).astype(float)
    shares = _shares(np.vstack([np.ones(count), drawn]), centred, belongs)
    low, high = np.quantile(shares[1:], [0.05, 0.95])
    share = float(shares[0])
    by_chance = (len(kinds) - 1) / (count - 1)
    return Importance(share, min(float(low), share), max(float(high), share), by_chance)


def _shares(weights: Any, numbers: Any, belongs: Any) -> Any:
    """Return the share of the variance that is between groups, for each row of trial weights."""
    sums, sizes = (weights * numbers) @ belongs, weights @ belongs
    mean = weights @ numbers / weights.sum(axis=1)
    total = weights @ numbers**2 - weights.sum(axis=1) * mean**2
    between = (sums**2 / np.maximum(sizes, 1)).sum(axis=1) - weights.sum(axis=1) * mean**2
    # A draw that repeats a single trial has no variance.
    return np.clip(between / np.where(total > 1e-12, total, np.inf), 0.0, 1.0)


def _group_values(values: Sequence[Any]) -> list[str]:
    numbers = [v for v in values if v is not ABSENT and v is not None]
    if not all(map(is_number, numbers)) or len(set(numbers)) <= 4:
        return [repr(v) for v in values]
    edges = np.quantile(np.asarray(numbers, dtype=float), [0.25, 0.5, 0.75])
    return [
        repr(v) if v is ABSENT or v is None else str(int(np.searchsorted(edges, v))) for v in values
    ]


def draw_importance(result: Any, metric: str, trials: Sequence[Any], look: Look) -> Figure:
    """Draw the share of the metric's variance that each dimension alone explains, with its range.

    With too few trials the bars are pale, and the title says so.
    """
    configs, values = table_of(result, metric, trials)
    names = _list_varying(configs, "importance")
    importances = {n: explained_variance(_list_values(configs, n), values) for n in names}
    ordered = sorted(names, key=lambda name: -1.0 if (f := importances[name]) is None else f.share)
    enough = TRIALS_PER_DIMENSION * len(names)
    tells = len(configs) >= enough
    labels = [wrap(name, 30, 2) for name in ordered]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    # Long names widen the plot, so that the bars and the title keep their room.
    figure, axes = figure_of(look, 7.2 + 0.07 * max(0, longest - 12), 1.9 + 0.38 * len(ordered))
    axes.grid(False, axis="y")
    for place, name in enumerate(ordered):
        _draw_share(axes, place, importances[name], look, pale=not tells)
    axes.set_yticks(range(len(ordered)), labels)
    axes.set_ylim(-0.5, len(ordered) - 0.5)
    axes.set_xlim(0, 128)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel(
        f"variance of {escape_dollars(cut_middle(fmt.short_name(metric), 30))} explained alone "
        "(%), with its 90% range;\n"
        "dotted: the share by chance alone",
        color=look.ink,
    )
    counted = fmt.count_noun(len(configs), "trial")
    heading = "What mattered" if tells else "What mattered: too few trials to tell"
    write_title(look, axes, heading, counted if tells else f"{counted}, {enough} would do")
    return figure


def _draw_share(
    axes: Axes, place: int, found: Importance | None, look: Look, *, pale: bool
) -> None:
    if found is None:
        axes.text(1, place, "unknown", va="center", fontsize=9, color=look.ink)
        return
    share, low, high = (100 * part for part in (found.share, found.low, found.high))
    axes.barh(place, share, color=look.faint if pale else look.runners_up[0])
    axes.plot([low, high], [place, place], color=look.ink, linewidth=1.2, marker="|", markersize=7)
    chance = 100 * found.by_chance
    axes.plot(
        [chance] * 2, [place - 0.4, place + 0.4], color=look.accent, linewidth=1.2, linestyle=":"
    )
    text = f"{share:.0f}% ({low:.0f} to {high:.0f})"
    axes.text(max(share, high) + 2, place, text, va="center", fontsize=9, color=look.ink)


# --- over each setting ---------------------------------------------------------

ACROSS = 3  # panels side by side
MAX_LISTED = 8  # the most numbers that get one place each, without an axis
SPREAD = 0.16  # how far the trials of a category are spread
MAX_LABEL = 14  # the most characters of a category
MAX_TURNED = 24  # the most labels of categories


@dataclass(frozen=True)
class _Style:
    """How the trials of a group are drawn, and its name in the legend."""

    text: str
    marker: str
    face: str  # the color inside; "none" for a hollow mark
    edge: str
    size: float
    linewidth: float
    zorder: int


STYLE_OF = {"stopped": "pruned", "failed": "failed", "diverged": "failed"}


def _list_styles(look: Look) -> dict[str, _Style]:
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
    names = _list_varying(list(configs.values()), "slice")
    points = {t.number: find_selected_point(result, t, metric) for t in shown}
    values = {n: math.nan if p is None else p[1] for n, p in points.items()}
    groups = _group_trials(shown, values, ranked[0].number)
    ranges = _ranges_of(result)
    across = 2 if len(names) == 4 else min(ACROSS, len(names))
    down = -(-len(names) // across)
    figure = empty_figure(look, max(5.4, 3.2 * across), 0.9 + 2.7 * down)
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for place, name in enumerate(names):
        axes = panels[place]
        clean_axes(look, axes)
        column = {n: config[name] for n, config in configs.items() if name in config}
        _draw_panel(axes, name, column, groups, values, ranges.get(name, Range()), look)
        if place % across == 0:
            axes.set_ylabel(wrap(axis_label(ranked[0], metric), 24, 3), color=look.ink)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    scale_metric(panels[0], list(values.values()))
    panels[0].margins(y=0.12)
    _explain_marks(figure, groups, look)
    return figure


def _group_trials(
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


def _draw_panel(
    axes: Axes,
    name: str,
    own: Mapping[int, Any],
    groups: Mapping[str, Sequence[int]],
    values: Mapping[int, float],
    known: Range,
    look: Look,
) -> None:
    numbers = list(own.values())
    numeric = all(map(is_number, numbers))
    distinct = sorted(set(numbers)) if numeric else _list_categories(numbers, known)
    if not numeric or (known.options and len(distinct) <= MAX_LISTED):
        identity = float if numeric else repr
        keys = [identity(value) for value in distinct]
        columns = {n: keys.index(identity(value)) for n, value in own.items()}
        places = {n: column + _offset_trial(n) for n, column in columns.items()}
        _label_columns(axes, tick_labels(distinct, MAX_LABEL))
        _mark_medians(axes, columns, values, look)
    else:
        places = {n: float(v) for n, v in own.items()}
        if _is_log(np.asarray(numbers, dtype=float), known):
            axes.set_xscale("log")
            _label_few(axes, [float(number) for number in numbers])
    styles = _list_styles(look)
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
    """Draw trials of one style at once; those without a finite metric on the lower edge."""
    marks: dict[str, Any] = {
        "marker": style.marker,
        "facecolor": style.face,
        "s": style.size,
        "linewidth": style.linewidth,
        "zorder": style.zorder,
    }
    if style.marker != "x":  # a cross has its face's color; matplotlib warns of an edge's
        marks["edgecolor"] = style.edge
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
            median = float(np.median(metrics))
            axes.hlines(median, column - 0.3, column + 0.3, color=look.dim, linewidth=1.2)


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
        for name, style in _list_styles(look).items()
        if name in groups
    ]
    write_legend(look, figure, handles, len(handles))
    figure.suptitle(
        "Metric by setting", x=0.01, ha="left", fontsize=11, fontweight="bold", color=look.ink
    )
