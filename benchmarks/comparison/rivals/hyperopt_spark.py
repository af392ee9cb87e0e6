"""Hyperopt on Spark's local cluster: ``SparkTrials`` with a task per configuration.

hyperopt.github.io, "Scaling out search with Apache Spark": ``parallelism`` is the number of cores.
``local[2,4]`` lets Spark try a lost task four times. The grid is a choice that a fixed queue of
points walks through, as ``points_to_evaluate`` does for one process.
"""

from __future__ import annotations

from typing import Any

import hyperopt
from pyspark.sql import SparkSession

from benchmarks.comparison.rivals.one_thread import one_thread
from benchmarks.comparison.training import Work, train_trial


def in_turn(new_ids: Any, domain: Any, trials: Any, seed: Any) -> Any:
    """Suggest the configurations in order."""
    made = []
    for number in new_ids:
        misc = {
            "tid": number,
            "cmd": domain.cmd,
            "workdir": domain.workdir,
            "idxs": {"number": [number]},
            "vals": {"number": [number]},
        }
        made += trials.new_trial_docs([number], [None], [domain.new_result()], [misc])
    return made


def run(work: Work) -> None:
    """Train every configuration."""
    session = (
        SparkSession.builder.master(f"local[{work.workers},4]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", work.place)
        .getOrCreate()
    )

    def objective(number: Any) -> float:
        one_thread()
        return -train_trial(work, int(number))

    hyperopt.fmin(
        objective,
        hyperopt.hp.randint("number", work.trials),
        algo=in_turn,
        max_evals=work.trials,
        trials=hyperopt.SparkTrials(parallelism=work.workers, spark_session=session),
        show_progressbar=False,
    )
    work.ended()
    session.stop()
