"""Optuna's checkpoint example: a study in SQLite that resumes after its process was killed.

    timeout -s KILL 10 python examples/optuna/resumed.py
    python examples/optuna/resumed.py

Running trials continue from their last shard, in the same study. An objective needs a heartbeat, a
callback that retries failed trials, an artifact store, and code to save and load checkpoints; here
the name of the run is enough. The lines that differ are marked.
"""

from __future__ import annotations

import argparse

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

import cerebro  # new


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def build(trial: optuna.Trial) -> cerebro.torch.Model:  # was: def objective(trial)
    units = trial.suggest_int("units", 8, 128, log=True)
    net = nn.Sequential(nn.Linear(64, units), nn.ReLU(), nn.Linear(units, 10))
    lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    # was: looking for a checkpoint, the loops over epochs and batches, saving a checkpoint
    return cerebro.torch.Model(
        net,
        optimizer=torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9),
        loss=nn.functional.cross_entropy,
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
    parser.add_argument("--run", default="runs/resumed")
    parser.add_argument("--storage", default="sqlite:///resumed.db")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    train, valid = make_data(options.data).split(0.75, 0.25, stratify="y")
    study = optuna.create_study(  # was: with heartbeat_interval and failed_trial_callback
        study_name="resumed",
        storage=options.storage,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
    )
    cerebro.optuna.optimize(  # was: study.optimize(objective, n_trials=..., timeout=...)
        study,
        build,
        train,
        epochs=options.epochs,
        n_trials=options.trials,
        validation=valid,
        metric="accuracy",
        batch_size=64,
        workers=options.workers,
        run=options.run,
    )
    states = [trial.state.name.lower() for trial in study.trials]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    best = study.best_trial
    print(f"best: trial {best.number}, accuracy {best.value:.4f}, {best.params}")


if __name__ == "__main__":
    main()
