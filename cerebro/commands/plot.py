"""``plot``: draw a run into a picture file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cerebro.commands.options import count, new_command
from cerebro.errors import InputError


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = new_command(commands, "plot", main, "draw a run into a picture file")
    parser.add_argument("run", nargs="?", help="the run's folder (the newest under runs)")
    parser.add_argument(
        "--kind", choices=["curves", "gantt", "parallel", "importance"], default="curves"
    )
    parser.add_argument("--metric", help="the metric (what trials are ranked by)")
    parser.add_argument("--trials", type=count, nargs="+", metavar="N", help="only these")
    parser.add_argument("--out", help="the file, .png, .svg or .pdf (RUN/KIND.png)")


def main(options: argparse.Namespace) -> int:
    """Draw a run into a picture file."""
    import cerebro

    result = cerebro.open(options.run)
    figure = result.plot(options.metric, trials=options.trials, kind=options.kind)
    out = Path(options.out) if options.out else Path(result.path) / f"{options.kind}.png"
    try:
        figure.savefig(out)
    except ValueError as error:  # an ending that matplotlib does not know
        raise InputError(f"--out {out}: {error}") from error
    print(out)
    return 0
