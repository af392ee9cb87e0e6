"""Cerebro: trials hop between workers (README), by default and with recorded steps."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import cerebro
from benchmarks.comparison.training import Work, digest, state_bytes
from benchmarks.comparison.workloads import accuracy, network, optimizer_of


def build(work: Work, graph: bool | None, config: dict[str, Any]) -> cerebro.torch.Model:
    work.log.write("worker", os.getpid())
    chosen = work.workload.configs[config["number"]]
    torch.manual_seed(config["number"])  # the initial weights of all other rivals
    net = network(work.workload.kind, chosen)
    return cerebro.torch.Model(
        net,
        optimizer=optimizer_of(net, chosen),
        loss=cross_entropy,
        epoch_metrics={"accuracy": accuracy},  # on validation rows only, as all others
        graph=graph,
    )


class Heard:
    """Passes a search's events on to the log."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def on_epoch_end(self, trial: Any, metrics: Any) -> None:
        self.work.log.write("epoch", trial.number, trial.epoch, 0, metrics["accuracy"])


def run(work: Work, graph: bool | None = None) -> None:
    """Search the grid of all configurations."""
    folder = Path(work.data)
    result = cerebro.search(
        partial(build, work, graph),
        {"number": list(range(work.trials))},
        str(folder / "shards"),
        validation=str(folder / "vshards"),
        searcher="grid",
        epochs=work.epochs,
        metric="accuracy",
        batch_size=work.workload.batch,
        shuffle="shards" if work.workload.limit else "rows",  # as its guide says of data this large
        workers=work.workers,
        select="last",
        keep="last",
        run=Path(work.place, "run"),
        progress=False,
        callbacks=[Heard(work)],
    )
    work.ended()
    units = result.units()
    work.log.write("span", min(u["start"] for u in units), max(u["end"] for u in units))
    for trial in result.trials:
        work.log.write("final", trial.config["number"], digest(trial.load("last").net))
    size = state_bytes(network(work.workload.kind, work.workload.configs[0]))
    work.moved(sum(u["state_bytes"] or 3 * size for u in units if u["hopped"]))


def run_recorded(work: Work) -> None:
    """Search with recorded steps."""
    run(work, graph=True)
