"""``doctor``: print what this machine offers."""

from __future__ import annotations

import argparse
from typing import Any

from cerebro.commands.options import new_command


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = new_command(commands, "doctor", main, "print what this machine offers")
    parser.add_argument("path", nargs="?", default=".", help="the folder for data and runs (.)")


def main(options: argparse.Namespace) -> int:
    """Print what this machine offers."""
    from cerebro import diagnosis

    print(diagnosis.report(options.path))
    return 0
