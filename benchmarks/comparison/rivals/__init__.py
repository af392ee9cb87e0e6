"""The rivals: one short file each, written as its own documentation says.

``run(work)`` trains every configuration of the workload and reports through `Work`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rival:
    """Where a rival's code is, and which packages it needs."""

    module: str
    function: str = "run"
    needs: tuple[str, ...] = ()
    settings: str = ""
    is_slow: bool = False
    """Whether it takes several times as long as the others, and so runs less often."""

    def lacking(self) -> str | None:
        """Return why it cannot run here, or None."""
        for package in self.needs:
            found = None
            with contextlib.suppress(ImportError, ValueError):
                found = importlib.util.find_spec(package)
            if found is None:
                return f"{package} is not installed"
        return None

    def load(self) -> Callable[[Any], None]:
        """Return its function."""
        module = importlib.import_module(f"benchmarks.comparison.rivals.{self.module}")
        return getattr(module, self.function)  # type: ignore[no-any-return]


LOOP = "plain loop"
OURS = "Cerebro"
RECORDED = "Cerebro, graph=True"
RIVALS = {
    LOOP: Rival("plain_loop", settings="one process"),
    OURS: Rival("cerebro_hopper", settings="defaults"),
    RECORDED: Rival("cerebro_hopper", "run_recorded", settings="`graph=True`: recorded steps"),
    "joblib": Rival("joblib_pool", needs=("joblib",), settings="loky, a task per configuration"),
    "Optuna": Rival(
        "optuna_processes", needs=("optuna",), settings="2 processes, SQLite, heartbeat, retries"
    ),
    "Ray Tune": Rival(
        "ray_tune", needs=("ray.tune",), settings="`reuse_actors`, a checkpoint per epoch"
    ),
    "Dask-ML": Rival(
        "dask_search", needs=("dask_ml", "distributed"), settings="`IncrementalSearchCV`"
    ),
    "dask.distributed": Rival(
        "dask_futures", needs=("distributed",), settings="a future per configuration"
    ),
    "Hyperopt on Spark": Rival(
        "hyperopt_spark",
        needs=("hyperopt", "pyspark"),
        settings="`SparkTrials`, `local[2,4]`",
        is_slow=True,
    ),
    "DDP": Rival(
        "data_parallel", settings="gloo, torchrun's agent, a snapshot per epoch", is_slow=True
    ),
    "model averaging": Rival("model_averaging", settings="an average per epoch, gloo"),
    "parameter server, sync": Rival(
        "parameter_server", settings="`torch.distributed.rpc`", is_slow=True
    ),
    "parameter server, async": Rival(
        "parameter_server",
        "run_asynchronous",
        settings="`torch.distributed.rpc`",
        is_slow=True,
    ),
}

PUBLISHED = "cerebro-dl 1.1.1"
NOT_RUN = {
    PUBLISHED: "it imports itself as `cerebro`, as this project does, so both cannot be installed "
    "together; it also needs TensorFlow, Spark, petastorm and flask-restplus",
}
"""Systems that cannot run beside this project, and why."""
