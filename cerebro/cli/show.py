"""``show``: print a run or one of its trials."""

from __future__ import annotations

import argparse
from typing import Any

from cerebro.cli.options import (
    json_option,
    new_command,
    parse_count,
    print_json,
    run_record,
    trial_of,
    trial_record,
)


def add(commands: Any) -> None:
    parser = new_command(commands, "show", main, "print a run's trials and its best configuration")
    parser.add_argument("run", nargs="?", help="the run's folder (the newest under runs)")
    parser.add_argument(
        "--top", type=parse_count, default=20, metavar="N", help="trials to list (20)"
    )
    parser.add_argument("--trial", type=parse_count, metavar="N", help="print one trial instead")
    json_option(parser)


def main(options: argparse.Namespace) -> int:
    import cerebro
    from cerebro.report import summary

    result = cerebro.open(options.run)
    trial = None if options.trial is None else trial_of(result, options.trial)
    if options.json:
        print_json(run_record(result) if trial is None else trial_record(trial))
    elif trial is None:
        print(summary.render(result, options.top))
    else:
        print(summary.render_trial(trial))
    return 0
