"""The overhead of training through Cerebro: ``python -m benchmarks.bench_overhead``.

1. A small MLP, trained by the inline executor, against the same handwritten loop over batches made
with ``index_select`` into reused buffers. Bar: at most 1 % more. 2. A model that does nothing:
microseconds per batch and per unit beyond an empty loop over the loader and beyond the state's
copy. Bars: 3 us and 0.3 ms.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import cerebro
import cerebro._core as _core
from benchmarks.harness import Bench, parser
from cerebro.data.batches import make_loader
from cerebro.machine.local import LOCAL
from cerebro.run.settings import Batches, Limits
from cerebro.worker.messages import RunContext, RunFolders, Task
from cerebro.worker.runner import UnitRunner

BATCH = 256
FEATURES = 128


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def build(config: dict[str, object]) -> cerebro.torch.Model:
    net, optimizer = parts()
    return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)


class Nothing:
    """Costs nothing itself, so the rest is Cerebro's overhead."""

    framework = "torch"

    def __init__(self) -> None:
        self.metrics = {"loss": 0.0}

    def train_batch(self, batch: object) -> dict[str, float]:
        return self.metrics

    eval_batch = train_batch

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None:
        pass


def build_nothing(config: dict[str, object]) -> Nothing:
    return Nothing()


def context(build_model: object, data: cerebro.Dataset, folder: str) -> RunContext:
    return RunContext(
        build=build_model,  # type: ignore[arg-type]
        train=data,
        limits=Limits(epochs=1000),
        batches=Batches(batch_size=BATCH),
        folders=RunFolders(folder, folder, folder),
    )


class Units:
    """Runs the units of trial 0 one after the other, as the inline executor does."""

    def __init__(self, runner: UnitRunner, shards: int) -> None:
        self.runner = runner
        self.shards = shards
        self.position = 0

    def next(self) -> float:
        epoch, step = divmod(self.position, self.shards)
        task = Task(0, {}, epoch, step, step, 0, self.position, keep_state=False)
        start = time.perf_counter()
        done = self.runner.run(task)
        seconds = time.perf_counter() - start
        if isinstance(done, cerebro.worker.messages.UnitFailed):
            raise SystemExit(done.traceback or done.message)
        self.position += 1
        return seconds


class HandLoop:
    """The loop a careful PyTorch user writes: index_select into reused buffers."""

    def __init__(self, data: cerebro.Dataset) -> None:
        self.columns = [
            (torch.from_numpy(np.array(s["x"])), torch.from_numpy(np.array(s["y"])))
            for s in (data.shard(i) for i in range(data.num_shards))
        ]
        torch.manual_seed(0)
        self.net, self.optimizer = parts()
        self.x = torch.empty(BATCH, FEATURES)
        self.y = torch.empty(BATCH, dtype=torch.int64)

    def unit(self, shard: int) -> float:
        x, y = self.columns[shard]
        net, optimizer = self.net, self.optimizer
        start = time.perf_counter()
        order = torch.randperm(len(x))
        net.train()
        total = torch.zeros((), dtype=torch.float64)
        for begin in range(0, len(x) - BATCH + 1, BATCH):
            rows = order[begin : begin + BATCH]
            torch.index_select(x, 0, rows, out=self.x)
            torch.index_select(y, 0, rows, out=self.y)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(self.x), self.y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        total.item()
        return time.perf_counter() - start


def overhead(bench: Bench, data: cerebro.Dataset, folder: str, rounds: int) -> None:
    units = Units(
        UnitRunner(context(build, data, folder), worker=0, machine=LOCAL, own_process=True),
        data.num_shards,
    )
    hand = HandLoop(data)
    torch.set_num_threads(1)
    ratios, ours, theirs = [], [], []
    for i in range(rounds + 1):
        shard = i % data.num_shards
        first, second = hand.unit(shard), units.next()
        if i > 0:
            ratios.append(second / first)
            ours.append(second)
            theirs.append(first)
    bench.add("MLP by hand, per unit", statistics.median(theirs) * 1e3, "ms")
    bench.add(
        "MLP by Cerebro, per unit (with its state's copy)",
        statistics.median(ours) * 1e3,
        "ms",
        reference="by hand",
        ratio=statistics.median(ratios),
        bar="<= 1.01",
    )


def loop(loader: _core.Loader, shard: int, step: object = None) -> float:
    """Seconds for one pass over a shard, with `run_unit` or by an empty loop."""
    loader.begin([[shard]], 0)
    start = time.perf_counter()
    if step is not None:
        _core.run_unit(loader, step)  # type: ignore[arg-type]
    else:
        for _ in loader:
            pass
    return time.perf_counter() - start


def nothing(bench: Bench, data: cerebro.Dataset, folder: str, rounds: int) -> None:
    """A model that does nothing: many batches for the first figure, few for the second."""
    loader = make_loader(data, BATCH, seed=0, framework="torch", threads=0)
    batches = -(-data.num_rows // data.num_shards // BATCH)
    step = Nothing().train_batch
    pairs = [(loop(loader, 0, step), loop(loader, 0)) for _ in range(rounds)]
    per_batch = statistics.median(a - b for a, b in pairs) / batches
    few = data.split(4 * BATCH * data.num_shards / data.num_rows)[0]
    units = Units(
        UnitRunner(context(build_nothing, few, folder), worker=0, machine=LOCAL, own_process=True),
        few.num_shards,
    )
    loader = make_loader(few, BATCH, seed=0, framework="torch", threads=0)
    units.next()
    extra = [units.next() - loop(loader, i % few.num_shards) for i in range(10 * rounds)]
    bench.add(
        "model that does nothing, per batch beyond the loader", per_batch * 1e6, "us", bar="<= 3"
    )
    bench.add(
        "model that does nothing, per unit beyond the loader",
        statistics.median(extra) * 1e3,
        "ms",
        bar="<= 0.3",
    )


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    rows = 40_000 if arguments.quick else 200_000
    rng = np.random.default_rng(0)
    folder = tempfile.mkdtemp(prefix="cerebro-bench-")
    torch.set_num_threads(1)
    try:
        source = {
            "x": rng.normal(size=(rows, FEATURES)).astype("float32"),
            "y": rng.integers(0, 10, rows),
        }
        # Whole batches only, so that both sides take the same number of steps.
        shards = 8
        keep = rows // (shards * BATCH) * shards * BATCH
        source = {name: column[:keep] for name, column in source.items()}
        data = cerebro.shard(source, Path(folder, "data"), shards=shards, progress=False)
        bench = Bench("bench_overhead", arguments.json)
        rounds = 8 if arguments.quick else 8 * arguments.rounds
        for name, part in (("a", overhead), ("b", nothing)):
            states = Path(folder, name)
            states.mkdir()
            part(bench, data, str(states), rounds)
        bench.report()
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
