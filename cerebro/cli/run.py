"""``run``: search with the definitions in a Python file."""

from __future__ import annotations

import argparse
from typing import Any

from cerebro.cli import search_file
from cerebro.cli.options import (
    new_command,
    parse_count,
    parse_progress,
    progress_option,
    report_interrupt,
    show_result,
    use_arguments,
)
from cerebro.cli.search_file import SHUFFLE_HELP

COUNTS = {
    "epochs": "epochs per trial",
    "n-trials": "trials to run",
    "workers": "worker processes; 0: train in this process (one per core)",
    "threads": "compute threads per worker (1)",
    "workers-per-device": "worker processes for each GPU (1)",
    "batch-size": "rows per batch",
    "eval-batch-size": "rows per validation batch (256, or the batch size for large rows)",
    "width": "live trials at a time, for adaptive searchers (8)",
    "max-retries": "retries of a unit after the loss of its worker (3)",
}

SOUGHT = ("build", "space", "data")
"""The names that the file must define."""


def add(commands: Any) -> None:
    parser = new_command(commands, "run", main, "search with the definitions in a Python file")
    parser.description = (
        "Search with the definitions in a Python file. The file defines build, space, data and, "
        "optionally, settings: a dictionary of keywords of cerebro.search. Options override it."
    )
    parser.add_argument("file", help="the Python file")
    for name, text in COUNTS.items():
        parser.add_argument(f"--{name}", type=parse_count, metavar="N", help=text)
    parser.add_argument("--devices", nargs="+", help="auto, cpu, cuda, or GPUs such as cuda:1")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all random numbers (0)")
    parser.add_argument("--shuffle", choices=["rows", "shards"], help=SHUFFLE_HELP)
    parser.add_argument(
        "--unit-timeout",
        type=float,
        metavar="SECONDS",
        help="time limit for one unit, a trial over one part of an epoch",
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="start no new units after this"
    )
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--metric", help="the metric that ranks trials, such as accuracy")
    parser.add_argument(
        "--mode", choices=["min", "max"], help="whether a small or a large value is better"
    )
    parser.add_argument(
        "--searcher",
        metavar="NAME",
        help="random, quasirandom, grid, successive_halving, hyperband, asha, median, pbt, tpe "
        "or gp (random)",
    )
    parser.add_argument(
        "--validation", help="a data folder, or the fraction of the data to hold out"
    )
    parser.add_argument("--keep", choices=["best", "last", "all"], help="which states to keep")
    parser.add_argument(
        "--if-exists",
        choices=["error", "resume", "new"],
        help="what to do if the run's folder exists (error)",
    )
    progress_option(parser)


def main(options: argparse.Namespace) -> int:
    with use_arguments([options.file]):
        return _search(options)


def _search(options: argparse.Namespace) -> int:
    import cerebro

    module = search_file.read_search_file(options.file, SOUGHT, "run")
    settings = search_file.settings_of(module, options.file, options)
    if options.progress is not None:
        settings["progress"] = parse_progress(options.progress)
    data = search_file.data_of(module)
    try:
        result = cerebro.search(module.build, module.space, data, **settings)
    except KeyboardInterrupt as error:
        return report_interrupt(error)
    return show_result(result)
