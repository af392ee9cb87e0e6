"""``run``: search with the definitions in a Python file."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebro.cli.options import (
    arguments,
    count,
    imported,
    interrupted,
    new_command,
    progress,
    progress_option,
    status_of,
)
from cerebro.errors import InputError

COUNTS = {
    "epochs": "epochs per trial",
    "n-trials": "trials to run",
    "workers": "worker processes; 0: train in this process (one per core)",
    "threads": "compute threads per worker (1)",
    "workers-per-device": "worker processes for each GPU (1)",
    "batch-size": "rows per batch",
    "eval-batch-size": "rows per validation batch (the batch size)",
    "width": "live trials at a time, for adaptive searchers (8)",
    "max-retries": "retries of a unit after the loss of its worker (3)",
}

SOUGHT = ("build", "space", "data")
"""The names that the file must define."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = new_command(commands, "run", main, "search with the definitions in a Python file")
    parser.description = (
        "Search with the definitions in a Python file. The file defines build, space, data and, "
        "optionally, settings: a dictionary of keywords of cerebro.search. Options override it."
    )
    parser.add_argument("file", help="the Python file")
    for name, text in COUNTS.items():
        parser.add_argument(f"--{name}", type=count, metavar="N", help=text)
    parser.add_argument("--devices", nargs="+", help="auto, cpu, cuda, or GPUs such as cuda:1")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all random numbers (0)")
    parser.add_argument(
        "--unit-timeout",
        type=float,
        metavar="SECONDS",
        help="time limit for one trial on one shard",
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
    """Search with the definitions in a Python file."""
    with arguments([options.file]):
        return _search(options)


def _search(options: argparse.Namespace) -> int:
    import cerebro
    from cerebro.machine.guard import stopped_at

    file = Path(options.file)
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    module = imported(file, *SOUGHT)
    stop = stopped_at(module)
    if stop is not None:
        warnings.warn(
            f"{stop.where}: the file calls {stop.call} itself. That call is ignored: build, "
            "space, data and settings above it are used, with the options given here. For the "
            f"file's own call, run the file: python {shlex.quote(str(file))}",
            stacklevel=1,
        )
    missing = [name for name in SOUGHT if not hasattr(module, name)]
    if missing:
        raise InputError(f"{file} does not define {' and '.join(missing)}")
    settings = _settings(module, file, options)
    data = module.data
    if isinstance(data, (str, os.PathLike)):
        data = cerebro.Dataset(os.fspath(data))
    try:
        result = cerebro.search(module.build, module.space, data, **settings)
    except KeyboardInterrupt as error:
        return interrupted(error)
    print()
    print(result.summary())
    print(f"\nThe run is in {result.path}. To look at it:\n")
    print(f"  python -m cerebro show {shlex.quote(str(result.path))}")
    return status_of(result)


def _settings(module: Any, file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Merge the file's settings with the options, which take precedence."""
    settings = getattr(module, "settings", {})
    if not isinstance(settings, Mapping):
        raise InputError(
            f"{file}: settings must be a dictionary of cerebro.search's keywords, such as "
            f"settings = dict(epochs=10), not {type(settings).__name__}"
        )
    settings = dict(settings)
    _refuse_unknown(settings, file)
    for name, value in vars(options).items():
        if name not in ("command", "file") and value is not None:
            settings[name] = value
    if options.progress is not None:
        settings["progress"] = progress(options.progress)
    if isinstance(settings.get("validation"), str):
        settings["validation"] = _validation(settings["validation"])
    if "epochs" not in settings:
        raise InputError(
            f"epochs is missing: give --epochs, or settings = dict(epochs=...) in {file}"
        )
    return settings


def _refuse_unknown(settings: dict[Any, Any], file: Path) -> None:
    """Raise InputError for a setting that cerebro.search does not take, with a suggestion."""
    from cerebro.api.search import search

    known = list(inspect.signature(search).parameters)[3:]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise InputError(f"{file}: settings has {name!r}, which search does not take: {hint}")


def _validation(text: str) -> Any:
    """Read a fraction, or open a data folder."""
    import cerebro

    try:
        return float(text)
    except ValueError:
        return cerebro.Dataset(text)
