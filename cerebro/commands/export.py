"""``export``: write a trial's weights where others can read them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cerebro.commands.options import (
    arguments,
    arguments_of,
    build_of,
    build_option,
    count,
    new_command,
    trial_of,
)
from cerebro.errors import InputError

ENDINGS = {"safetensors": ".safetensors", "torch": ".pt", "onnx": ".onnx"}


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = new_command(commands, "export", main, "write a trial's weights into a file")
    parser.add_argument("run", nargs="?", help="the run's folder (the newest under runs)")
    parser.add_argument("--trial", type=count, metavar="N", help="which trial (the best)")
    parser.add_argument(
        "--epoch", type=_epoch, default="best", help="best, last or the number of a kept epoch"
    )
    parser.add_argument("--format", choices=ENDINGS, help="(by the file's ending, or safetensors)")
    parser.add_argument("--out", help="the file (RUN/trial-N.safetensors)")
    build_option(parser)


def _epoch(text: str) -> str | int:
    return text if text in ("best", "last") else count(text)


def main(options: argparse.Namespace) -> int:
    """Write a trial's weights."""
    import cerebro

    result = cerebro.open(options.run)
    trial = result.best if options.trial is None else trial_of(result, options.trial)
    kind: Any = options.format or _format_of(options.out)
    out = options.out or Path(result.path) / f"trial-{trial.number}{ENDINGS[kind]}"
    with arguments(arguments_of(result.path, options.build)):
        print(trial.export(out, kind, epoch=options.epoch, build=build_of(options.build)))
    return 0


def _format_of(out: str | None) -> str:
    if out is None:
        return "safetensors"
    for kind, ending in ENDINGS.items():
        if Path(out).suffix == ending:
            return kind
    raise InputError(
        f"--out {out}: what format? Let it end in {', '.join(ENDINGS.values())}, or give --format"
    )
