"""Check the arguments of a search before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cerebro.arguments import (
    KERAS_CALLBACKS,
    check_optional_real,
    check_whole_number,
    warn_user,
)
from cerebro.data import Dataset
from cerebro.errors import InputError, one_line
from cerebro.machine.devices import ALL, CPU, MAX_WORKERS, are_gpus, choose_devices, name_devices
from cerebro.model import Info, is_keras
from cerebro.run.settings import Settings
from cerebro.searchers.base import Searcher
from cerebro.searchers.metrics import EarlyStopping
from cerebro.space import Space
from cerebro.worker.models import make_info

HOOKS = (
    "on_run_start", "on_trial_start", "on_unit_end", "on_epoch_end", "on_trial_end", "on_run_end",
)  # fmt: skip

EVAL_ROWS = 256
MOST_VALUES = 2**16
"""The most values per row for `EVAL_ROWS`; an image of 128 x 128 in color has 49,152."""

MOST_NUMBERED = 16
"""The most integers in a row that are not the tokens of a sequence."""


def check_points(points: Any) -> tuple[dict[str, Any], ...]:
    """Check the configurations to try first; replace trials by their configurations."""
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
    if stop is None or isinstance(stop, EarlyStopping):
        return stop
    raise InputError(
        f"stop must be a cerebro.EarlyStopping, not {stop!r}: give "
        "stop=cerebro.EarlyStopping('val_loss', patience=3)"
    )


def check_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """Check that each callback has a hook, because a misspelled hook would never be called."""
    if not isinstance(callbacks, (list, tuple)):
        raise InputError(f"callbacks must be a list of callbacks, not {callbacks!r}")
    for callback in callbacks:
        if is_keras(callback):
            raise InputError(f"{type(callback).__name__} is a Keras callback; {KERAS_CALLBACKS}")
        if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            raise InputError(
                f"the callback {callback!r} has none of the methods {', '.join(HOOKS)}"
            )
    return tuple(callbacks)


def check_executor(executor: Any) -> Any:
    """Check that an executor has the methods of `cerebro.executors.base.Executor`."""
    names = ("start", "submit", "wait", "replace", "close")
    missing = [name for name in names if not callable(getattr(executor, name, None))]
    if executor is not None and missing:
        raise InputError(
            f"executor={executor!r} is not an executor: it has no {missing[0]}() method"
        )
    return executor


def set_up_searcher(searcher: Searcher, space: Space, settings: Settings) -> None:
    searcher.bind_run(settings.folder, partial(make_trial_info, settings))
    settings.set_up(searcher, space)


def make_trial_info(settings: Settings, trial: int, config: Mapping[str, Any]) -> Info:
    """Return a trial's `Info`; with folds, a configuration's, for its first fold."""
    data = settings.train if settings.folds is None else settings.folds.get_views(0)[0]
    batches, epochs = settings.batches, settings.limits.epochs
    order = batches.make_order(data, settings.exactness.seed)
    return make_info(data, order, trial=trial, epochs=epochs, cut=batches.make_cut(config))


def devices_of(devices: Any, workers_per_device: Any, executor: Any) -> tuple[str, ...]:
    """Check `devices` and return their names; with an executor, those of its machines."""
    wanted = name_devices(devices)
    if executor is None:
        resolved = choose_devices(devices)
        if workers_per_device is not None and resolved == (CPU,) and wanted != ["auto"]:
            raise InputError(
                "workers_per_device is for GPUs, but devices='cpu': give workers= instead"
            )
        return resolved
    theirs: tuple[str, ...] = getattr(executor, "devices", (CPU,))  # GPUs, if any, or the CPU
    if workers_per_device is not None:
        raise InputError(
            "workers_per_device is for GPUs of this machine, not for those of executor=: "
            "give cerebro.ray.Executor resources={'GPU': 0.5}, or another executor gpus=0.5, for "
            "two workers on each GPU"
        )
    if wanted == ["auto"]:
        return theirs
    if wanted == [CPU]:
        return (CPU,)
    if wanted != [ALL]:
        raise InputError(
            f"devices={devices!r} names devices of this machine, but executor= trains on others: "
            "give 'auto', 'cuda' or 'cpu'"
        )
    if not are_gpus(theirs):
        raise InputError(
            "devices='cuda', but the workers of executor= have no GPUs: give each one with "
            "cerebro.ray.Executor(resources={'GPU': 1}), or with gpus=1 of another executor"
        )
    return theirs


def seconds_per_unit(unit_timeout: Any, workers: int, executor: Any) -> float | None:
    """Return `unit_timeout`; raise InputError if no worker process can be killed on a timeout."""
    seconds = check_optional_real("unit_timeout", unit_timeout, above=0)
    if seconds is not None and workers == 0 and executor is None:
        raise InputError(
            "unit_timeout kills the worker process of a unit that takes too long, but workers=0 "
            "trains in this process: give workers=1 or more, or leave it out"
        )
    return seconds


def eval_rows(data: Dataset) -> int | None:
    """Return the default of ``eval_batch_size`` for a dataset; None: the trial's batch size.

    Large images and sequences of tokens might not fit in memory in larger batches: a language model
    returns one number per word of its vocabulary for each token.
    """
    values = 0
    for column in data.columns.values():
        size = math.prod(column.shape)
        is_wide_integer = column.dtype.lstrip("u") in ("int16", "int32", "int64")
        if column.ragged or (is_wide_integer and size > MOST_NUMBERED):
            return None
        values += size
    return EVAL_ROWS if values <= MOST_VALUES else None


def choose_worker_count(workers: Any, executor: Any) -> Any:
    """Return the number of workers that `workers` or the executor names; None: neither names one.

    The executor's number counts; warns if `workers` differs from it. Without a number, an executor
    starts as many workers as fit.
    """
    count = check_whole_number("workers", workers, 0, MAX_WORKERS, optional=True)
    number = getattr(executor, "workers", count)  # an executor need not have a number
    if count is not None and count != number:
        starts = "as many as fit" if number is None else number
        cure = "leave workers= out"
        if count > 0:
            cure += f", or give the number to the executor, as in Executor(workers={count})"
        warn_user(
            f"workers={count} is not used, because executor= has the workers, and starts {starts}: "
            f"{cure}"
        )
    return number


def idle_advice(
    at_once: int | None,
    workers: int,
    threads: int,
    *,
    folds: int | None = None,
    devices: Sequence[str] = (CPU,),
    elsewhere: bool = False,
) -> str | None:
    """Return how many workers are idle and what would use them; None if all have work.

    `at_once` is the most trials that train at a time, counting each fold; None: unknown. With
    `elsewhere`, an executor has the workers, whose nodes may have no cores for more threads.
    """
    if at_once is None or not 0 < at_once < workers:
        return None
    cures = []
    more = workers * threads // at_once
    if more > threads and not are_gpus(devices) and not elsewhere:
        cures.append(f"threads={more} with workers={at_once}")
    if folds is None:
        cures.append("folds (validation=cerebro.KFold(...))")
    text = f"{', '.join(cures)} or more trials" if cures else "more trials"
    if not text.startswith("threads="):
        text = text[0].upper() + text[1:]
    trials = "1 trial trains" if at_once == 1 else f"{at_once} trials train"
    idle = workers - at_once
    return f"{trials} at a time on {workers} workers: {idle} idle. {text} would use them"
