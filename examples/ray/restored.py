"""A Tuner that resumes after an interruption, as in Ray Tune's guide.

    python examples/ray/restored.py --storage results # kill it at any time python
    examples/ray/restored.py --storage results # run it again

In Tune's program, the trainable saves a checkpoint after every epoch and loads the newest when it
is restored. Here neither is needed: every epoch is on disk before Tune receives its result, and no
epoch is trained twice. The lines that differ are marked.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from ray import tune
from sklearn.datasets import load_digits
from torch import nn

import cerebro  # new

NAME = "restored"


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def trainable(config):  # was: the same, with checkpoints and all of the training
    net = nn.Sequential(nn.Linear(64, config["hidden"]), nn.ReLU(), nn.Linear(config["hidden"], 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
    # was: tune.get_checkpoint(), the loops over epochs and batches, tune.report with a checkpoint
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
        inputs="x",
        target="y",
    )


def make_data(folder: str) -> cerebro.Dataset:  # was: a data loader
    digits = load_digits()
    arrays = {"x": (digits.data / 16).astype("float32"), "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=4, exist_ok=True, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-flat")
    parser.add_argument("--storage", default="results", help="where Tune keeps its experiments")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    train, valid = make_data(options.data).split(0.75, 0.25, stratify="y")
    trained = cerebro.ray.trainable(  # was: nothing; the function was passed itself
        trainable, train, validation=valid, batch_size=64, workers=options.workers
    )
    path = Path(options.storage).resolve() / NAME
    if tune.Tuner.can_restore(str(path)):
        tuner = tune.Tuner.restore(str(path), trainable=trained, resume_errored=True)
        print("goes on")
    else:
        tuner = tune.Tuner(
            trained,
            param_space={
                "hidden": tune.choice([16, 32, 64]),
                "lr": tune.loguniform(1e-3, 1e-1),
            },
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", num_samples=options.samples),
            run_config=tune.RunConfig(
                name=NAME,
                storage_path=str(path.parent),
                stop={"training_iteration": options.iterations},
                failure_config=tune.FailureConfig(max_failures=1),
                verbose=0,
            ),
        )
    results = tuner.fit()

    best = results.get_best_result()
    print("best config:", best.config)
    print("best accuracy:", best.metrics["accuracy"])
    print("iterations:", sorted(result.metrics["training_iteration"] for result in results))


if __name__ == "__main__":
    main()
