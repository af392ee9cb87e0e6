"""Write a result or a trial as static HTML for a notebook; `cerebro.report.page` writes a page."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report import summary
from cerebro.report.block import CELL, Block, describe_causes
from cerebro.report.snapshot import TrialRow

MAX_TRIALS = 20


def render_html(result: Any, max_trials: int = MAX_TRIALS) -> str:
    """Write a result as one ``<div>`` without scripts, style sheets or outside references."""
    trials = summary.rank_trials(result)
    has_best = bool(summary.best_lines(result))
    hidden = Counter(trial.status for trial in trials[max_trials:])
    failed: dict[str, list[int]] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.error:
            cause = f"{trial.status}: {str(trial.error).strip().splitlines()[-1]}"
            failed.setdefault(cause, []).append(trial.number)
    return Block(
        title=str(result.path),
        state=result.status,
        rows=[_make_row(trial, result.select) for trial in trials[:max_trials]],
        metric=result.metric,
        mode=result.mode,
        best=trials[0].number if has_best else None,
        facts=[summary.count_statuses(result)],
        more=f"and {hidden.total()} more: {fmt.states(hidden)}" if hidden else "",
        notes=[
            *([summary.describe_tie(result)] if has_best and summary.describe_tie(result) else []),
            *describe_causes(failed),
            *summary.list_warnings(result),
        ],
    ).to_html()


def _make_row(trial: Any, select: str) -> TrialRow:
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


def _render_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(_render_cell("th", text) for text in headings)
    body = "".join(f"<tr>{''.join(_render_cell('td', text) for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _render_cell(tag: str, text: str) -> str:
    return f'<{tag} style="{CELL.format(align="right")}">{html.escape(text)}</{tag}>'


def trial_html(trial: Any) -> str:
    """Write one trial as a two-column HTML table: status, metrics, configuration."""
    rows = [["status", str(trial.status)], ["epochs", str(trial.epoch)]]
    select = getattr(getattr(trial, "saved", None), "select", "best")
    if trial.best_epoch is not None and select == "best":
        rows.append([fmt.BEST_AT, str(trial.best_epoch + 1)])
    names = fmt.full_names(trial.metrics)
    rows += [[fmt.heading(name), fmt.metric(trial.metrics[name])] for name in names]
    rows += [[k, fmt.number(v)] for k, v in flatten(trial.config).items()]
    return f"<div>{_render_table([f'trial {trial.number}', ''], rows)}</div>"
