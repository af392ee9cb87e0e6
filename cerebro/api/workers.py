"""Check the number of workers; imports little, so that the demo can start its workers early."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from cerebro.arguments import users_level, whole_number
from cerebro.machine.devices import CPU, MAX_WORKERS, count_workers


def own_workers(workers: Any, executor: Any) -> Any:
    """Return the number of workers that a call names, in `workers` or in its executor.

    None: it names none. An executor then starts as many as fit, and only it knows how many. Warns
    if `workers` is another number than the executor's, which counts.

    Raises
    ------
    InputError
        If `workers` is not a number of workers.
    """
    count = whole_number("workers", workers, 0, MAX_WORKERS, optional=True)
    own = getattr(executor, "workers", count)  # an executor need not have a number
    if count is not None and count != own:
        starts = "as many as fit" if own is None else own
        cure = "leave workers= out"
        if count > 0:
            cure += f", or give the number to the executor, as in Executor(workers={count})"
        warnings.warn(
            f"workers={count} is not used, because executor= has the workers, and starts {starts}: "
            f"{cure}",
            stacklevel=users_level(),
        )
    return own


def worker_count(
    workers: Any, threads: int, devices: Sequence[str] = (CPU,), workers_per_device: Any = None
) -> int:
    """Return the number of workers to start: `workers`, or by default one per core or GPU."""
    count = whole_number("workers", workers, 0, MAX_WORKERS, optional=True)
    each = whole_number("workers_per_device", workers_per_device, 1, MAX_WORKERS, optional=True)
    return count_workers(devices, count, each, threads)
