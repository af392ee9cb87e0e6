"""The command line: thin commands over the public interface.

Exit status: 0 if what was asked for was done, 1 on an error (one line that begins
with ``error:`` and says what to do), 130 on Ctrl-C. ``--traceback``, or
``CEREBRO_TRACEBACK=1`` in the environment, shows where an error came from.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cerebro import errors
from cerebro.errors import CerebroError, InputError, text_of
from cerebro.interrupts import uninterrupted

INTERRUPTED = 130
MESSAGE_LIMIT = 2000


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv
        Its arguments; those of this process if None.

    Returns
    -------
    int
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    warnings.showwarning = _show_warning
    show_traceback = "--traceback" in arguments or bool(os.environ.get("CEREBRO_TRACEBACK"))
    try:
        options = _parser().parse_args([a for a in arguments if a != "--traceback"])
        status = options.command(options)
        sys.stdout.flush()
        return int(status or 0)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `cerebro show | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Write a warning as one line, without the source line that Python adds."""
    print(f"warning: {message}", file=sys.stderr)


def one_line(error: BaseException) -> str:
    """Say what went wrong in one line; errors from elsewhere say what kind they are."""
    text = text_of(error, MESSAGE_LIMIT)
    if isinstance(error, OSError) and error.strerror:
        named = error.filename is not None
        reason = f"{error.filename}: {error.strerror}" if named else error.strerror
        text = errors.one_line(reason, MESSAGE_LIMIT)
    if isinstance(error, (CerebroError, OSError)):
        return text or type(error).__name__
    place = _place(error)
    return f"{place}{type(error).__name__}: {text}" if text else f"{place}{type(error).__name__}"


def _place(error: BaseException) -> str:
    """Name the user's line that raised: the last one outside of installed packages and us."""
    own = str(Path(__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        packaged = "site-packages" in frame.filename or frame.filename.startswith(("<", own))
        if not packaged and not frame.filename.startswith(sys.base_prefix):
            return f"{frame.filename}, line {frame.lineno}: "
    return ""


# --- parsing -----------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Reports a mistake as every other command does: one line and status 1."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process."""
        raise InputError(f"{message}; see {self.prog} --help")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m cerebro",
        description="Trains many models over one data set and finds the best.",
        epilog="--traceback after any command shows where an error came from.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for add in (_demo, _shard, _run, _show, _replay, _verify, _plot, _doctor):
        add(commands)
    return parser


def _version() -> str:
    from cerebro import environment

    return f"cerebro {environment.version()}"


def _command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + "."
    )
    parser.set_defaults(command=function)
    return parser


def _progress_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--progress",
        choices=["auto", "table", "lines", "none"],
        help="a live table, plain lines or nothing; auto: a table in a terminal",
    )


def _progress(value: str | None) -> str | bool:
    return False if value == "none" else value or "auto"


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _demo(commands: Any) -> None:
    parser = _command(commands, "demo", demo, "search 16 small models on handwritten digits")
    parser.add_argument("--quick", action="store_true", help="a few seconds: two epochs")
    parser.add_argument("--epochs", type=_count, help="epochs per trial (8)")
    parser.add_argument("--workers", type=_count, help="worker processes (one per core)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search (0)")
    parser.add_argument("--run", help="the run's folder (runs/demo-<time>)")
    parser.add_argument("--data", default="data/digits", help="the data's folder (data/digits)")
    _progress_option(parser)


def _shard(commands: Any) -> None:
    parser = _command(commands, "shard", shard, "write a data set as shards")
    parser.add_argument(
        "source", help="a .npz, .csv, .parquet or .arrow file, or a folder of class folders"
    )
    parser.add_argument("path", help="the folder to write")
    parser.add_argument("--shards", type=_count, help="how many (8, or more for large data)")
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="NAME[=SOURCE,...]",
        help="columns to keep; x=age,fare stacks two into one, y=label renames",
    )
    parser.add_argument(
        "--dtypes", nargs="+", metavar="NAME=DTYPE", help="types to store, such as x=float32"
    )
    parser.add_argument("--no-shuffle", action="store_true", help="keep the order of the rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle (0)")
    parser.add_argument("--size", metavar="WxH", help="size of the pictures of an image folder")
    parser.add_argument("--mode", default="RGB", help="colour mode of the pictures (RGB)")
    parser.add_argument(
        "--exist-ok",
        action="store_true",
        help="succeed if the folder was made from the same arguments",
    )
    _progress_option(parser)


def _run(commands: Any) -> None:
    parser = _command(commands, "run", run, "search as a Python file says")
    parser.description = (
        "Search as a Python file says. The file defines build, space, data and, if it likes, "
        "settings: a dictionary of keywords of cerebro.search. Options override settings."
    )
    parser.add_argument("file", help="the Python file")
    for name in ("epochs", "n-trials", "workers", "threads", "batch-size", "eval-batch-size"):
        parser.add_argument(f"--{name}", type=_count)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--width", type=_count, help="trials that live at a time")
    parser.add_argument("--max-retries", type=_count)
    parser.add_argument("--unit-timeout", type=float, metavar="SECONDS")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--metric", help="what to rank trials by, such as accuracy")
    parser.add_argument("--mode", choices=["min", "max"], help="whether small or large is good")
    parser.add_argument("--searcher", help="grid or random")
    parser.add_argument(
        "--validation", help="a data folder, or the fraction of the data to hold out"
    )
    parser.add_argument("--keep", choices=["best", "last", "all"], help="which states to keep")
    parser.add_argument("--if-exists", choices=["error", "resume"])
    _progress_option(parser)


def _show(commands: Any) -> None:
    parser = _command(commands, "show", show, "print a run's trials and its best configuration")
    parser.add_argument("run", nargs="?", help="the run's folder (the newest under runs)")
    parser.add_argument("--top", type=_count, default=20, metavar="N", help="trials to list (20)")
    parser.add_argument("--trial", type=_count, metavar="N", help="print one trial instead")


def _replay(commands: Any) -> None:
    parser = _command(
        commands, "replay", replay, "train one trial of a run again and compare every state"
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--trial", type=_count, required=True, metavar="N", help="which trial")
    parser.add_argument("--epochs", type=_count, help="only that many epochs")
    parser.add_argument(
        "--build", metavar="FILE", help="the file that defines build, if it has moved"
    )


def _verify(commands: Any) -> None:
    parser = _command(
        commands, "verify", verify, "compare a data set's or a run's files with their checksums"
    )
    parser.add_argument("path", help="a data folder or a run's folder")


def _plot(commands: Any) -> None:
    parser = _command(commands, "plot", plot, "draw a run into a picture file")
    parser.add_argument("run", nargs="?", help="the run's folder (the newest under runs)")
    parser.add_argument(
        "--kind", choices=["curves", "gantt", "parallel", "importance"], default="curves"
    )
    parser.add_argument("--metric", help="the metric (what trials are ranked by)")
    parser.add_argument("--trials", type=_count, nargs="+", metavar="N", help="only these")
    parser.add_argument("--out", help="the file, .png, .svg or .pdf (RUN/KIND.png)")


def _doctor(commands: Any) -> None:
    parser = _command(commands, "doctor", doctor, "print what this machine offers")
    parser.add_argument("path", nargs="?", default=".", help="the folder for data and runs (.)")


# --- commands ----------------------------------------------------------------


def demo(options: argparse.Namespace) -> int:
    """Search 16 small models on the digits."""
    from cerebro import demo as demonstration

    return demonstration.main(
        epochs=options.epochs or (2 if options.quick else demonstration.EPOCHS),
        workers=options.workers,
        seed=options.seed,
        run=options.run,
        data=options.data,
        progress=_progress(options.progress),
    )


def shard(options: argparse.Namespace) -> int:
    """Write a data set as shards."""
    import cerebro

    source: Any = options.source
    if Path(source).is_dir():
        size = None if options.size is None else _picture_size(options.size)
        source = cerebro.images(source, size=size, mode=options.mode)
    data = cerebro.shard(
        source,
        options.path,
        shards=options.shards,
        columns=_columns(options.columns),
        dtypes=_dtypes(options.dtypes),
        shuffle=not options.no_shuffle,
        seed=options.seed,
        exist_ok=options.exist_ok,
        progress=_progress(options.progress),
    )
    print(data)
    return 0


def _picture_size(text: str) -> tuple[int, int]:
    """Read ``WxH``, or one number for a square, as (height, width)."""
    try:
        width, _, height = text.lower().partition("x")
        return int(height or width), int(width)
    except ValueError:
        raise InputError(f"--size {text}: must look like 224x224 (width x height)") from None


def _columns(items: Sequence[str] | None) -> dict[str, Any] | list[str] | None:
    """Read ``x=age,fare y=label`` as a mapping, ``age fare`` as a list."""
    if items is None:
        return None
    if not any("=" in item for item in items):
        return list(items)
    columns: dict[str, Any] = {}
    for item in items:
        name, _, sources = item.partition("=")
        parts = sources.split(",") if sources else [name]
        columns[name] = parts if len(parts) > 1 else parts[0]
    return columns


def _dtypes(items: Sequence[str] | None) -> dict[str, str] | None:
    if items is None:
        return None
    dtypes = {}
    for item in items:
        name, equals, dtype = item.partition("=")
        if not equals:
            raise InputError(f"--dtypes {item}: must look like x=float32")
        dtypes[name] = dtype
    return dtypes


def run(options: argparse.Namespace) -> int:
    """Search as a Python file says."""
    import cerebro
    from cerebro.recipe import import_file

    file = Path(options.file)
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    module = import_file(file)
    missing = [name for name in ("build", "space", "data") if not hasattr(module, name)]
    if missing:
        raise InputError(f"{file} does not define {' and '.join(missing)}")
    settings = _settings(module, file, options)
    data = module.data
    if isinstance(data, (str, os.PathLike)):
        data = cerebro.Dataset(os.fspath(data))
    try:
        result = cerebro.search(module.build, module.space, data, **settings)
    except KeyboardInterrupt:
        return _interrupted(settings["run"])
    print()
    print(result.summary())
    print(f"\nThe run is in {result.path}. To look at it:\n")
    print(f"  python -m cerebro show {shlex.quote(str(result.path))}")
    return _status(result)


def _settings(module: Any, file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Merge the file's settings with the options, which win."""
    from cerebro.settings import new_run_folder

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
        settings["progress"] = _progress(options.progress)
    if isinstance(settings.get("validation"), str):
        settings["validation"] = _validation(settings["validation"])
    if settings.get("run") is None:
        settings["run"] = new_run_folder(None, "error")  # known even if Ctrl-C comes
    if "epochs" not in settings:
        raise InputError(
            f"how many epochs? Give --epochs, or settings = dict(epochs=...) in {file}"
        )
    return settings


def _refuse_unknown(settings: dict[Any, Any], file: Path) -> None:
    """Name the first setting that cerebro.search does not take, and what may be meant."""
    from cerebro.search import search

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


def _interrupted(path: Any) -> int:
    """Say what an interrupted run has kept."""
    with uninterrupted():
        return _say_what_is_kept(path)


def _say_what_is_kept(path: Any) -> int:
    import cerebro

    try:
        kept = cerebro.open(path)
    except (CerebroError, OSError):
        print("\ninterrupted before any trial began; nothing was kept", file=sys.stderr)
        return INTERRUPTED
    epochs = sum(trial.epoch for trial in kept.trials)
    print(
        f"\ninterrupted: {len(kept.trials)} trials with {epochs} finished epochs are kept in "
        f"{kept.path}. To look at them:\n\n"
        f"  python -m cerebro show {shlex.quote(str(kept.path))}",
        file=sys.stderr,
    )
    return INTERRUPTED


def _status(result: Any) -> int:
    """Give the exit status of a search that returned."""
    if result.status == "finished":
        return 0
    print(f"error: the run is {result.status}, not finished", file=sys.stderr)
    return 1


def show(options: argparse.Namespace) -> int:
    """Print a run or one of its trials."""
    import cerebro
    from cerebro.report import summary

    result = cerebro.open(options.run)
    if options.trial is None:
        print(summary.render(result, options.top))
    else:
        print(summary.render_trial(_trial(result, options.trial)))
    return 0


def _trial(result: Any, number: int) -> Any:
    for trial in result.trials:
        if trial.number == number:
            return trial
    raise InputError(f"--trial {number}: {result.path} has trials 0 to {len(result.trials) - 1}")


def replay(options: argparse.Namespace) -> int:
    """Train one trial again and compare every state."""
    import cerebro

    build = None
    if options.build is not None:
        from cerebro.recipe import import_file

        module = import_file(options.build)
        build = getattr(module, "build", None)
        if build is None:
            raise InputError(f"--build {options.build}: the file does not define build")
    outcome = cerebro.replay(options.run, options.trial, build, epochs=options.epochs)
    print(outcome)
    return 0 if outcome.identical else 1


def verify(options: argparse.Namespace) -> int:
    """Compare files with their checksums."""
    import cerebro
    from cerebro.report import format as fmt

    path = Path(options.path)
    if (path / "run.sqlite").exists():
        checked = cerebro.open(path).verify()
        print(f"{path}: {len(checked)} states and data sets, as they were written")
    elif (path / "manifest.json").exists():
        data = cerebro.Dataset(path)
        data.verify()
        print(f"{path}: {data.num_shards} shards, {fmt.size(data.nbytes)}, as they were written")
    elif not path.exists():
        raise InputError(f"{path}: there is no such folder")
    else:
        raise InputError(f"{path}: neither a data folder (manifest.json) nor a run (run.sqlite)")
    return 0


def plot(options: argparse.Namespace) -> int:
    """Draw a run into a picture file."""
    import cerebro

    result = cerebro.open(options.run)
    figure = result.plot(options.metric, trials=options.trials, kind=options.kind)
    out = Path(options.out) if options.out else Path(result.path) / f"{options.kind}.png"
    try:
        figure.savefig(out)
    except ValueError as error:  # an ending that matplotlib does not know
        raise InputError(f"--out {out}: {error}") from error
    print(out)
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Print what this machine offers."""
    from cerebro import diagnosis

    print(diagnosis.report(options.path))
    return 0
