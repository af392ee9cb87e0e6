"""How well a search uses two workers: ``python -m benchmarks.bench_search``.

16, 3 and 5 configurations of an MLP on 200,000 x 128 rows, 5 epochs, two workers. The figure is the
makespan divided by half the time of the same search with one worker, measured before and after. 1
is perfect; one trial per worker gives 1.33 for 3 configurations. Bars: 1.03 for 16, 1.05 for 3 and
5.

Then two searches of small networks against a loop written by hand (`benchmarks.plain_search`), with
each setting of `graph`.

The cost of durable states: the time of 16 configurations with a durable state after every epoch
(`keep="best"`) over the same without, from the first unit's start until the run is closed. Bar:
1.02.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

import cerebro
from benchmarks.harness import Bench, parser
from benchmarks.plain_search import add_plain
from cerebro.worker import messages

FEATURES = 128


def build(config: dict[str, object]) -> cerebro.torch.Model:
    width = config["width"]
    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 2),
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
    loss = torch.nn.functional.cross_entropy
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, graph=config.get("graph"))


class Clock:
    """Records when a run began and when it was closed."""

    def on_run_start(self, run: cerebro.Result) -> None:
        self.began = time.perf_counter()

    def on_run_end(self, result: cerebro.Result) -> None:
        self.closed = time.perf_counter()


@contextlib.contextmanager
def without_durable_states() -> Iterator[None]:
    """Make workers skip writing epoch states."""
    ours = {**vars(messages), "Task": partial(messages.Task, keep_state=False)}
    with mock.patch("cerebro.coordinator.coordinator.messages", SimpleNamespace(**ours)):
        yield


def makespan(
    data: cerebro.Dataset,
    trials: int,
    workers: int,
    epochs: int,
    folder: str,
    *,
    until_closed: bool = False,
) -> float:
    """Seconds from the first unit's start to the last one's end, or until the run is closed."""
    clock = Clock()
    space = {"lr": cerebro.loguniform(1e-4, 1e-2), "width": [64, 96, 128]}
    result = cerebro.search(
        build,
        space,
        data,
        epochs=epochs,
        validation=0.1,
        n_trials=trials,
        batch_size=256,
        workers=workers,
        run=folder,
        progress=False,
        callbacks=[clock],
    )
    units = result.units()
    shutil.rmtree(folder)
    if until_closed:
        return clock.closed - clock.began - min(u["start"] for u in units)
    return max(u["end"] for u in units) - min(u["start"] for u in units)


def add_durable(bench: Bench, data: cerebro.Dataset, epochs: int, rounds: int, folder: str) -> None:
    """Compare a search with durable states to the same without, measured before and after."""
    ratios, times = [], []
    for _ in range(rounds):
        with without_durable_states():
            before = makespan(data, 16, 2, epochs, folder, until_closed=True)
        times.append(makespan(data, 16, 2, epochs, folder, until_closed=True))
        with without_durable_states():
            after = makespan(data, 16, 2, epochs, folder, until_closed=True)
        ratios.append(times[-1] / ((before + after) / 2))
    bench.add(
        f"16 configurations, {epochs} epochs, states durable after each",
        statistics.median(times),
        "s",
        reference="without",
        ratio=statistics.median(ratios),
        bar="<= 1.02",
    )


def add_makespans(
    bench: Bench, data: cerebro.Dataset, epochs: int, rounds: int, folder: str
) -> None:
    """Compare two workers to one, measured before and after."""
    for trials, bar in ((16, "<= 1.03"), (5, "<= 1.05"), (3, "<= 1.05")):
        ratios, doubles = [], []
        for _ in range(rounds):
            before = makespan(data, trials, 1, epochs, folder)
            doubles.append(makespan(data, trials, 2, epochs, folder))
            after = makespan(data, trials, 1, epochs, folder)
            ratios.append(doubles[-1] / ((before + after) / 4))
        bench.add(
            f"{trials} configurations, {epochs} epochs, 2 workers",
            statistics.median(doubles),
            "s",
            reference="sequential / 2",
            ratio=statistics.median(ratios),
            bar=bar,
        )


PARTS = {"makespan": add_makespans, "durable": add_durable}


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--only", choices=(*PARTS, "plain"), help="one part")
    arguments = made.parse_args()
    rows = 20_000 if arguments.quick else 200_000
    epochs = 2 if arguments.quick else 5
    rounds = 1 if arguments.quick else max(1, arguments.rounds // 2)
    rng = np.random.default_rng(0)
    folder = tempfile.mkdtemp(prefix="cerebro-bench-")
    bench = Bench("bench_search: makespan over half of the sequential time", arguments.json)
    try:
        x = rng.normal(size=(rows, FEATURES)).astype("float32")
        y = (x[:, :8].sum(1) + rng.normal(size=rows) > 0).astype("int64")
        data = cerebro.shard({"x": x, "y": y}, Path(folder, "data"), shards=8, progress=False)
        for name, add in PARTS.items():
            if arguments.only in (None, name):
                add(bench, data, epochs, rounds, f"{folder}/{name}")
        if arguments.only in (None, "plain"):
            add_plain(bench, rounds, f"{folder}/plain", quick=arguments.quick)
        bench.report()
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
