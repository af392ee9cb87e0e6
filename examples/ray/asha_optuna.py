"""ASHA and Optuna as in Ray Tune's PyTorch tutorial: a two-layer perceptron.

    python examples/ray/asha_optuna.py

Optuna's sampler suggests, ASHA stops unpromising trials, Tune logs and collects results. In Tune's
program, the trainable loads the data, trains, validates and reports; here it ends with the
optimizer. The lines that differ are marked.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch
from sklearn.datasets import load_digits
from torch import nn

import cerebro  # new


class Net(nn.Module):
    def __init__(self, l1: int = 120, l2: int = 84) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, l1)
        self.fc2 = nn.Linear(l1, l2)
        self.fc3 = nn.Linear(l2, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.fc1(x))
        x = nn.functional.relu(self.fc2(x))
        return self.fc3(x)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def train_digits(config):  # was: def train_digits(config), with all of the training
    net = Net(config["l1"], config["l2"])
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"], momentum=0.9)
    # was: the checkpoint loaded, the loops over epochs and batches, validation, tune.report
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
        inputs="x",
        target="y",
    )


def load_data(folder: str) -> cerebro.Dataset:  # was: two datasets, loaded by every trial
    digits = load_digits()
    arrays = {"x": (digits.data / 16).astype("float32"), "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=4, exist_ok=True, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-flat")
    parser.add_argument("--storage", help="where Tune keeps its experiments (~/ray_results)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    train, valid, test = load_data(options.data).split(0.6, 0.2, 0.2, stratify="y")
    config = {
        "l1": tune.choice([2**i for i in range(4, 8)]),
        "l2": tune.choice([2**i for i in range(4, 8)]),
        "lr": tune.loguniform(1e-3, 3e-1),
        "batch_size": tune.choice([16, 32, 64]),
    }
    tuner = tune.Tuner(
        cerebro.ray.trainable(  # was: train_digits, with resources for each trial
            train_digits, train, validation=valid, workers=options.workers
        ),
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            search_alg=ConcurrencyLimiter(OptunaSearch(seed=0), max_concurrent=4),
            scheduler=ASHAScheduler(max_t=options.epochs, grace_period=1, reduction_factor=2),
            num_samples=options.samples,
        ),
        run_config=tune.RunConfig(
            name="asha_optuna",
            storage_path=str(Path(options.storage or tempfile.mkdtemp()).resolve()),
            verbose=0,
        ),
        param_space=config,
    )
    results = tuner.fit()

    best = results.get_best_result("loss", "min")
    print("best config:", best.config)
    print("best validation loss:", best.metrics["loss"])
    print("best validation accuracy:", best.metrics["accuracy"])
    print(results.get_dataframe()[["training_iteration", "loss", "config/lr"]].to_string())
    # was: the best network rebuilt, its checkpoint loaded, a loop over test batches
    run = cerebro.open(Path(results.experiment_path, "cerebro"), build=train_digits)
    outcome = run.trials[best.metrics["cerebro_trial"]].evaluate(test)
    print("test accuracy:", outcome["accuracy"])


if __name__ == "__main__":
    main()
