"""``compare``: print how runs differ in settings, environment and results."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cerebro.cli.options import json_option, new_command, print_json
from cerebro.machine.mappings import flatten

WIDTH = 40
"""The most characters of a value that the table shows."""


def add(commands: Any) -> None:
    parser = new_command(commands, "compare", main, "print how two or more runs differ")
    parser.add_argument("first", metavar="RUN", help="the folder of a run")
    parser.add_argument("others", metavar="RUN", nargs="+", help="the folders of other runs")
    json_option(parser)


def main(options: argparse.Namespace) -> int:
    import cerebro
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
        rows = [[name, *_make_cells(values)] for name, values in report[what].items()]
        table = summary.lay_out_table([heading, *report["runs"]], rows) if rows else ""
        parts.append(table or f"{what}: no difference")
    parts.append("\n".join(_state_line(states) for states in report["states"]))
    print("\n\n".join(parts))
    return 0


def _describe_outcome(result: Any) -> dict[str, Any]:
    from cerebro.report import format as fmt
    from cerebro.report import summary

    outcome = {
        "status": result.status,
        "trials": summary.count_statuses(result),
        "metric": result.metric,
    }
    for best in result.top(1):
        outcome["best trial"] = best.number
        outcome["best value"] = fmt.metric_value(best.metrics, result.metric)
        outcome["best epoch"] = best._select_epoch().epoch + 1  # the one that has the value
        outcome |= {f"best {name}": value for name, value in flatten(best.config).items()}
    return outcome


def _find_differing(
    records: Sequence[Mapping[str, Any]], *, always: bool = False
) -> dict[str, list[Any]]:
    """Return each name's values, one per run, unless all are equal; None where a run has none."""
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: [record.get(name) for record in records] for name in names}
    return {
        name: row
        for name, row in values.items()
        if always or len({repr(value) for value in row}) > 1
    }


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


def _make_cells(values: Sequence[Any]) -> list[str]:
    """Write a row of values; long ones are cut around their first difference."""
    from cerebro.report import format as fmt

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
