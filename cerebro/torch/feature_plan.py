"""`plan_features`: choose which layers of a frozen network to store within a disk budget.

A trial that reads a stored layer loads the layer's rows in every epoch. A trial that reads another
layer runs the network up to that layer in every epoch. Storing layers costs one pass up to the
deepest of them. All sets of layers that fit the budget are compared, at most 2^16.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cerebro.arguments import check_whole_number
from cerebro.data import Dataset
from cerebro.data.derive import parse_budget
from cerebro.errors import InputError
from cerebro.model import Columns
from cerebro.report.format import duration, size
from cerebro.torch.frozen_trunk import Trunk, check_images

MAX_LAYERS = 16
_ROUNDS = 5


@dataclass(frozen=True)
class LayerCost:
    """The cost of a layer for one pass over all rows."""

    compute: float  # seconds to load the inputs and compute the layer
    load: float  # seconds to load the stored layer
    nbytes: int  # bytes on disk
    trials: int  # the number of trials that read the layer


@dataclass(frozen=True)
class FeaturePlan:
    """Which layers to store; see `plan_features`.

    Attributes
    ----------
    keep
        The layers to store, in the order of the network: pass them to `features`.
    seconds
        Seconds to compute and load features in all trials on one worker, if `keep` is stored.
    seconds_without
        The same if no layer is stored.
    nbytes
        Bytes of the layers in `keep` on disk.
    budget
        The budget in bytes, or None.
    epochs
        Epochs of each trial.
    layers
        The cost of each layer, in the order of the network.
    """

    keep: tuple[str, ...]
    seconds: float
    seconds_without: float
    nbytes: int
    budget: int | None
    epochs: int
    layers: Mapping[str, LayerCost]

    def __str__(self) -> str:
        lines = [
            f"{'layer':<16}{'on disk':>10}{'compute':>12}{'load':>12}{'trials':>8}  (per pass)"
        ]
        for name, cost in self.layers.items():
            mark = "  store" if name in self.keep else ""
            lines.append(
                f"{name:<16}{size(cost.nbytes):>10}{duration(cost.compute):>12}"
                f"{duration(cost.load):>12}{cost.trials:>8}{mark}"
            )
        limit = "" if self.budget is None else f" of a budget of {size(self.budget)}"
        lines.append(
            f"{size(self.nbytes)}{limit}; {duration(self.seconds)} instead of "
            f"{duration(self.seconds_without)} for {self.epochs} epochs, without the heads"
        )
        return "\n".join(lines)


def plan_features(
    images: Dataset,
    net: Any,
    *,
    layers: Sequence[str] | Mapping[str, str],
    trials: int | Mapping[str, int],
    epochs: int,
    budget: int | str | None = None,
    inputs: Columns = "x",
    batch_size: int = 256,
    threads: int = 1,
) -> FeaturePlan:
    """Choose the layers to store from costs that are measured on a batch.

    The sizes are exact; the times are measured on this machine, on the network's device.

    Parameters
    ----------
    images, net, layers, inputs, batch_size, threads
        As for `features`.
    trials
        The number of trials that read each layer: a mapping by column, or a number for every layer.
    epochs
        Epochs of each trial.
    budget
        The maximum disk space: bytes, or a string such as ``"20GB"``; None: unlimited.

    Returns
    -------
    FeaturePlan
        The plan. ``plan.keep`` has the layers for `features`; printing the plan shows the costs.

    Raises
    ------
    InputError
        An argument is invalid, or there are more than 16 layers.
    """
    trunk = Trunk(net, layers, inputs, check_whole_number("threads", threads, 1))
    check_images(images)
    epochs = check_whole_number("epochs", epochs, 1)
    if len(trunk.layers) > MAX_LAYERS:
        raise InputError(f"layers: {len(trunk.layers)} are too many to plan: name at most 16")
    uses = dict.fromkeys(trunk.layers, trials) if not isinstance(trials, Mapping) else trials
    for name in uses:
        if name not in trunk.layers:
            raise InputError(f"trials: {name!r} is not one of the layers {', '.join(trunk.layers)}")
    counts = {name: check_whole_number("trials", uses.get(name, 0), 0) for name in trunk.layers}
    costs = _measure(images, trunk, batch_size, counts)
    keep, seconds = choose_layers(costs, epochs, parse_budget(budget))
    without = choose_layers(costs, epochs, 0)[1]
    nbytes = sum(costs[name].nbytes for name in keep)
    return FeaturePlan(keep, seconds, without, nbytes, parse_budget(budget), epochs, costs)


def choose_layers(
    costs: Mapping[str, LayerCost], epochs: int, budget: int | None
) -> tuple[tuple[str, ...], float]:
    """Return the fastest set of layers that fits a budget, and its seconds.

    Of equally fast sets, return the smallest. Layers that no trial reads are not stored.
    """
    names = list(costs)
    uses = np.array([costs[name].trials * epochs for name in names], float)
    compute = np.array([costs[name].compute for name in names])
    load = np.array([costs[name].load for name in names])
    nbytes = np.array([costs[name].nbytes for name in names], np.int64)
    sets = (np.arange(2 ** len(names))[:, None] >> np.arange(len(names))) & 1 == 1
    fits = ~sets[:, uses == 0].any(axis=1)
    if budget is not None:
        fits &= sets @ nbytes <= budget
    sets = sets[fits]
    once = np.where(sets, compute, 0).max(axis=1, initial=0)
    seconds = once + np.where(sets, uses * load, uses * compute).sum(axis=1)
    best = np.lexsort(((sets * nbytes).sum(axis=1), seconds))[0]
    chosen = tuple(name for name, stored in zip(names, sets[best], strict=True) if stored)
    return chosen, float(seconds[best])


def _measure(
    images: Dataset, trunk: Trunk, batch_size: int, trials: Mapping[str, int]
) -> dict[str, LayerCost]:
    """Measure a batch several times; return the costs for all rows, in the network's order."""
    work = trunk.derive(images, batch_size, copies=0, seed=0, dtypes=None)
    batches = work.batches(images.view.parts, 0, None)
    outputs: dict[str, Any] = {}
    rows = 1
    times: dict[str, list[float]] = {name: [] for name in trunk.layers}
    for _ in range(_ROUNDS + 1):  # the first round is a warm-up
        trunk.wait()
        start = time.perf_counter()
        batch = next(iter(batches))
        trunk.wait()  # batches are copied to a GPU in the background
        loaded = time.perf_counter() - start
        rows = len(next(iter(batch.values())))
        outputs = trunk.measure(batch, timed=True)
        for name, seconds in trunk.seconds.items():
            times[name].append(loaded + seconds)
    passes = images.num_rows / rows
    return {
        name: LayerCost(
            statistics.median(times[name][1:]) * passes,
            _time_gathering(outputs[name]) * passes,
            outputs[name][0].numel() * outputs[name].element_size() * images.num_rows,
            trials[name],
        )
        for name in trunk.order
    }


def _time_gathering(rows: torch.Tensor) -> float:
    """Return the seconds to copy the rows of a batch in another order, as a loader does."""
    stored = rows.cpu()
    order = torch.arange(len(stored)).flip(0)
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        stored.index_select(0, order)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
