"""Optuna's LSTM example, with one of its own samplers: a Gaussian process.

    python examples/optuna/sampled_lstm.py

The image of a digit is read row by row. The sampler is Optuna's, unchanged. Timing does not affect
the order of suggestions and reports, so a seed gives the same study with any number of workers. The
lines that differ from an objective are marked.
"""

from __future__ import annotations

import argparse

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

import cerebro  # new


class Reader(nn.Module):
    """LSTM layers over the rows, and a linear layer over their final output."""

    def __init__(self, layers: int, hidden: int, dropout: float) -> None:
        super().__init__()
        inner = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(8, hidden, layers, batch_first=True, dropout=inner)
        self.out = nn.Linear(hidden, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.lstm(rows)[0]
        return self.out(states[:, -1])


def define_net(trial: optuna.Trial) -> Reader:
    return Reader(
        trial.suggest_int("layers", 1, 2),
        trial.suggest_int("hidden", 8, 48),
        trial.suggest_float("dropout", 0.0, 0.5),
    )


def build(trial: optuna.Trial) -> cerebro.torch.Model:  # was: def objective(trial)
    net = define_net(trial)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    # was: the loops over epochs and batches, for training and for validation
    return cerebro.torch.Model(
        net,
        optimizer=torch.optim.Adam(net.parameters(), lr=lr),
        loss=nn.functional.cross_entropy,
        inputs="x",
        target="y",
        clip_norm=1.0,
    )


def make_data(folder: str) -> cerebro.Dataset:  # was: two data loaders
    digits = load_digits()
    arrays = {"x": (digits.images / 16).astype("float32"), "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=8, exist_ok=True, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-rows")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    train, valid = make_data(options.data).split(0.75, 0.25, stratify="y")
    sampler = optuna.samplers.GPSampler(seed=0, n_startup_trials=4)
    study = optuna.create_study(direction="minimize", study_name="lstm", sampler=sampler)
    result = cerebro.optuna.optimize(  # was: study.optimize(objective, n_trials=..., timeout=...)
        study,
        build,
        train,
        epochs=options.epochs,
        n_trials=options.trials,
        validation=valid,
        batch_size=32,
        width=4,
        workers=options.workers,
        run=options.run,
    )
    print(f"best: trial {study.best_trial.number}, loss {study.best_value:.4f}")
    for name, value in study.best_params.items():
        print(f"    {name}: {value}")
    print(f"the run is in {result.path}")  # new


if __name__ == "__main__":
    main()
