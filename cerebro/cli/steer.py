"""Steer a running search: ``clone add extend actions``."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cerebro import control
from cerebro.cli.options import json_option, new_command, parse_count, print_json
from cerebro.errors import InputError
from cerebro.machine.files import path_of
from cerebro.report.format import rough_duration
from cerebro.run.records import ActionRecord
from cerebro.run.store import read_actions, reader


def add(commands: Any) -> None:
    parser = new_command(commands, "clone", clone, "clone a trial of a live run, with changes")
    parser.description = (
        "Clone a trial of a live run: with its weights and optimizer's state, and with other "
        "settings. No other trial changes."
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--trial", type=parse_count, required=True, metavar="N", help="its parent")
    clone_options(parser)
    parser.add_argument("--epochs", type=parse_count, help="train until these are done in total")
    parser.add_argument("--stop-parent", action="store_true", help="then stop the parent")
    parser = new_command(commands, "add", add_trial, "add a configuration to a live run")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("settings", nargs="+", metavar="NAME=VALUE", help="all of its settings")
    parser.add_argument("--epochs", type=parse_count, help="epochs to train (as the run's trials)")
    parser = new_command(commands, "extend", extend, "train an open trial of a live run longer")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--trial", type=parse_count, required=True, metavar="N", help="which")
    parser.add_argument("--epochs", type=parse_count, required=True, help="epochs in total")
    parser = new_command(commands, "actions", actions, "list what users have asked of a run")
    parser.add_argument("run", help="the run's folder")
    json_option(parser)


def clone_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what a clone changes and where it begins."""
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="a clone's settings that differ from its parent's",
    )
    parser.add_argument(
        "--after", type=parse_count, metavar="N", help="begin after N epochs of the parent"
    )
    parser.add_argument(
        "--cold", action="store_true", help="take only the configuration, and begin anew"
    )
    parser.add_argument("--anyway", action="store_true", help="even if only the seed differs")


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``name=value``: numbers, true, false, null, lists and mappings as JSON, else text."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"{text!r} is not NAME=VALUE, such as lr=0.01")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            try:
                settings[name] = float(value)  # .01, 1e-3
            except ValueError:
                settings[name] = value
    return settings


def clone_of(options: argparse.Namespace, trial: int) -> control.Command:
    """Return the request that a command's options describe."""
    if options.cold and options.after is not None:
        raise InputError("--after and --cold exclude each other: a cold clone begins anew")
    changes = parse_settings(options.set)
    return control.Clone(
        trial,
        changes,
        after=options.after,
        epochs=options.epochs,
        cold=options.cold,
        anyway=options.anyway,
    )


def clone(options: argparse.Namespace) -> int:
    command = clone_of(options, options.trial)
    number = control.clone(
        options.run,
        options.trial,
        command.changes,
        after=command.after,
        epochs=command.epochs,
        cold=command.cold,
        anyway=command.anyway,
    )
    print(f"{options.run}: trial {number} is a clone of trial {options.trial}")
    if options.stop_parent:
        control.stop(options.run, options.trial)
        print(f"{options.run}: trial {options.trial} stops; what it has trained is kept")
    print(f"to prove it later:\n\n  python -m cerebro replay {_quote(options)} --trial {number}")
    return 0


def add_trial(options: argparse.Namespace) -> int:
    number = control.add(options.run, parse_settings(options.settings), epochs=options.epochs)
    print(f"{options.run}: trial {number} is added")
    return 0


def extend(options: argparse.Namespace) -> int:
    control.extend(options.run, options.trial, options.epochs)
    print(f"{options.run}: trial {options.trial} trains until {options.epochs} epochs are done")
    return 0


def actions(options: argparse.Namespace) -> int:
    with reader(path_of("run", options.run)) as connection:
        rows = read_actions(connection)
    if options.json:
        print_json([asdict(row) for row in rows])
        return 0
    for row in rows:
        print(describe_action(row))
    if not rows:
        print(f"no requests were sent to {options.run}")
    return 0


def describe_action(action: ActionRecord) -> str:
    """Return a line about an action."""
    command = control.Command(
        action.verb,  # type: ignore[arg-type]
        action.trial,
        action.changes,
        after=None if action.epoch is None else action.epoch + 1,
        epochs=action.epochs,
        cold=action.child is not None and action.trial is not None and action.epoch is None,
    )
    child = "" if action.child is None else f" -> trial {action.child}"
    when = rough_duration(action.time)
    return f"{when:>8}  {control.to_command_line(command)}{child}  {action.outcome}"


def _quote(options: argparse.Namespace) -> str:
    return shlex.quote(str(options.run))
