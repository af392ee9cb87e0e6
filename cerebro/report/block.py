"""Draw the block that a notebook shows for a run, during a search and for a `Result`.

The block is static HTML without scripts, style sheets or outside references. It survives saving,
nbconvert and sanitizers, which leave at least the text. Its colors are readable on white and black.
Without HTML, the same rows are shown as plain text.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro.errors import escape_unprintable
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report import summary
from cerebro.report.snapshot import TrialRow

MAX_SETTINGS = 8
"""The number of settings that get a separate column; the others share one."""

MAX_TEXT = 60
"""The largest length of a setting's text, in characters."""

CURVE_POINTS = 60
CURVE_WIDTH, CURVE_HEIGHT, CURVE_MARGIN = 96, 20, 3  # pixels

# These differ about equally in luminance from white and from black.
BLUE, GREEN, AMBER, RED = "#2f83c5", "#2f9148", "#b0740a", "#d9453f"
STATE_COLORS = {
    "running": BLUE,
    "paused": AMBER,
    "stopped": AMBER,
    "interrupted": AMBER,
    "finished": GREEN,
    "diverged": RED,
    "failed": RED,
}

# Inline, because sanitizers remove style sheets. Inline styles override those of notebooks.
CELL = (
    "padding:2px 10px 2px 0;border:0;background:transparent;white-space:nowrap;"
    "vertical-align:middle;text-align:{align};font-variant-numeric:tabular-nums"
)
TABLE = "border-collapse:collapse;border:0;margin:6px 0;font-size:inherit;color:inherit"
DIM = "opacity:.7"
RULE = "border-bottom:1px solid rgba(128,128,128,.4)"
BEST_ROW = "font-weight:600;background:rgba(128,128,128,.14)"


@dataclass(frozen=True)
class Block:
    """The contents of a block."""

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
        color = STATE_COLORS.get(self.state, "inherit")
        title = f"<b>{_escape(self.title)}</b>" if self.facts else _escape(self.title)
        parts = [_render_line(f'{title} <span style="color:{color}">{_escape(self.state)}</span>')]
        if self.share_done is not None:
            parts.append(_render_bar(self.share_done))
        if self.facts:
            parts.append(_render_line(_escape(" · ".join(self.facts))))
        if best := self._best_line():
            parts.append(_render_line(f"<b>{_escape(best)}</b>"))
        if self.rows:
            parts.append(_render_table(self))
        if self.more:
            parts.append(_render_line(_escape(self.more), DIM))
        parts += [_render_line(_escape(note)) for note in self.notes]
        return f'<div style="color:inherit;overflow-x:auto;line-height:1.5">{"".join(parts)}</div>'

    def to_text(self) -> str:
        """Return the block as plain text, without its curves."""
        parts = [f"{self.title}: {self.state}" if self.state else self.title]
        parts += [" · ".join(self.facts)] if self.facts else []
        parts += [best] if (best := self._best_line()) else []
        if self.rows:
            columns = [column for column in _make_columns(self) if not column.is_drawn]
            cells = [[column.text(row) for column in columns] for row in self.rows]
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


def _escape(text: str) -> str:
    return html.escape(escape_unprintable(text))


def _render_line(inner: str, style: str = "") -> str:
    return f'<div style="margin:2px 0;{style}">{inner}</div>'


def _render_bar(share: float) -> str:
    """Return a progress bar as HTML; it is invisible where a page removes styles."""
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        '<div style="height:5px;max-width:520px;margin:4px 0;border-radius:3px;overflow:hidden;'
        f'background:rgba(128,128,128,.25)"><div style="height:5px;width:{width:.1f}%;'
        f'background:{BLUE}"></div></div>'
    )


# --- the table ---------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column of the table: for each row, by number, a text or a drawing."""

    heading: str
    texts: Mapping[int, str]
    align: str = "right"
    drawings: Mapping[int, str] = field(default_factory=dict)
    colors: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_drawn(self) -> bool:
        return bool(self.drawings)

    def text(self, row: TrialRow) -> str:
        return self.texts.get(row.number, "")

    def to_html(self, row: TrialRow) -> str:
        if self.is_drawn:
            return self.drawings.get(row.number, "")
        text = _escape(self.text(row))
        color = self.colors.get(row.number)
        return text if color is None else f'<span style="color:{color}">{text}</span>'


def _make_columns(block: Block) -> list[_Column]:
    rows = block.rows
    trials = {r.number: f"{'★ ' if r.number == block.best else ''}{r.number}" for r in rows}
    columns = [
        _Column("trial", trials),
        _Column(
            "state",
            {row.number: row.status for row in rows},
            align="left",
            colors={row.number: STATE_COLORS.get(row.status, "inherit") for row in rows},
        ),
        _Column("epoch", {row.number: f"{row.epoch}/{row.epochs}" for row in rows}),
    ]
    for name in fmt.metric_columns((row.metrics for row in rows), block.metric):
        values = {row.number: fmt.mean_metric(row.metrics, name) for row in rows}
        columns.append(_Column(fmt.heading(name), values))
    if any(row.best_at is not None for row in rows):
        at = {row.number: "-" if row.best_at is None else str(row.best_at) for row in rows}
        columns.append(_Column(fmt.BEST_AT, at))
    if any(row.history for row in rows):
        by_epoch = f"{fmt.heading(block.metric)} by epoch"
        columns.append(_Column(by_epoch, {}, align="left", drawings=_draw_curves(block)))
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
        texts = {n: _shorten(config[key]) for n, config in flat.items() if key in config}
        columns.append(_Column(key, texts))
    if rest := differ[MAX_SETTINGS:]:
        others = {
            n: fmt.settings({k: c[k] for k in rest if k in c}, MAX_TEXT) for n, c in flat.items()
        }
        columns.append(_Column(f"{len(rest)} more", others, align="left"))
    return columns


def _shorten(value: Any) -> str:
    text = fmt.number(value, 3)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def _render_table(block: Block) -> str:
    columns = _make_columns(block)
    head = "".join(
        f'<th style="{CELL.format(align=c.align)};font-weight:400;{DIM};{RULE}">'
        f"{_escape(c.heading)}</th>"
        for c in columns
    )
    body = []
    for row in block.rows:
        cells = "".join(
            f'<td style="{CELL.format(align=c.align)}">{c.to_html(row)}</td>' for c in columns
        )
        style = f' style="{BEST_ROW}"' if row.number == block.best else ""
        body.append(f"<tr{style}>{cells}</tr>")
    return (
        f'<table style="{TABLE}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


# --- curves ------------------------------------------------------------------


def _draw_curves(block: Block) -> dict[int, str]:
    """Return the curve of each row's metric over its epochs, all on the same axes."""
    series = {
        row.number: [fmt.metric_value(epoch.metrics, block.metric) for epoch in row.history]
        for row in block.rows
    }
    low, high = find_limits(series.values(), block.mode)
    epochs = max((max(row.epochs, len(row.history)) for row in block.rows), default=1)
    return {
        row.number: draw_curve(series[row.number], row.best_at, epochs, low, high)
        for row in block.rows
    }


def find_limits(series: Any, mode: str) -> tuple[float, float]:
    """Return the ends of the vertical axis, without the worst twentieth of the values.

    Otherwise the first epochs of bad trials would flatten all other curves.
    """
    values = sorted(v for line in series for v in line if v is not None and math.isfinite(v))
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
    finite = [(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    if not finite:
        return ""
    step = -(-len(finite) // CURVE_POINTS)
    drawn = finite[::step] if finite[::step][-1] == finite[-1] else [*finite[::step], finite[-1]]
    points = [_locate_point(i, v, epochs, low, high) for i, v in drawn]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marked = [p for p in finite if p[0] + 1 == best_at] or finite[-1:]
    x, y = _locate_point(*marked[0], epochs, low, high)
    return (
        f'<svg width="{CURVE_WIDTH}" height="{CURVE_HEIGHT}" '
        f'viewBox="0 0 {CURVE_WIDTH} {CURVE_HEIGHT}" role="img" '
        f'aria-label="{fmt.metric(finite[0][1])} to {fmt.metric(finite[-1][1])}">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.2" '
        f'stroke-linejoin="round" opacity=".8"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{BLUE}"/></svg>'
    )


def _locate_point(
    epoch: int, value: float, epochs: int, low: float, high: float
) -> tuple[float, float]:
    """Return the position of a value in pixels, measured from the upper left corner."""
    right, bottom = CURVE_WIDTH - CURVE_MARGIN, CURVE_HEIGHT - CURVE_MARGIN
    share = 0.5 if high <= low else (min(max(value, low), high) - low) / (high - low)
    x = CURVE_MARGIN + (right - CURVE_MARGIN) * epoch / max(1, epochs - 1)
    return x, bottom - (bottom - CURVE_MARGIN) * share


# --- remarks -----------------------------------------------------------------


def describe_causes(failed: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a line for each cause of failures; `failed` maps status and cause to trial numbers."""
    return [
        f"trial {numbers[0]}{f' and {len(numbers) - 1} more' if numbers[1:] else ''} {what}"
        for what, numbers in failed.items()
    ]
