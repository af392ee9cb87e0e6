"""Draw how much of the metric's variance each dimension explains, with its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cerebro.report import format as fmt
from cerebro.report.format import ABSENT
from cerebro.report.plots.look import Look, cut_middle, escape_dollars, figure_of, wrap, write_title
from cerebro.report.plots.values import column_values, is_numeric, table_of, too_few_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRIALS_PER_DIMENSION = 10
"""The fewest trials per dimension that show the importance of dimensions."""
_DRAWS = 1000


@dataclass(frozen=True)
class Importance:
    """The share of a metric's variance that one dimension alone explains, and its uncertainty."""

    share: float
    low: float
    """The range from `low` to `high` contains the share with a probability of 90%."""
    high: float
    by_chance: float
    """The average share of a dimension that has no influence."""


def explained_variance(values: Sequence[Any], metric: Any) -> Importance | None:
    """Estimate the share of the metric's variance that one dimension alone explains.

    The share is the variance between groups divided by the total variance (eta squared). Groups are
    categories or, for a number, up to four ranges with equally many trials. The range, from the 5th
    to the 95th percentile over a bootstrap with fixed draws, shows the uncertainty: with few trials
    the share is large by chance. Interactions are not measured. None if there is one group, one
    group per trial, or a constant metric. A value is `ABSENT` where the trial has none.
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
    """Return the share of the variance that is between groups, for each row of trial weights."""
    sums, sizes = (weights * numbers) @ belongs, weights @ belongs
    mean = weights @ numbers / weights.sum(axis=1)
    total = weights @ numbers**2 - weights.sum(axis=1) * mean**2
    between = (sums**2 / np.maximum(sizes, 1)).sum(axis=1) - weights.sum(axis=1) * mean**2
    # A draw that repeats a single trial has no variance.
    return np.clip(between / np.where(total > 1e-12, total, np.inf), 0.0, 1.0)


def _groups(values: Sequence[Any]) -> list[str]:
    numbers = [v for v in values if v is not ABSENT and v is not None]
    if not is_numeric(numbers) or len(set(numbers)) <= 4:
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
    names = fmt.find_varying(configs)
    if not names:
        raise too_few_error("importance")
    importances = {n: explained_variance(column_values(configs, n), values) for n in names}
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
