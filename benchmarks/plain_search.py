"""A search against the loop that one writes by hand, for `benchmarks.bench_search`.

Eight configurations, six epochs, eight shards, a tenth of the rows for validation. The reference
trains and validates the same configurations one after the other in a plain PyTorch loop, one
thread, with the default optimizer. The figure is the search's makespan with two workers over half
of the loop's time: with ``graph=False``, with that and ``fused=True``, by default, and with
``graph=True``. All but those of ``fused=True`` must have the same states.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import cerebro
from benchmarks.harness import Bench

TRIALS, EPOCHS, SHARDS, WORKERS = 8, 6, 8, 2
WAYS: dict[str, tuple[bool | None, bool | None]] = {
    "graph=False": (None, False),
    "fused=True": (True, False),
    "default": (None, None),
    "graph=True": (None, True),
}
"""The settings of the optimizer's `fused` and of `graph`."""
VALIDATION_ROWS = 256


@dataclass
class Network:
    """A network of the comparison with its data."""

    make: Callable[[int], nn.Module]
    optimizer: type[torch.optim.Optimizer]
    features: int
    classes: int
    rows: int
    batch_size: int


def digits(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10)
    )  # fmt: skip


def binary(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 2),
    )


NETWORKS = {
    "64-w-10": Network(digits, torch.optim.AdamW, 64, 10, 20_000, 32),
    "128-w-w-2": Network(binary, torch.optim.Adam, 128, 2, 60_000, 256),
}


def build(config: dict[str, Any]) -> cerebro.torch.Model:
    network = NETWORKS[config["network"]]
    net = network.make(config["width"])
    optimizer = network.optimizer(net.parameters(), lr=config["lr"], fused=config["fused"])  # type: ignore[call-arg]
    loss = nn.functional.cross_entropy
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, graph=config["graph"])


class PlainLoop:
    """Trains configurations one after the other, as one writes it by hand."""

    def __init__(self, network: Network, x: torch.Tensor, y: torch.Tensor) -> None:
        self._network = network
        whole = len(x) // SHARDS
        kept = whole * 9 // 10
        shards = list(zip(x.split(whole), y.split(whole), strict=True))
        self._train = [(x[:kept], y[:kept]) for x, y in shards]
        self._valid = [(x[kept:], y[kept:]) for x, y in shards]

    def seconds(self, configs: list[dict[str, Any]]) -> float:
        """Train and validate all configurations; return the time."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        began = time.perf_counter()
        for config in configs:
            self._run(config)
        taken = time.perf_counter() - began
        torch.set_num_threads(threads)
        return taken

    def _run(self, config: dict[str, Any]) -> float:
        network = self._network
        net = network.make(config["width"])
        optimizer = network.optimizer(net.parameters(), lr=config["lr"])  # type: ignore[call-arg]
        loss_of = nn.functional.cross_entropy
        total = torch.zeros(())
        for _ in range(EPOCHS):
            net.train()
            for x, y in self._train:
                for rows in torch.randperm(len(x)).split(network.batch_size):
                    loss = loss_of(net(x.index_select(0, rows)), y.index_select(0, rows))
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    total += loss.detach()
            net.eval()
            with torch.no_grad():
                for x, y in self._valid:
                    for inputs, target in zip(
                        x.split(VALIDATION_ROWS), y.split(VALIDATION_ROWS), strict=True
                    ):
                        total += loss_of(net(inputs), target)
        return float(total)


def search(
    name: str, data: cerebro.Dataset, folder: str, *, fused: bool | None, graph: bool | None
) -> tuple[float, list[Any], list[dict[str, Any]]]:
    """Return a search's makespan, its states' hashes, and its configurations."""
    space = {
        "lr": cerebro.loguniform(1e-4, 1e-2),
        "width": [64, 96, 128],
        "network": [name],
        "fused": [fused],
        "graph": [graph],
    }
    result = cerebro.search(
        *(build, space, data),
        epochs=EPOCHS,
        validation=0.1,
        n_trials=TRIALS,
        batch_size=NETWORKS[name].batch_size,
        workers=WORKERS,
        run=folder,
        progress=False,
    )
    units = result.units()
    hashes = [epoch["state_hash"] for trial in result.trials for epoch in trial.history]
    configs = [dict(trial.config) for trial in result.trials]
    shutil.rmtree(folder)
    return max(u["end"] for u in units) - min(u["start"] for u in units), hashes, configs


def add_plain(bench: Bench, rounds: int, folder: str, *, quick: bool) -> None:
    """Compare searches with the plain loop."""
    for name, network in NETWORKS.items():
        rows = network.rows // (15 if quick else 1)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(rows, network.features)).astype("float32")
        y = rng.integers(network.classes, size=rows)
        data = cerebro.shard(
            {"x": x, "y": y}, Path(folder, "data", name), shards=SHARDS, progress=False
        )
        loop = PlainLoop(network, torch.from_numpy(x), torch.from_numpy(y))
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        _, expected, configs = search(name, data, folder + "/run", fused=None, graph=False)
        loop.seconds(configs[:1])
        loops: list[float] = []
        for _ in range(rounds):
            loops.append(loop.seconds(configs))
            for way, (fused, graph) in WAYS.items():
                span, hashes, _ = search(name, data, folder + "/run", fused=fused, graph=graph)
                if not fused and hashes != expected:
                    raise SystemExit(f"{name}: {way} gave other states")
                found[way].append(span)
        for way, spans in found.items():
            bench.add(
                f"{name}, {way}: 8 configurations, 2 workers",
                statistics.median(spans),
                "s",
                reference="plain loop / 2",
                ratio=statistics.median(2 * f / s for f, s in zip(spans, loops, strict=True)),
            )
