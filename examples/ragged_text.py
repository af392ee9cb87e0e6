"""Sequences of different lengths: which part of Python's library does a sentence describe?

    python examples/ragged_text.py

The sentences document Python's own functions and classes, as bytes. A list of arrays of different
lengths becomes a ragged column. Its batches are padded, with a mask, and the network ignores the
padding.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil

import numpy as np
import torch
from torch import nn

import cerebro
from cerebro.transforms import Pad

PACKAGES = ["asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml"]
LONGEST = 160  # bytes


def documentation(package: str) -> list[str]:
    """Yield the first docstring paragraph of a package's functions and classes."""
    found = set()
    root = importlib.import_module(package)
    names = [m.name for m in pkgutil.walk_packages(root.__path__, package + ".")]
    for name in [package, *names]:
        if "test" in name.split(".") or "__main__" in name or "windows" in name:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # for a different system
            continue
        for _, thing in inspect.getmembers(module):
            members = inspect.getmembers(thing) if inspect.isclass(thing) else []
            for _, part in [("", thing), *members]:
                own = str(getattr(part, "__module__", "")).startswith(package)
                text = inspect.getdoc(part) if own and callable(part) else None
                if text:
                    found.add(" ".join(text.split("\n\n")[0].split()))
    return sorted(text for text in found if len(text) > 20)


def make_data(folder: str) -> cerebro.Dataset:
    """Write a ragged column `text` (uint8) and the package's name."""
    texts, labels = [], []
    for package in PACKAGES:
        for text in documentation(package):
            # The packages' own names would reveal the answer.
            clean = text.lower().replace(package.rstrip("s"), "*")
            texts.append(np.frombuffer(clean.encode()[:LONGEST], dtype=np.uint8))
            labels.append(package)
    return cerebro.shard(
        {"text": texts, "package": labels}, folder, shards=6, exist_ok=True, progress=False
    )


class Reader(nn.Module):
    """Embeds bytes, convolves over neighbors and averages over the valid ones."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.convolve = nn.Conv1d(width, 2 * width, 5, padding=2)
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(2 * width, classes)

    def forward(self, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Take bytes and mask of shape (rows, longest); return scores (rows, classes)."""
        hidden = self.embed(text.int()) * mask.unsqueeze(2)
        hidden = self.convolve(hidden.transpose(1, 2)).relu()  # (rows, 2 width, longest)
        hidden = hidden.masked_fill(~mask.unsqueeze(1), 0.0).amax(2)
        return self.classify(self.dropout(hidden))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target.long())


def build(config, info):
    net = Reader(config["width"], info.num_classes("package"), config["dropout"])
    return cerebro.torch.Model(
        net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=config["lr"]),
        loss=cross_entropy,
        metrics={"accuracy": accuracy},
        inputs={"text": "text", "mask": "text_mask"},
        target="package",
    )


SPACE = {
    "width": [16, 32, 64],
    "dropout": [0.0, 0.3],
    "lr": cerebro.loguniform(1e-3, 2e-2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data/docstrings")
    parser.add_argument("--run", help="the run's folder (runs/<time>)")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()

    data = make_data(options.data).with_transforms({"text": [Pad(multiple_of=16)]})
    print(f"{len(data):,} sentences; {data.stats('package').counts}")
    train, valid = data.split(0.8, 0.2, stratify="package")
    result = cerebro.search(
        build,
        SPACE,
        train,
        epochs=options.epochs,
        validation=valid,
        n_trials=options.trials,
        metric="accuracy",
        batch_size=64,
        workers=options.workers,
        run=options.run,
    )
    print(result.summary())


if __name__ == "__main__":
    main()
