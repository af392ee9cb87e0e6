"""Read a run's folder, for results, replay and plots.

Only `SavedRun` knows where a run keeps its parts: the rows of the store, the kept states, the data
on which it was trained, and the identity of ``build``. Users access them through `cerebro.Result`
and `cerebro.Trial`.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.data import Dataset
from cerebro.data.given_rows import FOLDERS, is_rows, write_temporary
from cerebro.data.manifest import Column
from cerebro.data.validation import Folds
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.disk import Disk
from cerebro.machine.environment import hash_seed
from cerebro.machine.files import path_of, read_bytes
from cerebro.machine.libraries import recorded_settings
from cerebro.machine.local import LOCAL
from cerebro.machine.objects import is_url
from cerebro.report.format import Range, is_number
from cerebro.run.owner import owner_of
from cerebro.run.recipe import Recipe, StudyBuild, check_build
from cerebro.run.records import (
    NOT_EXACT,
    OPEN,
    EpochRecord,
    Ranking,
    TrialRecord,
    best_trials,
    gather_configurations,
)
from cerebro.run.settings import Batches, Exactness, Limits, read_group
from cerebro.run.store import check_meta, check_rows, read_meta, read_ranking, read_trials, reader
from cerebro.space import Space
from cerebro.space import dimensions as dims
from cerebro.space.foreign import Quantized
from cerebro.worker.messages import RunContext, RunFolders

HELD_TRIALS = 10_000
"""The trials of runs up to this size are all read at once; larger runs are read trial by trial."""


class SavedRun:
    """The files of a run, as they were when last read.

    Raises InputError if the folder does not hold a run, and CorruptDataError if its store cannot be
    read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        build: Callable[..., Any] | None = None,
        disk: Disk = LOCAL.disk,
    ) -> None:
        self.disk = disk
        self.path = path_of("run", path)
        self.folder = self.path.absolute()  # the working directory may change
        # During a run in this process, this waits until finished epochs are on disk.
        self.before_reading: Callable[[], None] = lambda: None
        self.meta: dict[str, Any] = {}
        self.trial_count = 0  # with folds, of configurations
        self._records: list[TrialRecord] | None = None
        self._configurations: list[TrialRecord] | None = None
        self._folds: Folds | None = None
        if build is not None:
            check_build(build)
        self._build = build
        self._data: dict[str, Dataset] = {}
        self.refresh()

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedRun, (self.folder,)  # neither the code of `build` nor a store open for writing

    def __copy__(self) -> SavedRun:
        return SavedRun(self.path, build=self._build)

    def __deepcopy__(self, memo: object) -> SavedRun:
        return self.__copy__()

    def refresh(self) -> None:
        """Read the store again; with more than `HELD_TRIALS` trials, read only their number."""
        self._refresh(HELD_TRIALS)

    def forget_trials(self) -> None:
        """Read the trials again when they are next needed."""
        self._records = None

    @property
    def records(self) -> list[TrialRecord]:
        """All trials by number; with folds, one for each fold, see `cerebro.run.records`."""
        if self._records is None:
            self._refresh(None)
        assert self._records is not None
        return self._records

    @property
    def trials_per_config(self) -> int:
        """The number of trials per configuration: one, or one for each fold."""
        folds = self.meta["folds"]
        return 1 if folds is None else len(folds["folds"])

    @property
    def configurations(self) -> list[TrialRecord]:
        """The trials that users see, by number; in a run with folds, each with its folds."""
        if self.meta["folds"] is None:
            return self.records
        if self._configurations is None:
            self._configurations = gather_configurations(self.records, self.trials_per_config)
        return self._configurations

    @property
    def holds_trials(self) -> bool:
        return self._records is not None

    def best_epoch(self, record: TrialRecord) -> int | None:
        """Return the epoch that ``keep="best"`` keeps; for a fold, its configuration's best."""
        number = record.number // self.trials_per_config
        if number < len(self.configurations):
            record = self.configurations[number]
        return record.best_epoch(self.metric, self.mode)

    def read_some(self, numbers: Sequence[int]) -> list[TrialRecord]:
        """Read the trials with these numbers, in this order, in a run without folds."""
        with self._store() as connection:
            return self._mark_interrupted(read_trials(connection, numbers))

    def counts(self) -> Counter[str]:
        if self._records is not None:
            return Counter(record.status for record in self.configurations)
        with self._store() as connection:
            sql = "SELECT status, count(*) FROM trials GROUP BY status"
            counts = Counter({str(status): n for status, n in connection.execute(sql)})
        if self.meta["status"] == "interrupted":
            counts["stopped"] += sum(counts.pop(status, 0) for status in OPEN)
        return counts

    def ranking(self, n: int) -> list[int]:
        """Return the numbers of the `n` best trials, best first; omit trials without a metric."""
        if self._records is not None:
            return best_trials(self.configurations, self.ranked_by, n)
        with self._store() as connection:
            return read_ranking(connection, self.ranked_by, n)

    @contextmanager
    def _store(self, *tables: str) -> Iterator[sqlite3.Connection]:
        """Open the store and check these tables; in a callback, wait for the finished epoch."""
        self.before_reading()
        with reader(self.folder, self.disk) as connection:
            check_rows(connection, *tables)
            yield connection

    def _refresh(self, held: int | None) -> None:
        self.before_reading()
        self._read(held)
        if self.meta["status"] == "running" and owner_of(self.folder) is None:
            self._read(held)  # the run may have ended meanwhile
            if self.meta["status"] == "running":
                self.meta["status"] = "interrupted"
                self._mark_interrupted(self._records or [])

    def _mark_interrupted(self, records: list[TrialRecord]) -> list[TrialRecord]:
        """If the run was interrupted, mark its open trials as stopped and resumable."""
        for record in records if self.meta["status"] == "interrupted" else ():
            if record.status in OPEN:
                record.status, record.resumable = "stopped", True
        return records

    def _read(self, held: int | None) -> None:
        with reader(self.folder, self.disk) as connection:
            meta = read_meta(connection)
            check_meta(meta)  # now, so that a missing part is reported as damage
            (count,) = connection.execute("SELECT count(*) FROM trials").fetchone()
            self.meta = self._relocate_own_rows(meta)
            self.trial_count = count // self.trials_per_config
            self._configurations = None
            # Means over folds are not in the store.
            if held is None or count <= held or meta["folds"] is not None:
                self._records = read_trials(connection)
            else:
                check_rows(connection, "trials", "epochs", "metrics")
                self._records = None

    # --- the run's settings ----------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.meta["settings"])

    @property
    def environment(self) -> dict[str, Any]:
        return dict(self.meta["environment"])

    @property
    def metric(self) -> str:
        return str(self.meta["settings"]["metric"])

    @property
    def mode(self) -> str:
        return str(self.meta["settings"]["mode"])

    @property
    def ranked_by(self) -> Ranking:
        return read_group(Ranking, self.meta["settings"])

    @property
    def argv(self) -> list[str]:
        """`sys.argv` of the program that started the run; empty if it is not recorded."""
        recorded = self.meta.get("argv")
        if not isinstance(recorded, list) or not all(isinstance(a, str) for a in recorded):
            return []
        return recorded

    @property
    def recipe(self) -> Recipe:
        return Recipe(**self.meta["build"])

    def units(self) -> list[dict[str, Any]]:
        with self._store("units") as connection:
            rows = connection.execute("SELECT * FROM units ORDER BY started, id").fetchall()
        parts = self.meta["parts"]
        return [
            {
                **self._split_number(row["trial"]),
                "epoch": row["epoch"],
                "step": row["step"],
                "part": row["part"],
                "kind": "train" if row["step"] < parts else "eval",
                "worker": row["worker"],
                "attempt": row["attempt"],
                "start": row["started"],
                "end": row["started"] + row["seconds"],
                "rows": row["rows"],
                "hopped": bool(row["hopped"]),
                "state_bytes": row["state_bytes"],
            }
            for row in rows
        ]

    def events(self) -> list[dict[str, Any]]:
        with self._store("events") as connection:
            rows = connection.execute("SELECT time, kind, trial, text FROM events ORDER BY id")
            return [
                {"time": time, "kind": kind, **self._split_number(trial), "text": text}
                for time, kind, trial, text in rows
            ]

    def _split_number(self, number: int | None) -> dict[str, int | None]:
        """Return the user's trial and fold for a stored trial; None stands for the run itself."""
        folds = self.trials_per_config
        place = {"trial": None if number is None else number // folds}
        if self.meta["folds"] is not None:
            place["fold"] = None if number is None else number % folds
        return place

    @property
    def state_dir(self) -> Path:
        """The folder of the run's slots, which may be gone if it was in a memory file system."""
        recorded = self.meta.get("state_dir")
        return Path(recorded) if isinstance(recorded, str) else self.path / "states"

    def spans(self) -> dict[int, tuple[float, float]]:
        """Return when each trial's first unit began and its last one ended, over all folds."""
        with self._store("units") as connection:
            rows = connection.execute(
                "SELECT trial / ?1, min(started), max(started + seconds) FROM units "
                "GROUP BY trial / ?1",
                (self.trials_per_config,),
            )
            return {trial: (begin, end) for trial, begin, end in rows}

    def rows_per_epoch(self, number: int) -> tuple[int, int]:
        """Return how many rows a stored trial trained and validated on in its first epoch.

        Only processed rows count; a unit that ran again counts once.
        """
        with self._store() as connection:
            check_rows(connection, "units", where=f"trial = {int(number)}")
            rows = connection.execute(
                "SELECT step >= ?, sum(most) FROM (SELECT step, max(rows) AS most FROM units "
                "WHERE trial = ? AND epoch = (SELECT min(epoch) FROM units WHERE trial = ?2) "
                "GROUP BY step) GROUP BY 1",
                (self.meta["parts"], number),
            )
            counted = {bool(validates): int(count) for validates, count in rows}
        return counted.get(False, 0), counted.get(True, 0)

    def space(self) -> Space | None:
        """Return the space; None if a part of it was not recorded."""
        try:
            return Space.from_json(self.meta["space"])
        except InputError:
            return None

    def ranges(self) -> dict[str, Range]:
        return ranges_of(self.space())

    def not_exact(self, number: int) -> list[str]:
        """Return the recorded operations of a trial that have no deterministic version."""
        with self._store("events") as connection:
            sql = "SELECT DISTINCT text FROM events WHERE kind = ? AND trial = ? ORDER BY text"
            return [str(row["text"]) for row in connection.execute(sql, (NOT_EXACT, number))]

    # --- files -----------------------------------------------------------

    def read_log(self, trial: int) -> str:
        """Return a trial's output; empty if it printed nothing."""
        path = self.folder / "trials" / f"{trial}.log"
        try:
            return read_bytes(path).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def state_path(self, record: EpochRecord) -> Path:
        assert record.state_file is not None
        return self.folder / "states" / record.state_file

    def read_state(self, trial: int, record: EpochRecord) -> bytes:
        """Read a kept state; raise CorruptDataError if it is missing or its checksum differs."""
        path = self.state_path(record)
        self.before_reading()  # in a callback, wait until the finished epoch is stored
        try:
            packed = read_bytes(path)
        except FileNotFoundError as error:
            raise CorruptDataError(
                f"{path} is missing: it was deleted, or the live run has replaced it with a "
                "better one (refresh() reads the run again)"
            ) from error
        if _core.hash_state(packed) != record.state_hash:
            raise CorruptDataError(
                f"{path} is not the state of trial {trial}, epoch {record.epoch}: its checksum "
                "differs"
            )
        return packed

    # --- code and data ---------------------------------------------------

    @property
    def known_build(self) -> Callable[..., Any] | None:
        """The run's ``build`` if it was given or already found; else None."""
        return self._build

    def find_build(self, build: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return the given ``build``, or import the run's again; warn if it has changed.

        For a run of an Optuna study, the result takes an Optuna trial, as in that run.
        """
        if build is not None:
            check_build(build)
            self.recipe.warn_if_changed(build)
        elif self._build is None:
            self._build = self.recipe.find()
        function: Callable[..., Any] = build or self._build  # type: ignore[assignment]
        if self.recipe.takes_trial and not isinstance(function, StudyBuild):
            return StudyBuild(function)
        return function

    def _relocate_own_rows(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Replace the path of rows that were passed to the search by the run's current folder."""
        for name in ("data", "validation"):
            where = (meta.get(name) or {}).get("path") or ""
            if is_url(where):
                continue
            path = Path(where)
            here = self.folder / path.name
            if path.name in FOLDERS and not path.exists() and here.exists():
                meta = {**meta, name: {**meta[name], "path": str(here.absolute())}}
        return meta

    def dataset(self, name: str) -> Dataset:
        """Open the run's ``"data"`` or ``"validation"``."""
        if name not in self._data:
            self._data[name] = self._open(name)
        return self._data[name]

    def _open(self, name: str, *, check: bool = True) -> Dataset:
        """Open the run's data; if it is missing, the InputError says how to record its new path."""
        path = self.meta[name]["path"]
        try:
            return Dataset.from_spec(self.meta[name], check=check)
        except InputError as error:
            if is_url(path) or Path(path).exists():
                raise
            self.recipe.check_maker()
            what, option = "validation data", name
            if path == self.meta["data"]["path"]:
                what = option = "data"
            raise InputError(
                f"the run's {what} is not at '{path}': if it has moved, this command records its "
                f"new path: python -m cerebro resume {shlex.quote(str(self.path))} --{option} PATH"
            ) from error

    def new_places(self, views: Mapping[str, Dataset | None]) -> dict[str, dict[str, Any]]:
        """Return updated records of datasets that have moved.

        `views` has the datasets ``"data"`` and ``"validation"`` as opened now. If the recorded path
        still exists, the record stays: the opened dataset is a copy, such as one on a local disk.
        """
        places = {}
        for name, view in views.items():
            recorded = self.meta[name]
            if view is None or recorded is None:
                continue
            if is_url(recorded["path"]) or Path(recorded["path"]).exists():
                continue
            now = view.spec()
            places[name] = {**recorded, **{key: now[key] for key in ("path", "set") if key in now}}
        return places

    def columns(self) -> Mapping[str, Column]:
        """Return the columns of the run's data; empty if the data is missing."""
        train = self.training_data()
        return {} if train is None else train.columns

    def folds(self) -> Folds | None:
        if self._folds is None and self.meta["folds"] is not None:
            self._folds = self.folds_of(self.dataset("data"))
        return self._folds

    def folds_of(self, data: Dataset | None) -> Folds | None:
        """Return the run's folds, given the run's data; None if the run has none."""
        described = self.meta["folds"]
        return None if described is None or data is None else Folds.from_json(data, described)

    def open_views(self, moved: Any) -> dict[str, Any]:
        """Open the data of a `RunContext`, from a dataset or path if it has moved, else None.

        Only the run's rows are used: `moved` may be the whole dataset from which `search` split off
        validation data.
        """
        if moved is not None and not isinstance(moved, Dataset):
            moved = Dataset(path_of("data", moved))
        train, validation = self.view("data", moved), self.view("validation", moved)
        return {"train": train, "validation": validation, "folds": self.folds_of(train)}

    def view(self, name: str, moved: Dataset | None) -> Dataset | None:
        spec = self.meta[name]
        if spec is None:
            return None
        if moved is not None:
            if name == "data":
                updated = {**spec, "path": moved.shards.place}
                if not moved.view.is_whole:
                    view = Dataset.from_spec(updated, check=False)
                    return view if moved.view.holds(view.view) else moved
                spec = {**updated, "transforms": moved.spec()["transforms"] or spec["transforms"]}
            elif spec["path"] == self.meta["data"]["path"]:
                spec = {**spec, "path": moved.shards.place}
        if spec is self.meta[name]:
            return self._open(name, check=False)
        return Dataset.from_spec(spec, check=False)

    def data_for(self, data: Any, number: int, rows: ExitStack) -> Dataset:
        """Return the dataset to evaluate on: `data`, or the validation data of trial `number`.

        Data in memory is written to a temporary folder, which closing `rows` removes.
        """
        if isinstance(data, (str, os.PathLike)) and not is_rows(data):
            data = Dataset(data)
        if isinstance(data, Dataset):
            return data
        if is_rows(data):
            return rows.enter_context(write_temporary(data, self.dataset("data"), "evaluate"))
        if data is not None:
            raise InputError(
                f"evaluate needs a cerebro.Dataset, not {type(data).__name__}: write one with "
                "cerebro.shard(arrays, folder), give (x, y), or use load() and your own code"
            )
        folds = self.folds()
        if folds is not None:
            return folds.get_views(number)[1]
        if self.meta["validation"] is None:
            raise InputError("the run has no validation data: give data=")
        return self.dataset("validation")

    def training_data(self) -> Dataset | None:
        """Return the run's training data; None if it is missing."""
        try:
            return self.dataset("data")
        except (InputError, CorruptDataError, OSError):
            return None

    def context(self, build: Callable[..., Any] | None, **changes: Any) -> RunContext:
        """Return the context that the run's workers had, with some values changed."""
        settings, states = self.meta["settings"], str(self.folder / "states")
        limits = read_group(Limits, settings)
        values: dict[str, Any] = {
            "batches": read_group(Batches, settings),
            "exactness": read_group(Exactness, settings),
            "limits": replace(limits, live_models=1, unit_timeout=None),
            "build": self.find_build(build),
            "folders": RunFolders(states, states, str(self.folder / "trials")),
            "libraries": recorded_settings(self.meta["environment"]),
            "hash_seed": hash_seed(self.meta["environment"].get("variables", {})),
        }
        if "train" not in changes:
            has_validation = self.meta["validation"] is not None
            values["train"] = self.dataset("data")
            values["validation"] = self.dataset("validation") if has_validation else None
            values["folds"] = self.folds()
        return RunContext(**values | changes)


def ranges_of(space: Space | None) -> dict[str, Range]:
    """Return the range of each setting, by its dotted name.

    Settings have no range if conditions define different ones, if their values have no bounds, or
    if a function of the user computes them.
    """
    ranges: dict[str, Range | None] = {}
    for node in space.nodes if space is not None else ():
        if not node.nest:
            name, span = dims.path_name(node.path), _make_range(node.dimension)
            ranges[name] = span if ranges.get(name, span) == span else None
    return {name: span for name, span in ranges.items() if span is not None}


def _make_range(dimension: dims.Dimension) -> Range | None:
    if isinstance(dimension, Quantized):
        inner = dimension.inner
        if isinstance(inner, dims.Normal):
            return None
        scale = dimension.q if isinstance(inner, dims.Integer) else 1
        low, high = (dimension.nearest(end * scale) for end in (inner.low, inner.high))
        return Range(low, high, is_log=isinstance(inner, dims.LogUniform) or inner.log)
    if isinstance(dimension, dims.LogUniform):
        return Range(dimension.low, dimension.high, is_log=True)
    if isinstance(dimension, dims.Uniform):
        return Range(dimension.low, dimension.high)
    if isinstance(dimension, dims.Integer):
        return Range(dimension.low, dimension.high, is_log=dimension.log)
    if isinstance(dimension, dims.Choice):
        numbers = all(is_number(option) for option in dimension.options)
        # A list such as [32, 64, 128, 256] is meant to be on a log axis.
        is_log = numbers and _is_geometric(sorted(set(dimension.options)))
        return Range(is_log=is_log, options=tuple(dimension.options))
    return None


def _is_geometric(values: list[float]) -> bool:
    """Return whether there are at least three values with growing differences."""
    if len(values) < 3 or values[0] <= 0:
        return False
    return values[-1] - values[-2] > 1.5 * (values[1] - values[0])
