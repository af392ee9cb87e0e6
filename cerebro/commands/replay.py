"""``replay``: train one trial again and compare every state."""

from __future__ import annotations

import argparse
from typing import Any

from cerebro.commands.options import count, new_command
from cerebro.errors import InputError


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = new_command(
        commands, "replay", main, "train one trial of a run again and compare every state"
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--trial", type=count, required=True, metavar="N", help="which trial")
    parser.add_argument("--epochs", type=count, help="only that many epochs")
    parser.add_argument(
        "--build", metavar="FILE", help="the file that defines build, if it has moved"
    )


def main(options: argparse.Namespace) -> int:
    """Train one trial again and compare every state."""
    import cerebro

    build = None
    if options.build is not None:
        from cerebro.recipe import import_file

        module = import_file(options.build)
        build = getattr(module, "build", None)
        if build is None:
            raise InputError(f"--build {options.build}: the file does not define build")
    outcome = cerebro.replay(options.run, options.trial, build, epochs=options.epochs)
    print(outcome)
    return 0 if outcome.identical else 1
