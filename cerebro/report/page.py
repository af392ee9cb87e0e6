"""Write a run as one self-contained HTML page, for colleagues, archives and issues.

The page has no outside references. Its only script sorts and filters the table of trials. The
content security policy allows no other script, so markup in a name or a configuration could not run
anything even if it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro.errors import InputError, escape_unprintable
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report import plots, summary
from cerebro.report.block import draw_curve, find_limits
from cerebro.report.conclusions import conclude
from cerebro.report.findings import UNREAD
from cerebro.report.plots.values import find_varying

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1f2933; --dim: #5d6873; --line: #dfe3e8;
  --band: #f4f6f8; --good: #1f7a3d; --warn: #93600a; --bad: #c2372f; --link: #2369a0; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --ink: #e4e8ed; --dim: #9aa5b1;
  --line: #323a44; --band: #1c2229; --good: #5fc27e; --warn: #e0ab55; --bad: #ff7b72;
  --link: #7db8e8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 2rem 4rem; max-width: 90rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; padding-top: .6rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
nav { margin: .8rem 0 0; display: flex; flex-wrap: wrap; gap: 0 1rem; }
nav a { color: var(--link); }
.dim { color: var(--dim); } .finished { color: var(--good); }
.stopped, .paused, .running, .waiting, .interrupted { color: var(--warn); }
.failed, .diverged { color: var(--bad); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: 0 2.5rem; }
ul { margin: .3rem 0; padding-left: 1.2rem; } li { margin: .25rem 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; }
table.facts th { font-weight: 400; color: var(--dim); white-space: nowrap; }
table.facts th.long { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
table.facts td { overflow-wrap: anywhere; min-width: 6rem; }
.scroll { overflow: auto; max-height: 85vh; border: 1px solid var(--line); border-radius: 4px; }
.scroll table { width: 100%; }
.scroll td, .scroll th { padding: .2rem .5rem; font-size: .9rem; white-space: nowrap;
  text-align: right; vertical-align: middle; }
.scroll td.text, .scroll th.text { text-align: left; }
.scroll thead th { position: sticky; top: 0; background: var(--band); font-weight: 600;
  border-bottom: 1px solid var(--line); }
.scroll tbody tr:nth-child(even) { background: var(--band); }
.scroll tbody tr.best td { font-weight: 700; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\25B2"; font-size: .7em; }
th[aria-sort=descending] button::after { content: " \\25BC"; font-size: .7em; }
input[type=search] { font: inherit; color: inherit; background: var(--band); padding: .25rem .6rem;
  border: 1px solid var(--line); border-radius: 4px; width: 20rem; max-width: 100%;
  margin-bottom: .6rem; }
pre { background: var(--band); padding: .6rem .8rem; overflow: auto; border-radius: 4px;
  font-size: .85rem; margin: .4rem 0; max-height: 34rem; }
code { font-size: .92em; background: var(--band); padding: .05rem .3rem; border-radius: 3px;
  overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--link); }
img { display: block; max-width: 100%; height: auto; margin: 0 0 1.6rem; }
@media print { .scroll { max-height: none; overflow: visible; } nav, input { display: none; } }
"""

SCRIPT = """
"use strict";
document.querySelectorAll("table.sortable").forEach(function (table) {
  var body = table.tBodies[0], heads = Array.from(table.tHead.rows[0].cells);
  function key(row, column) {
    var value = row.cells[column].dataset.v, number = Number(value);
    return value === "" ? null : isNaN(number) ? value : number;
  }
  heads.forEach(function (head, column) {
    var button = head.querySelector("button");
    if (!button) { return; }
    button.addEventListener("click", function () {
      var sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      var rows = Array.from(body.rows).map(function (row) { return [key(row, column), row]; });
      rows.sort(function (a, b) {
        a = a[0]; b = b[0];
        if (a === null || b === null) { return (a === null) - (b === null); }
        if (typeof a !== typeof b) { return typeof a === "number" ? -sign : sign; }
        return a < b ? -sign : a > b ? sign : 0;
      });
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      rows.forEach(function (row) { body.appendChild(row[1]); });
    });
  });
  var filter = document.getElementById("filter");
  filter.hidden = false;
  filter.addEventListener("input", function () {
    var sought = filter.value.toLowerCase();
    Array.from(body.rows).forEach(function (row) {
      row.hidden = !row.textContent.toLowerCase().includes(sought);
    });
  });
});
"""


MAX_ROWS = 2000
"""The most trials in the table, best first; a browser sorts this many at once."""
MAX_SETTINGS = 40
MAX_CAUSES = 20
MAX_EVENTS = 50
MAX_LINES = 20
"""The most lines shown of a log or a traceback, from its end."""
MAX_LINE = 300
MAX_CELL = 60
MAX_UNBROKEN = 30
"""The most characters of a fact's name that stay on one line."""
DPI = 144
BY_EPOCH = " by epoch"


@dataclass(frozen=True)
class About:
    """The contents of a page about a run, besides its trials."""

    started: float | None = None  # seconds since 1970
    ended: float | None = None
    data: Sequence[tuple[str, Mapping[str, Any]]] = ()  # each dataset's name and facts
    space: Sequence[tuple[str, str]] = ()  # each setting's name and description
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


def render_page(
    result: Any,
    about: About | None = None,
    *,
    kinds: Sequence[str] = tuple(plots.KINDS),
    metric: str | None = None,
    trials: Sequence[int] | None = None,
) -> str:
    """Write a run as an HTML document, with the plots of ``Result.plot``.

    A plot that cannot be drawn, for example because the run has just begun, is replaced by the
    reason. Everything that comes from the run is escaped. Raises InputError if there are plots, and
    `metric` or one of the `trials` is unknown.
    """
    about = about or About()
    if kinds:
        plots.check(result, metric, trials)
    ranked = summary.rank_trials(result)
    sections = [
        ("best", "Best configuration", _render_best(result, ranked)),
        ("plots", "Plots", _render_plots(result, kinds, metric, trials)),
        ("trials", "Trials", _render_trials(result, ranked)),
        ("failures", "Failures", _render_failures(ranked)),
        ("pruned", "Ended early", _render_pruned(result, ranked)),
        ("events", "Warnings and events", _render_events(result)),
        ("data", "Data", "".join(_render_facts(facts, name) for name, facts in about.data)),
        ("space", "Space", _render_facts(dict(about.space))),
        ("settings", "Settings", _render_facts(flatten(about.settings))),
        ("environment", "Environment", _render_facts(flatten(about.environment))),
    ]
    sections = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in sections)
    body = "".join(
        f'<section id="{anchor}"><h2>{title}</h2>{inner}</section>'
        for anchor, title, inner in sections
    )
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode("ascii")
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escape(result.path)}</title><style>{STYLE}</style></head>\n<body>"
        f"{_render_head(result, about)}<nav>{links}</nav>\n{body}\n<script>{SCRIPT}</script>"
        "</body></html>\n"
    )


def _escape(value: Any) -> str:
    return html.escape(escape_unprintable(str(value)))


def _shorten(value: Any) -> str:
    text = fmt.number(value) if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…"


def _render_list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _render_facts(facts: Mapping[str, Any], title: str = "") -> str:
    """Write names and values as a table with a title above it; nothing if empty."""
    rows = "".join(
        f'<tr><th scope="row"{_mark_long_name(name)}>{_escape(name)}</th>'
        f"<td>{_escape(_format_value(value))}</td></tr>"
        for name, value in facts.items()
    )
    heading = f"<h3>{_escape(title)}</h3>" if title else ""
    return f'{heading}<table class="facts"><tbody>{rows}</tbody></table>' if rows else ""


def _mark_long_name(name: str) -> str:
    """Return the class of a long name, which is broken so that its value has room."""
    return ' class="long"' if len(name) > MAX_UNBROKEN else ""


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_format_value, value)) or "-"
    return fmt.number(value, 6) if isinstance(value, float) else str(value)


def _render_head(result: Any, about: About) -> str:
    facts = [summary.count_statuses(result)]
    if about.started is not None:
        facts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(about.started)))
        if about.ended is not None:
            facts.append(_describe_duration(result, about.ended - about.started))
    ranked_by = f"ranked by {fmt.heading(result.metric)} ({result.mode})"
    state = _escape(result.status)
    error = getattr(result, "error", None)
    return (
        f'<h1>{_escape(result.path)} <span class="{state}">{state}</span></h1>'
        f'<div class="dim">{_escape(" · ".join([*facts, ranked_by]))}</div>'
        + (f'<p class="failed">{_escape(error)}</p>' if error else "")
    )


def _describe_duration(result: Any, seconds: float) -> str:
    """Write how long a run took; if it was resumed, also how long it ran."""
    text = f"took {fmt.duration(seconds)}"
    if not any(event["kind"] == "resumed" for event in result.events()):
        return text
    ran = max((unit["end"] for unit in result.units()), default=0.0)
    return f"{text} with interruptions, {fmt.duration(ran)} without"


def _render_best(result: Any, ranked: Sequence[Any]) -> str:
    lines = summary.best_lines(result)
    if not lines:
        yet = " yet" if result.status in ("running", "paused") else ""
        return f"<p>No trial has a finite metric{yet}.</p>"
    best = ranked[0]
    conclusions = conclude(result, ranked)
    metrics = {
        fmt.heading(n): fmt.mean_metric(best.metrics, n) for n in fmt.full_names(best.metrics)
    }
    folds = ""
    if best.folds:
        names = fmt.full_names(name for fold in best.folds for name in fold.metrics)
        names = [name for name in names if not name.startswith("train_")] or names
        parts = {
            f"fold {fold.fold}": ", ".join(
                f"{fmt.heading(n)} {fmt.metric(fold.metrics.get(n))}" for n in names
            )
            for fold in best.folds
        }
        folds = _render_facts(parts, "Folds")
    tie = summary.describe_tie(result)
    facts = (
        f"<p><b>{_escape(lines[0].removeprefix('best: '))}</b></p>"
        + (f"<p>{_escape(tie)}</p>" if tie else "")
        + _render_facts(flatten(best.config))
        + _render_facts(metrics, "Metrics")
        + folds
        + (f'<p class="dim">state hash <code>{_escape(best.state_hash)}</code></p>'
           if getattr(best, "state_hash", None) else "")
    )  # fmt: skip
    advice = ""
    if conclusions.sure:
        advice += f"<h3>How reliable these numbers are</h3>{_render_list(conclusions.sure)}"
    if conclusions.next:
        advice += f"<h3>What to try next</h3>{_render_list(conclusions.next)}"
    return f'<div class="pair"><div>{facts}</div><div>{advice}</div></div>'


# --- plots -------------------------------------------------------------------


def _render_plots(
    result: Any, kinds: Sequence[str], metric: str | None, trials: Sequence[int] | None
) -> str:
    parts = []
    for kind in kinds:
        try:
            light, dark = (
                plots.plot(result, metric, trials=trials, kind=kind, dark=dark)
                for dark in (False, True)
            )
        except InputError as error:
            parts.append(f'<p class="dim">{_escape(error)}</p>')
            continue
        width = round(96 * float(light.get_figwidth()))
        parts.append(
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_render_png(dark)}">'
            f'<img alt="{_escape(kind)}" width="{width}" src="{_render_png(light)}"></picture>'
        )
    return "".join(parts)


def _render_png(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"


# --- the table of trials -----------------------------------------------------


@dataclass(frozen=True)
class _Cell:
    """A cell: its HTML, and the value by which it is sorted; None sorts last."""

    inner: str
    key: float | str | None = None
    is_text: bool = False

    def to_html(self) -> str:
        key = "" if self.key is None else _escape(self.key)
        kind = ' class="text"' if self.is_text else ""
        return f'<td data-v="{key}"{kind}>{self.inner}</td>'


def _number_cell(value: float | None, text: str) -> _Cell:
    is_finite = value is not None and math.isfinite(value)
    return _Cell(_escape(text), value if is_finite else None)


def _setting_cell(value: Any) -> _Cell:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number_cell(value, fmt.number(value, 3))
    return _Cell(_escape(_shorten(value)), str(value), is_text=True)


def _render_trials(result: Any, ranked: Sequence[Any]) -> str:
    if not ranked:
        return "<p>No trial has begun.</p>"
    shown = ranked[:MAX_ROWS]
    flat = {trial.number: flatten(trial.config) for trial in shown}
    keys = list(dict.fromkeys(key for config in flat.values() for key in config))
    differing = find_varying(list(flat.values()))
    columns = differing[:MAX_SETTINGS]
    names = _choose_metrics(result, shown)
    by_best = result.select == "best"
    drawings = _draw_curves(result, shown)
    headings = [
        "trial",
        "state",
        "epochs",
        *([fmt.BEST_AT] if by_best else []),
        *(fmt.heading(name) for name in names),
        f"{fmt.heading(result.metric)}{BY_EPOCH}",
        "seconds",
        *columns,
    ]
    best = ranked[0].number if summary.best_lines(result) else None
    rows = []
    texts: set[int] = set()  # indices of columns that contain text
    for trial in shown:
        seconds = sum(entry.get("seconds") or 0.0 for entry in trial.history)
        at = trial.best_epoch
        state = _escape(trial.status)
        cells = [
            _number_cell(trial.number, f"{'★ ' if trial.number == best else ''}{trial.number}"),
            _Cell(f'<span class="{state}">{state}</span>', trial.status, is_text=True),
            _number_cell(trial.epoch, f"{trial.epoch}/{trial.epochs}"),
            *([_number_cell(None if at is None else at + 1, "-" if at is None else str(at + 1))]
              if by_best else []),
            *(_number_cell(fmt.metric_value(trial.metrics, name),
                           fmt.mean_metric(trial.metrics, name))
              for name in names),
            _Cell(drawings[trial.number]),
            _number_cell(seconds, f"{seconds:.1f}"),
            *(_setting_cell(flat[trial.number][key]) if key in flat[trial.number] else _Cell("")
              for key in columns),
        ]  # fmt: skip
        kind = ' class="best"' if trial.number == best else ""
        rows.append(f"<tr{kind}>{''.join(cell.to_html() for cell in cells)}</tr>")
        texts.update(place for place, cell in enumerate(cells) if cell.is_text)
    head = "".join(
        _render_heading(text, is_text=place in texts) for place, text in enumerate(headings)
    )
    more = len(ranked) - len(shown)
    constant = {k: next(iter(flat.values())).get(k) for k in keys if k not in differing}
    same = (
        f'<p class="dim">The same in all: {_escape(fmt.settings(constant))}</p>' if constant else ""
    )
    left_out = f'<p class="dim">and {more:,} more, in the run&#x27;s folder</p>' if more else ""
    return (
        '<input type="search" id="filter" placeholder="filter, for example: failed" '
        'aria-label="filter the trials" hidden>'
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{same}{left_out}"
    )


def _render_heading(text: str, *, is_text: bool) -> str:
    kind = ' class="text"' if is_text else ""
    if text.endswith(BY_EPOCH):  # drawings cannot be sorted
        return f'<th scope="col"{kind}>{_escape(text)}</th>'
    return f'<th scope="col"{kind}><button type="button">{_escape(text)}</button></th>'


def _choose_metrics(result: Any, trials: Sequence[Any]) -> list[str]:
    """List the metrics for the table, starting with the one that ranks trials."""
    seen: dict[str, None] = {}
    for trial in trials:
        seen.update(dict.fromkeys(trial.metrics))
    ranks = fmt.short_name(result.metric)
    others = [n for n in fmt.full_names(seen) if n not in (result.metric, f"val_{ranks}")]
    return [result.metric, *others] if seen else []


def _draw_curves(result: Any, trials: Sequence[Any]) -> dict[int, str]:
    """Return the curve of each trial's metric over its epochs, all on the same axes."""
    series = {
        t.number: [fmt.metric_value(entry["metrics"], result.metric) for entry in t.history]
        for t in trials
    }
    low, high = find_limits(series.values(), result.mode)
    epochs = max((max(t.epochs, len(t.history)) for t in trials), default=1)
    return {
        t.number: draw_curve(
            series[t.number], None if t.best_epoch is None else t.best_epoch + 1, epochs, low, high
        )
        for t in trials
    }


# --- what went wrong ---------------------------------------------------------


def _render_failures(ranked: Sequence[Any]) -> str:
    """Write each distinct cause: the trials, the line of code, the traceback and the output."""
    causes: dict[str, list[Any]] = {}
    for trial in sorted(ranked, key=lambda trial: trial.number):
        if trial.status == "diverged":  # each trial diverged at a different batch
            causes.setdefault("diverged", []).append(trial)
        elif trial.status == "failed":
            causes.setdefault(f"failed: {_find_cause(trial)}", []).append(trial)
    parts = []
    for cause, trials in list(causes.items())[:MAX_CAUSES]:
        first = trials[0]
        numbers = ", ".join(str(trial.number) for trial in trials)
        facts = {"trials" if trials[1:] else "trial": numbers}
        place = getattr(getattr(getattr(first, "record", None), "raised", None), "place", "")
        if place:
            facts["raised at"] = place
        if first.status == "failed":
            facts["configuration"] = fmt.settings(first.config)
        parts.append(
            f'<h3 class="{_escape(first.status)}">{_escape(cause)}</h3>{_render_facts(facts)}'
        )
        if first.status == "diverged":
            shown = trials[:MAX_CAUSES]
            parts.append(
                _render_list(
                    [
                        f"trial {t.number}: {_find_cause(t)} ({fmt.settings(t.config)})"
                        for t in shown
                    ]
                )
            )
        traceback = getattr(first, "traceback", None) or ""
        log = (getattr(first, "log", None) or "").rstrip().removesuffix(traceback.rstrip())
        parts.append(_render_tail("traceback", traceback, first.number))
        parts.append(_render_tail("output", log, first.number))
    if len(causes) > MAX_CAUSES:
        parts.append(f"<p>and {len(causes) - MAX_CAUSES} more causes</p>")
    return "".join(parts)


def _find_cause(trial: Any) -> str:
    lines = str(trial.error or "").strip().splitlines()
    return lines[-1] if lines else "no cause was recorded"


def _render_tail(what: str, text: str | None, number: int) -> str:
    lines = (text or "").rstrip().splitlines()
    if not lines:
        return ""
    shown = [line[:MAX_LINE] for line in lines[-MAX_LINES:]]
    cut = f", its last {MAX_LINES} lines" if len(lines) > MAX_LINES else ""
    return (
        f"<details><summary>{what} of trial {number}{cut}</summary>"
        f"<pre>{_escape(chr(10).join(shown))}</pre></details>"
    )


def _render_pruned(result: Any, ranked: Sequence[Any]) -> str:
    """List the trials that ended early, by the number of finished epochs."""
    by_epoch: dict[tuple[int, str], list[Any]] = {}
    for trial in ranked:
        if trial.status == "stopped":
            by_epoch.setdefault((trial.epoch, str(trial.error or "")), []).append(trial)
    lines = []
    for (epoch, why), trials in sorted(by_epoch.items(), key=lambda item: item[0]):
        values = [fmt.metric_value(trial.metrics, result.metric) for trial in trials]
        finite = sorted(v for v in values if v is not None and math.isfinite(v))
        span = ""
        if finite:
            ends = dict.fromkeys([fmt.metric(finite[0]), fmt.metric(finite[-1])])
            span = f", {fmt.heading(result.metric)} {' to '.join(ends)}"
        numbers = ", ".join(str(n) for n in sorted(trial.number for trial in trials))
        lines.append(
            f"after {fmt.count_noun(epoch, 'epoch')}: {fmt.count_noun(len(trials), 'trial')} "
            f"({numbers}){span}{f': {why}' if why else ''}"
        )
    return _render_list(lines)


def _render_events(result: Any) -> str:
    reported = ("warning", UNREAD)  # among the warnings
    others = [event for event in result.events() if event["kind"] not in reported]
    lines = [
        f"{fmt.duration(event['time'])}: {event['kind']}"
        f"{'' if event['trial'] is None else ' of trial ' + str(event['trial'])}: {event['text']}"
        for event in others[:MAX_EVENTS]
    ]
    if len(others) > MAX_EVENTS:
        lines.append(f"and {len(others) - MAX_EVENTS} more events")
    return _render_list([*summary.list_warnings(result), *lines])
