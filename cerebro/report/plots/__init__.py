"""Draw plots of a result: curves, units on workers, and plots by settings.

Every function returns a new ``matplotlib.figure.Figure`` without a window or pyplot's global state,
so it works without a display and in threads. A notebook shows it if it is the cell's value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cerebro.errors import InputError
from cerebro.report.plots.curves import draw_curves, missing_metric_error, series
from cerebro.report.plots.gantt import draw_gantt
from cerebro.report.plots.look import DARK, LIGHT, Look, complete_fonts, is_style_dark
from cerebro.report.plots.settings import draw_importance, draw_parallel, draw_slices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: dict[str, Callable[[Any, str, Sequence[Any], Look], Figure]] = {
    "curves": draw_curves,
    "gantt": draw_gantt,
    "parallel": draw_parallel,
    "importance": draw_importance,
    "slice": draw_slices,
}
"""The drawing function of each kind; its arguments are the result, metric, trials and look."""


def plot(
    result: Any,
    metric: str | None = None,
    *,
    trials: Sequence[int] | None = None,
    kind: str = "curves",
    dark: bool | None = None,
) -> Figure:
    """Draw a result; see ``Result.plot``.

    `dark` says whether the plot is for a dark page; None: as in matplotlib's current style. Raises
    InputError if `kind`, a trial or the metric is unknown, or if matplotlib is missing.
    """
    if kind not in KINDS:
        raise InputError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
    look = DARK if (is_style_dark() if dark is None else dark) else LIGHT
    figure = KINDS[kind](result, metric or result.metric, _choose_trials(result, trials), look)
    complete_fonts(figure)
    return figure


def check(result: Any, metric: str | None, trials: Sequence[int] | None) -> None:
    """Raise InputError if a trial, or the metric once an epoch has finished, is unknown."""
    shown = _choose_trials(result, trials)
    begun = any(trial.history for trial in shown)
    if metric is not None and begun and not any(series(trial, metric)[1] for trial in shown):
        raise missing_metric_error(metric, shown)


def _choose_trials(result: Any, numbers: Sequence[int] | None) -> list[Any]:
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
