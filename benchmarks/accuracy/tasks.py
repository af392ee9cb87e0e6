"""What is trained: rows from fixed seeds or from installed packages, networks and optimizers.

Where every shard ends in a batch of a few rows, accuracy is lost; the numbers of rows of the table
and the text provoke this: in 8 shards, each has 2 rows more than full batches of 64. Networks that
embed categories memorize single rows, and show whether rows come back together epoch after epoch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.comparison import workloads

WORDS, CONTEXT = 1_000, 5


@dataclass(frozen=True)
class Rows:
    """Rows to train on, and others on which accuracy is measured."""

    x: np.ndarray
    y: np.ndarray
    valid_x: np.ndarray
    valid_y: np.ndarray

    def few(self, count: int) -> Rows:
        """Return at most `count` rows of each."""
        return Rows(self.x[:count], self.y[:count], self.valid_x[:count], self.valid_y[:count])


@dataclass(frozen=True)
class Task:
    """A network to train on some rows; the loss is the cross entropy."""

    what: str
    rows: Callable[[], Rows]
    network: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: int

    def start(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the network with a seed's initial weights, and its optimizer."""
        torch.manual_seed(seed)
        net = self.network()
        return net, self.optimizer(net)


@cache
def clicks() -> Rows:
    """Rows of the comparison's clicks: 160 steps of 256 rows, and fresh ones for validation."""
    parts = [
        part
        for count, seed in ((workloads.WORKLOADS["clicks"].rows["full"], 0), (16_384, 1))
        for part in zip(*workloads.make_rows("clicks", count, seed), strict=True)
    ]
    return Rows(*(np.concatenate(part) for part in parts))


@cache
def table() -> Rows:
    """Rows like those of a forest's cover types: 10 numbers, 44 zeros and ones, 7 classes."""
    rng = np.random.default_rng(54)
    count = 6_160 + 16_384
    x = np.concatenate(
        [rng.normal(size=(count, 10)), rng.random(size=(count, 44)) < 0.3], axis=1
    ).astype("float32")
    hidden = 0.4 * x @ rng.normal(size=(54, 32))
    score = np.tanh(hidden - hidden.mean(0)) @ rng.normal(size=(32, 7))
    score = (score - score.mean(0)) / score.std()
    y = (score + 0.1 * rng.gumbel(size=score.shape)).argmax(1)
    return Rows(x[:6_160], y[:6_160], x[6_160:], y[6_160:])


@cache
def digits() -> Rows:
    """Return the handwritten digits of scikit-learn."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    x = (bunch.images.astype("float32") / 16)[order, None]
    y = bunch.target.astype("int64")[order]
    return Rows(x[:1_097], y[:1_097], x[1_097:], y[1_097:])


@cache
def text() -> Rows:
    """Five words and the next one, from the reference that Python's ``help`` prints.

    Validation rows are from topics of their own. The text differs a little between versions of
    Python. 0 stands for all rare words.
    """
    from pydoc_data.topics import topics

    found = [re.findall(r"[a-z]+|[^\sa-z]", topics[name].lower()) for name in sorted(topics)]
    counts = Counter(word for words in found for word in words)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - 1]
    number = {word: place for place, word in enumerate(frequent, 1)}
    rng = np.random.default_rng(0)
    windows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for words in found:
        codes = np.array([number.get(word, 0) for word in words])
        if len(codes) > CONTEXT:
            kept = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + 1)
            windows[rng.random() < 0.3].append(kept)
    both: list[np.ndarray] = []
    for parts, most in zip(windows, (12_304, 16_384), strict=True):
        all_rows = np.concatenate(parts)
        rows = all_rows[rng.permutation(len(all_rows))[:most]].astype("int64")
        both += [np.ascontiguousarray(rows[:, :CONTEXT]), np.ascontiguousarray(rows[:, CONTEXT])]
    return Rows(*both)


def mlp(*, norm: bool) -> nn.Module:
    """Return the table's network."""
    layers: list[nn.Module] = []
    for before in (54, 64):
        layers += [nn.Linear(before, 64), *([nn.BatchNorm1d(64)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 7))


def cnn() -> nn.Module:
    """Return the digits' network."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


def next_word() -> nn.Module:
    """Return the text's network."""
    return nn.Sequential(
        *(nn.Embedding(WORDS, 24), nn.Flatten(), nn.Linear(24 * CONTEXT, 64), nn.ReLU()),
        nn.Linear(64, WORDS),
    )


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of most tasks."""
    return torch.optim.Adam(net.parameters(), lr=0.003, fused=True)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that a short batch may throw far: its steps are not normalized."""
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


CONFIG: dict[str, Any] = dict(workloads.WORKLOADS["clicks"].configs[6])
TASKS = {
    "clicks": Task(
        "embedded categories, Adam",
        *(clicks, partial(workloads.network, "clicks", CONFIG)),
        *(partial(workloads.optimizer_of, config=CONFIG), 256),
    ),
    "table": Task(
        "dense network, Adam", table, partial(mlp, norm=False), adam, 64
    ),
    "table-norm": Task(
        "dense network with batch norm, Adam", table, partial(mlp, norm=True), adam, 64
    ),
    "table-sgd": Task(
        "dense network, SGD with momentum", table, partial(mlp, norm=False), sgd, 64
    ),
    "table-norm-sgd": Task(
        "dense network with batch norm, SGD with momentum", table, partial(mlp, norm=True), sgd, 64
    ),
    "digits": Task(
        "convolutions with batch norm, Adam", digits, cnn, adam, 32
    ),
    "text": Task(
        "the next of embedded words, Adam", text, next_word, adam, 64
    ),
}  # fmt: skip
