"""``plan``: estimate the cost of the search that a Python file defines, without training."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import asdict
from typing import Any

from cerebro.cli import run
from cerebro.cli.options import json_option, new_command, parse_count, print_json, use_arguments
from cerebro.cli.run import SHUFFLE_HELP

COUNTS = {
    "epochs": "epochs per trial",
    "n-trials": "trials to run",
    "workers": "worker processes (one per core)",
    "threads": "compute threads per worker (1)",
    "workers-per-device": "worker processes for each GPU (1)",
    "width": "live trials at a time, for adaptive searchers (8)",
}


def add(commands: Any) -> None:
    parser = new_command(commands, "plan", main, "estimate what a search would cost")
    parser.description = (
        "Estimate what a search would cost: its searcher and scheduler run on a simulated clock, "
        "and nothing is trained. The file is that of `run`."
    )
    parser.add_argument("file", help="the Python file")
    for name, text in COUNTS.items():
        parser.add_argument(f"--{name}", type=parse_count, metavar="N", help=text)
    parser.add_argument("--devices", nargs="+", help="auto, cpu, cuda, or GPUs such as cuda:1")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all random numbers (0)")
    parser.add_argument("--shuffle", choices=["rows", "shards"], help=SHUFFLE_HELP)
    parser.add_argument("--searcher", metavar="NAME", help="the searcher (random)")
    parser.add_argument(
        "--validation", help="a data folder, or the fraction of the data to hold out"
    )
    parser.add_argument(
        "--rows-per-second",
        type=float,
        metavar="N",
        help="rows that one worker trains per second, which a run's progress shows",
    )
    json_option(parser)


def main(options: argparse.Namespace) -> int:
    import cerebro

    with use_arguments([options.file]):
        module = run.read_search_file(options.file, ("space", "data"), "plan")
        settings = run.settings_of(module, options.file, options)
        parameters = inspect.signature(cerebro.plan).parameters
        plan_settings = {name: value for name, value in settings.items() if name in parameters}
        plan = cerebro.plan(module.space, run.data_of(module), **plan_settings)
    if options.json:
        print_json(asdict(plan))
    else:
        print(plan)
    return 0
