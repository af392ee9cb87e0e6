"""``plot``, ``report``: draw one plot of a run, or write an HTML page with all of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cerebro.cli.options import new_command, parse_numbers
from cerebro.errors import InputError
from cerebro.machine.files import check_no_link

KINDS = ("curves", "gantt", "parallel", "importance", "slice")


def add(commands: Any) -> None:
    parser = new_command(commands, "plot", plot, "draw a plot of a run, or write an HTML page")
    _add_what_to_draw(parser)
    parser.add_argument(
        "--kind", choices=KINDS, help="what to draw (default: curves; in a page, all kinds)"
    )
    parser.add_argument("--dark", action="store_true", help="for a dark page (default: light)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the file to write: .png, .svg, .pdf, or .html for the page that `report` writes "
        "(default: KIND.png in the run's folder)",
    )
    parser = new_command(commands, "report", report, "write a run as one self-contained HTML page")
    _add_what_to_draw(parser)
    parser.add_argument(
        "--no-plots",
        "--no-pictures",
        action="store_true",
        help="leave out the plots (default: draw all)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="the file to write (default: report.html in the run's folder)"
    )


def _add_what_to_draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", help="the run's folder (default: the newest one under runs)"
    )
    parser.add_argument("--metric", help="the metric to draw (default: the one that ranks trials)")
    parser.add_argument(
        "--trials", type=parse_numbers, metavar="N,N,...", help="draw only these (default: all)"
    )


def plot(options: argparse.Namespace) -> int:
    import cerebro

    result = cerebro.open(options.run)
    if options.out is not None and Path(options.out).suffix == ".html":
        kinds = KINDS if options.kind is None else (options.kind,)
        print(_write_page(result, options, kinds))
    else:
        print(_write_plot(result, options))
    return 0


def report(options: argparse.Namespace) -> int:
    import cerebro

    print(_write_page(cerebro.open(options.run), options, () if options.no_plots else KINDS))
    return 0


def _write_plot(result: Any, options: argparse.Namespace) -> Path:
    from cerebro.report import plots

    kind = options.kind or "curves"
    out = Path(options.out) if options.out else Path(result.path) / f"{kind}.png"
    if out.is_dir():
        raise InputError(f"--out {out} is a folder: give the file to write")
    if not out.suffix:
        out = out.with_name(f"{out.name}.png")
    figure = plots.plot(result, options.metric, trials=options.trials, kind=kind, dark=options.dark)
    if not options.out:
        check_no_link(out)  # a run from elsewhere must not choose the file to overwrite
    try:
        figure.savefig(out)
    except ValueError as error:  # matplotlib does not support the extension
        raise InputError(f"--out {out}: {error}") from error
    return out


def _write_page(result: Any, options: argparse.Namespace, kinds: Sequence[str]) -> Path:
    from cerebro.report.page import render_page
    from cerebro.results.about_run import describe_run

    page = render_page(
        result,
        describe_run(result.saved),
        kinds=kinds,
        metric=options.metric,
        trials=options.trials,
    )
    out = Path(options.out) if options.out else Path(result.path) / "report.html"
    if not options.out:
        check_no_link(out)  # a run from elsewhere must not choose the file to overwrite
    out.write_text(page, encoding="utf-8")
    return out
