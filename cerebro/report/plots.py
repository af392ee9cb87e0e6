"""Pictures of a result: learning curves, units on workers, and importance of parameters.

Every function returns a new ``matplotlib.figure.Figure`` that is tied to no window
and to no global state of pyplot, so it works without a display and in threads:
``figure.savefig("curves.png")``. A notebook draws it when it is the cell's value.
"""

from __future__ import annotations

import colorsys
import functools
import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cerebro.errors import InputError
from cerebro.machine.imports import import_extra
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"  # text
FAINT = "#c3cad3"  # curves that are only background
GRID = "#e6e9ed"
ACCENT = "#d1495b"  # the best trial
RUNNERS_UP = ("#2e6f9e", "#3f9e8c", "#8a63b0", "#c58a2b")
MAX_NAMED = 24  # trials that a legend or a bar names
LABEL_SHARE = 0.012  # of the time axis; narrower bars get no number
CUT_SHARE = 0.006  # of the time axis; narrower units are not cut apart
TOUCHING_SHARE = 0.001  # of the time axis; smaller gaps are not seen

ABSENT = -0.14  # where a dimension that a configuration lacks is drawn

Colour = tuple[float, float, float]


def plot(
    result: Any,
    metric: str | None = None,
    *,
    trials: Sequence[int] | None = None,
    kind: str = "curves",
) -> Figure:
    """Draw a result.

    Parameters
    ----------
    result
        A ``Result``.
    metric
        The metric; None: the one that ranks trials.
    trials
        Numbers of the trials to draw; all if None.
    kind
        ``"curves"`` the metric over epochs; ``"gantt"`` which worker trained which trial
        when; ``"parallel"`` configurations as lines across their dimensions;
        ``"importance"`` share of the metric's variance that each dimension explains, and how well
        that is known.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    InputError
        If `kind`, a trial or the metric is not known, or matplotlib is missing.
    """
    makers: dict[str, Callable[[Any, str, Sequence[Any]], Figure]] = {
        "curves": curves,
        "gantt": gantt,
        "parallel": parallel,
        "importance": importance,
    }
    if kind not in makers:
        raise InputError(f"kind={kind!r}: must be one of {', '.join(makers)}")
    return makers[kind](result, metric or result.metric, _chosen(result, trials))


def _chosen(result: Any, numbers: Sequence[int] | None) -> list[Any]:
    if numbers is None:
        return list(result.trials)
    if not hasattr(numbers, "__iter__"):
        raise InputError(f"trials must be a list of trials' numbers, not {numbers!r}")
    numbers = [getattr(trial, "number", trial) for trial in numbers]
    by_number = {trial.number: trial for trial in result.trials}
    missing = [n for n in numbers if n not in by_number]
    if missing:
        raise InputError(f"trials={numbers}: there is no trial {missing[0]} in this run")
    return [by_number[n] for n in numbers]


@functools.cache
def _figure_class() -> type[Figure]:
    import_extra("matplotlib", "plots", "pictures need matplotlib")
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that a notebook shows whether or not pyplot was imported."""

        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png")
            return out.getvalue()

    return Picture


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = _figure_class()(
        figsize=(width, height), dpi=120, layout="constrained", facecolor="white"
    )
    axes = figure.add_subplot()
    _clean(axes)
    return figure, axes


def _clean(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, length=3, color=FAINT)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _title(axes: Axes, text: str, detail: str = "") -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color=INK, pad=10)
    if detail:
        axes.set_title(detail, loc="right", fontsize=9, color="#66717d", pad=10)


def _mode(result: Any, metric: str) -> str:
    """Whether small or large is good; unknown metrics count as the search's own."""
    if fmt.short_name(metric) == fmt.short_name(result.metric):
        return str(result.mode)
    return "min" if any(w in metric for w in ("loss", "error", "mse", "mae", "rmse")) else "max"


# --- learning curves ---------------------------------------------------------


def _series(trial: Any, metric: str) -> tuple[list[int], list[float]]:
    """Give epochs trained (from 1) and the metric after each."""
    points = [(e["epoch"] + 1, fmt.metric_value(e["metrics"], metric)) for e in trial.history]
    known = [(x, y) for x, y in points if y is not None]
    return [x for x, _ in known], [y for _, y in known]


def _selected(result: Any, trial: Any, metric: str) -> tuple[int, float] | None:
    """Return the trained epochs and the metric of the epoch that represents a trial.

    Where it has no finite value there, the trial's best one.
    """
    points = [(x, y) for x, y in zip(*_series(trial, metric), strict=True) if math.isfinite(y)]
    if not points:
        return None
    by_last = result.select == "last" or trial.best_epoch is None
    epoch = trial.history[-1]["epoch"] if by_last else trial.best_epoch
    pick = max if _mode(result, metric) == "max" else min
    there = [point for point in points if point[0] == epoch + 1]
    return there[0] if there else pick(points, key=lambda point: point[1])


def _ranked(result: Any, metric: str, trials: Sequence[Any]) -> list[Any]:
    """Sort trials that have the metric, best first, by its value in the epoch for each."""
    sign = -1.0 if _mode(result, metric) == "max" else 1.0

    def key(trial: Any) -> tuple[float, int]:
        point = _selected(result, trial, metric)
        return (math.inf if point is None else sign * point[1]), trial.number

    return sorted((t for t in trials if _series(t, metric)[1]), key=key)


def curves(result: Any, metric: str, trials: Sequence[Any]) -> Figure:
    """Draw the metric over the epochs: the best trial on top, four more named, the rest faint."""
    ranked = _ranked(result, metric, trials)
    if not ranked:
        raise InputError(f"metric={metric!r}: no trial has it yet; there is {_known(trials)}")
    figure, axes = _figure(8.4, 4.6)
    colours = [ACCENT, *RUNNERS_UP]
    for rank, trial in reversed(list(enumerate(ranked))):
        named = rank < len(colours)
        x, y = _series(trial, metric)
        axes.plot(
            x,
            y,
            color=colours[rank] if named else FAINT,
            linewidth=2.6 if rank == 0 else 1.5 if named else 1.1,
            zorder=10 - rank if named else 2,
            marker="o" if len(x) == 1 else None,
            markersize=4,
            solid_capstyle="round",
            label=_curve_label(trial) if named else None,
        )
        if trial.status in ("diverged", "failed"):
            axes.plot(x[-1:], y[-1:], "x", color=INK, markersize=6, zorder=11)
    _mark_best(axes, ranked[0], result, metric)
    _finish_curves(axes, ranked, result, metric)
    return figure


def _known(trials: Sequence[Any]) -> str:
    names = sorted({name for t in trials for e in t.history for name in e["metrics"]})
    return ", ".join(names) if names else "none, for no epoch has finished"


def _curve_label(trial: Any) -> str:
    lines = textwrap.wrap(fmt.settings(trial.config), 40, max_lines=3, placeholder=" …")
    return "\n".join([f"trial {trial.number}", *lines])


def _mark_best(axes: Axes, trial: Any, result: Any, metric: str) -> None:
    point = _selected(result, trial, metric)
    if point is None:
        return
    high = _mode(result, metric) == "max"
    axes.plot(*point, "o", color=ACCENT, markersize=7, markeredgecolor="white", zorder=12)
    axes.annotate(
        fmt.metric(point[1]),
        point,
        xytext=(0, 9 if high else -9),
        textcoords="offset points",
        ha="center",
        va="bottom" if high else "top",
        fontsize=10,
        fontweight="bold",
        color=ACCENT,
        zorder=13,
        bbox={
            "boxstyle": "round,pad=0.15",
            "facecolor": "white",
            "edgecolor": "none",
            "alpha": 0.8,
        },
    )


def _finish_curves(axes: Axes, ranked: Sequence[Any], result: Any, metric: str) -> None:
    from matplotlib.ticker import MaxNLocator

    values = [y for t in ranked for y in _series(t, metric)[1] if math.isfinite(y)]
    if values and min(values) > 0 and max(values) / min(values) > 30:
        axes.set_yscale("log")
    axes.margins(x=0.03, y=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epochs trained", color=INK)
    axes.set_ylabel(_axis_label(ranked[0], metric), color=INK)
    count = len(ranked)
    _title(axes, "Learning curves", f"{count} trial{'s' if count > 1 else ''}, best first")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],  # drawn from the worst to the best
        labels[::-1],
        loc="upper left",
        bbox_to_anchor=(1.04, 1.0),
        fontsize=8,
        frameon=False,
        labelcolor=INK,
        labelspacing=0.9,
        borderaxespad=0.0,
    )


def _axis_label(trial: Any, metric: str) -> str:
    name = fmt.short_name(metric)
    keys = {key for entry in trial.history for key in entry["metrics"]}
    if metric.startswith("train_"):
        return f"training {name}"
    if metric.startswith("val_") or f"val_{name}" in keys:
        return f"validation {name}"
    return f"training {name}" if f"train_{name}" in keys else name


# --- units on workers --------------------------------------------------------


def trial_colours(count: int) -> list[Colour]:
    """Give `count` colors that stay apart: hues by the golden ratio, three depths in turn."""
    depths = [(0.55, 0.80), (0.38, 0.92), (0.70, 0.62)]
    colours = []
    for i in range(count):
        saturation, value = depths[i % 3]
        colours.append(colorsys.hsv_to_rgb((0.58 + i * 0.618034) % 1.0, saturation, value))
    return colours


def gantt(result: Any, metric: str, trials: Sequence[Any]) -> Figure:
    """Draw which worker trained which trial when; one color a trial, validation hatched.

    The share of time that a worker was busy counts from the start of the first unit.
    """
    numbers = {trial.number for trial in trials}
    units = [unit for unit in result.units() if unit["trial"] in numbers]
    if not units:
        raise InputError("kind='gantt': no unit has finished yet in this run")
    workers = sorted({unit["worker"] for unit in units})
    end = max(unit["end"] for unit in units)
    drawn = sorted({unit["trial"] for unit in units})
    colours = dict(zip(drawn, trial_colours(len(drawn)), strict=True))
    figure, axes = _figure(10.5, 1.7 + 0.62 * len(workers) + 0.22 * (len(drawn) // 10))
    for row, worker in enumerate(workers):
        own = sorted((u for u in units if u["worker"] == worker), key=lambda u: u["start"])
        _bars(axes, own, row, colours, end)
        _number_bars(axes, own, row, end)
        for unit in own:
            if unit["attempt"] > 0:
                _mark_retry(axes, unit, row)
    _finish_gantt(axes, units, workers, end)
    _gantt_legend(figure, colours)
    return figure


def _bars(
    axes: Axes,
    units: Sequence[Mapping[str, Any]],
    row: int,
    colours: Mapping[int, Colour],
    end: float,
) -> None:
    """Draw one worker's units: neighbors of one trial and kind as one bar, cut where wide."""
    for first, last in _stretches(units, ("trial", "kind"), gap=TOUCHING_SHARE * end):
        start, stop = units[first]["start"], units[last]["end"]
        validation = units[first]["kind"] == "eval"
        colour = colours[units[first]["trial"]]
        axes.broken_barh(
            [(start, stop - start)],
            (row - 0.38, 0.76),
            facecolor=_tint(colour) if validation else colour,
            edgecolor=colour,
            linewidth=0.0,
            hatch="//////" if validation else None,
        )
        cuts = [
            units[i]["start"]
            for i in range(first + 1, last + 1)
            if units[i]["end"] - units[i - 1]["start"] > CUT_SHARE * end
        ]
        axes.vlines(cuts, row - 0.38, row + 0.38, color="white", linewidth=0.5)


def _tint(colour: Colour) -> Colour:
    red, green, blue = (0.45 * part + 0.55 for part in colour)
    return red, green, blue


def _stretches(
    units: Sequence[Mapping[str, Any]], keys: Sequence[str], gap: float
) -> list[tuple[int, int]]:
    """Find runs of units (sorted by start) that agree in `keys` and follow within `gap` seconds."""
    found = []
    first = 0
    for i in range(1, len(units) + 1):
        if i < len(units):
            before, after = units[i - 1], units[i]
            alike = all(before[key] == after[key] for key in keys)
            if alike and after["start"] - before["end"] <= gap:
                continue
        found.append((first, i - 1))
        first = i
    return found


def _mark_retry(axes: Axes, unit: Mapping[str, Any], row: int) -> None:
    axes.plot(unit["start"], row - 0.46, marker="v", color=ACCENT, markersize=5, clip_on=False)


def _number_bars(axes: Axes, units: Sequence[Mapping[str, Any]], row: int, end: float) -> None:
    """Write a trial's number once on each wide stretch of its units on one worker."""
    for first, last in _stretches(units, ("trial",), gap=LABEL_SHARE * end):
        left, right = units[first]["start"], units[last]["end"]
        if right - left >= LABEL_SHARE * end:
            axes.text(
                (left + right) / 2,
                row,
                str(units[first]["trial"]),
                ha="center",
                va="center",
                fontsize=7.5,
                color=INK,
                bbox={
                    "boxstyle": "round,pad=0.12",
                    "facecolor": "white",
                    "edgecolor": "none",
                    "alpha": 0.75,
                },
            )


def _finish_gantt(
    axes: Axes, units: Sequence[Mapping[str, Any]], workers: Sequence[int], end: float
) -> None:
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(workers)), [f"worker {w}" for w in workers])
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.set_xlim(0, end * 1.005)
    axes.set_xlabel("time since the run's start (seconds)", color=INK)
    begun = min(unit["start"] for unit in units)
    for row, worker in enumerate(workers):
        spent = sum(u["end"] - u["start"] for u in units if u["worker"] == worker)
        busy = spent / ((end - begun) or 1.0)
        axes.text(
            1.008,
            row,
            f"{busy:.0%} busy",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
            color="#66717d",
        )
    hops = sum(bool(unit.get("hopped")) for unit in units)
    count = len(units)
    _title(axes, "Units on workers", f"{count:,} units, {hops:,} hops, {fmt.duration(end)}")


def _gantt_legend(figure: Figure, colours: Mapping[int, Colour]) -> None:
    from matplotlib.patches import Patch

    handles: list[Patch] = []
    if len(colours) <= MAX_NAMED:
        handles = [Patch(facecolor=c, label=f"trial {n}") for n, c in colours.items()]
    grey = Patch(facecolor="#d5dae0", edgecolor="#87919c", linewidth=0, hatch="//////")
    figure.legend(
        handles=[*handles, grey],
        labels=[*(str(handle.get_label()) for handle in handles), "validation"],
        loc="outside lower center",
        ncols=10,
        fontsize=8,
        frameon=False,
        labelcolor=INK,
        handlelength=1.2,
        columnspacing=1.4,
    )


# --- dimensions --------------------------------------------------------------


def _table(result: Any, metric: str, trials: Sequence[Any]) -> tuple[list[dict[str, Any]], Any]:
    """Give the flattened configurations of the trials that have the metric, and its values.

    These are the ones that the summary shows.
    """
    configs, values = [], []
    for trial in _ranked(result, metric, trials):
        point = _selected(result, trial, metric)
        if point is not None:
            configs.append(flatten(trial.config))
            values.append(point[1])
    return configs, np.asarray(values, dtype=float)


def _varying(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the dimensions that take more than one value, in the order of the space."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [n for n in names if len({repr(config.get(n)) for config in configs}) > 1]


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(v, (int, float, np.number)) and not isinstance(v, bool) for v in values)


def _is_log(numbers: Any) -> bool:
    return bool(numbers.min() > 0 and numbers.max() / numbers.min() > 50)


def _position(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Place one dimension's values on 0..1, absent ones below, and give the ticks."""
    present = [v for v in values if v is not None]
    if _is_numeric(present):
        numbers = np.asarray(present, dtype=float)
        scale = np.log if _is_log(numbers) else np.asarray
        low, high = float(scale(numbers.min())), float(scale(numbers.max()))
        distinct = sorted(set(present))
        if len(distinct) > 6:
            marks = np.linspace(low, high, 5)
            distinct = [float(np.exp(m)) if scale is np.log else float(m) for m in marks]

        def place(value: Any) -> float:
            return (float(scale(float(value))) - low) / ((high - low) or 1.0)
    else:
        distinct = sorted({str(v) for v in present})
        step = 1.0 / max(len(distinct) - 1, 1)

        def place(value: Any) -> float:
            return distinct.index(str(value)) * step

    ticks = [(place(v), fmt.number(v, 3)) for v in distinct]
    if len(present) < len(values):
        ticks.append((ABSENT, "not used"))
    return [ABSENT if v is None else place(v) for v in values], ticks


def parallel(result: Any, metric: str, trials: Sequence[Any]) -> Figure:
    """Draw each trial as a line across the dimensions and the metric, colored by the metric."""
    from matplotlib import colormaps

    configs, values = _table(result, metric, trials)
    names = _varying(configs) if configs else []
    if not names:
        raise InputError("kind='parallel': needs two finished trials that differ")
    columns = [_position([config.get(name) for config in configs]) for name in names]
    columns.append(_position(values.tolist()))
    figure, axes = _figure(max(6.0, 1.7 * len(columns)), 4.6)
    axes.grid(False)
    heights = np.asarray(columns[-1][0])
    goodness = heights if _mode(result, metric) == "max" else 1.0 - heights
    shades = colormaps["viridis"](0.05 + 0.85 * goodness)
    x = np.arange(len(columns))
    for i in reversed(range(len(configs))):
        best = i == 0
        axes.plot(
            x,
            [places[i] for places, _ in columns],
            color=ACCENT if best else shades[i],
            linewidth=2.6 if best else 1.2,
            alpha=1.0 if best else 0.75,
            marker="o",
            markersize=3,
        )
    for i, (_, ticks) in enumerate(columns):
        _scale(axes, i, ticks)
    axes.set_xticks(x, [*names, fmt.short_name(metric)])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlim(-0.1, len(columns) - 0.55)
    _title(axes, "Configurations", f"{len(configs)} trials, best in red")
    return figure


def _scale(axes: Axes, x: int, ticks: Sequence[tuple[float, str]]) -> None:
    """Draw one dimension's axis with its values beside it."""
    axes.axvline(x, color=FAINT, linewidth=1.0, zorder=1)
    for place, label in ticks:
        axes.text(
            x + 0.04,
            place,
            label,
            fontsize=8,
            color=INK,
            va="center",
            zorder=20,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
        )


TRIALS_PER_DIMENSION = 10
"""With fewer, the importance of dimensions is unknown."""
_DRAWS = 1000


@dataclass(frozen=True)
class Importance:
    """The shares of a metric's variance that one dimension alone explains."""

    share: float
    low: float
    """With `high` the range that holds it with 90 % probability;"""
    high: float
    by_chance: float
    """the average share of a dimension without influence."""


def explained_variance(values: Sequence[Any], metric: Any) -> Importance | None:
    """Estimate the share of the metric's variance that one dimension alone explains.

    Trials are put into groups (a category each, or up to four ranges of a number with
    equally many trials): the share is the variance between groups over the whole (eta
    squared). With few trials it is large by chance, and the range says how little is
    known: the 5th and the 95th percentile of the same of trials drawn with replacement (a
    bootstrap, always with the same draws). Interactions of dimensions are not seen.

    Parameters
    ----------
    values
        The dimension's value in each trial; None where it is absent.
    metric
        The metric of each trial, shape (trials,).

    Returns
    -------
    Importance
        None if the trials do not show it: one group, a group for each trial, or a constant
        metric.
    """
    numbers = np.asarray(metric, dtype=float)
    kinds, groups = np.unique(np.asarray(_groups(values)), return_inverse=True)
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
    """The share of the variance between groups, for each row of weights of the trials."""
    sums, sizes = (weights * numbers) @ belongs, weights @ belongs
    mean = weights @ numbers / weights.sum(axis=1)
    total = weights @ numbers**2 - weights.sum(axis=1) * mean**2
    between = (sums**2 / np.maximum(sizes, 1)).sum(axis=1) - weights.sum(axis=1) * mean**2
    # Draws of one trial alone have no variance.
    return np.clip(between / np.where(total > 1e-12, total, np.inf), 0.0, 1.0)


def _groups(values: Sequence[Any]) -> list[str]:
    present = [v for v in values if v is not None]
    if not _is_numeric(present) or len(set(present)) <= 4:
        return [repr(v) for v in values]
    edges = np.quantile(np.asarray(present, dtype=float), [0.25, 0.5, 0.75])
    return ["absent" if v is None else str(int(np.searchsorted(edges, v))) for v in values]


def importance(result: Any, metric: str, trials: Sequence[Any]) -> Figure:
    """Draw the share of the metric's variance that each dimension explains alone, with its range.

    With too few trials the bars are pale, and the title says so.
    """
    configs, values = _table(result, metric, trials)
    names = _varying(configs) if configs else []
    if not names:
        raise InputError("kind='importance': needs two finished trials that differ")
    found = {n: explained_variance([c.get(n) for c in configs], values) for n in names}
    ordered = sorted(names, key=lambda name: -1.0 if (f := found[name]) is None else f.share)
    enough = TRIALS_PER_DIMENSION * len(names)
    tells = len(configs) >= enough
    figure, axes = _figure(7.2, 1.9 + 0.38 * len(ordered))
    axes.grid(False, axis="y")
    for place, name in enumerate(ordered):
        _draw_share(axes, place, found[name], pale=not tells)
    axes.set_yticks(range(len(ordered)), ordered)
    axes.set_xlim(0, 128)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel(
        f"variance of {fmt.short_name(metric)} explained alone (%), with its 90 % range;\n"
        "dotted: what chance alone would give",
        color=INK,
    )
    counted = fmt.counted(len(configs), "trial")
    title = "What mattered" if tells else "What mattered: too few trials to tell"
    _title(axes, title, counted if tells else f"{counted}, {enough} would do")
    return figure


def _draw_share(axes: Axes, place: int, found: Importance | None, *, pale: bool) -> None:
    if found is None:
        axes.text(1, place, "cannot be told", va="center", fontsize=9, color=INK)
        return
    share, low, high = (100 * part for part in (found.share, found.low, found.high))
    axes.barh(place, share, color=FAINT if pale else RUNNERS_UP[0])
    axes.plot([low, high], [place, place], color=INK, linewidth=1.2, marker="|", markersize=7)
    chance = 100 * found.by_chance
    axes.plot([chance] * 2, [place - 0.4, place + 0.4], color=ACCENT, linewidth=1.2, linestyle=":")
    text = f"{share:.0f} % ({low:.0f} to {high:.0f})"
    axes.text(max(share, high) + 2, place, text, va="center", fontsize=9, color=INK)
