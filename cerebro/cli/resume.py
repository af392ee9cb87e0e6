"""``resume``, ``replay``: train a recorded run for longer, or one of its trials again."""

from __future__ import annotations

import argparse
from typing import Any

from cerebro.cli.options import (
    arguments_of,
    build_of,
    build_option,
    new_command,
    parse_count,
    parse_numbers,
    parse_progress,
    progress_option,
    report_interrupt,
    say,
    show_result,
    use_arguments,
)


def add(commands: Any) -> None:
    parser = new_command(
        commands, "resume", resume, "resume a run, or train a finished one for more epochs"
    )
    parser.add_argument("run", help="the run's folder, or the URL of its copy")
    parser.add_argument("--epochs", type=parse_count, help="the total number of epochs")
    parser.add_argument(
        "--trials", type=parse_numbers, metavar="N,N,...", help="only these, whatever their status"
    )
    parser.add_argument("--workers", type=parse_count, help="worker processes (as many as before)")
    build_option(parser)
    parser.add_argument("--data", metavar="PATH", help="the current path of the run's data")
    parser.add_argument(
        "--validation", metavar="PATH", help="the current path of its validation data"
    )
    progress_option(parser)
    parser = new_command(
        commands, "replay", replay, "train one trial of a run again and compare every state"
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--trial", type=parse_count, required=True, metavar="N", help="which trial")
    parser.add_argument("--epochs", type=parse_count, help="only that many epochs")
    build_option(parser)
    parser.add_argument("--data", metavar="PATH", help="the current path of the run's data")


def resume(options: argparse.Namespace) -> int:
    import cerebro

    shown: Any = parse_progress(options.progress)
    try:
        with use_arguments(arguments_of(options.run, options.build)):
            result = cerebro.resume(
                options.run,
                build_of(options.build),
                data=options.data,
                validation=options.validation,
                epochs=options.epochs,
                trials=options.trials,
                workers=options.workers,
                progress=shown,
            )
    except KeyboardInterrupt as error:
        return report_interrupt(error)
    return show_result(result)


def replay(options: argparse.Namespace) -> int:
    import cerebro

    with use_arguments(arguments_of(options.run, options.build)):
        build = build_of(options.build)
        outcome = cerebro.replay(
            options.run, options.trial, build, data=options.data, epochs=options.epochs
        )
    say(outcome)
    return 0 if outcome.identical else 1
