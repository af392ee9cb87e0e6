"""Ray Tune: a class trainable per configuration, actors reused.

docs.ray.io, "Ray Tune: Trainables" (reuse_actors), "Fault tolerance" (max_failures with a
checkpoint after every epoch), one CPU per trial.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ray import tune

from benchmarks import peers
from benchmarks.comparison.rivals.one_thread import one_thread
from benchmarks.comparison.training import Trial, Work


class Trained(tune.Trainable):
    """One configuration; a step is an epoch."""

    def setup(self, config: dict[str, Any]) -> None:
        one_thread()
        self.trial = Trial(Work(*config["work"]), config["number"])

    def reset_config(self, config: dict[str, Any]) -> bool:
        self.setup(config)
        return True

    def step(self) -> dict[str, Any]:
        score = self.trial.epoch(self.iteration)
        over = self.iteration + 1 == self.trial.work.epochs
        if over:
            self.trial.work.finished(self.trial.number, self.trial.net)
        return {"accuracy": score, "done": over}

    def save_checkpoint(self, folder: str) -> str:
        torch.save(self.trial.state(), Path(folder, "state"))
        return folder

    def load_checkpoint(self, folder: Any) -> None:
        self.trial.load(torch.load(Path(folder, "state")))


def run(work: Work) -> None:
    """Train every configuration."""
    with peers.ray_of(work.place, work.workers, _node_ip_address="127.0.0.1"):
        tune.Tuner(
            Trained,
            param_space={
                "number": tune.grid_search(list(range(work.trials))),
                "work": (work.name, work.size, work.data, work.place),
            },
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", reuse_actors=True),
            run_config=tune.RunConfig(
                storage_path=str(Path(work.place, "tune")),
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=3),
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=1),
            ),
        ).fit()
        work.ended()
