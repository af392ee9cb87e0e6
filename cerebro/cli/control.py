"""``stop``, ``pause``, ``continue``: control a live run."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from cerebro.cli.options import new_command, parse_count

HELP = {
    "stop": "stop an active run, or one of its trials; finished epochs are kept",
    "pause": "pause a run, or one of its trials, until it is continued",
    "continue": "continue a paused run or trial",
}


def add(commands: Any) -> None:
    for verb, text in HELP.items():
        parser = new_command(commands, verb, main, text)
        parser.set_defaults(verb=verb)
        parser.add_argument("run", help="the run's folder")
        parser.add_argument("--trial", type=parse_count, metavar="N", help="only this trial")


def main(options: argparse.Namespace) -> int:
    import cerebro.control as control

    control.send(options.run, control.Command(options.verb, options.trial))
    what = "the run" if options.trial is None else f"trial {options.trial}"
    happens = {
        "stop": f"{what} stops; what it has trained is kept",
        "pause": f"{what} pauses when its units in flight are done; to continue:\n\n"
        f"  python -m cerebro continue {shlex.quote(options.run)}"
        + ("" if options.trial is None else f" --trial {options.trial}"),
        "continue": f"{what} continues",
    }
    print(f"{options.run}: {happens[options.verb]}")
    return 0
