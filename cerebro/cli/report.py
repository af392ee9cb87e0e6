"""``report``: write a run as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cerebro.cli.options import new_command, parse_numbers
from cerebro.machine.files import check_no_link

NAME = "report.html"


def add(commands: Any) -> None:
    parser = new_command(commands, "report", main, "write a run as one self-contained HTML page")
    parser.add_argument(
        "run", nargs="?", help="the run's folder (default: the newest one under runs)"
    )
    parser.add_argument("--metric", help="the metric to draw (default: the one that ranks trials)")
    parser.add_argument(
        "--trials", type=parse_numbers, metavar="N,N,...", help="draw only these (default: all)"
    )
    parser.add_argument(
        "--no-plots",
        "--no-pictures",
        action="store_true",
        help="leave out the plots (default: draw all)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help=f"the file to write (default: {NAME} in the run's folder)"
    )


def main(options: argparse.Namespace) -> int:
    import cerebro
    from cerebro.report import plots
    from cerebro.report.page import render_page
    from cerebro.results.about_run import describe_run

    result = cerebro.open(options.run)
    page = render_page(
        result,
        describe_run(result.saved),
        kinds=() if options.no_plots else tuple(plots.KINDS),
        metric=options.metric,
        trials=options.trials,
    )
    out = Path(options.out) if options.out else Path(result.path) / NAME
    if not options.out:
        check_no_link(out)  # a run from elsewhere must not choose the file to overwrite
    out.write_text(page, encoding="utf-8")
    print(out)
    return 0
