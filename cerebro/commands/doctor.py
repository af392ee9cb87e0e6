"""``doctor``: print what this machine offers."""

from __future__ import annotations

import argparse
from typing import Any

from cerebro.commands.options import new_command


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = new_command(commands, "doctor", main, "print what this machine offers")
    parser.add_argument("path", nargs="?", default=".", help="the folder for data and runs (.)")
    parser.add_argument(
        "--train",
        action="store_true",
        help="also train small networks, with workers and without, and compare their bits",
    )


def main(options: argparse.Namespace) -> int:
    """Print what this machine offers; 1 if it was to train and does not do so exactly."""
    from cerebro import diagnosis

    print(diagnosis.report(options.path))
    if not options.train:
        return 0
    from cerebro import proof

    print(flush=True)
    return proof.main()
