"""Check the number of workers; imports little, so that the demo can start its workers early.

`idle_advice` is for a search that trains fewer trials at a time than it has workers: units of
different trials run in parallel; those of one trial run one after the other. With fewer trials than
workers, the other workers are idle.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from cerebro.arguments import check_whole_number, find_stacklevel
from cerebro.machine.devices import CPU, MAX_WORKERS, are_gpus, count_workers


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
        warnings.warn(
            f"workers={count} is not used, because executor= has the workers, and starts {starts}: "
            f"{cure}",
            stacklevel=find_stacklevel(),
        )
    return number


def worker_count(
    workers: Any, threads: int, devices: Sequence[str] = (CPU,), workers_per_device: Any = None
) -> int:
    """Return the number of workers to start: `workers`, or by default one per core or GPU."""
    count = check_whole_number("workers", workers, 0, MAX_WORKERS, optional=True)
    per_device = check_whole_number(
        "workers_per_device", workers_per_device, 1, MAX_WORKERS, optional=True
    )
    return count_workers(devices, count, per_device, threads)


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
