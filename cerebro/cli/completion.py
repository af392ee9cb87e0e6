"""``completion``: print a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from cerebro.cli.options import new_command
from cerebro.machine.imports import import_extra

SHELLS = ("bash", "zsh", "tcsh")


def add(commands: Any) -> None:
    parser = new_command(
        commands, "completion", main, "print a script that completes commands in a shell"
    )
    parser.description = (
        "Print a script that completes the commands and options of `cerebro`. For bash: "
        'eval "$(cerebro completion bash)" in ~/.bashrc.'
    )
    parser.add_argument("shell", choices=SHELLS)


def main(options: argparse.Namespace) -> int:
    shtab = import_extra("shtab", "completion", "shell completion needs shtab")
    print(shtab.complete(options.make_parser("cerebro"), options.shell))
    return 0
