"""Arguments of a search, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cerebro.arguments import whole_number
from cerebro.errors import InputError, one_line
from cerebro.machine.devices import ALL, CPU, are_gpus, choose, count_workers, named
from cerebro.run.settings import HOOKS, MAX_WORKERS
from cerebro.searchers.metrics import metric_mode
from cerebro.searchers.stopping import EarlyStopping


def check_points(points: Any) -> tuple[dict[str, Any], ...]:
    """Check configurations to try first; of trials their configurations are taken."""
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
    """Check that `stop` is a rule, not a number of epochs."""
    if stop is None or isinstance(stop, EarlyStopping):
        return stop
    raise InputError(
        f"stop must be a cerebro.EarlyStopping, not {stop!r}: give "
        "stop=cerebro.EarlyStopping('val_loss', patience=3)"
    )


def check_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """Check that each callback has a hook: a misspelled one would never be called."""
    if not isinstance(callbacks, (list, tuple)):
        raise InputError(f"callbacks must be a list of callbacks, not {callbacks!r}")
    for callback in callbacks:
        if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            raise InputError(
                f"the callback {callback!r} has none of the methods {', '.join(HOOKS)}"
            )
    return tuple(callbacks)


def check_executor(executor: Any) -> Any:
    """Check that an executor has the methods of `cerebro.executors.base.Executor`."""
    missing = [
        name
        for name in ("start", "submit", "wait", "replace", "close")
        if not callable(getattr(executor, name, None))
    ]
    if executor is not None and missing:
        raise InputError(
            f"executor={executor!r} is not an executor: it has no {missing[0]}() method"
        )
    return executor


def worker_count(
    workers: Any, threads: int, devices: Sequence[str] = (CPU,), workers_per_device: Any = None
) -> int:
    """Return how many workers to start: `workers`, or by the cores or GPUs of this machine."""
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
    """Return the devices of an executor's workers: their GPUs, if any, or the CPU."""
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
    """Check `unit_timeout`, which needs worker processes to end."""
    if unit_timeout is not None and workers == 0 and executor is None:
        raise InputError(
            "unit_timeout ends the process of a unit that takes too long, and workers=0 trains in "
            "this one: give workers=1 or more, or leave it out"
        )
    return unit_timeout


def resolve_mode(metric: Any, mode: Any) -> Literal["min", "max"]:
    if not isinstance(metric, str) or not metric:
        raise InputError(f"metric must be a metric's name, not {metric!r}")
    return metric_mode(metric, mode)
