"""How well a search fills two workers: ``python -m benchmarks.bench_search``.

16, 3 and 5 configurations of an MLP on 200,000 x 128 rows, 5 epochs, two workers.
The reference is the same search by one worker, measured before and after: the
makespan over half of its time. 1 is perfect; one trial per worker gives 1.33 for
3 configurations. Bars: 1.03 for 16, 1.05 for 3 and 5.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

import cerebro
from benchmarks.harness import Bench, parser

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
    return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)


def makespan(data: cerebro.Dataset, trials: int, workers: int, epochs: int, folder: str) -> float:
    """Seconds from the first unit's start to the last one's end."""
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
    )
    units = result.units()
    shutil.rmtree(folder)
    return max(u["end"] for u in units) - min(u["start"] for u in units)


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    rows = 20_000 if arguments.quick else 200_000
    epochs = 2 if arguments.quick else 5
    rng = np.random.default_rng(0)
    folder = tempfile.mkdtemp(prefix="cerebro-bench-")
    bench = Bench("bench_search: makespan over half of the sequential time", arguments.json)
    try:
        x = rng.normal(size=(rows, FEATURES)).astype("float32")
        y = (x[:, :8].sum(1) + rng.normal(size=rows) > 0).astype("int64")
        data = cerebro.shard({"x": x, "y": y}, Path(folder, "data"), shards=8, progress=False)
        for trials, bar in ((16, "<= 1.03"), (5, "<= 1.05"), (3, "<= 1.05")):
            ratios, doubles = [], []
            for i in range(max(1, arguments.rounds // 2)):
                run = f"{folder}/run-{trials}-{i}"
                before = makespan(data, trials, 1, epochs, run)
                double = makespan(data, trials, 2, epochs, run)
                after = makespan(data, trials, 1, epochs, run)
                ratios.append(double / ((before + after) / 4))
                doubles.append(double)
            bench.add(
                f"{trials} configurations, {epochs} epochs, 2 workers",
                statistics.median(doubles),
                "s",
                reference="sequential / 2",
                ratio=statistics.median(ratios),
                bar=bar,
            )
        bench.report()
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
