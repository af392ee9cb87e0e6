"""``--json``: print the findings of a command as one JSON document, for other programs.

Numbers that JSON lacks (NaN, infinity) become null; paths become strings.
"""

from __future__ import annotations

import argparse
from typing import Any

from cerebro.machine.strict_json import strict_json


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")


def print_json(value: Any) -> None:
    print(strict_json(value))


def run_record(result: Any) -> dict[str, Any]:
    best = result.top(1)
    return {
        "path": result.path,
        "status": result.status,
        "error": result.error,
        "metric": result.metric,
        "mode": result.mode,
        "select": result.select,
        "best": best[0].number if best else None,
        "trials": [trial_record(trial) for trial in result.trials],
        "settings": result.settings,
        "environment": result.environment,
        "events": result.events(),
    }


def trial_record(trial: Any) -> dict[str, Any]:
    """Describe a trial and its epochs; with folds, also the epochs of each fold."""
    record = {
        "number": trial.number,
        "status": trial.status,
        "config": trial.config,
        "epoch": trial.epoch,
        "epochs": trial.epochs,
        "best_epoch": trial.best_epoch,
        "metrics": trial.metrics,
        "history": trial.history,
        "state_hash": trial.state_hash,
        "parent": trial.parent,
        "error": trial.error,
    }
    if trial.fold is not None:
        record["fold"] = trial.fold
    if trial.folds:
        record["folds"] = [trial_record(fold) for fold in trial.folds]
    return record
