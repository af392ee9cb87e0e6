"""Collect what a page says of a run besides its trials: data, space, failures, conclusions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cerebro.errors import CorruptDataError, InputError, one_line
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report import summary
from cerebro.report.conclusions import conclude
from cerebro.report.findings import UNREAD

if TYPE_CHECKING:
    from cerebro.data.manifest import Column
    from cerebro.results.saved_run import SavedRun

MAX_CAUSES = 20
MAX_EVENTS = 50
MAX_LINES = 20  # of a log or a traceback, from its end
MAX_LINE = 300
MAX_CLASSES = 12


def describe(result: Any) -> dict[str, Any]:
    """Return sections of plain text and tables; all values can be written as JSON."""
    ranked = summary.rank_trials(result)
    causes = _group_failures(ranked)
    saved = getattr(result, "saved", None)
    return {
        "facts": _list_facts(result),
        "error": result.error,
        "best": _describe_best(result, ranked),
        "failures": [_describe_failure(*cause) for cause in list(causes.items())[:MAX_CAUSES]],
        "other_causes": max(0, len(causes) - MAX_CAUSES),
        "pruned": _list_pruned(result, ranked),
        "events": _list_events(result),
        **({} if saved is None else describe_run(saved)),
    }


def describe_run(saved: SavedRun) -> dict[str, Any]:
    """Describe a run's data, space and settings; if its data has moved, as they were recorded."""
    meta, settings = saved.meta, saved.settings
    data = {"Training data": _describe_data(saved, "data")}
    if meta["validation"] is not None:
        data["Validation data"] = _describe_data(saved, "validation")
    if meta["folds"] is not None:
        data["Folds"] = {"number": saved.trials_per_config, "checksum": meta["folds_checksum"]}
    written, space = settings.pop("space"), saved.space()
    lines = [] if space is None else space.describe().splitlines()
    parts = (line.partition("  ") for line in lines)
    described = {name.strip(): text.strip() for name, _, text in parts}
    if not described and written:
        described = {"as it was written": written}
    return {
        "data": {name: _write(facts) for name, facts in data.items()},
        "space": described,
        "settings": _write(flatten(settings)),
        "environment": _write(flatten(saved.environment)),
    }


def _write(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: _format_value(value) for name, value in facts.items()}


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_format_value, value)) or "-"
    return fmt.number(value, 6) if isinstance(value, float) else str(value)


def _describe_data(saved: SavedRun, name: str) -> dict[str, Any]:
    spec = saved.meta[name]
    facts: dict[str, Any] = {"name": Path(str(spec["path"])).name, "folder": spec["path"]}
    try:
        data = saved.dataset(name)
    except (InputError, CorruptDataError, OSError) as error:
        now = one_line(str(error), 200)
        return facts | {"shards": len(spec["rows"]), "checksum": spec["checksum"], "now": now}
    facts |= {
        "rows": f"{len(data):,}",
        "shards": data.num_shards,
        "size": fmt.size(data.nbytes),
        "checksum": spec["checksum"],
    }
    for column in data.columns.values():
        facts[f"column {column.name}"] = _describe_column(column)
    for column_name, steps in data.transforms.items():
        facts[f"transforms of {column_name}"] = ", ".join(map(repr, steps))
    return facts


def _describe_column(column: Column) -> str:
    shape = f" of shape {tuple(column.shape)}" if column.shape else ""
    ragged = ", rows of different length" if column.ragged else ""
    if column.classes is None:
        return f"{column.dtype}{shape}{ragged}"
    names = ", ".join(column.classes[:MAX_CLASSES])
    more = f" and {len(column.classes) - MAX_CLASSES} more" if column.classes[MAX_CLASSES:] else ""
    return f"{column.dtype}{shape}{ragged}; {len(column.classes)} classes: {names}{more}"


def _list_facts(result: Any) -> list[str]:
    facts = [summary.count_statuses(result)]
    saved = getattr(result, "saved", None)
    times = {} if saved is None else saved.meta
    started, ended = times.get("started"), times.get("ended")
    if isinstance(started, (int, float)):
        facts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(started)))
        if isinstance(ended, (int, float)):
            facts.append(describe_duration(result, ended - started))
    return [*facts, f"ranked by {fmt.heading(result.metric)} ({result.mode})"]


def describe_duration(result: Any, seconds: float) -> str:
    """Write how long a run took; if it was resumed, also how long it ran."""
    text = f"took {fmt.duration(seconds)}"
    if not any(event["kind"] == "resumed" for event in result.events()):
        return text
    ran = max((unit["end"] for unit in result.units()), default=0.0)
    return f"{text} with interruptions, {fmt.duration(ran)} without"


def _describe_best(result: Any, ranked: Sequence[Any]) -> dict[str, Any] | None:
    """Describe the best trial; None while no trial has a finite metric."""
    lines = summary.best_lines(result)
    if not lines:
        return None
    best = ranked[0]
    names = fmt.full_names(name for fold in best.folds for name in fold.metrics)
    names = [name for name in names if not name.startswith("train_")] or names
    conclusions = conclude(result, ranked)
    return {
        "text": lines[0].removeprefix("best: "),
        "tie": fmt.describe_tie(ranked, best, result.metric),
        "config": _write(flatten(best.config)),
        "metrics": {
            fmt.heading(n): fmt.mean_metric(best.metrics, n) for n in fmt.full_names(best.metrics)
        },
        "folds": {
            f"fold {fold.fold}": ", ".join(
                f"{fmt.heading(n)} {fmt.metric(fold.metrics.get(n))}" for n in names
            )
            for fold in best.folds
        },
        "state_hash": best.state_hash,
        "sure": list(conclusions.sure),
        "next": [*conclusions.next, *summary.faster_steps(result)],
    }


def _group_failures(ranked: Sequence[Any]) -> dict[str, list[Any]]:
    causes: dict[str, list[Any]] = {}
    for trial in sorted(ranked, key=lambda trial: trial.number):
        if trial.status == "diverged":  # each trial diverged at a different batch
            causes.setdefault("diverged", []).append(trial)
        elif trial.status == "failed":
            causes.setdefault(f"failed: {_find_cause(trial)}", []).append(trial)
    return causes


def _describe_failure(cause: str, trials: Sequence[Any]) -> dict[str, Any]:
    first = trials[0]
    facts = {"trials" if trials[1:] else "trial": ", ".join(str(t.number) for t in trials)}
    place = getattr(getattr(getattr(first, "record", None), "raised", None), "place", "")
    if place:
        facts["raised at"] = place
    lines = []
    if first.status == "failed":
        facts["configuration"] = fmt.settings(first.config)
    else:
        lines = [
            f"trial {t.number}: {_find_cause(t)} ({fmt.settings(t.config)})"
            for t in trials[:MAX_CAUSES]
        ]
    traceback = getattr(first, "traceback", None) or ""
    log = (getattr(first, "log", None) or "").rstrip().removesuffix(traceback.rstrip())
    return {
        "status": first.status,
        "cause": cause,
        "facts": facts,
        "trials": lines,
        "traceback": cut_lines(traceback),
        "log": cut_lines(log),
        "number": first.number,
    }


def cut_lines(text: str, most: int = MAX_LINES) -> str:
    """Return the last lines of a text, each cut to `MAX_LINE` characters."""
    lines = text.rstrip().splitlines()[-most:]
    return "\n".join(line[:MAX_LINE] for line in lines)


def _find_cause(trial: Any) -> str:
    return summary.last_line(trial.error) or "no cause was recorded"


def _list_pruned(result: Any, ranked: Sequence[Any]) -> list[str]:
    """List the trials that ended early, by the number of finished epochs."""
    by_epoch: dict[tuple[int, str], list[Any]] = {}
    for trial in ranked:
        if trial.status == "stopped":
            by_epoch.setdefault((trial.epoch, str(trial.error or "")), []).append(trial)
    lines = []
    for (epoch, why), trials in sorted(by_epoch.items(), key=lambda item: item[0]):
        values = [fmt.metric_value(trial.metrics, result.metric) for trial in trials]
        finite = sorted(filter(fmt.is_finite, values))
        span = ""
        if finite:
            ends = dict.fromkeys([fmt.metric(finite[0]), fmt.metric(finite[-1])])
            span = f", {fmt.heading(result.metric)} {' to '.join(ends)}"
        numbers = ", ".join(str(n) for n in sorted(trial.number for trial in trials))
        lines.append(
            f"after {fmt.count_noun(epoch, 'epoch')}: {fmt.count_noun(len(trials), 'trial')} "
            f"({numbers}){span}{f': {why}' if why else ''}"
        )
    return lines


def _list_events(result: Any) -> list[str]:
    reported = ("warning", UNREAD)  # among the warnings
    others = [event for event in result.events() if event["kind"] not in reported]
    lines = [
        f"{fmt.duration(event['time'])}: {event['kind']}"
        f"{'' if event['trial'] is None else ' of trial ' + str(event['trial'])}: {event['text']}"
        for event in others[:MAX_EVENTS]
    ]
    if len(others) > MAX_EVENTS:
        lines.append(f"and {len(others) - MAX_EVENTS} more events")
    return [*summary.list_warnings(result), *lines]
