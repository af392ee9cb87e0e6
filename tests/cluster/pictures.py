"""A model on a GPU of the stand-in, and small pictures for it."""

from __future__ import annotations

import os
import warnings

import cerebro
from cerebro.cli import doctor

ROWS, SHARDS, EPOCHS = 48, 3, 2
SPACE = {"lr": [0.01, 0.05]}


def build(config, info):
    print("device", info.device, repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
    return cerebro.native.Model(
        (1, doctor.SIDE, doctor.SIDE),
        len(doctor.FIGURES),
        filters=(2, 4),
        lr=config["lr"],
        device=info.device,
    )


def shards(folder):
    data = cerebro.shard(doctor.draw_pictures(ROWS), folder, shards=SHARDS, progress=False)
    return data.with_transforms({"x": [cerebro.transforms.Scale(1 / 255)]})


def search(data, run, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no validation data")
        return cerebro.search(
            build, SPACE, data, epochs=EPOCHS, searcher="grid", batch_size=8, run=run,
            progress=False, **options,
        )  # fmt: skip


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


def printed(result):
    return {line for trial in result.trials for line in trial.log.splitlines()}
