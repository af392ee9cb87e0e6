"""A search whose steps are recorded, that is killed at a unit; run as a program, the victim."""

from __future__ import annotations

import sys

import resumable
import torch

import cerebro

SPACE = {"lr": cerebro.loguniform(1e-3, 3e-2), "dropout": cerebro.uniform(0.1, 0.5)}
BATCH = 8


class Told(cerebro.torch.Model):
    """Prints at the end of every epoch how many steps it has replayed."""

    def end_epoch(self, epoch, metrics):
        super().end_epoch(epoch, metrics)
        print("replayed", sum(step.replays for step in self._recorded))


class Reads(torch.nn.Module):
    def forward(self, x):
        return x * x.abs().max().item()


def make(config, info, graph, *parts):
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(config["dropout"]),
        torch.nn.Linear(16, 1),
        torch.nn.Flatten(0),
        *parts,
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config["lr"], total_steps=info.total_steps + 10
    )
    return Told(
        net,
        optimizer=optimizer,
        loss=torch.nn.functional.mse_loss,
        scheduler=schedule,
        scheduler_step="batch",
        clip_norm=1.0,
        graph=graph,
    )


def build(config, info):
    return make(config, info, True)


def build_ordinary(config, info):
    return make(config, info, False)


def build_that_reads(config, info):
    return make(config, info, True, Reads())


def build_that_reads_ordinary(config, info):
    return make(config, info, False, Reads())


def search(folder, data, callbacks=(), build=build, workers=2, **settings):
    return resumable.search(
        folder, data, build=build, space=SPACE, callbacks=callbacks, workers=workers,
        batch_size=BATCH, **settings,
    )  # fmt: skip


if __name__ == "__main__":
    import recorded_torch

    recorded_torch.search(
        sys.argv[1], sys.argv[2], [resumable.Strike(int(sys.argv[3]))], if_exists="resume"
    )
