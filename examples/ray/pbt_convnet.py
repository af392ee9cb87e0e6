"""Population-based training as in Ray Tune's guide to PBT: a small convnet.

    python examples/ray/pbt_convnet.py

Four networks train in parallel. Every few epochs, the worst copies the weights, momentum and
hyperparameters of the best and continues with changed hyperparameters. In Tune's program, the
trainable has the loops over epochs and batches and saves and loads checkpoints; here it ends with
the optimizer. Scheduler, Tuner and results are Tune's. The lines that differ are marked.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from sklearn.datasets import load_digits
from torch import nn

import cerebro  # new


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, kernel_size=3)
        self.fc = nn.Linear(27, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(nn.functional.max_pool2d(self.conv1(x), 2))
        return nn.functional.log_softmax(self.fc(x.flatten(1)), dim=1)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def train_convnet(config):  # was: def train_convnet(config), with all of the training
    net = ConvNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"], momentum=config["momentum"])
    # was: checkpoints loaded and saved, the loops over epochs and batches, tune.report
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=nn.functional.nll_loss,
        metrics={"mean_accuracy": accuracy},
        inputs="x",
        target="y",
    )


def make_data(folder: str) -> cerebro.Dataset:  # was: two data loaders
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype("float32")
    arrays = {"x": images, "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=4, exist_ok=True, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-chw")
    parser.add_argument("--storage", help="where Tune keeps its experiments (~/ray_results)")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--interval", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    train, valid = make_data(options.data).split(0.75, 0.25, stratify="y")
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=options.interval,
        synch=True,  # wait for networks that start late
        metric="mean_accuracy",
        mode="max",
        hyperparam_mutations={
            "lr": tune.uniform(0.0001, 1),
            "momentum": [0.8, 0.9, 0.99],
        },
    )
    tuner = tune.Tuner(
        cerebro.ray.trainable(  # was: train_convnet
            train_convnet, train, validation=valid, batch_size=32, workers=options.workers
        ),
        run_config=tune.RunConfig(
            name="pbt_convnet",
            storage_path=str(Path(options.storage or tempfile.mkdtemp()).resolve()),
            stop={"mean_accuracy": 0.99, "training_iteration": options.iterations},
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_score_attribute="mean_accuracy", num_to_keep=4
            ),
            verbose=0,
        ),
        tune_config=tune.TuneConfig(
            scheduler=scheduler, num_samples=options.samples, reuse_actors=True
        ),
        param_space={"lr": tune.uniform(0.001, 1), "momentum": tune.uniform(0.1, 0.9)},
    )
    results = tuner.fit()

    best = results.get_best_result(metric="mean_accuracy", mode="max")
    print("best accuracy:", best.metrics["mean_accuracy"])
    print("best config:", best.config)
    run = cerebro.open(Path(results.experiment_path, "cerebro"), build=train_convnet)  # new
    for trial in run.trials:
        if trial.parent is not None:
            print(f"trial {trial.number} is a clone of {trial.parent}: {trial.config}")
    # was: the network rebuilt, and the checkpoint's file loaded into it
    net = run.trials[best.metrics["cerebro_trial"]].load().net
    print("parameters:", sum(p.numel() for p in net.parameters()))


if __name__ == "__main__":
    main()
