"""Heads on a frozen network: its layers' outputs are computed once, and the layer is searched.

    python examples/frozen_trunk.py

The trunk is a small network that has learned to tell even digits from odd ones. Which of its layers
is best for telling all ten apart? Replace `pretrained` by a network of your own.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import cerebro
from cerebro.transforms import Scale, ToCHW

LAYERS = ["early", "late", "pool"]


def make_data(folder: str) -> cerebro.Dataset:
    digits = load_digits()
    columns = {"x": digits.images.astype("uint8")[..., None], "y": digits.target}
    data = cerebro.shard(columns, folder, shards=8, exist_ok=True, progress=False)
    return data.with_transforms({"x": [Scale(1 / 16), ToCHW()]})


def pretrained(images: cerebro.Dataset) -> nn.Module:
    """Train the trunk, with one thread: the same weights every time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trunk = nn.Sequential()
    trunk.add_module("early", nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()))
    trunk.add_module("late", nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()))
    trunk.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    net = nn.Sequential(trunk, nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    batches = images.batches(32)
    for _ in range(3):
        for batch in batches:
            loss = nn.functional.cross_entropy(net(batch["x"]), batch["y"] % 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.set_num_threads(threads)
    return trunk.eval().requires_grad_(False)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def build(config, info):
    features = info.columns[config["layer"]].shape
    width = int(torch.Size(features).numel())
    head = nn.Sequential(nn.Flatten(), nn.Linear(width, info.num_classes("y")))
    return cerebro.torch.Model(
        head,
        optimizer=torch.optim.AdamW(head.parameters(), lr=config["lr"]),
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
        inputs=config["layer"],
    )


SPACE = {"layer": LAYERS, "lr": cerebro.loguniform(1e-3, 1e-1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/digits-images-y")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    images = make_data(options.data)
    trunk = pretrained(images.split(0.8, 0.2)[0])
    print(
        cerebro.torch.plan_features(
            images, trunk, layers=LAYERS, trials=options.trials // 3, epochs=options.epochs
        )
    )
    features = cerebro.torch.features(images, trunk, layers=LAYERS, budget="100 MB")
    train, valid = features.split(0.8, 0.2)  # the same rows as images.split(0.8, 0.2)
    result = cerebro.search(
        build,
        SPACE,
        train,
        validation=valid,
        epochs=options.epochs,
        n_trials=options.trials,
        metric="accuracy",
        batch_size=32,
        workers=options.workers,
        run=options.run,
    )
    print(result.summary())

    net = features.complete(result.best.load())  # from images to classes, for export
    batch = next(iter(images.split(0.8, 0.2)[1].in_order(64, "torch")))
    with torch.no_grad():
        print(f"the whole network: {float(accuracy(net(batch['x']), batch['y'])):.3f} on 64 images")


if __name__ == "__main__":
    main()
