"""The problem of a search: a dataset, a space and its extent.

A `Problem` is everything that a run's results depend on. The number of workers, the kept states and
the place of live states must not change results, so one fault-free run is the oracle for all runs
of a problem.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

BATCH_SIZE = 8
ROWS_PER_SHARD = 40


@dataclass(frozen=True)
class Problem:
    """Everything that the results of a run depend on."""

    model: str = "numpy"
    searcher: str = "random"
    trials: int = 4
    shards: int = 4
    epochs: int = 3
    seed: int = 1

    @property
    def units_per_epoch(self) -> int:
        return self.shards + 1  # the last one is validation

    @property
    def units(self) -> int:
        return self.trials * self.epochs * self.units_per_epoch

    @property
    def adaptive(self) -> bool:
        """Whether the searcher decides how long trials train."""
        return self.searcher == "tournament"

    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    def data(self, folder: Path) -> Path:
        """Create the problem's dataset in `folder` if missing, and return its path."""
        import cerebro

        rng = np.random.default_rng([self.shards, self.seed])
        rows = self.shards * ROWS_PER_SHARD
        x = rng.normal(size=(rows, 4))
        y = x @ np.array([1.0, -2.0, 0.5, 0.0]) + 0.1 * rng.normal(size=rows)
        path = folder / f"data-{self.shards}-{self.seed}"
        cerebro.shard({"x": x, "y": y}, path, shards=self.shards, seed=self.seed, exist_ok=True)
        return path

    def arguments(self) -> dict[str, Any]:
        """Keywords of `cerebro.search`, without those that must not affect results."""
        import cerebro
        from benchmarks.faults import models
        from benchmarks.faults.searchers import Tournament

        space = {"lr": cerebro.loguniform(1e-3, 3e-2), "rows": [10, 300, 1500]}
        if self.searcher == "grid":
            space["lr"] = [0.003 * (1 + n) for n in range(-(-self.trials // 3))]
        return {
            "build": models.build_torch if self.model == "torch" else models.build_numpy,
            "space": space,
            "epochs": self.epochs,
            "n_trials": self.trials,
            "searcher": Tournament() if self.adaptive else self.searcher,
            "validation": 0.2,
            "batch_size": BATCH_SIZE,
            "seed": self.seed,
            "progress": False,
        }


def to_json(problem: Problem, **more: Any) -> str:
    return json.dumps({"problem": asdict(problem), **more})
