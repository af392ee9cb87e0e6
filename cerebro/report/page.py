"""Write a run as one self-contained HTML page, for colleagues, archives and issues.

The page has no outside references. Its only script sorts and filters the table of trials. The
content security policy allows no other script, so markup in a name or a configuration could not run
anything even if it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro.errors import InputError
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report import plots, summary
from cerebro.report.block import TEMPLATES, draw_curves, fill_template, row_of
from cerebro.report.conclusions import conclude
from cerebro.report.findings import UNREAD

MAX_ROWS = 2000  # trials in the table, best first; a browser sorts this many at once
MAX_SETTINGS = 40
MAX_CAUSES = 20
MAX_EVENTS = 50
MAX_LINES = 20  # of a log or a traceback, from its end
MAX_LINE = 300
MAX_CELL = 60
DPI = 144


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
    causes = _group_failures(ranked)
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    return fill_template(
        "page.html",
        result=result,
        about=about,
        facts=_list_facts(result, about),
        best=_describe_best(result, ranked),
        plots=[_draw_plot(result, kind, metric, trials) for kind in kinds],
        **_tabulate(result, ranked),
        failures=[_describe_failure(*cause) for cause in list(causes.items())[:MAX_CAUSES]],
        other_causes=len(causes) - MAX_CAUSES,
        pruned=_list_pruned(result, ranked),
        events=_list_events(result),
        space=dict(about.space),
        settings=flatten(about.settings),
        environment=flatten(about.environment),
        show=_format_value,
        max_lines=MAX_LINES,
        max_line=MAX_LINE,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_format_value, value)) or "-"
    return fmt.number(value, 6) if isinstance(value, float) else str(value)


def _list_facts(result: Any, about: About) -> list[str]:
    facts = [summary.count_statuses(result)]
    if about.started is not None:
        facts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(about.started)))
        if about.ended is not None:
            facts.append(_describe_duration(result, about.ended - about.started))
    return [*facts, f"ranked by {fmt.heading(result.metric)} ({result.mode})"]


def _describe_duration(result: Any, seconds: float) -> str:
    """Write how long a run took; if it was resumed, also how long it ran."""
    text = f"took {fmt.duration(seconds)}"
    if not any(event["kind"] == "resumed" for event in result.events()):
        return text
    ran = max((unit["end"] for unit in result.units()), default=0.0)
    return f"{text} with interruptions, {fmt.duration(ran)} without"


def _describe_best(result: Any, ranked: Sequence[Any]) -> dict[str, Any] | None:
    """Describe the best trial; None while no trial has a finite metric."""
    lines = summary.best_lines(result)
    if not lines:
        return None
    best = ranked[0]
    names = fmt.full_names(name for fold in best.folds for name in fold.metrics)
    names = [name for name in names if not name.startswith("train_")] or names
    return {
        "text": lines[0].removeprefix("best: "),
        "tie": fmt.describe_tie(ranked, best, result.metric),
        "config": flatten(best.config),
        "metrics": {
            fmt.heading(n): fmt.mean_metric(best.metrics, n) for n in fmt.full_names(best.metrics)
        },
        "folds": {
            f"fold {fold.fold}": ", ".join(
                f"{fmt.heading(n)} {fmt.metric(fold.metrics.get(n))}" for n in names
            )
            for fold in best.folds
        },
        "state_hash": best.state_hash,
        "conclusions": conclude(result, ranked),
    }


def _draw_plot(
    result: Any, kind: str, metric: str | None, trials: Sequence[int] | None
) -> dict[str, Any]:
    """Draw a plot for light and for dark pages; or say why it cannot be drawn."""
    try:
        light, dark = (
            plots.plot(result, metric, trials=trials, kind=kind, dark=dark)
            for dark in (False, True)
        )
    except InputError as error:
        return {"error": str(error)}
    return {
        "error": "",
        "kind": kind,
        "width": round(96 * float(light.get_figwidth())),
        "light": _render_png(light),
        "dark": _render_png(dark),
    }


def _render_png(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"


# --- the table of trials -----------------------------------------------------


@dataclass(frozen=True)
class _Cell:
    """A cell's text, and the value by which it is sorted; empty values sort last."""

    text: str
    key: float | str = ""
    is_text: bool = False


@dataclass(frozen=True)
class _Column:
    heading: str
    cells: Sequence[_Cell]
    kind: str = ""  # "state", or "curve": drawings cannot be sorted

    @property
    def is_text(self) -> bool:
        return any(cell.is_text for cell in self.cells)


def _number_cell(value: float | None, text: str) -> _Cell:
    return _Cell(text, value if fmt.is_finite(value) else "")


def _setting_cell(value: Any) -> _Cell:
    if fmt.is_number(value):
        return _number_cell(value, fmt.number(value, 3))
    return _Cell(fmt.cut_end(str(value), MAX_CELL), str(value), is_text=True)


def _tabulate(result: Any, ranked: Sequence[Any]) -> dict[str, Any]:
    """Return the columns and rows of the table of trials, and what is said below it."""
    shown = ranked[:MAX_ROWS]
    flat = [flatten(trial.config) for trial in shown]
    differing = fmt.find_varying(flat)
    best = ranked[0].number if summary.best_lines(result) else None
    columns = [
        _Column(
            "trial",
            [_number_cell(t.number, f"{'★ ' if t.number == best else ''}{t.number}")
             for t in shown],
        ),
        _Column("state", [_Cell(t.status, t.status, is_text=True) for t in shown], "state"),
        _Column("epochs", [_number_cell(t.epoch, f"{t.epoch}/{t.epochs}") for t in shown]),
    ]  # fmt: skip
    if result.select == "best":
        epochs = [None if t.best_epoch is None else t.best_epoch + 1 for t in shown]
        best_at = [_number_cell(e, "-" if e is None else str(e)) for e in epochs]
        columns.append(_Column(fmt.BEST_AT, best_at))
    for name in _choose_metrics(result, shown):
        values = [
            _number_cell(fmt.metric_value(t.metrics, name), fmt.mean_metric(t.metrics, name))
            for t in shown
        ]
        columns.append(_Column(fmt.heading(name), values))
    curves = draw_curves([row_of(t, "best") for t in shown], result.metric, result.mode)
    by_epoch = [_Cell(curves[t.number]) for t in shown]
    columns.append(_Column(f"{fmt.heading(result.metric)} by epoch", by_epoch, kind="curve"))
    times = [sum(entry.get("seconds") or 0.0 for entry in t.history) for t in shown]
    columns.append(_Column("seconds", [_number_cell(s, f"{s:.1f}") for s in times]))
    for key in differing[:MAX_SETTINGS]:
        cells = [_setting_cell(c[key]) if key in c else _Cell("") for c in flat]
        columns.append(_Column(key, cells))
    keys = dict.fromkeys(key for config in flat for key in config)
    more = len(ranked) - len(shown)
    return {
        "columns": columns,
        "rows": list(zip(*(column.cells for column in columns), strict=True)),
        "common": fmt.settings({k: flat[0].get(k) for k in keys if k not in differing}),
        "more": f"{more:,}" if more else "",
    }


def _choose_metrics(result: Any, trials: Sequence[Any]) -> list[str]:
    """List the metrics for the table, starting with the one that ranks trials."""
    seen = dict.fromkeys(name for trial in trials for name in trial.metrics)
    ranks = fmt.short_name(result.metric)
    others = [n for n in fmt.full_names(seen) if n not in (result.metric, f"val_{ranks}")]
    return [result.metric, *others] if seen else []


# --- what went wrong ---------------------------------------------------------


def _group_failures(ranked: Sequence[Any]) -> dict[str, list[Any]]:
    causes: dict[str, list[Any]] = {}
    for trial in sorted(ranked, key=lambda trial: trial.number):
        if trial.status == "diverged":  # each trial diverged at a different batch
            causes.setdefault("diverged", []).append(trial)
        elif trial.status == "failed":
            causes.setdefault(f"failed: {_find_cause(trial)}", []).append(trial)
    return causes


def _describe_failure(cause: str, trials: Sequence[Any]) -> dict[str, Any]:
    first = trials[0]
    facts = {"trials" if trials[1:] else "trial": ", ".join(str(t.number) for t in trials)}
    place = getattr(getattr(getattr(first, "record", None), "raised", None), "place", "")
    if place:
        facts["raised at"] = place
    lines = []
    if first.status == "failed":
        facts["configuration"] = fmt.settings(first.config)
    else:
        lines = [
            f"trial {t.number}: {_find_cause(t)} ({fmt.settings(t.config)})"
            for t in trials[:MAX_CAUSES]
        ]
    traceback = getattr(first, "traceback", None) or ""
    log = (getattr(first, "log", None) or "").rstrip().removesuffix(traceback.rstrip())
    return {
        "status": first.status,
        "cause": cause,
        "facts": facts,
        "trials": lines,
        "traceback": traceback,
        "log": log,
        "number": first.number,
    }


def _find_cause(trial: Any) -> str:
    return summary.last_line(trial.error) or "no cause was recorded"


def _list_pruned(result: Any, ranked: Sequence[Any]) -> list[str]:
    """List the trials that ended early, by the number of finished epochs."""
    by_epoch: dict[tuple[int, str], list[Any]] = {}
    for trial in ranked:
        if trial.status == "stopped":
            by_epoch.setdefault((trial.epoch, str(trial.error or "")), []).append(trial)
    lines = []
    for (epoch, why), trials in sorted(by_epoch.items(), key=lambda item: item[0]):
        values = [fmt.metric_value(trial.metrics, result.metric) for trial in trials]
        finite = sorted(filter(fmt.is_finite, values))
        span = ""
        if finite:
            ends = dict.fromkeys([fmt.metric(finite[0]), fmt.metric(finite[-1])])
            span = f", {fmt.heading(result.metric)} {' to '.join(ends)}"
        numbers = ", ".join(str(n) for n in sorted(trial.number for trial in trials))
        lines.append(
            f"after {fmt.count_noun(epoch, 'epoch')}: {fmt.count_noun(len(trials), 'trial')} "
            f"({numbers}){span}{f': {why}' if why else ''}"
        )
    return lines


def _list_events(result: Any) -> list[str]:
    reported = ("warning", UNREAD)  # among the warnings
    others = [event for event in result.events() if event["kind"] not in reported]
    lines = [
        f"{fmt.duration(event['time'])}: {event['kind']}"
        f"{'' if event['trial'] is None else ' of trial ' + str(event['trial'])}: {event['text']}"
        for event in others[:MAX_EVENTS]
    ]
    if len(others) > MAX_EVENTS:
        lines.append(f"and {len(others) - MAX_EVENTS} more events")
    return [*summary.list_warnings(result), *lines]
