"""What the commands share: how they are added to the parser, and common options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def new_command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command whose arguments `function` is called with."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + "."
    )
    parser.set_defaults(command=function)
    return parser


def progress_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--progress``."""
    parser.add_argument(
        "--progress",
        choices=["auto", "table", "lines", "none"],
        help="a live table, plain lines or nothing; auto: a table in a terminal",
    )


def progress(value: str | None) -> str | bool:
    """Turn the option's value into that of ``progress=``."""
    return False if value == "none" else value or "auto"


def count(text: str) -> int:
    """Read a whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value
