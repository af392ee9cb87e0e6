"""Draw which worker trained which trial when."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cerebro.errors import InputError
from cerebro.report import format as fmt
from cerebro.report.plots.look import Look, figure_of, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NAMED = 24  # the most trials named in the legend or on a bar
LABEL_SHARE = 0.012  # share of the time axis; narrower bars get no number
CUT_SHARE = 0.006  # share of the time axis; narrower units are not separated
TOUCHING_SHARE = 0.001  # share of the time axis; smaller gaps are invisible

Colour = tuple[float, float, float]


def trial_colours(count: int) -> list[Colour]:
    """Return `count` distinct colors: hues by the golden ratio, in three alternating depths."""
    depths = [(0.55, 0.80), (0.38, 0.92), (0.70, 0.62)]
    colours = []
    for i in range(count):
        saturation, value = depths[i % 3]
        colours.append(colorsys.hsv_to_rgb((0.58 + i * 0.618034) % 1.0, saturation, value))
    return colours


def draw_gantt(result: Any, metric: str, trials: Sequence[Any], look: Look) -> Figure:
    """Draw which worker trained which trial when; one color per trial, validation hatched.

    The share of time in which a worker was busy is counted from the start of the first unit.
    """
    numbers = {trial.number for trial in trials}
    units = [unit for unit in result.units() if unit["trial"] in numbers]
    if not units:
        raise InputError("kind='gantt': no unit has finished yet in this run")
    workers = sorted({unit["worker"] for unit in units})
    end = max(unit["end"] for unit in units)
    drawn = sorted({unit["trial"] for unit in units})
    colours = dict(zip(drawn, trial_colours(len(drawn)), strict=True))
    figure, axes = figure_of(look, 10.5, 1.7 + 0.62 * len(workers) + 0.22 * (len(drawn) // 10))
    for row, worker in enumerate(workers):
        own = sorted((u for u in units if u["worker"] == worker), key=lambda u: u["start"])
        _bars(axes, own, row, colours, end, look)
        _number_bars(axes, own, row, end, look)
        for unit in own:
            if unit["attempt"] > 0:
                _mark_retry(axes, unit, row, look)
    _finish_gantt(axes, units, workers, end, look)
    _gantt_legend(figure, colours, look)
    return figure


def _bars(
    axes: Axes,
    units: Sequence[Mapping[str, Any]],
    row: int,
    colours: Mapping[int, Colour],
    end: float,
    look: Look,
) -> None:
    """Draw one worker's units.

    Adjacent units of the same trial and kind form one bar; lines separate them if they are wide
    enough.
    """
    for first, last in _stretches(units, ("trial", "kind"), gap=TOUCHING_SHARE * end):
        start, stop = units[first]["start"], units[last]["end"]
        validation = units[first]["kind"] == "eval"
        colour = colours[units[first]["trial"]]
        axes.broken_barh(
            [(start, stop - start)],
            (row - 0.38, 0.76),
            facecolor=_tint(colour, look) if validation else colour,
            edgecolor=colour,
            linewidth=0.0,
            hatch="//////" if validation else None,
        )
        cuts = [
            units[i]["start"]
            for i in range(first + 1, last + 1)
            if units[i]["end"] - units[i - 1]["start"] > CUT_SHARE * end
        ]
        axes.vlines(cuts, row - 0.38, row + 0.38, color=look.page, linewidth=0.5)


def _tint(colour: Colour, look: Look) -> Colour:
    """Mix a color with the color of the page."""
    from matplotlib.colors import to_rgb

    pairs = zip(colour, to_rgb(look.page), strict=True)
    red, green, blue = (0.45 * part + 0.55 * page for part, page in pairs)
    return red, green, blue


def _stretches(
    units: Sequence[Mapping[str, Any]], keys: Sequence[str], gap: float
) -> list[tuple[int, int]]:
    """Find series of units (by start) that agree in `keys`, with gaps up to `gap` seconds."""
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


def _mark_retry(axes: Axes, unit: Mapping[str, Any], row: int, look: Look) -> None:
    axes.plot(unit["start"], row - 0.46, marker="v", color=look.accent, markersize=5, clip_on=False)


def _number_bars(
    axes: Axes, units: Sequence[Mapping[str, Any]], row: int, end: float, look: Look
) -> None:
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
                color=look.ink,
                bbox={
                    "boxstyle": "round,pad=0.12",
                    "facecolor": look.page,
                    "edgecolor": "none",
                    "alpha": 0.75,
                },
            )


def _finish_gantt(
    axes: Axes, units: Sequence[Mapping[str, Any]], workers: Sequence[int], end: float, look: Look
) -> None:
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(workers)), [f"worker {w}" for w in workers])
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.set_xlim(0, end * 1.005)
    axes.set_xlabel("time since the run's start (seconds)", color=look.ink)
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
            color=look.dim,
        )
    hops = sum(bool(unit.get("hopped")) for unit in units)
    count = len(units)
    title(look, axes, "Units on workers", f"{count:,} units, {hops:,} hops, {fmt.duration(end)}")


def _gantt_legend(figure: Figure, colours: Mapping[int, Colour], look: Look) -> None:
    from matplotlib.patches import Patch

    handles: list[Patch] = []
    if len(colours) <= MAX_NAMED:
        handles = [Patch(facecolor=c, label=f"trial {n}") for n, c in colours.items()]
    grey = Patch(facecolor=look.faint, edgecolor=look.dim, linewidth=0, hatch="//////")
    figure.legend(
        handles=[*handles, grey],
        labels=[*(str(handle.get_label()) for handle in handles), "validation"],
        loc="outside lower center",
        ncols=10,
        fontsize=8,
        frameon=False,
        labelcolor=look.ink,
        handlelength=1.2,
        columnspacing=1.4,
    )
