"""Look at runs, without changing them: ``list show logs compare verify``.

``list``, ``show`` and ``logs`` print the runs in a folder, one run or trial, or their output.
``compare`` prints how runs differ; ``verify`` checks the files of a run or a dataset.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cerebro
from cerebro.cli.options import (
    complain,
    json_option,
    new_command,
    parse_count,
    print_json,
    trial_of,
)
from cerebro.errors import CerebroError, CorruptDataError, InputError, one_line
from cerebro.machine.mappings import flatten
from cerebro.machine.objects import is_url
from cerebro.report import format as fmt
from cerebro.report.progress import is_terminal

SECONDS = 0.5  # between two checks for new output with ``logs --follow``
WIDTH = 40  # the most characters of a value that ``compare`` shows


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
    parser = new_command(commands, "compare", compare, "print how two or more runs differ")
    parser.add_argument("first", metavar="RUN", help="the folder of a run")
    parser.add_argument("others", metavar="RUN", nargs="+", help="the folders of other runs")
    json_option(parser)


def add_verify(commands: Any) -> None:
    parser = new_command(
        commands, "verify", verify, "compare a dataset's or a run's files with their checksums"
    )
    parser.add_argument("path", help="a data folder or a run's folder, or the URL of a dataset")
    json_option(parser)


def show(options: argparse.Namespace) -> int:
    from cerebro.report import summary

    result = cerebro.open(options.run)
    trial = None if options.trial is None else trial_of(result, options.trial)
    if options.json:
        print_json(_make_run_record(result) if trial is None else _make_trial_record(trial))
    elif trial is None:
        print(summary.render(result, options.top))
    else:
        print(summary.render_trial(trial))
    return 0


def _make_run_record(result: Any) -> dict[str, Any]:
    best = result.top(1)
    names = ("path", "status", "error", "metric", "mode", "select", "settings", "environment")
    return {
        **{name: getattr(result, name) for name in names},
        "best": best[0].number if best else None,
        "trials": [_make_trial_record(trial) for trial in result.trials],
        "events": result.events(),
    }


def _make_trial_record(trial: Any) -> dict[str, Any]:
    """Describe a trial and its epochs; with folds, also the epochs of each fold."""
    names = (
        "number", "status", "config", "epoch", "epochs", "best_epoch", "metrics", "history",
        "state_hash", "parent", "error",
    )  # fmt: skip
    record = {name: getattr(trial, name) for name in names}
    if trial.fold is not None:
        record["fold"] = trial.fold
    if trial.folds:
        record["folds"] = [_make_trial_record(fold) for fold in trial.folds]
    return record


def list_runs(options: argparse.Namespace) -> int:
    from cerebro.report import summary

    folder = Path(options.folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder")
    files = [*folder.glob("run.sqlite"), *folder.glob("*/run.sqlite")]
    rows = sorted((_describe_run(file.parent) for file in files), key=lambda row: -row["started"])
    if options.json:
        print_json(rows)
    elif not rows:
        print(f"no runs in {folder}")
    else:
        headings = ["run", "started", "status", "trials", "best", "metric", "value"]
        print(summary.lay_out_table(headings, [_make_run_cells(row) for row in rows]))
    return 0


def _describe_run(path: Path) -> dict[str, Any]:
    """Describe a run; if it cannot be read, its status is the error."""
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
        row["status"] = f"unreadable: {one_line(str(error), 100)}"
    return row


def _make_run_cells(row: dict[str, Any]) -> list[str]:
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


def compare(options: argparse.Namespace) -> int:
    from cerebro.report import summary

    results = [cerebro.open(path) for path in (options.first, *options.others)]
    report: dict[str, Any] = {
        "runs": [str(result.path) for result in results],
        "results": _find_differing([_describe_outcome(result) for result in results], always=True),
        "settings": _find_differing([flatten(result.settings) for result in results]),
        "environment": _find_differing([flatten(result.environment) for result in results]),
        "states": [_compare_states(results[0], other) for other in results[1:]],
    }
    if options.json:
        print_json(report)
        return 0
    parts = []
    for heading, what in (("", "results"), ("settings",) * 2, ("environment",) * 2):
        rows = [[name, *_make_value_cells(values)] for name, values in report[what].items()]
        table = summary.lay_out_table([heading, *report["runs"]], rows) if rows else ""
        parts.append(table or f"{what}: no difference")
    parts.append("\n".join(_state_line(states) for states in report["states"]))
    print("\n\n".join(parts))
    return 0


def _describe_outcome(result: Any) -> dict[str, Any]:
    from cerebro.report import summary

    outcome = {
        "status": result.status,
        "trials": summary.count_statuses(result),
        "metric": result.metric,
    }
    for best in result.top(1):
        outcome["best trial"] = best.number
        outcome["best value"] = fmt.metric_value(best.metrics, result.metric)
        selected = best.record.selected(result.saved.ranked_by)
        outcome["best epoch"] = selected.epoch + 1
        outcome |= {f"best {name}": value for name, value in flatten(best.config).items()}
    return outcome


def _find_differing(
    records: Sequence[Mapping[str, Any]], *, always: bool = False
) -> dict[str, list[Any]]:
    """Return each name's values, one per run, unless all are equal; None where a run has none."""
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: [record.get(name) for record in records] for name in names}
    return {name: row for name, row in values.items() if always or len(set(map(repr, row))) > 1}


def _compare_states(first: Any, other: Any) -> dict[str, Any]:
    """Compare, by epoch, the states of the configurations that both runs have trained."""
    theirs: dict[str, list[Any]] = {}
    for trial in other.trials:
        theirs.setdefault(repr(trial.config), []).append(trial)
    shared = same = shorter = 0
    differing: list[list[int]] = []
    for trial in first.trials:
        if not theirs.get(repr(trial.config)):
            continue
        twin = theirs[repr(trial.config)].pop(0)
        ours, its = _collect_hashes(trial), _collect_hashes(twin)
        common = ours.keys() & its.keys()
        if not common:
            continue  # one of them has failed or diverged before its first state
        shared += 1
        if all(ours[epoch] == its[epoch] for epoch in common):
            same += 1
            shorter += len(common) < max(len(ours), len(its))
        else:
            differing.append([trial.number, twin.number])
    return {"configurations": shared, "same": same, "shorter": shorter, "differing": differing}


def _collect_hashes(trial: Any) -> dict[int, str]:
    return {entry["epoch"]: entry["state_hash"] for entry in trial.history}


def _state_line(states: Mapping[str, Any]) -> str:
    shared, same = states["configurations"], states["same"]
    if not shared:
        return "states: the runs have trained no configuration in common"
    line = f"states: {same} of {shared} common configurations have the same states, bit for bit"
    if states["shorter"]:
        line += f" ({states['shorter']} of them for the epochs that both runs trained)"
    if states["differing"]:
        pairs = ", ".join(f"{ours} and {its}" for ours, its in states["differing"][:5])
        more = len(states["differing"]) - 5
        line += f"; trials that differ: {pairs}{f' and {more} more' if more > 0 else ''}"
    return line


def _make_value_cells(values: Sequence[Any]) -> list[str]:
    """Write a row of values; long ones are cut around their first difference."""
    texts = ["-" if v is None else str(v) if isinstance(v, int) else fmt.number(v) for v in values]
    present = [text for text, value in zip(texts, values, strict=True) if value is not None]
    begin = 0
    if len(set(present)) > 1 and max(map(len, present)) > WIDTH:
        columns = enumerate(zip(*present, strict=False))
        differs = (at for at, column in columns if len(set(column)) > 1)
        begin = max(0, next(differs, min(map(len, present))) - WIDTH // 2)
    if begin:
        texts = [f"...{text[begin:]}" if text in present else text for text in texts]
    return [text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..." for text in texts]


def verify(options: argparse.Namespace) -> int:
    if is_url(options.path):
        return _verify_data(options.path, options.json)
    path = Path(options.path)
    if (path / "run.sqlite").exists():
        return _verify_run(path, options.json)
    if (path / "manifest.json").exists() or (path / "shard-00000").exists():
        return _verify_data(path, options.json)
    if not path.exists():
        raise InputError(f"{path}: there is no such folder")
    raise InputError(f"{path}: neither a data folder (manifest.json) nor a run (run.sqlite)")


def _verify_run(path: Path, as_json: bool) -> int:
    from cerebro.results.verify import verify_run

    check = verify_run(path)
    if as_json:
        print_json({**vars(check), "problems": [vars(problem) for problem in check.problems]})
        return 1 if check.problems else 0
    if check:
        print(check)
    return _complain(path, check.problems)


def _verify_data(place: Path | str, as_json: bool) -> int:
    """Check a dataset; if it is in object storage, first copy what is missing here."""
    from cerebro.data.shards import find_damage

    data = None if isinstance(place, Path) else cerebro.Dataset(place)
    problems: list[str] = []
    if data is None:
        problems = [str(damage) for damage in find_damage(Path(place))]
    else:
        try:
            data.verify()
        except CorruptDataError as error:
            problems.append(str(error))
    if as_json:
        print_json({"path": place, "problems": problems})
        return 1 if problems else 0
    if not problems:
        data = cerebro.Dataset(place) if data is None else data
        print(f"{place}: {data.num_shards} shards, {fmt.size(data.nbytes)}: all checksums match")
    return _complain(place, problems)


def _complain(path: Path | str, problems: Sequence[Any]) -> int:
    """Print one line for each problem, and an error with the number of problems."""
    lines = [one_line(str(problem), 2000) for problem in problems]
    if len(lines) != 1 or not (is_terminal(sys.stdout) and is_terminal(sys.stderr)):
        print("\n".join(lines), end="\n" * bool(lines))  # one problem would be there twice
    if lines:
        count = "a problem" if len(lines) == 1 else f"{len(lines)} problems, the first"
        complain(f"error: {path} has {count}: {lines[0]}")
    return 1 if lines else 0
