"""``logs``: print the output of a run's trials."""

from __future__ import annotations

import argparse
import time
from typing import Any

from cerebro.cli.options import new_command, parse_count, trial_of

SECONDS = 0.5
"""The seconds between two checks for new output with ``--follow``."""


def add(commands: Any) -> None:
    parser = new_command(commands, "logs", main, "print what trials have printed and logged")
    parser.add_argument("run", nargs="?", help="the run's folder (the newest under runs)")
    parser.add_argument("--trial", type=parse_count, metavar="N", help="only this trial")
    parser.add_argument(
        "--follow", action="store_true", help="keep printing new output until the run ends"
    )


def main(options: argparse.Namespace) -> int:
    import cerebro

    result = cerebro.open(options.run)
    shown: dict[int, int] = {}
    _print_new(result, options.trial, shown)
    if not any(shown.values()) and not options.follow:
        who = "no trial has" if options.trial is None else f"trial {options.trial} has not"
        print(f"{who} printed anything")
    while options.follow and result.status in ("running", "paused"):
        time.sleep(SECONDS)
        result.refresh()
        _print_new(result, options.trial, shown)
    return 0


def _print_new(result: Any, number: int | None, shown: dict[int, int]) -> None:
    """Print what trials have printed since the last call; `shown` counts characters by trial."""
    trials = result.trials if number is None else [trial_of(result, number)]
    for trial in trials:
        text = trial.log
        new = text[shown.get(trial.number, 0) :]
        shown[trial.number] = len(text)
        if new:
            heading = f"--- trial {trial.number}\n" if number is None else ""
            print(f"{heading}{new}", end="" if new.endswith("\n") else "\n", flush=True)
