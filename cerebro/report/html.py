"""A result as static HTML: a notebook shows it, and it survives saving the notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from cerebro.report import format as fmt
from cerebro.report import summary

MAX_TRIALS = 20
# Inline, for a notebook's sanitizer drops style sheets; colours are left to the page's theme.
CELL = "padding:0.2em 0.8em;text-align:{align};white-space:nowrap"
BEST = "font-weight:bold"


def render_html(result: Any, max_trials: int = MAX_TRIALS) -> str:
    """Write a result as HTML without scripts, style sheets or outside references.

    Parameters
    ----------
    result
        A ``Result``.
    max_trials
        How many trials to list, best first.

    Returns
    -------
    str
        One ``<div>`` element.
    """
    trials = summary.ranked(result)
    head = f"<b>{html.escape(str(result.path))}</b>: {html.escape(result.status)}; "
    has_best = bool(summary.best_lines(result))
    parts = [f"<p>{head}{html.escape(summary.counts(result))}</p>"]
    if trials:
        headings, rows = summary.columns(result, trials[:max_trials])
        parts.append(table_html(headings, rows, best=0 if has_best else None))
    if len(trials) > max_trials:
        parts.append(f"<p>and {len(trials) - max_trials} more</p>")
    lines = list(filter(None, [summary.tie(result)])) if has_best else []
    lines += [*summary.failures(result), *summary.warned(result)]
    parts += [f"<p>{html.escape(line)}</p>" for line in lines]
    return f"<div>{''.join(parts)}</div>"


def table_html(
    headings: Sequence[str], rows: Sequence[Sequence[str]], best: int | None = None
) -> str:
    """Write a table; row `best` in bold. All text is escaped."""
    head = "".join(_cell("th", text, "right") for text in headings)
    body = []
    for i, row in enumerate(rows):
        cells = "".join(_cell("td", text, "right") for text in row)
        body.append(f'<tr style="{BEST}">{cells}</tr>' if i == best else f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cell(tag: str, text: str, align: str) -> str:
    return f'<{tag} style="{CELL.format(align=align)}">{html.escape(text)}</{tag}>'


def trial_html(trial: Any) -> str:
    """Write one trial as a two-column HTML table: status, metrics, configuration."""
    rows = [["status", str(trial.status)], ["epochs", str(trial.epoch)]]
    select = getattr(getattr(trial, "saved", None), "select", "best")
    if trial.best_epoch is not None and select == "best":
        rows.append([fmt.BEST_AT, str(trial.best_epoch + 1)])
    names = fmt.full_names(trial.metrics)
    rows += [[fmt.heading(name), fmt.metric(trial.metrics[name])] for name in names]
    rows += [[k, fmt.number(v)] for k, v in fmt.flatten(trial.config).items()]
    return f"<div>{table_html([f'trial {trial.number}', ''], rows)}</div>"
