"""A run as one HTML file: its table and its pictures, without anything outside of it."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from cerebro.errors import InputError
from cerebro.report import plots
from cerebro.report.html import render_html

STYLE = "body{font-family:sans-serif;margin:2em}img{display:block;max-width:100%;margin:2em 0}"
DPI = 144


def render_page(
    result: Any,
    kinds: Sequence[str],
    metric: str | None = None,
    trials: Sequence[int] | None = None,
) -> str:
    """Write a result's table and pictures as a page of its own.

    Parameters
    ----------
    result
        A ``Result``.
    kinds
        The pictures, as for ``Result.plot``.
    metric, trials
        What to draw, as for ``Result.plot``.

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
