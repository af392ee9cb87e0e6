"""Draw which worker trained which trial when."""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cerebro.errors import InputError
from cerebro.report import format as fmt
from cerebro.report.plots.look import Look, figure_of, write_legend, write_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NAMED = 24  # the most trials named in the legend or on a bar
LABEL_SHARE = 0.012  # share of the time axis; narrower bars get no number
CUT_SHARE = 0.006  # share of the time axis; narrower units are not separated
TOUCHING_SHARE = 0.001  # share of the time axis; smaller gaps are invisible
PIXEL_SHARE = 0.0005  # share of the time axis; narrower bars are joined
HATCH = "//////"  # of validation

Colour = tuple[float, float, float]


def trial_colours(count: int) -> list[Colour]:
    """Return `count` distinct colors: hues by the golden ratio, in three alternating depths."""
    depths = [(0.55, 0.80), (0.38, 0.92), (0.70, 0.62)]
    hues = [(0.58 + i * 0.618034) % 1.0 for i in range(count)]
    return [colorsys.hsv_to_rgb(hue, *depths[i % 3]) for i, hue in enumerate(hues)]


def draw_gantt(result: Any, metric: str, trials: Sequence[Any], look: Look) -> Figure:
    """Draw which worker trained which trial when; one color per trial, validation hatched.

    A worker's busy share is counted from the start of the first unit.
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
        of_worker = sorted((u for u in units if u["worker"] == worker), key=lambda u: u["start"])
        _draw_bars(axes, _bars(of_worker, row, end), colours, look)
        _draw_cuts(axes, of_worker, row, end, look)
        _number_bars(axes, of_worker, row, end, look)
        retried = [unit["start"] for unit in of_worker if unit["attempt"] > 0]
        if retried:
            above = [row - 0.46] * len(retried)
            axes.plot(retried, above, "v", color=look.accent, markersize=5, clip_on=False)
    _finish_gantt(axes, units, workers, end, look)
    _gantt_legend(figure, colours, look)
    return figure


@dataclass(frozen=True)
class _Bar:
    """Adjacent units of one trial and kind on one worker."""

    row: int
    start: float
    stop: float
    trial: int
    kind: str

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def _bars(units: Sequence[Mapping[str, Any]], row: int, end: float) -> list[_Bar]:
    """Return one worker's bars; those too narrow to see are joined, and look like the longest."""
    gap = TOUCHING_SHARE * end
    joined: list[list[_Bar]] = []
    for stretch in _find_stretches(units, ("trial", "kind"), gap):
        first, last = stretch[0], stretch[-1]
        bar = _Bar(row, first["start"], last["end"], first["trial"], first["kind"])
        before = joined[-1] if joined else []
        width = max(bar.seconds, before[-1].stop - before[0].start) if before else bar.seconds
        if before and width < PIXEL_SHARE * end and bar.start - before[-1].stop <= gap:
            before.append(bar)
        else:
            joined.append([bar])
    return [
        replace(max(bars, key=lambda bar: bar.seconds), start=bars[0].start, stop=bars[-1].stop)
        for bars in joined
    ]


def _draw_bars(axes: Axes, bars: Sequence[_Bar], colours: Mapping[int, Colour], look: Look) -> None:
    """Draw a worker's bars of a kind at once: thousands of separate ones would take minutes."""
    for hatch in (None, HATCH):
        of_kind = [bar for bar in bars if (bar.kind == "eval") == (hatch is not None)]
        axes.broken_barh(
            [(bar.start, bar.seconds) for bar in of_kind],
            (bars[0].row - 0.38, 0.76),
            facecolors=[colours[bar.trial] for bar in of_kind],
            edgecolors=look.page,  # the color of the hatching
            linewidths=0.0,
            hatch=hatch,
        )


def _draw_cuts(
    axes: Axes, units: Sequence[Mapping[str, Any]], row: int, end: float, look: Look
) -> None:
    """Draw lines between adjacent units of one trial and kind, if they are wide enough."""
    cuts = [
        after["start"]
        for before, after in itertools.pairwise(units)
        if (before["trial"], before["kind"]) == (after["trial"], after["kind"])
        and after["start"] - before["end"] <= TOUCHING_SHARE * end
        and after["end"] - before["start"] > CUT_SHARE * end
    ]
    axes.vlines(cuts, row - 0.38, row + 0.38, color=look.page, linewidth=0.5)


def _find_stretches(
    units: Sequence[Mapping[str, Any]], keys: Sequence[str], gap: float
) -> list[list[Mapping[str, Any]]]:
    """Find series of units (by start) that agree in `keys`, with gaps up to `gap` seconds."""
    stretches = [[units[0]]]
    for before, after in itertools.pairwise(units):
        alike = all(before[key] == after[key] for key in keys)
        if alike and after["start"] - before["end"] <= gap:
            stretches[-1].append(after)
        else:
            stretches.append([after])
    return stretches


def _number_bars(
    axes: Axes, units: Sequence[Mapping[str, Any]], row: int, end: float, look: Look
) -> None:
    """Write a trial's number once on each wide stretch of its units on one worker."""
    for stretch in _find_stretches(units, ("trial",), gap=LABEL_SHARE * end):
        begin, stop = stretch[0]["start"], stretch[-1]["end"]
        if stop - begin >= LABEL_SHARE * end:
            axes.text(
                (begin + stop) / 2,
                row,
                str(stretch[0]["trial"]),
                ha="center",
                va="center",
                fontsize=7.5,
                color=look.ink,
                bbox=look.box(0.12, 0.75),
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
    counted = f"{len(units):,} units, {hops:,} hops, {fmt.duration(end)}"
    write_title(look, axes, "Units on workers", counted)


def _gantt_legend(figure: Figure, colours: Mapping[int, Colour], look: Look) -> None:
    from matplotlib.patches import Patch

    named = colours if len(colours) <= MAX_NAMED else {}
    handles = [Patch(facecolor=c, label=f"trial {n}") for n, c in named.items()]
    hatched: dict[str, Any] = {"edgecolor": look.page, "linewidth": 0, "hatch": HATCH}
    handles.append(Patch(facecolor=look.dim, label="validation", **hatched))
    write_legend(look, figure, handles, 10, handlelength=1.2, columnspacing=1.4)
