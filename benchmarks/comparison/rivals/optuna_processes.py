"""Optuna: two processes share a study in a database.

optuna.readthedocs.io, "Easy Parallelization", and the FAQ, "How can I retry failed trials?": an
``RDBStorage`` with a heartbeat and ``RetryFailedTrialCallback``. Every trial is queued with
``enqueue_trial``; one that the sampler made up is pruned.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import optuna

from benchmarks.comparison.rivals.one_thread import one_thread
from benchmarks.comparison.training import Work, train_trial

RUNNING, WAITING = optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.WAITING


def storage(work: Work) -> Any:
    return optuna.storages.RDBStorage(
        f"sqlite:///{work.place}/study.db",
        heartbeat_interval=1,
        grace_period=3,
        heartbeat_stale_trial_callback=optuna.storages.RetryFailedTrialCallback(max_retry=3),
    )


def work_on(work: Work) -> None:
    one_thread()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.load_study(study_name="comparison", storage=storage(work))

    def objective(trial: Any) -> float:
        if "queued" not in trial.user_attrs:  # the other process took the last one
            raise optuna.TrialPruned
        return train_trial(work, trial.suggest_int("number", 0, work.trials - 1))

    while states := {trial.state for trial in study.trials} & {WAITING, RUNNING}:
        if WAITING in states:
            study.optimize(objective, n_trials=1)
        else:  # the other process may have died
            time.sleep(0.2)
            optuna.storages.fail_stale_trials(study)


def run(work: Work) -> None:
    """Train every configuration."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        study_name="comparison", storage=storage(work), direction="maximize"
    )
    for number in range(work.trials):
        study.enqueue_trial({"number": number}, user_attrs={"queued": True})
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work_on, args=(work,)) for _ in range(work.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    lost = [worker.exitcode for worker in workers if worker.exitcode]
    if lost:
        work.log.write("lost", *lost)  # the other process goes on alone
