"""``plot``: draw a picture of a run, or a page with all its pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cerebro.cli.options import new_command, numbers
from cerebro.errors import InputError
from cerebro.machine.files import check_no_link

KINDS = ("curves", "gantt", "parallel", "importance")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = new_command(commands, "plot", main, "draw a picture of a run, or a page")
    parser.add_argument("run", nargs="?", help="the run's folder (the newest under runs)")
    parser.add_argument("--kind", choices=KINDS, help="what to draw (curves; in a page, all)")
    parser.add_argument("--metric", help="the metric (the one that ranks trials)")
    parser.add_argument("--trials", type=numbers, metavar="N,N,...", help="only these")
    parser.add_argument("--out", help="the file, .png, .svg, .pdf or .html (RUN/KIND.png)")


def main(options: argparse.Namespace) -> int:
    """Draw a run."""
    import cerebro

    result = cerebro.open(options.run)
    if options.out is not None and Path(options.out).suffix == ".html":
        out = _write_page(result, options)
    else:
        out = _write_picture(result, options)
    print(out)
    return 0


def _write_picture(result: Any, options: argparse.Namespace) -> Path:
    kind = options.kind or "curves"
    figure = result.plot(options.metric, trials=options.trials, kind=kind)
    out = Path(options.out) if options.out else Path(result.path) / f"{kind}.png"
    if not options.out:
        check_no_link(out)  # a run from elsewhere must not choose which file is overwritten
    try:
        figure.savefig(out)
    except ValueError as error:  # matplotlib does not know the extension
        raise InputError(f"--out {out}: {error}") from error
    return out


def _write_page(result: Any, options: argparse.Namespace) -> Path:
    from cerebro.report.html import render_page

    kinds = KINDS if options.kind is None else (options.kind,)
    page = render_page(result, kinds, options.metric, options.trials)
    out = Path(options.out)
    out.write_text(page, encoding="utf-8")
    return out
