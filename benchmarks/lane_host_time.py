"""Host time per batch of units on a GPU, over the stand-in for CUDA: nothing but the host works.

    python -m benchmarks.lane_host_time

In turn, for batches of resident rows: the loader alone; the loader and a Python step that copies
the batch into a graph's inputs, launches the graph and reads nothing; the same units by
GraphReplays, one lane and sixteen. The stand-in queues kernels and graphs but does not run them. A
call of it costs about as much as one of CUDA's that only enqueues (it takes a lock and allocates),
so the number of calls per batch is printed, too. Times are those of the process on its cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ROWS, SIZE, LANES, ROUNDS = 256_000, 128, 16, 7
MOST = 8.0  # microseconds per batch by GraphReplays


def build_standin(folder: Path) -> Path:
    library = folder / "libcudart_standin.so"
    core = ROOT / "csrc" / "core"
    command = ["cc", "-shared", "-fPIC", "-O2", "-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off"]
    command += ["-fvisibility=hidden", f"-I{core}", f"-I{ROOT / 'csrc' / 'third_party'}"]
    command += [str(ROOT / "tests" / "standin" / "cudart.c"), *map(str, sorted(core.glob("*.c")))]
    subprocess.run([*command, "-lpthread", "-lm", "-ldl", "-o", str(library)], check=True)
    return library


def measure(folder: Path) -> None:
    import graphed_units
    from graphed_units import Unit, runtime

    import cerebro._core as _core
    import cerebro.data

    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=(ROWS, 8)).astype(np.float32), "y": np.arange(ROWS)}
    data = cerebro.data.shard(columns, folder / "data", shards=1)
    units = [Unit(data, size=SIZE) for _ in range(LANES)]

    def step_of(unit: Unit) -> Callable[[Any], dict[str, float]]:
        def step(batch: dict[str, Any]) -> dict[str, float]:
            views = unit.views_of(batch)
            graph = unit.graph_for(views)
            for (_, view, tensor), one in zip(views, graph.inputs, strict=True):
                size, how = tensor.nbytes, graphed_units.ON_DEVICE
                runtime.cudaMemcpyAsync(one[0], view.data, size, how, unit.stream)
            runtime.cudaGraphLaunch(graph.handle, unit.stream)
            return {"loss": 1.0}

        return step

    def load(unit: Unit) -> None:
        for _ in unit.loader:
            pass

    def take_steps(unit: Unit) -> None:
        _core.run_unit(unit.loader, step_of(unit))

    def replay(unit: Unit) -> None:
        _core.run_unit(unit.loader, unit.step, replays=unit.replays)

    def time_ways(work: Callable[[Unit], None], lanes: int) -> tuple[float, float]:
        """Return microseconds and calls of the runtime per batch."""
        chosen = units[:lanes]
        for unit in chosen:
            unit.loader.begin([[0]], 1)
        batches = sum(len(unit.loader) for unit in chosen)
        threads = [threading.Thread(target=work, args=(unit,)) for unit in chosen[1:]]
        calls, start = runtime.standin_calls(None), time.process_time()
        for thread in threads:
            thread.start()
        work(chosen[0])
        for thread in threads:
            thread.join()
        passed = time.process_time() - start
        return passed / batches * 1e6, (runtime.standin_calls(None) - calls) / batches

    ways: dict[str, tuple[Callable[[Unit], None], int]] = {
        "the loader's next()": (load, 1),
        "next() and a Python step": (take_steps, 1),
    }
    if hasattr(_core, "GraphReplay"):
        ways["GraphReplays, 1 lane"] = (replay, 1)
        ways[f"GraphReplays, {LANES} lanes"] = (replay, LANES)
    for unit in units if hasattr(_core, "GraphReplay") else units[:1]:
        unit.loader.begin([[0]], 0, count=2)
        for batch in unit.loader:
            unit.step(batch)
        del batch
        unit.record()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, how in ways.items():
            found[way].append(time_ways(*how))
    ordinary = statistics.median(one[0] for one in found["next() and a Python step"])
    for way, times in found.items():
        middle = statistics.median(one[0] for one in times)
        print(
            f"{way:28} {middle:8.2f} us per batch ({min(times)[0]:.2f} to {max(times)[0]:.2f}), "
            f"{times[0][1]:5.1f} calls, {ordinary / middle:5.1f} x"
        )
    print(f"GraphReplays should take at most {MOST} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    inside = parser.parse_args().inside
    if inside is not None:
        sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "standin")]
        measure(inside)
        sys.stdout.flush()
        os._exit(0)  # what the units hold is not of interest
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "CEREBRO_CUDART": str(build_standin(folder))}
        environment |= {"STANDIN_BREAK": "kernel,graph", "CEREBRO_CACHE": str(folder / "cache")}
        command = [sys.executable, str(Path(__file__)), "--inside", str(folder)]
        raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
