"""Define what commands share: options, ``--json``, and output that may be lost.

``--json`` prints a command's findings as one JSON document. Numbers that JSON lacks (NaN, infinity)
become null; paths become strings.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from cerebro.errors import CerebroError, InputError
from cerebro.machine.files import expand_path
from cerebro.machine.mappings import strict_json


def new_command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + "."
    )
    parser.set_defaults(command=function)
    return parser


def progress_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--progress",
        choices=["auto", "table", "lines", "none"],
        help="a live table, plain lines or nothing; auto: a table in a terminal",
    )


def parse_progress(value: str | None) -> str | bool:
    """Convert the option to a value of ``progress=``."""
    return False if value == "none" else value or "auto"


def parse_count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"give a whole number, not {text!r}") from None
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def parse_numbers(text: str) -> list[int]:
    try:
        return [parse_count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"give trial numbers with commas between them, such as 3,7, not {text!r}"
        ) from None


_PATHS = ("run", "path", "data", "validation", "out", "folder", "file", "build", "first", "others",
          "key", "source")  # fmt: skip
"""The arguments of all commands that are paths, or lists of them."""


def expand_paths(options: argparse.Namespace) -> None:
    """Expand ``~`` and variables in paths: shells leave ``--out=~/x`` as it is."""
    for name in _PATHS:
        value = getattr(options, name, None)
        if isinstance(value, str):
            setattr(options, name, expand_path(value))
        elif value:
            setattr(options, name, list(map(expand_path, value)))


def build_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--build", metavar="FILE", help="the file that defines build, if it has moved"
    )


@contextmanager
def use_arguments(argv: Sequence[str]) -> Iterator[None]:
    """Use a script's `sys.argv` in the block, in this process and in workers."""
    before = list(sys.argv)
    sys.argv[:] = argv
    try:
        yield
    finally:
        sys.argv[:] = before


def arguments_of(run: Any, file: str | Path | None) -> list[str]:
    """Return `sys.argv` of the program that started a run; `file` replaces its script."""
    from cerebro.results.saved_run import SavedRun

    recorded: list[str] = []
    with suppress(CerebroError, OSError):  # the command itself will report the error
        recorded = SavedRun(run).argv
    return [*([str(file)] if file is not None else recorded[:1] or sys.argv[:1]), *recorded[1:]]


def import_user_file(file: str | Path, *sought: str) -> ModuleType:
    """Import a user's file; if the file itself starts a search, the import ends there."""
    from cerebro.run.recipe import import_file

    try:
        return import_file(file, sought=sought)
    except SystemExit as error:  # which would look like success
        raise InputError(
            f"{file} ends the process while it is imported (sys.exit({error})): put a script's "
            "actions behind if __name__ == '__main__'"
        ) from error


def build_of(file: str | None) -> Callable[..., Any] | None:
    if file is None:
        return None
    build: Callable[..., Any] | None = getattr(import_user_file(file, "build"), "build", None)
    if build is None:
        raise InputError(f"--build {file}: the file does not define build")
    return build


def trial_of(result: Any, number: int) -> Any:
    """Return the trial given by ``--trial``; raise InputError if the run does not have it."""
    if number < len(result.trials):
        return result.trials[number]
    has = f"trials 0 to {len(result.trials) - 1}" if result.trials else "no trials yet"
    raise InputError(f"--trial {number}: {result.path} has {has}")


def say(text: object = "") -> None:
    """Print text in a command that trains; if the output is lost, drop it from now on."""
    try:
        print(text, flush=True)
    except OSError:
        drop_lost_output()


def complain(text: str) -> None:
    """Print text to standard error; if it is lost, the exit status still tells."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr)


def drop_lost_output() -> None:
    """Send streams that cannot be written to nowhere, including text that is not yet written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except ValueError:  # closed
            continue
        except OSError:
            # Otherwise Python complains at its end, and changes the exit status.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")


def print_json(value: Any) -> None:
    print(strict_json(value))
