"""The cost of feeding when every core trains: ``python -m benchmarks.bench_two_workers``.

Two processes, one compute thread each, train the same small CNN on rows of 12,288 bytes: from
Cerebro's loader (inline, as in workers) and from prepared batches. Both do the same at the same
time, in alternating rounds.

The network takes floats. The step casts its input; the loader's rows come as stored in the shard,
or already as floats (`Cast`). Two networks: a smaller one with steps of about 3 ms, and a larger
one with about 4 ms. Bar: 0.97 of the steps per second with prepared batches, for the larger one; at
that step length, other loaders reached 0.93 to 0.94.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bench, parser

BATCH = 128
WORKERS = 2
FILTERS = {"smaller": 8, "larger": 16}


def child(number: int, folder: str, filters: int, rounds: int, barrier: Any, answers: Any) -> None:
    """Train in alternating rounds; send the steps per second of each kind."""
    import torch

    import cerebro
    import cerebro._core as _core
    from cerebro.data.batches import make_loader

    torch.set_num_threads(1)
    torch.manual_seed(number)
    data = cerebro.Dataset(folder)
    floats = data.with_transforms({"x": [cerebro.transforms.Cast("float32")]})
    loaders = {
        kind: make_loader(view, BATCH, seed=number, framework="torch", threads=0)
        for kind, view in (("bytes", data), ("floats", floats))
    }
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, filters, 5, stride=4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(filters * 15 * 15, 10),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train(batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        x = batch["x"].to(torch.float32)
        torch.nn.functional.cross_entropy(net(x), batch["y"]).backward()
        optimizer.step()

    loaders["bytes"].begin([[0]], 0)
    # Enough different batches to exceed the caches, like fresh ones.
    ready = [{name: t.clone() for name, t in batch.items()} for batch in loaders["bytes"]]
    speeds: dict[str, list[float]] = {"ready": [], "bytes": [], "floats": []}
    for i in range(rounds + 1):
        for kind in speeds:
            if kind in loaders:
                loaders[kind].begin([[0]], i)
            barrier.wait()
            start = time.perf_counter()
            if kind in loaders:
                _core.run_unit(loaders[kind], train)  # as workers do
            else:
                for batch in ready:
                    train(batch)
            if i > 0:
                speeds[kind].append(len(ready) / (time.perf_counter() - start))
    answers.put(speeds)


def measure(folder: str, filters: int, rounds: int) -> list[dict[str, list[float]]]:
    """Return every worker's answer."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(WORKERS), context.Queue()
    children = [
        context.Process(target=child, args=(n, folder, filters, rounds, barrier, answers))
        for n in range(WORKERS)
    ]
    for process in children:
        process.start()
    speeds = [answers.get() for _ in children]
    for process in children:
        process.join()
    return speeds


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    rows = 4_000 if arguments.quick else 20_000
    rounds = 2 if arguments.quick else 3 * arguments.rounds
    rng = np.random.default_rng(0)
    bench = Bench("bench_two_workers", arguments.json)
    with tempfile.TemporaryDirectory(prefix="cerebro-bench-") as folder:
        import cerebro

        path = Path(folder, "data")
        source = {
            "x": rng.integers(0, 255, (rows, 3, 64, 64), dtype=np.uint8),
            "y": rng.integers(0, 10, rows),
        }
        cerebro.shard(source, path, shards=1, progress=False)
        for size, filters in FILTERS.items():
            speeds = measure(str(path), filters, rounds)
            add(bench, size, speeds)
    bench.report()


def add(bench: Bench, size: str, speeds: list[dict[str, list[float]]]) -> None:
    """Add the medians of one network."""
    ready = statistics.median(v for s in speeds for v in s["ready"])
    bench.add(f"{size} network, batches made beforehand", ready, "steps/s")
    for kind, what in (("floats", "which makes floats"), ("bytes", "which gives bytes")):
        bench.add(
            f"{size} network, Cerebro's loader inside, {what}",
            statistics.median(v for s in speeds for v in s[kind]),
            "steps/s",
            reference="beforehand",
            ratio=statistics.median(
                a / b for s in speeds for a, b in zip(s[kind], s["ready"], strict=True)
            ),
            bar=">= 0.97" if (size, kind) == ("larger", "floats") else "",
        )


if __name__ == "__main__":
    main()
