"""A CNN on handwritten digits, with augmentation and a per-batch learning-rate schedule.

    python examples/digits_cnn.py

Images are shifted by up to one pixel while C gathers their batches. The shift depends only on the
seed, the epoch and the image, so results do not depend on the number of workers.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import cerebro
from cerebro.transforms import RandomCrop, Scale, ToCHW


def make_data(folder: str) -> cerebro.Dataset:
    """Write 1,797 gray images of 8 x 8 pixels, 0 to 16, as height x width x channels."""
    digits = load_digits()
    images = digits.images.astype("uint8")[..., None]
    arrays = {"x": images, "y": digits.target.astype("int64")}
    return cerebro.shard(arrays, folder, shards=8, exist_ok=True, progress=False)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def build(config, info):
    width = config["width"]
    net = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(config["dropout"]),
        nn.Linear(8 * width, 10),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"], momentum=0.9, nesterov=True)
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=nn.CrossEntropyLoss(label_smoothing=0.05),
        metrics={"accuracy": accuracy},
        scheduler=OneCycleLR(optimizer, config["lr"], total_steps=info.total_steps),
        scheduler_step="batch",
        clip_norm=5.0,
    )


SPACE = {
    "width": [8, 16, 32],
    "dropout": cerebro.uniform(0.0, 0.4, step=0.1),
    "lr": cerebro.loguniform(1e-2, 3e-1),
    "batch_size": [32, 64],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-hwc")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    train, valid, test = make_data(options.data).split(0.7, 0.15, 0.15, stratify="y")
    plain = {"x": [ToCHW(), Scale(1 / 16)]}
    shifted = {"x": [RandomCrop(8, padding=1), ToCHW(), Scale(1 / 16)]}
    result = cerebro.search(
        build,
        SPACE,
        train.with_transforms(shifted),
        epochs=options.epochs,
        validation=valid.with_transforms(plain),
        n_trials=options.trials,
        metric="accuracy",
        workers=options.workers,
        run=options.run,
    )
    print(result.summary())
    outcome = result.best.evaluate(test.with_transforms(plain))
    print(f"\naccuracy on {len(test)} other images: {outcome['accuracy']:.4f}")


if __name__ == "__main__":
    main()
