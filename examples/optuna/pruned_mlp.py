"""Optuna's PyTorch example with a pruner: layers, dropout and optimizer of a perceptron.

    python examples/optuna/pruned_mlp.py

An Optuna objective defines a network from the trial's suggestions, trains it epoch by epoch,
reports its accuracy after each and checks whether to prune. Here it ends after the optimizer: it
returns a model, and ``cerebro.optuna.optimize`` replaces ``study.optimize``. The lines that differ
are marked.
"""

from __future__ import annotations

import argparse

import optuna
import torch
from optuna.trial import TrialState
from sklearn.datasets import load_digits
from torch import nn

import cerebro  # new

CLASSES = 10
PIXELS = 64


def define_net(trial: optuna.Trial) -> nn.Sequential:
    """Suggest the number of layers, and the width and dropout of each."""
    layers: list[nn.Module] = []
    width = PIXELS
    for number in range(trial.suggest_int("layers", 1, 3)):
        units = trial.suggest_int(f"units_{number}", 4, 128)
        dropout = trial.suggest_float(f"dropout_{number}", 0.2, 0.5)
        layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(dropout)]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, CLASSES), nn.LogSoftmax(dim=1))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def build(trial: optuna.Trial) -> cerebro.torch.Model:  # was: def objective(trial)
    net = define_net(trial)
    name = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=lr)
    # was: the loops over epochs and batches, trial.report and trial.should_prune
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=nn.functional.nll_loss,
        metrics={"accuracy": accuracy},
        inputs="x",
        target="y",
    )


def make_data(folder: str) -> cerebro.Dataset:  # was: two data loaders
    digits = load_digits()
    arrays = {"x": (digits.data / 16).astype("float32"), "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=8, exist_ok=True, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-flat")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    train, valid = make_data(options.data).split(0.75, 0.25, stratify="y")
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(),
    )
    result = cerebro.optuna.optimize(  # was: study.optimize(objective, n_trials=..., timeout=...)
        study,
        build,
        train,
        epochs=options.epochs,
        n_trials=options.trials,
        validation=valid,
        metric="accuracy",
        batch_size=128,
        workers=options.workers,
        timeout=600,
        run=options.run,
    )

    pruned = study.get_trials(deepcopy=False, states=[TrialState.PRUNED])
    complete = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    print(f"{len(study.trials)} trials: {len(pruned)} pruned, {len(complete)} complete")
    best = study.best_trial
    print(f"best: trial {best.number}, accuracy {best.value:.4f}")
    for name, value in best.params.items():
        print(f"    {name}: {value}")
    print(f"the run is in {result.path}")  # new


if __name__ == "__main__":
    main()
