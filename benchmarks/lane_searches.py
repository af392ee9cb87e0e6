"""Cerebro's searches in `benchmarks.gpu_lanes`, and what is read from their runs."""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import cerebro
from benchmarks.lane_models import Make
from benchmarks.lane_ways import Place
from cerebro.machine.flags import compute_settings

SEED = 0


@dataclass
class Searched:
    """What a search has given."""

    result: Any
    seconds: float  # of the whole call
    step: float  # seconds of a step of all trials, after the first epoch
    hashes: list[list[str]]  # by trial and epoch


@dataclass
class Work:
    """A search that is repeated with different numbers of lanes."""

    build: Callable[..., Any]
    data: cerebro.Dataset
    batch: int
    folder: Path
    place: Place
    trials: int
    config: dict[str, Any] = field(default_factory=dict)

    def search(self, *, lanes: int, epochs: int, graph: bool | None) -> Searched:
        space = {name: [value] for name, value in self.config.items()}
        rates = [1e-3 * (1 + number / self.trials) for number in range(self.trials)]
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        where: dict[str, Any] = {"devices": "cpu", "workers": min(lanes, 2) if lanes > 1 else 0}
        if self.place.is_gpu:
            where = {"devices": self.place.device, "workers_per_device": lanes}
        begun = time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="no validation data")
            result = cerebro.search(
                self.build, {"lr": rates, "graph": [graph], **space}, self.data, epochs=epochs,
                searcher="grid", batch_size=self.batch, seed=SEED, run=run, progress=False,
                keep="last", **where,
            )  # fmt: skip
        seconds = time.perf_counter() - begun
        failed = [trial.error for trial in result.trials if trial.status != "finished"]
        if failed:
            raise RuntimeError(f"{len(failed)} trials failed: {failed[0]}")
        hashes = [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]
        step = measure_step(result.units(), self.batch, self.trials)
        return Searched(result, seconds, step, hashes)

    def train_by_hand(self, make: Make, config: dict[str, Any], epochs: int) -> torch.nn.Module:
        """Return the network of the first trial, trained by the loop that the guide gives."""
        with compute_settings(1, "warn", self.place.device):
            seed = cerebro.trial_seed(SEED, 0)
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            net = make().to(self.place.device)
            optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
            for epoch in range(epochs):
                batches = self.data.batches(
                    self.batch, seed=SEED, epoch=epoch, device=self.place.device
                )
                for batch in batches:
                    functional.cross_entropy(net(batch["x"]), batch["y"]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return net


def measure_step(units: Sequence[dict[str, Any]], batch: int, trials: int) -> float:
    """Return the seconds of a step of all trials, once all have finished their first epoch.

    A unit that began before counts with the share that lies after.
    """
    training = [unit for unit in units if unit["kind"] == "train"]
    end = max(unit["end"] for unit in training)
    begin = max(unit["end"] for unit in training if unit["epoch"] == 0)
    if begin == end:  # there is one epoch
        begin = min(unit["start"] for unit in training)
    steps = 0.0
    for unit in training:
        share = (unit["end"] - max(begin, unit["start"])) / (unit["end"] - unit["start"])
        steps += max(0.0, share) * -(-unit["rows"] // batch)
    return float((end - begin) / (steps / trials))


@contextlib.contextmanager
def watch_memory(place: Place) -> Iterator[list[int]]:
    """Yield a list that gets the most bytes in use on the device, by all processes."""
    most = [0]
    if not place.is_gpu:
        yield most
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            most[0] = max(most[0], total - free)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()
