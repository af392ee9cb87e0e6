"""The training code that every rival shares, as a careful user writes it.

Rows are gathered from the mapped files with ``index_select``, in a new order each epoch. Data
larger than the memory are read in blocks instead, some of which are mixed. A rival gets a `Work`
and reports through it; `benchmarks.comparison.measures` reads what it reported.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.comparison.workloads import (
    BLOCK,
    POOL,
    WORKLOADS,
    accuracy,
    network,
    optimizer_of,
)
from benchmarks.peers import CORES, Log

SCORED = 1_024
"""The rows of a batch of validation."""


class Work:
    """One cell's task: which configurations to train on which data, and its log.

    It can be pickled: processes of a rival make their own from `name`, `size`, `data` and `place`.
    """

    def __init__(self, name: str, size: str, data: str, place: str) -> None:
        self.name, self.size, self.data, self.place = name, size, data, place
        self.workload = WORKLOADS[name]
        self.epochs = self.workload.epochs[size]
        self.trials = len(self.workload.configs)
        self.workers = CORES
        self.log = Log(place)

    def __reduce__(self) -> tuple[Any, ...]:
        return Work, (self.name, self.size, self.data, self.place)

    def read(self, name: str, worker: int = 0, workers: int = 1) -> torch.Tensor:
        """Map a column; with `workers`, the part of one of them."""
        column = np.load(Path(self.data, f"{name}.npy"), mmap_mode="c")  # torch wants it writable
        share = len(column) // workers
        return torch.from_numpy(column[worker * share : (worker + 1) * share])

    def began(self, trial: int, epoch: int) -> None:
        """Report that an epoch begins in this process."""
        self.log.write("begin", trial, epoch, os.getpid())

    def trained(self, trial: int, epoch: int, score: float) -> None:
        """Report an epoch and the accuracy after it."""
        self.log.write("epoch", trial, epoch, os.getpid(), float(score))

    def finished(self, trial: int, net: torch.nn.Module) -> None:
        """Report a trained network."""
        self.log.write("final", trial, digest(net))

    def moved(self, size: int) -> None:
        """Report bytes of states that went from one process to another."""
        self.log.write("moved", int(size))

    def ended(self) -> None:
        """Report that the search has ended; what follows is for the record only."""
        self.log.write("ended")


def digest(net: torch.nn.Module) -> str:
    """Return a hash of a network's weights."""
    made = hashlib.sha256()
    for name, value in sorted(net.state_dict().items()):
        made.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return made.hexdigest()[:16]


def state_bytes(net: torch.nn.Module) -> int:
    """Return the size of a network's weights."""
    return sum(value.numel() * value.element_size() for value in net.state_dict().values())


class Trial:
    """A configuration in training; `worker` of `workers` trains its share of the rows."""

    def __init__(self, work: Work, number: int, worker: int = 0, workers: int = 1) -> None:
        self.work, self.number = work, number
        self.config = work.workload.configs[number]
        self.worker, self.workers = worker, workers
        self.batch = work.workload.batch // workers
        torch.manual_seed(number)
        self.net = network(work.workload.kind, self.config)
        self.optimizer = optimizer_of(self.net, self.config)
        self.x, self.y = (work.read(name, worker, workers) for name in "xy")
        self.vx, self.vy = work.read("vx"), work.read("vy")

    def batches(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield an epoch's batches."""
        order = torch.Generator().manual_seed(1000 * self.number + 10 * epoch + self.worker)
        if self.work.workload.limit:
            yield from self.mixed(order)
            return
        rows = torch.randperm(len(self.x), generator=order)
        for part in rows.split(self.batch):
            yield self.x.index_select(0, part), self.y.index_select(0, part)

    def mixed(self, order: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches of rows from `POOL` random blocks at a time."""
        starts = torch.arange(0, len(self.x), BLOCK)
        starts = starts[torch.randperm(len(starts), generator=order)]
        for chosen in starts.split(POOL):
            x, y = (
                torch.cat([rows[start : start + BLOCK] for start in chosen.tolist()])
                for rows in (self.x, self.y)
            )
            for part in torch.randperm(len(x), generator=order).split(self.batch):
                yield x.index_select(0, part), y.index_select(0, part)

    def train(self, epoch: int, net: torch.nn.Module | None = None) -> None:
        """Train for one epoch; `net` may wrap the network."""
        wrapped = net or self.net
        wrapped.train()
        for x, y in self.batches(epoch):
            self.optimizer.zero_grad(set_to_none=True)
            cross_entropy(wrapped(x), y).backward()
            self.optimizer.step()

    @torch.no_grad()
    def score(self) -> float:
        """Return the accuracy on the validation rows."""
        self.net.eval()
        right = 0.0
        for x, y in zip(self.vx.split(SCORED), self.vy.split(SCORED), strict=True):
            right += float(accuracy(self.net(x), y)) * len(x)
        return right / len(self.vx)

    def epoch(self, epoch: int) -> float:
        """Train for one epoch, report it, and return the accuracy."""
        self.work.began(self.number, epoch)
        self.train(epoch)
        score = self.score()
        self.work.trained(self.number, epoch, score)
        return score

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def train_trial(work: Work, number: int) -> float:
    """Train a configuration from start to end in this process; return its best accuracy."""
    trial = Trial(work, number)
    best = max(trial.epoch(epoch) for epoch in range(work.epochs))
    work.finished(number, trial.net)
    return best
