"""``list``, ``show``, ``logs``: print the runs in a folder, one run or trial, or their output."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
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
from cerebro.errors import CerebroError, InputError, one_line

MESSAGE_LIMIT = 100
SECONDS = 0.5
"""The seconds between two checks for new output with ``logs --follow``."""


def add(commands: Any) -> None:
    parser = new_command(commands, "list", list_runs, "list the runs in a folder, the newest first")
    parser.add_argument("folder", nargs="?", default="runs", help="the folder of runs (runs)")
    json_option(parser)
    parser = new_command(commands, "show", show, "print a run's trials and its best configuration")
    parser.add_argument("run", nargs="?", help="the run's folder (the newest under runs)")
    parser.add_argument(
        "--top", type=parse_count, default=20, metavar="N", help="trials to list (20)"
    )
    parser.add_argument("--trial", type=parse_count, metavar="N", help="print one trial instead")
    json_option(parser)
    parser = new_command(commands, "logs", show_logs, "print what trials have printed and logged")
    parser.add_argument("run", nargs="?", help="the run's folder (the newest under runs)")
    parser.add_argument("--trial", type=parse_count, metavar="N", help="only this trial")
    parser.add_argument(
        "--follow", action="store_true", help="keep printing new output until the run ends"
    )


def show(options: argparse.Namespace) -> int:
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


def list_runs(options: argparse.Namespace) -> int:
    from cerebro.report import summary

    folder = Path(options.folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder")
    files = [*folder.glob("run.sqlite"), *folder.glob("*/run.sqlite")]
    rows = sorted((_make_row(file.parent) for file in files), key=lambda row: -row["started"])
    if options.json:
        print_json(rows)
    elif not rows:
        print(f"no runs in {folder}")
    else:
        headings = ["run", "started", "status", "trials", "best", "metric", "value"]
        print(summary.lay_out_table(headings, [_make_cells(row) for row in rows]))
    return 0


def _make_row(path: Path) -> dict[str, Any]:
    """Describe a run; if it cannot be read, its status is the error."""
    import cerebro
    from cerebro.report import format as fmt

    row: dict[str, Any] = {"path": path, "started": 0.0, "trials": None, "best": None}
    try:
        result = cerebro.open(path)
        best = result.top(1)
        row |= {
            "started": float(result.saved.meta["started"]),
            "status": result.status,
            "trials": result.saved.trial_count,
            "metric": result.metric,
        }
        if best:
            value = fmt.metric_value(best[0].metrics, result.metric)
            row |= {"best": best[0].number, "value": value}
    except (CerebroError, OSError) as error:
        row["status"] = f"unreadable: {one_line(str(error), MESSAGE_LIMIT)}"
    return row


def _make_cells(row: dict[str, Any]) -> list[str]:
    from cerebro.report import format as fmt

    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["started"]))
    return [
        str(row["path"]),
        at if row["started"] else "-",
        row["status"],
        *("-" if row[name] is None else str(row[name]) for name in ("trials", "best")),
        fmt.heading(row.get("metric", "-")),
        fmt.metric(row.get("value")),
    ]


def show_logs(options: argparse.Namespace) -> int:
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
    for trial in result.trials if number is None else [trial_of(result, number)]:
        text = trial.log
        new = text[shown.get(trial.number, 0) :]
        shown[trial.number] = len(text)
        if new:
            heading = f"--- trial {trial.number}\n" if number is None else ""
            print(f"{heading}{new}", end="" if new.endswith("\n") else "\n", flush=True)
