"""Run the command line: thin commands on top of the public interface.

Exit status: 0 on success; 1 on an error, with one line that begins with ``error:`` and says how to
fix it; 130 on Ctrl-C and 143 on SIGTERM, after printing the command that resumes the run; 141 if
the reader of the output leaves, as in ``cerebro show | head``, unless the command trains.
``--traceback``, or ``CEREBRO_TRACEBACK=1`` in the environment, shows the origin of an error.

Functions that begin with ``add`` add commands with their options to the parser. A command is a
function that returns the exit status. Heavy modules, such as those for plots, are imported by the
command that needs them, so that mistakes in the arguments are reported without delay.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import cerebro.errors as errors
from cerebro.cli import agent, demo, doctor, export, run, shard, show, steer, watch
from cerebro.cli.options import complain, drop_lost_output, expand_paths, new_command
from cerebro.errors import CerebroError, InputError, text_of
from cerebro.machine.environment import version
from cerebro.machine.imports import describe_shadows, find_raising_line, import_extra
from cerebro.machine.signals import INTERRUPTED, READER_LEFT

ADDERS = (
    demo.add,
    shard.add,
    run.add,
    steer.add,
    show.add,
    watch.add,
    export.add_plots,
    show.add_verify,
    export.add,
    agent.add,
    doctor.add,
)
"""What adds the commands, in the order in which ``--help`` lists them."""

TRAINING = (demo.main, run.run, run.resume, run.replay)
"""Commands that train continue if standard output is closed; see `cerebro.cli.options.say`."""

MESSAGE_LIMIT = 2000


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of this process, and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # it may lack characters, such as ±
    warnings.showwarning = _show_warning
    trains = False
    show_traceback = "--traceback" in arguments or bool(os.environ.get("CEREBRO_TRACEBACK"))
    try:
        words = [argument for argument in arguments if argument != "--traceback"]
        parser = make_parser()
        if not words:
            parser.print_help()
            return 0
        _check_command(parser, words)
        options = parser.parse_args(words)
        expand_paths(options)
        trains = options.command in TRAINING
        status = options.command(options)
        if sys.stdout is not None:  # as after `>&-`
            sys.stdout.flush()
        return int(status or 0)
    except KeyboardInterrupt as error:
        complain(f"\n{str(error) or 'interrupted'}")
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not trains:  # as in `cerebro show | head`
            return READER_LEFT
        if show_traceback:
            complain(traceback.format_exc().rstrip())
        shadows = describe_shadows(error)
        complain(f"error: {one_line(error)}{shadows and f' ({shadows})'}")
        return 1
    finally:
        drop_lost_output()


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Write a warning as one line, without the source line that Python adds."""
    complain(f"warning: {message}")


def one_line(error: BaseException) -> str:
    """Describe an error in one line, with its type unless it is one of Cerebro's exceptions."""
    text = text_of(error, MESSAGE_LIMIT)
    if isinstance(error, OSError) and error.strerror:
        named = error.filename is not None
        reason = f"{error.filename}: {error.strerror}" if named else error.strerror
        text = errors.one_line(reason, MESSAGE_LIMIT)
    if isinstance(error, (CerebroError, OSError)):
        return text or type(error).__name__
    line = find_raising_line(error)
    place = "" if line is None else f"{line.filename}, line {line.lineno}: "
    return f"{place}{type(error).__name__}{text and f': {text}'}"


class Parser(argparse.ArgumentParser):
    """A parser that reports mistakes like any other error: in one line, with status 1."""

    commands: Sequence[str] = ()
    """The names of all commands."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the process after ``--help`` and the like; raise OSError if the text is lost."""
        if sys.stdout is not None:
            sys.stdout.flush()
        super().exit(status, message)


def make_parser(program: str = "python -m cerebro") -> Parser:
    """Return the parser of all commands; help texts call it by the name `program`."""
    parser = Parser(
        prog=program,
        description="Trains many models over one dataset and finds the best.",
        epilog="Add --traceback to any command to see the full traceback of an error.",
    )
    parser.add_argument("--version", action="version", version=f"cerebro {version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for add in ADDERS:
        add(commands)
    completion = new_command(
        commands, "completion", _complete, "print a script that completes commands in a shell"
    )
    completion.description = (
        "Print a script that completes the commands and options of `cerebro`. For bash: "
        'eval "$(cerebro completion bash)" in ~/.bashrc.'
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    parser.commands = list(commands.choices)
    return parser


def _complete(options: argparse.Namespace) -> int:
    shtab = import_extra("shtab", "completion", "shell completion needs shtab")
    print(shtab.complete(make_parser("cerebro"), options.shell))
    return 0


def _check_command(parser: Parser, arguments: Sequence[str]) -> None:
    """Raise InputError for an unknown command, with a suggestion."""
    names = parser.commands
    if arguments and not arguments[0].startswith("-") and arguments[0] not in names:
        near = difflib.get_close_matches(arguments[0], names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(names)}"
        raise InputError(f"unknown command {arguments[0]!r}: {hint}; see {parser.prog} --help")
