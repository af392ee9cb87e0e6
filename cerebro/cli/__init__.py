"""The command line: thin commands on top of the public interface.

Exit status: 0 on success, 1 on an error (one line that begins with ``error:`` and names the
cure), 130 on Ctrl-C and 143 on SIGTERM, after printing the command that resumes the run.
``--traceback``, or ``CEREBRO_TRACEBACK=1`` in the environment, shows the origin of an error.

Every module has ``add``, which adds the command with its options to the parser, and ``main``,
which runs it and returns the exit status. ``main`` imports the other modules that it needs, so
that mistakes in the arguments are reported without delay.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import cerebro.errors as errors
from cerebro.cli import (
    control,
    demo,
    doctor,
    export,
    plot,
    replay,
    resume,
    run,
    shard,
    show,
    verify,
)
from cerebro.errors import CerebroError, InputError, text_of
from cerebro.machine.imports import imported_shadows, raised_at
from cerebro.machine.signals import INTERRUPTED

COMMANDS = (demo, shard, run, resume, show, control, replay, verify, plot, export, doctor)

MESSAGE_LIMIT = 2000


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv
        The command's arguments; None: those of this process.

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
    except KeyboardInterrupt as error:
        print(f"\n{str(error) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `cerebro show | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        shadows = imported_shadows()
        print(f"error: {one_line(error)}{shadows and f' ({shadows})'}", file=sys.stderr)
        return 1


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Write a warning as one line, without the source line that Python adds."""
    print(f"warning: {message}", file=sys.stderr)


def one_line(error: BaseException) -> str:
    """Describe an error in one line, with its type if it is not one of Cerebro's."""
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
    """Return the user's line that raised the error; empty if there is none."""
    at = raised_at(error)
    return "" if at is None else f"{at.filename}, line {at.lineno}: "


class Parser(argparse.ArgumentParser):
    """A parser that reports mistakes like any other error: one line and status 1."""

    def error(self, message: str) -> NoReturn:
        """Raise InputError instead of ending the process."""
        raise InputError(f"{message}; see {self.prog} --help")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m cerebro",
        description="Trains many models over one data set and finds the best.",
        epilog="--traceback after any command shows the origin of an error.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for module in COMMANDS:
        module.add(commands)
    return parser


def _version() -> str:
    from cerebro.machine import environment

    return f"cerebro {environment.version()}"
