"""joblib: ``Parallel`` over configurations, with its default loky processes.

joblib.readthedocs.io, "Embarrassingly parallel for loops": one task per configuration; the arrays
are memory maps, which processes share. A batch is one task, since tasks take seconds.
"""

from __future__ import annotations

import joblib

from benchmarks.comparison.rivals.one_thread import one_thread
from benchmarks.comparison.training import Work, train_trial


def task(work: Work, number: int) -> float:
    one_thread()
    return train_trial(work, number)


def run(work: Work) -> None:
    """Train every configuration."""
    joblib.Parallel(n_jobs=work.workers, batch_size=1, pre_dispatch="all")(
        joblib.delayed(task)(work, number) for number in range(work.trials)
    )
