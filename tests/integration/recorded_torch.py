"""A search whose steps are recorded, that is killed at a unit; run as a program, the victim."""

from __future__ import annotations

import ctypes
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


class Later(torch.nn.Module):
    """Takes another way from step 50 on; what it reads is part of the state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.steps.add_(1)
        # Past PyTorch, which would notice that the number is read.
        steps = ctypes.c_float.from_address(self.steps.data_ptr()).value
        return x * 2 if steps > 50 else x


def build_that_changes(config, info):
    return make(config, info, True, Later())


def build_that_changes_ordinary(config, info):
    return make(config, info, False, Later())


def search(folder, data, callbacks=(), build=build, workers=2, **settings):
    return resumable.search(
        folder, data, build=build, space=SPACE, callbacks=callbacks, workers=workers,
        batch_size=BATCH, **settings,
    )  # fmt: skip


if __name__ == "__main__":
    import recorded_torch

    recorded_torch.search(
        sys.argv[1],
        sys.argv[2],
        [resumable.Strike(int(sys.argv[3]))],
        build=getattr(recorded_torch, sys.argv[4]),
        if_exists="resume",
    )
