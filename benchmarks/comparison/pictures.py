"""The four pictures of `docs/comparison.md`, and README's chart, as SVG."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.comparison.formats import megabytes, number
from benchmarks.comparison.page import WHAT, present
from benchmarks.comparison.record import Record, cells, median
from benchmarks.comparison.rivals import LOOP, OURS

OURS_COLOR, OTHER = "#0b6e99", "#a8b0b8"
LINES = (
    *("#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d"),
    *("#b2182b", "#35978f", "#8073ac", "#999999"),
)
"""The colors of rivals' lines, in their order."""

TUNERS = (OURS, "Optuna", "Ray Tune", "joblib")
MODELS = {"three": "3 models", "nine": "9 models", "equal": "16 models"}


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


def bars(
    axes: Any,
    known: list[tuple[str, float]],
    title: str,
    write: Callable[[float], str] = number,
) -> None:
    """Draw a bar for each rival, the best one on top."""
    known.sort(key=lambda pair: -pair[1])
    names = [name for name, _ in known]
    colors = [OURS_COLOR if name.startswith(OURS) else OTHER for name in names]
    drawn = axes.barh(names, [value for _, value in known], color=colors)
    axes.bar_label(drawn, [write(value) for _, value in known], padding=3, fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def line(name: str, colors: Iterator[str]) -> dict[str, Any]:
    """Return the style of a system's line."""
    if name == OURS:
        return {"color": OURS_COLOR, "linewidth": 2.5, "zorder": 3}
    if name.startswith(OURS):
        return {"color": OURS_COLOR, "linewidth": 2.5, "linestyle": ":", "zorder": 3}
    if name == LOOP:
        return {"color": "black", "linewidth": 1, "linestyle": "--"}
    return {"color": next(colors), "linewidth": 1}


def chart(found: Record, path: Path) -> None:
    """Draw README's chart: the makespans of what people use instead, by the number of models."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(MODELS), figsize=(9.5, 2), sharex=True)
    for axis, (workload, title) in zip(axes, MODELS.items(), strict=True):
        known = [(name, median(found, name, workload, "ratio")) for name in TUNERS]
        bars(axis, [(name, value) for name, value in known if value], title)
        axis.margins(x=0.2)
        axis.axvline(1, color="black", linewidth=1, linestyle=":")
    figure.supxlabel(
        "training time on two cores; 1 = plain PyTorch loops that share the cores evenly",
        fontsize=9,
    )
    figure.tight_layout()
    save(figure, path)


def write(found: Record, folder: Path) -> None:
    """Write all pictures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "comparison", "svg.fonttype": "none"})
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    names = present(found)

    chosen = [each for each in ("equal", "uneven", "three") if any(
        median(found, name, each, "ratio") for name in names)]  # fmt: skip
    figure, axes = pyplot.subplots(1, max(1, len(chosen)), figsize=(11, 4), squeeze=False)
    for place, workload in zip(axes[0], chosen, strict=False):
        known = [(n, median(found, n, workload, "ratio")) for n in names if n != LOOP]
        bars(place, [(n, v) for n, v in known if v], f"{WHAT[workload]}: makespan / bound")
    figure.tight_layout()
    save(figure, folder / "makespan.svg")

    figure, axis = pyplot.subplots(figsize=(8, 4))
    colors = itertools.cycle(LINES)
    for name in names:
        for cell in cells(found, name, "equal")[:1]:
            points = cell.get("curve") or []
            if points:
                times = [*(p[0] for p in points), cell["seconds"]]
                best = [*(p[1] for p in points), points[-1][1]]
                axis.step(times, best, where="post", label=name, **line(name, colors))
    axis.set_xlabel("seconds since the start of the program")
    axis.set_ylabel("best accuracy so far")
    axis.legend(fontsize=7, ncols=2)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, folder / "accuracy.svg")

    figure, axis = pyplot.subplots(figsize=(8, 4))
    known = [(name, median(found, name, "equal", "peak")) for name in names]
    bars(axis, [(n, v) for n, v in known if v], "16 equal: memory of all processes, MB", megabytes)
    axis.xaxis.set_major_formatter(lambda value, _: megabytes(value))
    save(figure, folder / "memory.svg")

    figure, axis = pyplot.subplots(figsize=(8, 4))
    labels, rows = [], {}
    for case in found["papers"]:
        labels.append(f"{case['configs']} on {case['workers']}")
        for name, gigabytes in case["network"].items():
            rows.setdefault(name, []).append(gigabytes / case["epochs"])
    for name, moved in rows.items():
        axis.plot(labels, moved, marker="o", label=name, linewidth=2.5 if name == "MOP" else 1)
    axis.set_yscale("log")
    axis.set_ylabel("GB moved per epoch")
    axis.set_xlabel("configurations on workers")
    axis.legend(fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, folder / "network.svg")
    chart(found, folder / "tuners.svg")
    pyplot.close("all")
