"""Train and control runs: ``run plan resume replay stop pause continue``.

``run`` and ``plan`` read a Python file that defines ``build``, ``space``, ``data`` and, optionally,
``settings``.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import cerebro
from cerebro.cli.options import (
    arguments_of,
    build_of,
    build_option,
    complain,
    import_user_file,
    json_option,
    new_command,
    parse_count,
    parse_numbers,
    parse_progress,
    print_json,
    progress_option,
    say,
    use_arguments,
)
from cerebro.cli.steer import clone_of, clone_options
from cerebro.errors import InputError
from cerebro.machine.signals import INTERRUPTED, defer_interrupts

COUNTS = {
    "epochs": "epochs per trial",
    "n-trials": "trials to run",
    "workers": "workers; 0: only this process (a process per core, or the lanes of all GPUs)",
    "threads": "compute threads per worker (1)",
    "workers-per-device": "trials that each GPU trains at once (by the model)",
    "batch-size": "rows per batch",
    "eval-batch-size": "rows per validation batch (256, or the batch size for large rows)",
    "width": "live trials at a time, for adaptive searchers (8)",
    "max-retries": "retries of a unit after the loss of its worker (3)",
}

PLANNED = ("epochs", "n-trials", "workers", "threads", "workers-per-device", "width")
"""The members of `COUNTS` that ``plan`` takes, too."""

CONTROLS = {
    "stop": "stop an active run, or one of its trials; finished epochs are kept",
    "pause": "pause a run, or one of its trials, until it is continued",
    "unpause": "let a paused run or trial go on",
    "continue": "the same as unpause",
}


def add(commands: Any) -> None:
    parser = new_command(commands, "plan", plan, "estimate what a search would cost")
    parser.description = (
        "Estimate what a search would cost: its searcher and scheduler run on a simulated clock, "
        "and nothing is trained. The file is that of `run`."
    )
    _add_settings(parser, PLANNED)
    parser.add_argument(
        "--rows-per-second",
        type=float,
        metavar="N",
        help="rows that one worker trains per second, which a run's progress shows",
    )
    json_option(parser)
    parser = new_command(commands, "run", run, "search with the definitions in a Python file")
    parser.description = (
        "Search with the definitions in a Python file. The file defines build, space, data and, "
        "optionally, settings: a dictionary of keywords of cerebro.search. Options override it."
    )
    _add_settings(parser, COUNTS)
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
    parser.add_argument("--keep", choices=["best", "last", "all"], help="which states to keep")
    parser.add_argument(
        "--if-exists",
        choices=["error", "resume", "new"],
        help="what to do if the run's folder exists (error)",
    )
    progress_option(parser)
    parser = new_command(
        commands, "resume", resume, "resume a run, or train a finished one for more epochs"
    )
    parser.add_argument("run", help="the run's folder, or the URL of its copy")
    parser.add_argument(
        "--epochs", type=parse_count, help="the total number of epochs; with --clone, the clone's"
    )
    parser.add_argument(
        "--trials", type=parse_numbers, metavar="N,N,...", help="only these, whatever their status"
    )
    parser.add_argument("--workers", type=parse_count, help="worker processes (as many as before)")
    build_option(parser)
    parser.add_argument("--data", metavar="PATH", help="the current path of the run's data")
    parser.add_argument(
        "--validation", metavar="PATH", help="the current path of its validation data"
    )
    parser.add_argument(
        "--clone", type=parse_count, metavar="N", help="first clone this trial, with --set"
    )
    clone_options(parser)
    progress_option(parser)
    parser = new_command(
        commands, "replay", replay, "train one trial of a run again and compare every state"
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--trial", type=parse_count, required=True, metavar="N", help="which trial")
    parser.add_argument("--epochs", type=parse_count, help="only that many epochs")
    build_option(parser)
    parser.add_argument("--data", metavar="PATH", help="the current path of the run's data")
    for verb, text in CONTROLS.items():
        parser = new_command(commands, verb, send_command, text)
        parser.set_defaults(verb=verb)
        parser.add_argument("run", help="the run's folder")
        parser.add_argument("--trial", type=parse_count, metavar="N", help="only this trial")


def _add_settings(parser: argparse.ArgumentParser, counts: Iterable[str]) -> None:
    parser.add_argument("file", help="the Python file")
    for name in counts:
        parser.add_argument(f"--{name}", type=parse_count, metavar="N", help=COUNTS[name])
    parser.add_argument("--devices", nargs="+", help="auto, cpu, cuda, or GPUs such as cuda:1")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all random numbers (0)")
    parser.add_argument(
        "--shuffle",
        choices=["rows", "shards"],
        help="the order of rows: all rows anew in each epoch, or groups of shards (rows for data "
        "up to 4 GB)",
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


def run(options: argparse.Namespace) -> int:
    with use_arguments([options.file]):
        module = _read_search_file(options.file, ("build", "space", "data"), "run")
        settings = _merge_settings(module, options)
        if options.progress is not None:
            settings["progress"] = parse_progress(options.progress)
        data = _open_data(module)
        return _train(lambda: cerebro.search(module.build, module.space, data, **settings))


def _train(search: Callable[[], cerebro.Result]) -> int:
    """Search; print what is found or, on Ctrl-C, how to resume; return the exit status."""
    try:
        result = search()
    except KeyboardInterrupt as error:
        with defer_interrupts(error):
            complain(f"\n{str(error) or 'interrupted before any trial began; nothing was kept'}")
        return INTERRUPTED
    path = shlex.quote(str(result.path))
    say(f"\n{result.summary()}\n\nThe run is in {result.path}. To look at it:\n")
    say(f"  python -m cerebro show {path}")
    if result.status == "finished":
        return 0
    complain(
        f"error: the run is {result.status}, not finished; to resume it: "
        f"python -m cerebro resume {path}"
    )
    return 1


def plan(options: argparse.Namespace) -> int:
    with use_arguments([options.file]):
        module = _read_search_file(options.file, ("space", "data"), "plan")
        settings = _merge_settings(module, options)
        parameters = inspect.signature(cerebro.plan).parameters
        plan_settings = {name: value for name, value in settings.items() if name in parameters}
        outcome = cerebro.plan(module.space, _open_data(module), **plan_settings)
    if options.json:
        print_json(asdict(outcome))
    else:
        print(outcome)
    return 0


def _read_search_file(name: str, sought: Sequence[str], command: str) -> ModuleType:
    """Import a file for `command`; raise InputError if it does not define the names `sought`."""
    from cerebro.machine.guard import find_stop

    file = Path(name)
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    module = import_user_file(file, *sought)
    stop = find_stop(module)
    if stop is not None:
        warnings.warn(
            f"{stop.where}: the file calls {stop.call} itself. That call is ignored: {command} "
            "uses build, space, data and settings above it, with the options given here. For the "
            f"file's own call, run the file: python {shlex.quote(str(file))}",
            stacklevel=1,
        )
    missing = [name for name in sought if not hasattr(module, name)]
    if missing:
        raise InputError(f"{file} does not define {' and '.join(missing)}")
    return module


def _open_data(module: ModuleType) -> Any:
    """Return the file's data; if the data is a folder, open it."""
    data = module.data
    return cerebro.Dataset(os.fspath(data)) if isinstance(data, (str, os.PathLike)) else data


def _merge_settings(module: ModuleType, options: argparse.Namespace) -> dict[str, Any]:
    """Merge the file's settings with the options, which take precedence."""
    file, settings = options.file, getattr(module, "settings", {})
    if not isinstance(settings, Mapping):
        raise InputError(
            f"{file}: settings must be a dictionary of cerebro.search's keywords, such as "
            f"settings = dict(epochs=10), not {type(settings).__name__}"
        )
    settings = dict(settings)
    _refuse_unknown(settings, file)
    for name, value in vars(options).items():
        if name not in ("command", "file", "progress", "json") and value is not None:
            settings[name] = value
    held_out = settings.get("validation")
    if isinstance(held_out, str):
        try:
            settings["validation"] = float(held_out)
        except ValueError:
            settings["validation"] = cerebro.Dataset(held_out)
    if "epochs" not in settings:
        raise InputError(
            f"epochs is missing: give --epochs, or settings = dict(epochs=...) in {file}"
        )
    return settings


def _refuse_unknown(settings: dict[Any, Any], file: str) -> None:
    """Raise InputError, with a suggestion, for a setting that cerebro.search does not accept."""
    from cerebro.api.search import search

    keywords = list(inspect.signature(search).parameters)[3:]
    for name in settings:
        if name not in keywords:
            near = difflib.get_close_matches(str(name), keywords, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(keywords)}"
            raise InputError(f"{file}: settings has {name!r}, which search does not take: {hint}")


def resume(options: argparse.Namespace) -> int:
    names = ("data", "validation", "epochs", "trials", "workers")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    settings["progress"] = parse_progress(options.progress)
    if options.clone is not None:
        settings["actions"] = [clone_of(options, options.clone)]
        del settings["epochs"]  # they are the clone's
    elif options.set or options.after is not None or options.cold or options.anyway:
        raise InputError("--set, --after, --cold and --anyway are of a clone: give --clone N, too")
    with use_arguments(arguments_of(options.run, options.build)):
        return _train(lambda: cerebro.resume(options.run, build_of(options.build), **settings))


def replay(options: argparse.Namespace) -> int:
    with use_arguments(arguments_of(options.run, options.build)):
        build = build_of(options.build)
        outcome = cerebro.replay(
            options.run, options.trial, build, data=options.data, epochs=options.epochs
        )
    say(outcome)
    return 0 if outcome.identical else 1


def send_command(options: argparse.Namespace) -> int:
    cerebro.control.send(options.run, cerebro.control.Command(options.verb, options.trial))
    what = "the run" if options.trial is None else f"trial {options.trial}"
    happens = {
        "stop": f"{what} stops; what it has trained is kept",
        "pause": f"{what} pauses when its units in flight are done; to continue:\n\n"
        f"  python -m cerebro continue {shlex.quote(options.run)}"
        + ("" if options.trial is None else f" --trial {options.trial}"),
        "continue": f"{what} continues",
    }
    happens["unpause"] = happens["continue"]
    print(f"{options.run}: {happens[options.verb]}")
    return 0
