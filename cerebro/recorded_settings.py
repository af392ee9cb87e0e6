"""The settings of a run that is resumed: read from its record, or compared with it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cerebro.data import Dataset
from cerebro.devices import CPU, here, recorded
from cerebro.errors import CorruptDataError, InputError
from cerebro.saved_run import SavedRun
from cerebro.settings import Settings, check_callbacks, whole_number, worker_count
from cerebro.stopping import EarlyStopping
from cerebro.store import decode, encode

MAY_DIFFER = {
    "workers",
    "max_retries",
    "unit_timeout",
    "time_limit",
    "live_models",
    "epochs",
    "n_trials",
    "devices",
    "space",
    "searcher_name",
}
"""What a script that goes on with its run may say otherwise, or is compared in another way."""


NEWER = {"unit_timeout": None, "asynchronous": False, "devices": (CPU,)}
"""Settings that runs of the first version did not have."""


def settings_of(
    saved: SavedRun,
    *,
    build: Callable[..., Any] | None,
    data: Any,
    validation: Any,
    workers: int | None,
    callbacks: Sequence[Any],
    progress: Any,
) -> Settings:
    """Return the settings that a run was begun with.

    Parameters
    ----------
    data, validation
        The data sets, where they have moved.
    workers
        None: as many as the run had.

    Raises
    ------
    InputError
        If the data or ``build`` cannot be found, or are not what they were.
    CorruptDataError
        If the record is damaged.
    """
    meta = saved.meta
    record = dict(meta["settings"])
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    values = {name: record[name] for name in fields if name in record} | {
        name: value for name, value in NEWER.items() if name in fields and name not in record
    }
    stop = record["stop"]
    values |= {
        "build": saved.find_build(build),
        "train": moved_view(saved, "data", data),
        "validation": moved_view(saved, "validation", validation, data),
        "folds": None,
        "stop": None if stop is None else EarlyStopping(**stop),
        "workers": worker_count(workers if workers is not None else record["workers"], 1),
        "devices": here(recorded(record)),
        "folder": saved.path,
        "state_dir": saved.state_dir,
        "callbacks": check_callbacks(callbacks),
        "progress": progress,
        "executor": None,
        "points": tuple(meta["points"]),
        "space_json": meta.get("space"),
        "searcher_class": meta.get("searcher_class"),
    }
    values["folds"] = saved.folds_of(values["train"])
    if values["workers"] == 0:
        values["unit_timeout"] = None  # there is no process that could be ended
    try:
        return Settings(**values)
    except TypeError as error:
        raise CorruptDataError(
            f"{saved.path}: its settings are not all recorded: {error}"
        ) from None


def moved_view(saved: SavedRun, name: str, *given: Any) -> Dataset | None:
    """Return the run's ``"data"`` or ``"validation"``: where it was, or where it is now.

    Parameters
    ----------
    given
        Data sets or paths, or None: the first that is one tells where the data are. The
        second stands for another part of the same data set.

    Raises
    ------
    InputError
        If it is not there, or not the data that the run was trained on.
    """
    spec = saved.meta[name]
    if spec is None:
        return None
    own, *others = given
    place = own
    if place is None and others and spec["path"] == saved.meta["data"]["path"]:
        place = others[0]
    if isinstance(place, Dataset):
        place = place.path
    if place is not None and not isinstance(place, (str, os.PathLike)):
        raise InputError(f"{name} must be a cerebro.Dataset or a path, not {place!r}")
    path = spec["path"] if place is None else place
    try:
        view = Dataset.from_spec({**spec, "path": str(path)})
        if isinstance(own, Dataset) and not own.holds(view):
            raise InputError("these are other rows, or transformed in another way")
        return view
    except InputError as error:
        if not Path(path).exists():
            raise InputError(
                f"the run's {name} are not at {path}: say where they are now with {name}="
            ) from error
        raise InputError(
            f"{error}; a run goes on only with the {name} that it was begun with: give them with "
            f"{name}="
        ) from error


def refuse_changes(saved: SavedRun, settings: Settings) -> None:
    """Refuse to go on with a run under settings that would have given other trials.

    Raises
    ------
    InputError
        Naming what differs.
    """
    differences = list(_differences(saved, settings))
    if differences:
        raise InputError(
            f"the run in {saved.path} was begun with other settings: {'; '.join(differences)}. "
            "Give the same to go on with it, or begin a new one: another run=, or if_exists='new'"
        )


def _differences(saved: SavedRun, settings: Settings) -> Any:
    recorded = saved.meta["settings"]
    now = as_recorded(settings.record())
    adaptive = (saved.meta.get("searcher_class") or {}).get("adaptive", False)
    for name in now:
        if name in MAY_DIFFER or (name == "width" and not adaptive) or name not in recorded:
            continue
        if recorded[name] != now[name]:
            yield f"{name} was {recorded[name]!r}, is {now[name]!r}"
    for name in ("epochs", "n_trials"):
        if _number(now[name]) < _number(recorded[name]):
            yield f"{name} was {recorded[name]!r}, is {now[name]!r} (it may only grow)"
    for name, known, value in (
        ("points", saved.meta["points"], list(settings.points)),
        ("space", saved.meta.get("space"), settings.space_json),
        ("searcher", saved.meta.get("searcher_class"), settings.searcher_class),
    ):
        if known is not None and known != as_recorded(value):
            yield f"{name} is another" if name != "searcher" else _searchers(known, value)
    views = {"data": settings.train, "validation": settings.validation}
    for name, view in views.items():
        if (None if view is None else view.checksum) != saved.meta[f"{name}_checksum"]:
            yield f"{name} is another data set, or other rows or transforms of it"
    folds = settings.folds
    if (None if folds is None else folds.checksum) != saved.meta.get("folds_checksum"):
        yield "validation has other folds, or none"


def _searchers(known: Mapping[str, Any], now: Any) -> str:
    def shown(value: Mapping[str, Any]) -> str:
        name = value["class"].rpartition(":")[2]
        if value["parameters"] is None:
            return f"{name}(...)"
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in value['parameters'].items())})"

    return f"searcher was {shown(known)}, is {shown(now)}"


def as_recorded(value: Any) -> Any:
    """Return a value as the store gives it back."""
    return decode(encode(value))


def _number(value: int | None) -> float:
    return float("inf") if value is None else value


def check_trials(trials: Any, count: int) -> tuple[int, ...] | None:
    """Check the numbers of the trials that are to go on."""
    if trials is None:
        return None
    if isinstance(trials, int) and not isinstance(trials, bool):
        trials = (trials,)
    try:
        numbers = [whole_number("trials", number, 0) or 0 for number in trials]
    except TypeError:
        raise InputError(f"trials must be a list of trials' numbers, not {trials!r}") from None
    if not numbers:
        raise InputError("trials is empty: name the trials that are to go on, or leave it out")
    for number in numbers:
        if number >= count:
            raise InputError(f"there is no trial {number}: the run has 0 to {count - 1}")
    return tuple(sorted(set(numbers)))
