"""Collect the facts on a run's page: date, data, space, settings and environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebro.data.manifest import Column
from cerebro.errors import CorruptDataError, InputError, one_line
from cerebro.report import format as fmt
from cerebro.report.page import About
from cerebro.results.recorded_space import space_lines
from cerebro.results.saved_run import SavedRun

MAX_CLASSES = 12


def describe_run(saved: SavedRun) -> About:
    """Describe a run; if its data has moved, only the run's record of the data is used."""
    meta = saved.meta
    data = [("Training data", _describe_data(saved, "data"))]
    if meta["validation"] is not None:
        data.append(("Validation data", _describe_data(saved, "validation")))
    if meta["folds"] is not None:
        folds = {"number": saved.trials_each, "checksum": meta["folds_checksum"]}
        data.append(("Folds", folds))
    space = space_lines(meta["space"])
    recorded = meta["settings"]["space"]
    if not space and recorded:
        space = [("as it was written", str(recorded))]
    settings = {name: value for name, value in saved.settings.items() if name != "space"}
    return About(
        started=_as_time(meta.get("started")),
        ended=_as_time(meta.get("ended")),
        data=data,
        space=space,
        settings=settings,
        environment=saved.environment,
    )


def _as_time(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _describe_data(saved: SavedRun, name: str) -> Mapping[str, Any]:
    spec = saved.meta[name]
    facts: dict[str, Any] = {"name": Path(str(spec["path"])).name, "folder": spec["path"]}
    try:
        data = saved.dataset(name)
    except (InputError, CorruptDataError, OSError) as error:
        return {
            **facts,
            "shards": len(spec["rows"]),
            "checksum": spec["checksum"],
            "now": one_line(str(error), 200),
        }
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
