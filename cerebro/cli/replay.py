"""``replay``: train one trial again and compare every state."""

from __future__ import annotations

import argparse
from typing import Any

from cerebro.cli.options import (
    arguments_of,
    build_of,
    build_option,
    new_command,
    parse_count,
    say,
    use_arguments,
)


def add(commands: Any) -> None:
    parser = new_command(
        commands, "replay", main, "train one trial of a run again and compare every state"
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--trial", type=parse_count, required=True, metavar="N", help="which trial")
    parser.add_argument("--epochs", type=parse_count, help="only that many epochs")
    build_option(parser)
    parser.add_argument("--data", metavar="PATH", help="the current path of the run's data")


def main(options: argparse.Namespace) -> int:
    import cerebro

    with use_arguments(arguments_of(options.run, options.build)):
        build = build_of(options.build)
        outcome = cerebro.replay(
            options.run, options.trial, build, data=options.data, epochs=options.epochs
        )
    say(outcome)
    return 0 if outcome.identical else 1
