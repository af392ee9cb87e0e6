"""Optuna: two processes share a study in one journal file.

optuna.readthedocs.io, "Easy Parallelization" and the FAQ: ``JournalStorage`` over a file is the
storage for processes of one machine. Every trial is queued with ``enqueue_trial``.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import optuna

from benchmarks.comparison.rivals.one_thread import one_thread
from benchmarks.comparison.training import Work, train_trial


def storage(work: Work) -> Any:
    file = str(Path(work.place, "journal"))
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(file))


def work_on(work: Work) -> None:
    one_thread()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.load_study(study_name="comparison", storage=storage(work))

    def objective(trial: Any) -> float:
        return train_trial(work, trial.suggest_int("number", 0, work.trials - 1))

    done = optuna.study.MaxTrialsCallback(work.trials, states=None)
    while any(trial.state == optuna.trial.TrialState.WAITING for trial in study.trials):
        study.optimize(objective, n_trials=1, callbacks=[done])


def run(work: Work) -> None:
    """Train every configuration."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        study_name="comparison", storage=storage(work), direction="maximize"
    )
    for number in range(work.trials):
        study.enqueue_trial({"number": number})
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work_on, args=(work,)) for _ in range(work.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    lost = [worker.exitcode for worker in workers if worker.exitcode]
    if lost:
        work.log.write("lost", *lost)  # the other process goes on alone
