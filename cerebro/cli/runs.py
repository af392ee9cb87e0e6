"""``list``: print the runs in a folder, the newest first."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from cerebro.cli.options import json_option, new_command, print_json
from cerebro.errors import CerebroError, InputError, one_line

MESSAGE_LIMIT = 100


def add(commands: Any) -> None:
    parser = new_command(commands, "list", main, "list the runs in a folder, the newest first")
    parser.add_argument("folder", nargs="?", default="runs", help="the folder of runs (runs)")
    json_option(parser)


def main(options: argparse.Namespace) -> int:
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
        *("-" if row.get(name) is None else str(row[name]) for name in ("trials", "best")),
        fmt.heading(row["metric"]) if "metric" in row else "-",
        fmt.metric(row["value"]) if row.get("value") is not None else "-",
    ]
