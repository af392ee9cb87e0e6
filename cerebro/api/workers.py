"""Check the number of workers; imports little, so that the demo can start its workers early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cerebro.arguments import whole_number
from cerebro.machine.devices import CPU, MAX_WORKERS, count_workers


def worker_count(
    workers: Any, threads: int, devices: Sequence[str] = (CPU,), workers_per_device: Any = None
) -> int:
    """Return the number of workers to start: `workers`, or by default one per core or GPU."""
    count = whole_number("workers", workers, 0, MAX_WORKERS, optional=True)
    each = whole_number("workers_per_device", workers_per_device, 1, MAX_WORKERS, optional=True)
    return count_workers(devices, count, each, threads)
