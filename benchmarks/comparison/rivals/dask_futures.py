"""dask.distributed: one future per configuration, on processes with one thread each.

docs.dask.org, "Futures": ``Client.map`` and ``as_completed``; a lost task runs again.
"""

from __future__ import annotations

from benchmarks import peers
from benchmarks.comparison.rivals.one_thread import one_thread
from benchmarks.comparison.training import Work, train_trial


def task(number: int, work: Work) -> float:
    one_thread()
    return train_trial(work, number)


def run(work: Work) -> None:
    """Train every configuration."""
    with peers.dask_of(work.place, work.workers) as client:
        client.gather(client.map(task, range(work.trials), work=work, pure=False, batch_size=1))
        work.ended()
