"""``demo``: search 16 small models on handwritten digits.

The functions resemble those that a user would write. ``build`` is in an importable module, so that
the run's models can be loaded later.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import cerebro
from cerebro.arguments import worker_count
from cerebro.cli.options import new_command, parse_count, parse_progress, progress_option, say
from cerebro.errors import InputError
from cerebro.executors.process import warm_workers
from cerebro.machine import environment
from cerebro.machine.devices import CPU, choose_devices, has_driver
from cerebro.machine.imports import install_hint
from cerebro.report import format as fmt

if TYPE_CHECKING:
    import torch


def add(commands: Any) -> None:
    parser = new_command(commands, "demo", main, "search 16 small models on handwritten digits")
    parser.add_argument("--quick", action="store_true", help="a few seconds: two epochs")
    parser.add_argument("--epochs", type=parse_count, help="epochs per trial (12)")
    parser.add_argument("--workers", type=parse_count, help="worker processes (one per core)")
    parser.add_argument(
        "--devices", nargs="+", default=CPU, help="cpu, auto, cuda, or GPUs such as cuda:1 (cpu)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the search (0)")
    parser.add_argument("--run", help="the run's folder (runs/demo-<time>)")
    parser.add_argument("--data", default="data/demo", help="the data's folder (data/demo)")
    progress_option(parser)


def main(options: argparse.Namespace) -> int:
    usual = 2 if options.quick else EPOCHS
    return demonstrate(options, usual if options.epochs is None else options.epochs)


TRIALS, EPOCHS, SHARDS = 16, 12, 8
SIDE = 8  # pixels


def digits(path: str | Path) -> cerebro.Dataset:
    """Return scikit-learn's 1,797 handwritten digits: ``x``, uint8 (1, 8, 8), and ``y``, int64."""
    table = _read_digits_table()
    arrays = {
        "x": table[:, :-1].astype("uint8").reshape(-1, 1, SIDE, SIDE),
        "y": table[:, -1].astype("int64"),
    }
    return cerebro.shard(arrays, path, shards=SHARDS, exist_ok=True, progress=False)


def _read_digits_table() -> NDArray[Any]:
    """Read scikit-learn's digits: one row per image, its pixels and then its digit."""
    # Importing scikit-learn, with SciPy, takes longer than the first epochs of the demo.
    package = importlib.util.find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.exists():
            with gzip.open(file, "rt", encoding="ascii") as lines:
                return np.loadtxt(lines, delimiter=",")
    raise InputError(f"the demo's digits need scikit-learn: {install_hint('demo')}")


def space() -> dict[str, Any]:
    """Return the search space: two kinds of networks, each with its own size."""
    return {
        "arch": ["mlp", "cnn"],
        "mlp": cerebro.when("arch", "mlp", {"hidden": [32, 64, 128, 256]}),
        "cnn": cerebro.when("arch", "cnn", {"channels": [4, 8, 16]}),
        "lr": cerebro.loguniform(1e-4, 3e-2),
        "dropout": cerebro.uniform(0.0, 0.5, step=0.1),
        "batch_size": [32, 64],
    }


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the share of rows in which the correct digit has the highest score."""
    return (output.argmax(1) == target).float().mean()


def network(config: dict[str, Any]) -> torch.nn.Module:
    from torch import nn

    if config["arch"] == "mlp":
        hidden = config["hidden"]
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(SIDE * SIDE, hidden),
            nn.ReLU(),
            nn.Dropout(config["dropout"]),
            nn.Linear(hidden, 10),
        )
    channels = config["channels"]
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(config["dropout"]),
        nn.Linear(2 * channels * 4, 10),
    )


def build(config: dict[str, Any], info: Any) -> Any:
    import torch

    net = network(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
        inputs="x",
        target="y",
        scheduler=torch.optim.lr_scheduler.OneCycleLR(
            optimizer, config["lr"], total_steps=info.total_steps
        ),
        scheduler_step="batch",
    )


def demonstrate(options: argparse.Namespace, epochs: int) -> int:
    """Shard the data, search, and print the results; return the command's exit status."""
    if not environment.is_importable("torch"):
        raise InputError(f"the demo needs PyTorch: {install_hint('demo')}")
    on_cpu = choose_devices(options.devices) == (CPU,)
    if on_cpu:
        # Workers import PyTorch while this process, which needs PyTorch last, imports the rest of
        # Cerebro and reads the data. So what this module imports delays them.
        warm_workers.start_early(1, [None] * worker_count(options.workers, 1), ["torch"])
    progress: Any = parse_progress(options.progress)
    whole = digits(options.data)
    pixels = {"x": [cerebro.transforms.Scale(1 / 16)]}  # uint8 to float32, 0 to 1
    train, valid, test = whole.with_transforms(pixels).split(0.7, 0.15, 0.15)
    say(
        f"{len(whole):,} handwritten digits of {SIDE} x {SIDE} pixels in {options.data}: "
        f"{whole.num_shards} shards, {fmt.size(whole.nbytes)}.\n"
        f"{len(train):,} rows to train on, {len(valid):,} to compare trials by, "
        f"{len(test):,} that no trial sees.\n"
        f"{TRIALS} configurations of a small MLP and a small CNN, {epochs} epochs each."
    )
    if on_cpu and has_driver():
        # A GPU of the largest kind took eight times as long as 16 cores.
        say("Networks of this size train faster on the CPU; --devices cuda uses the GPU.")
    say()
    result = cerebro.search(
        build,
        space(),
        train,
        epochs=epochs,
        validation=valid,
        n_trials=TRIALS,
        metric="accuracy",
        workers=options.workers,
        devices=options.devices,
        seed=options.seed,
        run=options.run or time.strftime("runs/demo-%Y%m%d-%H%M%S"),
        progress=progress,
    )
    from cerebro.report import summary

    say()
    say("\n".join(summary.best_lines(result)))
    outcome = result.best.evaluate(test)
    say(f"\nOn the {len(test)} rows that no trial saw: accuracy {outcome['accuracy']:.4f}")
    drawn = draw(result)
    say(f"\nThe run is in {result.path}" + (f", with {' and '.join(drawn)}" if drawn else ""))
    path = str(result.path)
    say(
        "\nTo open it again, in Python:\n\n"
        "  import cerebro\n"
        f"  result = cerebro.open({path!r})\n"
        "  net = result.best.load().net        # the trained network, an ordinary nn.Module\n\n"
        "or from here:\n\n"
        f"  python -m cerebro show {shlex.quote(path)}\n"
        f"  python -m cerebro replay {shlex.quote(path)} --trial 0"
    )
    return 0


def draw(result: Any) -> list[str]:
    """Draw learning curves and units on workers into the run's folder; return the file names."""
    if not environment.is_importable("matplotlib"):
        return []
    for kind in ("curves", "gantt"):
        result.plot(kind=kind).savefig(Path(result.path) / f"{kind}.png")
    return ["curves.png", "gantt.png"]
