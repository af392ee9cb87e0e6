"""The arguments of a search, checked once and written into the run's record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from cerebro.data import Dataset
from cerebro.data.given import FOLDERS
from cerebro.devices import ALL, CPU, are_gpus, choose, count_workers, named
from cerebro.errors import InputError, one_line
from cerebro.folds import Folds, KFold, Validation, is_splitter, make_folds
from cerebro.metrics import metric_mode
from cerebro.plain_files import path_of
from cerebro.recipe import accepts_info
from cerebro.stopping import EarlyStopping
from cerebro.store import FILE, default_run_path, unused_folder

HOOKS = (
    "on_run_start",
    "on_trial_start",
    "on_unit_end",
    "on_epoch_end",
    "on_trial_end",
    "on_run_end",
)


UNFINISHED = {
    *(FILE + ".new", FILE + ".new-journal", "owner.lock", "states", "trials", "control"),
    *FOLDERS,
}
"""What a process leaves that was killed while it made a run."""

rows_in: ContextVar[Path | None] = ContextVar("cerebro_rows_in", default=None)
"""The folder of the run that is being made, which has the rows that were given to it already."""

MAX_WORKERS = 4096
MAX_THREADS = 4096
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Settings:
    """What `cerebro.search` was asked to do; every field is valid."""

    build: Callable[..., Any]
    train: Dataset
    validation: Dataset | None
    folds: Folds | None
    epochs: int
    n_trials: int | None
    metric: str
    mode: Literal["min", "max"]
    select: Literal["best", "last"]
    batch_size: int | None
    eval_batch_size: int | None
    drop_last: bool
    stop: EarlyStopping | None
    width: int
    workers: int
    threads: int
    seed: int
    folder: Path
    keep: Literal["best", "last", "all"]
    max_retries: int
    unit_timeout: float | None
    time_limit: float | None
    stagger: bool
    asynchronous: bool
    live_models: int | None
    deterministic: Literal["warn"] | bool
    state_dir: Path
    callbacks: tuple[Any, ...]
    progress: Any
    executor: Any
    devices: tuple[str, ...] = (CPU,)
    """The CPU, or GPUs; the workers sit at them in turn."""
    searcher_name: str = ""
    space: str = ""
    points: tuple[Mapping[str, Any], ...] = field(default=())
    space_json: Mapping[str, Any] | None = None
    """The space, as `cerebro.space.Space.from_json` reads it."""
    searcher_class: Mapping[str, Any] | None = None
    """How the searcher can be made again; see `cerebro.searchers.description`."""

    @property
    def validates(self) -> bool:
        """Whether trials are validated."""
        return self.validation is not None or self.folds is not None

    @property
    def trials_each(self) -> int:
        """How many trials a configuration is: one, or one for each fold."""
        return 1 if self.folds is None else len(self.folds)

    def record(self) -> dict[str, Any]:
        """The part that the run's store keeps: everything that shapes the trials."""
        left_out = {
            "build", "train", "validation", "folds", "stop", "folder", "state_dir", "callbacks",
            "progress", "executor", "points", "space_json", "searcher_class",
        }  # fmt: skip
        names = [f.name for f in fields(self) if f.name not in left_out]
        record = {name: getattr(self, name) for name in names}
        return {**record, "stop": None if self.stop is None else asdict(self.stop)}


def whole_number(
    name: str, value: Any, least: int, most: int = 2**31 - 1, *, optional: bool = False
) -> int | None:
    """Check an integer argument."""
    if value is None and optional:
        return None
    try:
        number = int(value)
        wrong = isinstance(value, bool) or number != value or number < least
    except (TypeError, ValueError, OverflowError):
        wrong = True
    if wrong:
        raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if number > most:
        raise InputError(f"{name} must be at most {most}, not {value!r}")
    return number


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Check an argument with a few legal values."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        raise InputError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def views_of(data: Any, validation: Any) -> Validation:
    """Return what is trained on, what is validated on, and the folds where there are some.

    `validation` is as of `cerebro.search`: also a `cerebro.KFold` or a scikit-learn splitter.
    """
    if isinstance(validation, Folds):  # which were made already
        return Validation(validation.data, None, validation)
    if isinstance(validation, KFold) or (
        is_splitter(validation) and not isinstance(validation, Dataset)
    ):
        train, _ = split_validation(data, None)
        return Validation(train, None, make_folds(train, validation))
    return Validation(*split_validation(data, validation), None)


def split_validation(data: Any, validation: Any) -> tuple[Dataset, Dataset | None]:
    """Return training and validation views.

    `validation` is a data set, a fraction (the last part of the split) or None.
    """
    if isinstance(data, (str, os.PathLike)):
        data = Dataset(data)
    if not isinstance(data, Dataset):
        raise InputError(
            f"data must be a cerebro.Dataset, not {type(data).__name__}: write one with "
            "cerebro.shard(rows, folder), or give search() arrays as (x, y) or by name, a table or "
            "a PyTorch dataset"
        )
    if isinstance(validation, (str, os.PathLike)):
        validation = Dataset(validation)
    if validation is None or isinstance(validation, Dataset):
        return data, validation
    if isinstance(validation, (float, np.floating)) and 0 < validation < 1:
        share = float(validation)
        train, held_out = data.split(1 - share, share)
        return train, held_out
    raise InputError(
        f"validation must be a cerebro.Dataset, a fraction between 0 and 1, a cerebro.KFold, or "
        f"None, not {validation!r}"
    )


def check_columns(train: Dataset, validation: Dataset | None) -> None:
    """A model that trains on one must be able to read the other."""
    if validation is None:
        return
    missing = sorted(set(train.columns) - set(validation.columns))
    if missing:
        raise InputError(
            f"validation ({validation.path}) lacks the training data's column(s) "
            f"{', '.join(missing)}"
        )
    if validation.num_rows == 0:
        raise InputError(f"validation ({validation.path}) has no rows")
    other = other_classes(train, validation)
    if other is not None:
        raise InputError(f"validation ({validation.path}): {other}")


def other_classes(train: Dataset, data: Dataset) -> str | None:
    """Name a column whose codes mean other classes than in the training data; None if none does.

    Of data sets that were written apart, each has numbered the names that it has.
    """
    for name, ours in train.classes.items():
        theirs = data.classes.get(name)
        for number, (here, there) in enumerate(zip(ours or (), theirs or (), strict=False)):
            if here != there:
                return (
                    f"class {number} of column {name!r} is {there!r} here and {here!r} in the "
                    "training data: write all rows as one data set and split that, or give "
                    "numbers instead of names"
                )
    return None


def check_points(points: Any) -> tuple[dict[str, Any], ...]:
    """Configurations, or trials, whose configurations are meant."""
    if isinstance(points, (str, Mapping)) or not hasattr(points, "__iter__"):
        raise InputError(
            f"points must be a list of configurations or trials, not {one_line(repr(points), 100)}"
        )
    configs = [getattr(point, "config", point) for point in points]
    for config in configs:
        if not isinstance(config, Mapping):
            raise InputError(f"a point must be a mapping of names to values, not {config!r}")
    return tuple(dict(config) for config in configs)


def check_stop(stop: Any) -> EarlyStopping | None:
    """`stop` is a rule, not a number of epochs."""
    if stop is None or isinstance(stop, EarlyStopping):
        return stop
    raise InputError(
        f"stop must be a cerebro.EarlyStopping, not {stop!r}: give "
        "stop=cerebro.EarlyStopping('val_loss', patience=3)"
    )


def check_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """Callbacks are objects that each have a hook: a misspelt one would never be called."""
    if not isinstance(callbacks, (list, tuple)):
        raise InputError(f"callbacks must be a list of callbacks, not {callbacks!r}")
    for callback in callbacks:
        if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            raise InputError(
                f"the callback {callback!r} has none of the methods {', '.join(HOOKS)}"
            )
    return tuple(callbacks)


def check_executor(executor: Any) -> Any:
    """An executor has the methods of `cerebro.executors.base.Executor`."""
    missing = [
        name
        for name in ("start", "submit", "wait", "replace", "close")
        if not callable(getattr(executor, name, None))
    ]
    if executor is not None and missing:
        raise InputError(f"executor={executor!r} is no executor: it has no {missing[0]}() method")
    return executor


def new_run_folder(run: str | os.PathLike[str] | None, if_exists: str) -> Path:
    """Return the folder of a new run, not made yet."""
    one_of("if_exists", if_exists, ("error", "resume", "new"))
    if run is None and if_exists == "resume":
        raise InputError(
            "if_exists='resume' needs the run's folder, which is another each time by default: "
            "give run="
        )
    if run is None:
        return default_run_path()
    folder = path_of("run", run)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run={str(run)!r} is a file: choose another run=, a folder")
    names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    if names and folder != rows_in.get():
        if if_exists == "new":
            return unused_folder(folder)
        if if_exists == "error" or (FILE not in names and not names <= UNFINISHED):
            refuse_folder(folder)
    return folder


def refuse_folder(folder: Path) -> NoReturn:
    """Say that a run's folder is in use."""
    raise InputError(
        f"run folder {folder} exists already: choose another run=, delete it, open it with "
        "cerebro.open(), begin another beside it with if_exists='new', or continue it with "
        "if_exists='resume'"
    )


def worker_count(
    workers: Any, threads: int, devices: Sequence[str] = (CPU,), workers_per_device: Any = None
) -> int:
    """Workers to start: as asked, one for every `threads` cores, or so many for every GPU."""
    count = whole_number("workers", workers, 0, MAX_WORKERS, optional=True)
    each = whole_number("workers_per_device", workers_per_device, 1, MAX_WORKERS, optional=True)
    return count_workers(devices, count, each, threads)


def devices_of(devices: Any, workers_per_device: Any, executor: Any) -> tuple[str, ...]:
    """Check where models are trained; an executor knows its own machines' devices."""
    wanted = named(devices)
    if executor is not None:
        return _devices_of_executor(wanted, devices, workers_per_device, executor)
    chosen = choose(devices)
    if workers_per_device is not None and chosen == (CPU,) and wanted != ["auto"]:
        raise InputError("workers_per_device is for GPUs, and devices='cpu': give workers= instead")
    return chosen


def _devices_of_executor(
    wanted: list[str], devices: Any, workers_per_device: Any, executor: Any
) -> tuple[str, ...]:
    """Where an executor's workers train: on their GPUs, if they have some, unless on the CPU."""
    theirs: tuple[str, ...] = getattr(executor, "devices", (CPU,))
    if workers_per_device is not None:
        raise InputError(
            "workers_per_device is for GPUs of this machine, and executor= has workers of its own: "
            "to a cerebro.ray.Executor give resources={'GPU': 0.5} for two on each GPU"
        )
    if wanted == ["auto"]:
        return theirs
    if wanted == [CPU]:
        return (CPU,)
    if wanted != [ALL]:
        raise InputError(
            f"devices={devices!r} are of this machine, and executor= trains on others: give "
            "'auto', 'cuda' or 'cpu'"
        )
    if not are_gpus(theirs):
        raise InputError(
            "devices='cuda', and the workers of executor= have no GPUs: "
            "cerebro.ray.Executor(resources={'GPU': 1}) asks for one each"
        )
    return theirs


def seconds_per_unit(unit_timeout: float | None, workers: int, executor: Any) -> float | None:
    """`unit_timeout` ends processes, so there must be some."""
    if unit_timeout is not None and workers == 0 and executor is None:
        raise InputError(
            "unit_timeout ends the process of a unit that takes too long, and workers=0 trains in "
            "this one: give workers=1 or more, or leave it out"
        )
    return unit_timeout


def check_build(build: Any) -> None:
    """`build` must be callable with a configuration."""
    made = hasattr(build, "state_dict") and not isinstance(build, type)  # networks are callable
    if made or not callable(build):
        raise InputError(
            f"build must be a function that makes a model, such as def build(config): ..., "
            f"not {type(build).__name__}"
        )
    accepts_info(build)


def resolve_mode(metric: Any, mode: Any) -> Literal["min", "max"]:
    if not isinstance(metric, str) or not metric:
        raise InputError(f"metric must be a metric's name, not {metric!r}")
    return metric_mode(metric, mode)
