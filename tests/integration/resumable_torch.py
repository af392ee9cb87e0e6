"""A PyTorch search that is killed at a unit; as a program, it is the victim."""

from __future__ import annotations

import sys

import resumable
import torch

import cerebro

SPACE = {"lr": cerebro.loguniform(1e-3, 3e-2), "dropout": cerebro.uniform(0.1, 0.5)}


def build(config):
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(config["dropout"]),
        torch.nn.Linear(16, 1),
        torch.nn.Flatten(0),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=torch.nn.functional.mse_loss,
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        scheduler_step="metric",
    )


def search(folder, data, callbacks=(), **settings):
    return resumable.search(
        folder, data, build=build, space=SPACE, callbacks=callbacks, workers=2, **settings
    )


if __name__ == "__main__":
    import resumable_torch

    resumable_torch.search(
        sys.argv[1], sys.argv[2], [resumable.Strike(int(sys.argv[3]))], if_exists="resume"
    )
