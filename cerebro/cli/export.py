"""Write files about a run: ``plot report export``.

``plot`` draws one plot; ``report`` writes an HTML page with all of them; ``export`` writes a
trial's weights, or its network as ONNX, for other programs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cerebro
from cerebro.cli.options import (
    arguments_of,
    build_of,
    build_option,
    new_command,
    parse_count,
    parse_numbers,
    trial_of,
    use_arguments,
)
from cerebro.errors import InputError
from cerebro.machine.files import check_no_link

KINDS = ("curves", "gantt", "parallel", "importance", "slice")
ENDINGS = {"safetensors": ".safetensors", "torch": ".pt", "onnx": ".onnx"}


def add_plots(commands: Any) -> None:
    parser = new_command(commands, "plot", plot, "draw a plot of a run, or write an HTML page")
    _add_what_to_draw(parser)
    parser.add_argument(
        "--kind", choices=KINDS, help="what to draw (default: curves; in a page, all kinds)"
    )
    parser.add_argument("--dark", action="store_true", help="for a dark page (default: light)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the file to write: .png, .svg, .pdf, or .html for the page that `report` writes "
        "(default: KIND.png in the run's folder)",
    )
    parser = new_command(commands, "report", report, "write a run as one self-contained HTML page")
    _add_what_to_draw(parser)
    parser.add_argument(
        "--no-plots",
        "--no-pictures",
        action="store_true",
        help="leave out the plots (default: draw all)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="the file to write (default: report.html in the run's folder)"
    )


def add(commands: Any) -> None:
    parser = new_command(commands, "export", export, "write a trial's weights into a file")
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


def _add_what_to_draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", help="the run's folder (default: the newest one under runs)"
    )
    parser.add_argument("--metric", help="the metric to draw (default: the one that ranks trials)")
    parser.add_argument(
        "--trials", type=parse_numbers, metavar="N,N,...", help="draw only these (default: all)"
    )


def plot(options: argparse.Namespace) -> int:
    result = cerebro.open(options.run)
    if options.out is not None and Path(options.out).suffix == ".html":
        kinds = KINDS if options.kind is None else (options.kind,)
        print(_write_page(result, options, kinds))
    else:
        print(_write_plot(result, options))
    return 0


def report(options: argparse.Namespace) -> int:
    print(_write_page(cerebro.open(options.run), options, () if options.no_plots else KINDS))
    return 0


def _write_plot(result: Any, options: argparse.Namespace) -> Path:
    from cerebro.report import plots

    kind = options.kind or "curves"
    out = Path(options.out) if options.out else Path(result.path) / f"{kind}.png"
    if out.is_dir():
        raise InputError(f"--out {out} is a folder: give the file to write")
    if not out.suffix:
        out = out.with_name(f"{out.name}.png")
    figure = plots.plot(result, options.metric, trials=options.trials, kind=kind, dark=options.dark)
    if not options.out:
        check_no_link(out)  # a run from elsewhere must not choose the file to overwrite
    try:
        figure.savefig(out)
    except ValueError as error:  # matplotlib does not support the extension
        raise InputError(f"--out {out}: {error}") from error
    return out


def _write_page(result: Any, options: argparse.Namespace, kinds: Sequence[str]) -> Path:
    from cerebro.watch.page import make_report

    page = make_report(result, kinds=kinds, metric=options.metric, trials=options.trials)
    out = Path(options.out) if options.out else Path(result.path) / "report.html"
    if not options.out:
        check_no_link(out)  # a run from elsewhere must not choose the file to overwrite
    out.write_text(page, encoding="utf-8")
    return out


def _parse_epoch(text: str) -> str | int:
    if text in ("best", "last"):
        return text
    try:
        return parse_count(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"give best, last or a number, not {text!r}") from None


def export(options: argparse.Namespace) -> int:
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
