"""Heads on a frozen trunk, with stored features: ``python -m benchmarks.bench_features``.

16 heads on a small convolutional network, 5 epochs, 2 workers with one thread each. Both searches
train the same configurations from the same initial weights, in the same order of rows:

- ``trunk in every trial``: the network is a frozen trunk, in evaluation mode and without gradients,
  and a head; every trial runs the trunk for every batch of every epoch;
- ``features``: `cerebro.torch.features` runs the trunk once, with one thread, and the trials train
  the heads on its outputs. The time includes both.

Every metric of every epoch of every trial is compared bit for bit. A second part shows for which
batch sizes rows have the bits that they have in a batch of 256: the reason why the metrics can be
equal, and its limits.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bench, fail_quietly_without, parser

LAYER = "pool"
SIZES = (1, 2, 3, 4, 7, 15, 16, 31, 32, 33, 100, 128, 255)
SPACE = {"lr": [3e-4, 1e-3, 3e-3, 1e-2], "hidden": [64, 256], "batch_size": [32, 128]}


def make_trunk() -> Any:
    """Return the frozen network: three blocks and a pool, with fixed weights."""
    import torch
    from torch import nn

    def block(channels: int, width: int) -> Any:
        return nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )

    state = torch.get_rng_state()
    torch.manual_seed(1)
    trunk = nn.Sequential()
    for name, channels, width in (("block1", 3, 16), ("block2", 16, 32), ("block3", 32, 64)):
        trunk.add_module(name, block(channels, width))
    trunk.add_module(LAYER, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    torch.set_rng_state(state)
    return trunk.eval().requires_grad_(False)


def make_head(config: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, config["hidden"]), nn.ReLU(), nn.Linear(config["hidden"], 5))


def accuracy(output: Any, target: Any) -> Any:
    return (output.argmax(1) == target).float().mean()


def build_head(config: dict[str, Any], info: Any) -> Any:
    """Build a head that reads features."""
    return _model(make_head(config), config, LAYER)


def build_whole(config: dict[str, Any], info: Any) -> Any:
    """Build the frozen trunk and the head."""
    from torch import nn

    head = make_head(config)  # first: it draws the same weights as in build_head
    return _model(nn.Sequential(make_trunk(), head), config, "x", state="trainable")


def _model(net: Any, config: dict[str, Any], inputs: str, **options: Any) -> Any:
    import torch

    import cerebro

    trained = [weight for weight in net.parameters() if weight.requires_grad]
    return cerebro.torch.Model(
        net,
        optimizer=torch.optim.AdamW(trained, lr=config["lr"]),
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
        inputs=inputs,
        **options,
    )


def make_images(place: Path, rows: int) -> Any:
    """Write images of five classes: noise around a pattern for each."""
    import cerebro
    from cerebro.transforms import Scale, ToCHW

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, rows)
    patterns = rng.integers(0, 120, (5, 8, 8, 3)).repeat(4, 1).repeat(4, 2)
    images = patterns[labels] + rng.integers(0, 136, (rows, 32, 32, 3))
    data = cerebro.shard(
        {"x": images.astype(np.uint8), "y": labels}, place / "images", shards=4, progress=False
    )
    return data.with_transforms({"x": [Scale(1 / 255), ToCHW()]})


def search(build: Any, data: Any, run: Path, arguments: Any) -> Any:
    import cerebro

    train, valid = data.split(0.8, 0.2)
    return cerebro.search(
        *(build, SPACE, train),
        validation=valid,
        searcher="grid",
        epochs=arguments.epochs,
        workers=2,
        metric="accuracy",
        run=run,
        progress=False,
    )


def history(result: Any) -> list[tuple[Any, ...]]:
    """Return every metric of every epoch of every trial."""
    return [
        (trial.number, epoch, name, value)
        for trial in sorted(result.trials, key=lambda trial: trial.number)
        for epoch, entry in enumerate(trial.history)
        for name, value in sorted(entry["metrics"].items())
    ]


def show_heads(bench: Bench, place: Path, arguments: Any) -> Any:
    import cerebro

    images = make_images(place, arguments.rows)
    search(
        build_head_of_pixels,
        images.split(0.99, 0.01)[1],
        place / "warm",
        argparse.Namespace(epochs=1),
    )
    start = time.perf_counter()
    whole = search(build_whole, images, place / "whole", arguments)
    middle = time.perf_counter()
    stored = cerebro.torch.features(
        images, make_trunk(), layers=[LAYER], path=place / "features", progress=False
    )
    derived = time.perf_counter()
    heads = search(build_head, stored, place / "heads", arguments)
    end = time.perf_counter()
    reference = "trunk in every trial"
    ours, theirs = end - middle, middle - start
    bench.add(reference, theirs, "s")
    bench.add("features, derive and heads", ours, "s", reference=reference, ratio=ours / theirs)
    bench.add("  of which derive", derived - middle, "s")
    bench.add("times as fast", theirs / ours, "x", bar=">= 10")
    ours_all, theirs_all = history(heads), history(whole)
    equal = sum(a == b for a, b in zip(ours_all, theirs_all, strict=True))
    bench.add("metrics equal to the last bit", equal, f"of {len(theirs_all)}", bar="all")
    bench.add("features on disk / images on disk", stored.nbytes / images.nbytes, "")
    return stored


def build_head_of_pixels(config: dict[str, Any], info: Any) -> Any:
    """Build a small network, to start workers and import PyTorch before the clock runs."""
    from torch import nn

    return _model(nn.Sequential(nn.Flatten(), nn.Linear(3072, 5)), config, "x")


def show_bits(bench: Bench) -> None:
    """Compare the rows' bits in small batches with those in a batch of 256."""
    import torch
    from torch import nn

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        x = torch.randn(256, 3, 32, 32)
        linear = nn.Sequential(nn.Flatten(), nn.Linear(3072, 64)).eval()
        for name, net in (("convolutions", make_trunk()), ("a linear layer", linear)):
            with torch.no_grad():
                full = net(x)
                sizes = [n for n in SIZES if not torch.equal(net(x[:n]), full[:n])]
                order = torch.randperm(256)
                moved = torch.equal(net(x[order]), full[order])
                most = max([float((net(x[:n]) - full[:n]).abs().max()) for n in sizes], default=0.0)
            text = "none" if not sizes else f"{', '.join(map(str, sizes))} (by up to {most:.1e})"
            bench.note(f"{name}: batch sizes with other bits: {text}")
            bench.note(
                f"{name}: rows in another order have {'the same' if moved else 'other'} bits"
            )
    finally:
        torch.set_num_threads(before)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--rows", type=int, default=4000, help="images")
    made.add_argument("--epochs", type=int, default=5)
    arguments = made.parse_args()
    fail_quietly_without("torch")
    if arguments.quick:
        arguments.rows, arguments.epochs = 400, 1
    bench = Bench("bench_features", arguments.json)
    with tempfile.TemporaryDirectory() as folder:
        show_heads(bench, Path(folder), arguments)
    show_bits(bench)
    bench.report()


if __name__ == "__main__":
    main()
