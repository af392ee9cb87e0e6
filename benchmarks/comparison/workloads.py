"""What every rival trains: data, configurations and networks.

A workload's data are four ``.npy`` files that every rival maps, ``x y`` for training and ``vx vy``
for validation, and the same rows as shards of Cerebro. Where the data are larger than the memory,
every rival reads them in contiguous blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

CHUNK = 4096  # rows made at a time
BLOCK, POOL = 256, 16  # rows that are read together, and blocks that are mixed
SIZES = ("tiny", "quick", "full")
FIELDS, VOCABULARY = 26, 2000  # categories of the table of clicks, and values of each
TOKENS, WORDS = 32, 64


@dataclass(frozen=True)
class Workload:
    """Configurations to train on one kind of data."""

    what: str
    kind: str
    """The data and the network: ``table clicks pictures text large``."""
    configs: tuple[dict[str, Any], ...]
    rows: dict[str, int]
    """Training rows by size."""
    epochs: dict[str, int]
    limit: dict[str, int] | None = None
    """Bytes that all processes may use together, page cache included, by size."""
    batch: int = 256
    held_out: int = 16_384
    """Validation rows of a full run; the others have at most 1,024."""
    shards: int = 4

    def validation_rows(self, size: str) -> int:
        """Return the number of validation rows."""
        return self.held_out if size == "full" else min(self.held_out, 1_024)

    def labels_of(self, size: str) -> int:
        """Return the number of predictions behind an accuracy."""
        return self.validation_rows(size) * (TOKENS if self.kind == "text" else 1)


def same(count: int, **config: Any) -> tuple[dict[str, Any], ...]:
    """Return configurations of equal cost."""
    rates = np.geomspace(3e-4, 3e-2, count).round(6).tolist()
    return tuple({**config, "lr": rate} for rate in rates)


def uneven() -> tuple[dict[str, Any], ...]:
    """Return configurations whose steps differ about eightfold in cost, in mixed order."""
    widths = np.geomspace(32, 512, 16).round().astype(int).tolist()
    order = np.random.default_rng(3).permutation(16)
    return tuple({"width": widths[place], "lr": 2e-3} for place in order)


TABLE = {"tiny": 4_096, "quick": 12_288, "full": 49_152}
FEW = {"tiny": 2, "quick": 2, "full": 3}
MIB = 1 << 20
KILLED = "three"
"""The workload in which a worker is killed."""
WORKLOADS = {
    "equal": Workload("16 equal configurations", "table", same(16, width=96), TABLE, FEW),
    "three": Workload("3 configurations", "table", same(3, width=96), TABLE, FEW),
    "nine": Workload("9 configurations", "table", same(9, width=96), TABLE, FEW),
    "large": Workload(
        "data larger than the memory",
        "large",
        same(3, width=16),
        {"tiny": 16_384, "quick": 98_304, "full": 163_840},
        {"tiny": 1, "quick": 1, "full": 1},
        {"tiny": 1000 * MIB, "quick": 1000 * MIB, "full": 1600 * MIB},
        held_out=1_024,
        shards=32,
    ),
    "uneven": Workload("16 that differ eightfold in cost", "table", uneven(), TABLE, FEW),
    "clicks": Workload(
        "39 columns, 26 of them embedded",
        "clicks",
        same(8, width=64),
        {"tiny": 2_048, "quick": 8_192, "full": 40_960},
        FEW,
    ),
    "pictures": Workload(
        "images of 32 x 32",
        "pictures",
        same(8, width=8),
        {"tiny": 1_024, "quick": 4_096, "full": 16_384},
        FEW,
        batch=128,
    ),
    "text": Workload(
        "a small language model",
        "text",
        same(8, width=32),
        {"tiny": 512, "quick": 2_048, "full": 6_144},
        FEW,
        batch=64,
        held_out=2_048,
    ),
}


def make_rows(kind: str, count: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield x and y in chunks; the labels follow from x with some noise."""
    fixed = np.random.default_rng(7)
    weights = fixed.normal(size=(128, 8)).astype("float32")
    effects = fixed.normal(size=(FIELDS, VOCABULARY)).astype("float32")
    means = fixed.integers(60, 196, size=(10, 3, 8, 8))
    follow = fixed.integers(0, WORDS, size=WORDS)
    rng = np.random.default_rng(seed)
    for start in range(0, count, CHUNK):
        n = min(CHUNK, count - start)
        if kind == "table":
            x = rng.normal(size=(n, 128)).astype("float32")
            y = (np.tanh(x @ weights).sum(1) + 0.5 * rng.normal(size=n) > 0).astype("int64")
        elif kind == "clicks":
            ids = rng.integers(0, VOCABULARY, size=(n, FIELDS))
            x = np.concatenate([rng.normal(size=(n, 13)), ids], axis=1).astype("float32")
            score = effects[np.arange(FIELDS), ids][:, :4].sum(1) + x[:, :4].sum(1)
            y = (score > 0).astype("int64")
        elif kind in ("pictures", "large"):
            side = 32 if kind == "pictures" else 64
            y = rng.integers(0, 10, size=n)
            x = np.repeat(np.repeat(means[y], side // 8, 2), side // 8, 3)
            noise = rng.integers(-60, 61, size=(n, 3, 8, 8))
            noise = np.repeat(np.repeat(noise, side // 8, 2), side // 8, 3)
            x = (x + noise).clip(0, 255).astype("uint8")
        else:
            words = [rng.integers(0, WORDS, size=n)]
            for _ in range(TOKENS):
                jump = rng.random(n) < 0.3
                words.append(np.where(jump, rng.integers(0, WORDS, size=n), follow[words[-1]]))
            both = np.stack(words, axis=1).astype("int64")
            x, y = both[:, :-1], both[:, 1:]
        yield np.ascontiguousarray(x), np.ascontiguousarray(y)


def write(workload: Workload, size: str, folder: Path) -> None:
    """Write a workload's rows as ``.npy`` files and as shards."""
    import cerebro  # rivals do not wait for this

    parts = (("", workload.rows[size], 0), ("v", workload.validation_rows(size), 1))
    for prefix, count, seed in parts:
        maps: list[np.ndarray] = []
        at = 0
        for chunk in make_rows(workload.kind, count, seed):
            maps = maps or [
                np.lib.format.open_memmap(
                    folder / f"{prefix}{name}.npy", "w+", part.dtype, (count, *part.shape[1:])
                )
                for name, part in zip("xy", chunk, strict=True)
            ]
            for whole, part in zip(maps, chunk, strict=True):
                whole[at : at + len(part)] = part
            at += len(chunk[0])
        for whole in maps:
            whole.flush()  # type: ignore[attr-defined]
        cerebro.shard(
            {"x": maps[0], "y": maps[1]},
            folder / f"{prefix}shards",
            shards=1 if prefix else workload.shards,
            progress=False,
        )


class Clicks(nn.Module):
    """Numbers and embedded categories of a table like Criteo's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(FIELDS * VOCABULARY, 8)
        self.register_buffer("first", torch.arange(FIELDS) * VOCABULARY)
        self.rest = nn.Sequential(nn.Linear(13 + 8 * FIELDS, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(x[:, 13:].long() + self.first).flatten(1)
        return self.rest(torch.cat([x[:, :13], embedded], dim=1))


class Language(nn.Module):
    """One transformer block that predicts the next token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.zeros(TOKENS, width))
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.mix = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.out = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places
        q, k, v = self.attend(self.norm(h)).chunk(3, dim=-1)
        h = h + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.mix(self.last(h))
        return self.out(h).transpose(1, 2)  # batch, words, tokens: as cross entropy wants it


class Pictures(nn.Module):
    """A small convolutional network for bytes; large images are averaged first."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.rest = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * (side // 4) ** 2, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = x[:, :, :: x.shape[2] // self.side, :: x.shape[3] // self.side]
        return self.rest(small.float() / 255 - 0.5)


def network(kind: str, config: dict[str, Any]) -> nn.Module:
    """Return a configuration's untrained network."""
    width = config["width"]
    if kind == "table":
        return nn.Sequential(
            *(nn.Linear(128, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 2),
        )
    if kind == "clicks":
        return Clicks(width)
    if kind == "text":
        return Language(width)
    return Pictures(width, 32 if kind == "pictures" else 8)


def optimizer_of(net: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    """Return a configuration's optimizer."""
    return torch.optim.Adam(net.parameters(), lr=config["lr"])


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the share of right predictions."""
    return (output.argmax(1) == target).float().mean()
