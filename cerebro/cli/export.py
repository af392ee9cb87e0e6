"""``export``: write a trial's weights, or its network as ONNX, for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cerebro.cli.options import (
    arguments_of,
    build_of,
    build_option,
    new_command,
    parse_count,
    trial_of,
    use_arguments,
)
from cerebro.errors import InputError

ENDINGS = {"safetensors": ".safetensors", "torch": ".pt", "onnx": ".onnx"}


def add(commands: Any) -> None:
    parser = new_command(commands, "export", main, "write a trial's weights into a file")
    parser.add_argument("run", nargs="?", help="the run's folder (the newest under runs)")
    parser.add_argument("--trial", type=parse_count, metavar="N", help="which trial (the best)")
    parser.add_argument(
        "--epoch",
        type=_parse_epoch,
        default="best",
        help="best, last or the number of a kept epoch",
    )
    parser.add_argument(
        "--fold", type=parse_count, metavar="N", help="which fold's model, if the trial has folds"
    )
    parser.add_argument("--format", choices=ENDINGS, help="(by the file's ending, or safetensors)")
    parser.add_argument("--out", help="the file (RUN/trial-N.safetensors)")
    parser.add_argument(
        "--data", metavar="PATH", help="for onnx: the training data, if it has moved"
    )
    build_option(parser)


def _parse_epoch(text: str) -> str | int:
    if text in ("best", "last"):
        return text
    try:
        return parse_count(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"give best, last or a number, not {text!r}") from None


def main(options: argparse.Namespace) -> int:
    import cerebro

    result = cerebro.open(options.run)
    trial = result.best if options.trial is None else trial_of(result, options.trial)
    name = f"{trial.number}" if options.fold is None else f"{trial.number}-fold-{options.fold}"
    if trial.folds or options.fold is not None:
        trial = _choose_fold(trial, options.fold)
    kind: Any = options.format or _format_of(options.out)
    out = options.out or Path(result.path) / f"trial-{name}{ENDINGS[kind]}"
    with use_arguments(arguments_of(result.path, options.build)):
        build = build_of(options.build)
        print(trial.export(out, kind, epoch=options.epoch, build=build, data=options.data))
    return 0


def _choose_fold(trial: Any, number: int | None) -> Any:
    folds = trial.folds
    if number is not None and number < len(folds):
        return folds[number]
    if not folds:
        raise InputError(f"--fold {number}: trial {trial.number} has no folds")
    raise InputError(
        f"trial {trial.number} has {len(folds)} folds, each with its own model: choose one with "
        f"--fold 0 to --fold {len(folds) - 1}"
    )


def _format_of(out: str | None) -> str:
    if out is None:
        return "safetensors"
    for kind, ending in ENDINGS.items():
        if Path(out).suffix == ending:
            return kind
    raise InputError(
        f"--out {out}: unknown format: end it in {', '.join(ENDINGS.values())}, or give --format"
    )
