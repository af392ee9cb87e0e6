"""How recorded steps are run: ``python -m benchmarks.bench_step_engine``.

Training units on the CPU with one thread, batches from a loader:
``cerebro.torch.Model(graph=True)``, once it replays its recorded step, against ``graph=False``,
with the default AdamW and with ``fused=True``. The step is replayed in two ways. "list": every
operator is called from Python, as where the C core's operators do not have PyTorch's bits. "core":
elementwise operators run in the C core, and the unit without Python code of the model. Each is
measured in units, in turn; the figure is the median of the units' ratios. All train on the same
batches and must have the same weights, to the bit.

Then the step of "core" over the sum of its kernels: of its operators, timed one by one as they
follow each other in a step. Bar: 1.15.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import cerebro
from benchmarks.bench_step import CASES
from benchmarks.harness import Bench, parser
from cerebro.torch import native_calls
from cerebro.worker.evaluate import run_batches
from cerebro.worker.models import make_batches


def model(make: Callable[[], nn.Module], graph: bool, fused: bool | None) -> cerebro.torch.Model:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    return cerebro.torch.Model(
        net, optimizer=optimizer, loss=nn.functional.cross_entropy, graph=graph
    )


def unit(trained: cerebro.torch.Model, loader: Any, epoch: int, from_python: bool) -> float:
    """CPU seconds per step: other programs on the machine disturb them less than the clock's."""
    loader.begin([[0]], epoch)
    torch.manual_seed(epoch)  # of dropout
    step: Any = trained.train_batch
    if from_python:

        def step(batch: Any) -> Any:  # not a method: the epoch runner must call it
            return trained.train_batch(batch)

    start = time.process_time()
    result = run_batches(loader, step)
    seconds = (time.process_time() - start) / result.batches
    trained.end_unit()
    return seconds


def engine(name: str) -> None:
    os.environ["CEREBRO_STEP_ENGINE"] = name
    native_calls.measure_rounding.cache_clear()


STEPS = 200


def kernels(trained: cerebro.torch.Model) -> float:
    """Seconds of a step's operators, timed in their order; changes the weights."""
    (recorded,) = trained._recorded[0]._programs.values()
    calls = [(run, args, kwargs or {}) for run, args, kwargs in recorded.program.calls()]
    clock = time.perf_counter
    times, empty = [0.0] * STEPS, [0.0] * STEPS
    with torch._C._AutoDispatchBelowAutograd():
        for step in range(STEPS):
            begun = clock()
            empty[step] = clock() - begun
            for run, args, kwargs in calls:
                begun = clock()
                run(*args, **kwargs)
                times[step] += clock() - begun
    of_timer = len(calls) * statistics.median(empty)
    return statistics.median(times) - of_timer


def compare(bench: Bench, name: str, fused: bool | None, rounds: int, folder: Path) -> None:
    make, _, _, rows = CASES[name]
    data = cerebro.Dataset(folder)
    models = {"ordinary": model(make, False, fused)}
    for kind in ("list", "core"):
        engine("python" if kind == "list" else "native")
        models[kind] = model(make, True, fused)
        loader = make_batches(models[kind], data, rows, "cpu", seed=0, shuffle=True, threads=0)
        unit(models[kind], loader, 0, from_python=kind == "list")
    unit(models["ordinary"], loader, 0, from_python=True)
    found: dict[str, list[float]] = {kind: [] for kind in models}
    for epoch in range(1, rounds + 1):
        for kind, trained in models.items():
            found[kind].append(unit(trained, loader, epoch, from_python=kind == "list"))
    states = [list(trained.net.state_dict().values()) for trained in models.values()]
    for other in states[1:]:
        if not all(torch.equal(one, two) for one, two in zip(states[0], other, strict=True)):
            raise SystemExit(f"{name}: the recorded step gave other weights")
    for kind in ("list", "core"):
        if models[kind]._recorded[0].replays == 0:
            raise SystemExit(f"{name}: {models[kind]._recorded[0].refusal}")
        bench.add(
            f"{name}, {'fused=True' if fused else 'default'}, {kind}",
            statistics.median(found[kind]) * 1e6,
            "us",
            reference="ordinary",
            ratio=statistics.median(
                mine / its for mine, its in zip(found[kind], found["ordinary"], strict=True)
            ),
        )
    sums = [kernels(models["core"]) for _ in range(3)]
    step = statistics.median(found["core"])
    bench.add(
        f"{name}, {'fused=True' if fused else 'default'}, core",
        step * 1e6,
        "us",
        reference="sum of kernels",
        ratio=step / statistics.median(sums),
        bar="<= 1.15",
    )


def make_data(name: str, steps: int, folder: Path) -> None:
    _, shape, classes, rows = CASES[name]
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows * steps, *shape)).astype("float32")
    y = rng.integers(0, classes, rows * steps)
    cerebro.shard({"x": x, "y": y}, folder, shards=1, progress=False)


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    bench = Bench("bench_step_engine", arguments.json)
    rounds, steps = (3, 40) if arguments.quick else (4 * arguments.rounds, 300)
    with tempfile.TemporaryDirectory(prefix="cerebro-bench-") as folder:
        for number, name in enumerate(CASES):
            data = Path(folder, str(number))
            make_data(name, steps, data)
            for fused in (None, True):
                compare(bench, name, fused, rounds, data)
    bench.report()


if __name__ == "__main__":
    main()
