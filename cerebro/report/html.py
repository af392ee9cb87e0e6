"""A result as static HTML: in a notebook, or as one file with its pictures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from cerebro.errors import InputError
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report import plots, summary

MAX_TRIALS = 20

# Inline, because a notebook's sanitizer drops style sheets; colors are left to the page's theme.
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
    rows += [[k, fmt.number(v)] for k, v in flatten(trial.config).items()]
    return f"<div>{table_html([f'trial {trial.number}', ''], rows)}</div>"


STYLE = "body{font-family:sans-serif;margin:2em}img{display:block;max-width:100%;margin:2em 0}"

DPI = 144


def render_page(
    result: Any,
    kinds: Sequence[str],
    metric: str | None = None,
    trials: Sequence[int] | None = None,
) -> str:
    """Write a result's table and pictures as a standalone page.

    Parameters
    ----------
    result
        A ``Result``.
    kinds
        The pictures, as for ``Result.plot``.
    metric, trials
        The metric to draw, as for ``Result.plot``.

    A picture that cannot be drawn, of a run that has just begun say, is replaced by the
    reason.

    Raises
    ------
    InputError
        As ``Result.plot``, if no picture can be drawn.
    """
    title = html.escape(str(result.path))
    pictures, reasons = [], []
    for kind in kinds:
        try:
            pictures.append(_picture(plots.plot(result, metric, trials=trials, kind=kind), kind))
        except InputError as error:
            reasons.append(error)
            pictures.append(f"<p>{html.escape(str(error))}</p>")
    if len(reasons) == len(kinds):
        raise reasons[0]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>\n"
        + "\n".join([render_html(result), *pictures])
        + "\n</body></html>\n"
    )


def _picture(figure: Any, kind: str) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    data = base64.b64encode(out.getvalue()).decode("ascii")
    return f'<img alt="{kind}" src="data:image/png;base64,{data}">'
