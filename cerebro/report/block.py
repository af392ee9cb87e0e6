"""Draw the block that a notebook shows for a run, during a search and for a `Result`.

The block is static HTML without scripts, style sheets or outside references. It survives saving,
nbconvert and sanitizers, which leave at least the text. Its colors are readable on white and black.
Without HTML, the same rows are shown as plain text. The HTML is in Jinja templates, which escape
every value that they do not mark as safe; a run's page has some, too.

During a search it is updated in place: a kernel's output is not a terminal, but the contents of a
display with an identifier can be replaced, without a widget, and the last contents are saved with
the notebook. If a display fails, the search continues without it.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cerebro.errors import escape_unprintable, text_of
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report import summary
from cerebro.report.progress import Progress, Snapshot, TrialRow, choose_rows, describe_load

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"

DRAW_SECONDS = 0.5
MAX_CAUSES = 8  # distinct causes of failures
MAX_SETTINGS = 8  # settings with a separate column; the others share one
MAX_TEXT = 60  # of a setting, in characters

CURVE_POINTS = 60
CURVE_WIDTH, CURVE_HEIGHT, CURVE_MARGIN = 96, 20, 3  # pixels

# These differ about equally in luminance from white and from black.
BLUE, GREEN, AMBER, RED = "#2f83c5", "#2f9148", "#b0740a", "#d9453f"
STATE_COLORS = {
    "running": BLUE,
    **dict.fromkeys(("paused", "stopped", "interrupted"), AMBER),
    "finished": GREEN,
    **dict.fromkeys(("diverged", "failed"), RED),
}


def fill_template(name: str, **values: Any) -> str:
    return _environment().get_template(name).render(values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def write(value: Any) -> Any:
        return value if isinstance(value, Markup) else escape_unprintable(str(value))

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=write,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@dataclass(frozen=True)
class Block:
    title: str
    state: str
    rows: Sequence[TrialRow] = ()
    metric: str = "loss"
    mode: str = "min"
    best: int | None = None  # the number of the best trial so far
    facts: Sequence[str] = ()  # short notes about the whole run, on one line
    more: str = ""  # a note about trials without a row
    notes: Sequence[str] = ()  # lines below the table
    share_done: float | None = None  # 0 to 1; None shows no bar

    def to_html(self) -> str:
        share = self.share_done
        return fill_template(
            "block.html",
            block=self,
            color=STATE_COLORS.get(self.state, "inherit"),
            percent="" if share is None else f"{100 * min(max(share, 0.0), 1.0):.1f}%",
            blue=BLUE,
            best=self._best_line(),
            columns=_make_columns(self),
        )

    def to_text(self) -> str:
        """Return the block as plain text, without its curves."""
        parts = [f"{self.title}: {self.state}" if self.state else self.title]
        parts += [" · ".join(self.facts)] if self.facts else []
        parts += [best] if (best := self._best_line()) else []
        if self.rows:
            columns = [column for column in _make_columns(self) if not column.is_drawn]
            cells = [[column.texts.get(row.number, "") for column in columns] for row in self.rows]
            parts.append(summary.lay_out_table([column.heading for column in columns], cells))
        parts += [self.more] if self.more else []
        return escape_unprintable("\n".join([*parts, *self.notes]))

    def _best_line(self) -> str:
        row = next((row for row in self.rows if row.number == self.best), None)
        if row is None:
            return ""
        value = fmt.mean_metric(row.metrics, self.metric)
        after = "" if row.best_at is None else f" after {fmt.count_noun(row.best_at, 'epoch')}"
        return f"best: trial {row.number}, {fmt.heading(self.metric)} {value}{after}"


# --- the table ---------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column of the table; each row, by number, has a text or a drawing."""

    heading: str
    texts: Mapping[int, str]
    align: str = "right"
    colors: Mapping[int, str] = field(default_factory=dict)
    is_drawn: bool = False


def _make_columns(block: Block) -> list[_Column]:
    rows = block.rows
    trials = {r.number: f"{'★ ' if r.number == block.best else ''}{r.number}" for r in rows}
    states = {row.number: row.status for row in rows}
    colors = {n: STATE_COLORS.get(status, "inherit") for n, status in states.items()}
    columns = [
        _Column("trial", trials),
        _Column("state", states, "left", colors),
        _Column("epoch", {row.number: f"{row.epoch}/{row.epochs}" for row in rows}),
    ]
    for name in fmt.metric_columns((row.metrics for row in rows), block.metric):
        values = {row.number: fmt.mean_metric(row.metrics, name) for row in rows}
        columns.append(_Column(fmt.heading(name), values))
    if any(row.best_at is not None for row in rows):
        at = {row.number: "-" if row.best_at is None else str(row.best_at) for row in rows}
        columns.append(_Column(fmt.BEST_AT, at))
    if any(row.history for row in rows):
        curves = draw_curves(rows, block.metric, block.mode)
        by_epoch = f"{fmt.heading(block.metric)} by epoch"
        columns.append(_Column(by_epoch, curves, "left", is_drawn=True))
    if any(row.rows_per_second for row in rows):
        rates = {r.number: f"{r.rows_per_second:,.0f}" if r.rows_per_second else "-" for r in rows}
        columns.append(_Column("rows/s", rates))
    return columns + _make_setting_columns(rows)


def _make_setting_columns(rows: Sequence[TrialRow]) -> list[_Column]:
    """Return columns of the settings that differ between rows; after the first few, one for all."""
    flat = {row.number: flatten(row.config) for row in rows}
    differ = fmt.choose_settings(list(flat.values()))
    columns = []
    for key in differ[:MAX_SETTINGS]:
        texts = {
            n: fmt.cut_end(fmt.number(config[key], 3), MAX_TEXT)
            for n, config in flat.items()
            if key in config
        }
        columns.append(_Column(key, texts))
    if rest := differ[MAX_SETTINGS:]:
        others = {
            n: fmt.settings({k: c[k] for k in rest if k in c}, MAX_TEXT) for n, c in flat.items()
        }
        columns.append(_Column(f"{len(rest)} more", others, "left"))
    return columns


# --- curves ------------------------------------------------------------------


def draw_curves(rows: Sequence[TrialRow], metric: str, mode: str) -> dict[int, str]:
    """Return the curve of each row's metric over its epochs, all on the same axes."""
    series = {
        row.number: [fmt.metric_value(epoch.metrics, metric) for epoch in row.history]
        for row in rows
    }
    low, high = _find_limits(series.values(), mode)
    epochs = max((max(row.epochs, len(row.history)) for row in rows), default=1)
    return {
        row.number: draw_curve(series[row.number], row.best_at, epochs, low, high) for row in rows
    }


def _find_limits(series: Any, mode: str) -> tuple[float, float]:
    """Return the axis's limits without the worst twentieth, which would flatten the rest."""
    values = sorted(v for line in series for v in line if fmt.is_finite(v))
    if not values:
        return 0.0, 1.0
    low, high = values[len(values) // 20], values[-1 - len(values) // 20]
    return (low, values[-1]) if mode == "max" else (values[0], high)


def draw_curve(
    values: Sequence[float | None], best_at: int | None, epochs: int, low: float, high: float
) -> str:
    """Return an SVG curve of values over epochs, in the text's color, with a dot at the best value.

    `best_at` is the number of epochs after which the metric was best. Values that are not finite
    are left out; those beyond the ends of the vertical axis, `low` and `high`, are drawn at the
    nearer end.
    """
    finite = [(i, v) for i, v in enumerate(values) if fmt.is_finite(v)]
    if not finite:
        return ""
    right, bottom = CURVE_WIDTH - CURVE_MARGIN, CURVE_HEIGHT - CURVE_MARGIN

    def locate(epoch: int, value: float) -> tuple[float, float]:  # from the upper left corner
        share = 0.5 if high <= low else (min(max(value, low), high) - low) / (high - low)
        x = CURVE_MARGIN + (right - CURVE_MARGIN) * epoch / max(1, epochs - 1)
        return x, bottom - (bottom - CURVE_MARGIN) * share

    step = -(-len(finite) // CURVE_POINTS)
    drawn = finite[::step] if finite[::step][-1] == finite[-1] else [*finite[::step], finite[-1]]
    line = " ".join("{:.1f},{:.1f}".format(*locate(i, v)) for i, v in drawn)
    marked = [p for p in finite if p[0] + 1 == best_at] or finite[-1:]
    x, y = locate(*marked[0])
    return (
        f'<svg width="{CURVE_WIDTH}" height="{CURVE_HEIGHT}" '
        f'viewBox="0 0 {CURVE_WIDTH} {CURVE_HEIGHT}" role="img" '
        f'aria-label="{fmt.metric(finite[0][1])} to {fmt.metric(finite[-1][1])}">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.2" '
        f'stroke-linejoin="round" opacity=".8"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{BLUE}"/></svg>'
    )


# --- results -----------------------------------------------------------------


def render_result(result: Any) -> str:
    return make_block(result).to_html()


def make_block(result: Any) -> Block:
    """Return the block of a run, read from its store."""
    trials = summary.rank_trials(result)
    has_best = bool(summary.best_lines(result))
    hidden = Counter(trial.status for trial in trials[summary.MAX_TRIALS :])
    tie = fmt.describe_tie(trials, trials[0], result.metric) if has_best else ""
    return Block(
        title=str(result.path),
        state=result.status,
        rows=[row_of(trial, result.select) for trial in trials[: summary.MAX_TRIALS]],
        metric=result.metric,
        mode=result.mode,
        best=trials[0].number if has_best else None,
        facts=[summary.count_statuses(result)],
        more=f"and {hidden.total()} more: {fmt.states(hidden)}" if hidden else "",
        notes=[
            *filter(None, [tie]),
            *summary.list_failures(result, with_status=True),
            *summary.list_warnings(result),
        ],
    )


def row_of(trial: Any, select: str) -> TrialRow:
    """Return the row of a trial of a result; with ``select="best"``, marked at its best epoch."""
    by_best = select == "best" and trial.best_epoch is not None
    return TrialRow(
        number=trial.number,
        config=trial.config,
        status=trial.status,
        epoch=trial.epoch,
        epochs=trial.epochs,
        metrics=trial.metrics,
        error=trial.error,
        best_at=trial.best_epoch + 1 if by_best else None,
        history=[SimpleNamespace(metrics=epoch["metrics"]) for epoch in trial.history],
    )


def render_trial(trial: Any) -> str:
    """Write one trial as a two-column HTML table: status, metrics, configuration."""
    rows = [("status", trial.status), ("epochs", trial.epoch)]
    select = getattr(getattr(trial, "saved", None), "select", "best")
    if trial.best_epoch is not None and select == "best":
        rows.append((fmt.BEST_AT, trial.best_epoch + 1))
    names = fmt.full_names(trial.metrics)
    rows += [(fmt.heading(name), fmt.metric(trial.metrics[name])) for name in names]
    rows += [(name, fmt.number(value)) for name, value in flatten(trial.config).items()]
    return fill_template("trial.html", number=trial.number, rows=rows)


# --- during a search -----------------------------------------------------------


class Notebook(Progress):
    """Redraws one block of HTML, at most twice a second; tests pass their own clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawn = float("-inf")
        self._handle: Any = None
        self._phases: list[str] = []
        self._advice: list[str] = []
        self._causes: dict[str, list[int]] = {}
        self._other_causes = 0
        self._failed: set[int] = set()
        self._is_over = False
        self._is_broken = False

    def phase(self, what: str) -> None:
        self._phases.append(f"{what} ...")
        self.draw(Block(" ".join(self._phases), ""))

    def advise(self, text: str) -> None:
        self._advice.append(text)

    def run_started(self, snapshot: Snapshot) -> None:
        self.draw(self._make_block(snapshot, "running"))

    def update(self, snapshot: Snapshot) -> None:
        """Redraw the block, at most twice a second; immediately if the search is paused."""
        self._note_failures(snapshot)
        if snapshot.resting or self._clock() - self._drawn >= DRAW_SECONDS:
            self.draw(self._make_block(snapshot, snapshot.pause or snapshot.waits_for or "running"))

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        """Draw the final state, which is saved with the notebook."""
        self._is_over = True
        self.draw(self._make_block(snapshot, result.status))

    def ended_early(self, snapshot: Snapshot | None, error: BaseException) -> None:
        if self._is_over or self._handle is None:
            return
        self._is_over = True
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        of_phases = Block(" ".join(self._phases), state)
        self.draw(of_phases if snapshot is None else self._make_block(snapshot, state))

    def _make_block(self, snapshot: Snapshot, state: str) -> Block:
        self._note_failures(snapshot)
        rows = choose_rows(snapshot)
        hidden = snapshot.count_trials(rows)
        count = hidden.total()
        return Block(
            title=snapshot.path or "search",
            state=state,
            rows=rows,
            metric=snapshot.metric,
            mode=snapshot.mode,
            best=snapshot.best,
            facts=_list_facts(snapshot, is_over=self._is_over),
            more=f"and {count} more: {fmt.states(hidden)}" if count else "",
            notes=[
                *self._advice,
                *summary.describe_causes(self._causes),
                *([f"and {self._other_causes} for other reasons"] if self._other_causes else []),
            ],
            share_done=None if self._is_over and state != "interrupted" else snapshot.share_done,
        )

    def _note_failures(self, snapshot: Snapshot) -> None:
        """Remember why trials failed, because the snapshot omits trials that ended long ago."""
        for row in snapshot.trials:
            if row.status in ("failed", "diverged") and row.number not in self._failed:
                self._failed.add(row.number)
                what = f" {row.status}: {row.error}" if row.error else f" {row.status}"
                if what in self._causes or len(self._causes) < MAX_CAUSES:
                    self._causes.setdefault(what, []).append(row.number)
                else:
                    self._other_causes += 1

    def draw(self, block: Block) -> None:
        """Show a block in place of the one before; if that fails, warn once."""
        if self._is_broken:
            return
        try:
            from IPython.display import display

            bundle = {"text/plain": block.to_text(), "text/html": block.to_html()}
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            else:
                self._handle.update(bundle, raw=True)
        except Exception as error:
            self._is_broken = True
            warnings.warn(
                f"the notebook's display failed, so the search continues without it: "
                f"{text_of(error)}",
                stacklevel=2,
            )
        self._drawn = self._clock()


def _list_facts(snapshot: Snapshot, *, is_over: bool) -> list[str]:
    of_workers = filter(None, [describe_load(snapshot)])
    if is_over:
        ended = fmt.states(snapshot.count_trials()) or "no trials"
        return [ended, fmt.duration(snapshot.seconds), *of_workers]
    so_far = f"{fmt.rough_duration(snapshot.seconds)} so far"
    return [
        *([] if snapshot.share_done is None else [f"{fmt.percent(snapshot.share_done)} done"]),
        ", ".join(filter(None, [so_far, snapshot.time_left])),
        *of_workers,
    ]
