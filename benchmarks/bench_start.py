"""Startup: ``python -m benchmarks.bench_start``.

Seconds from the start of ``python -m cerebro demo`` to its first unit and to its end, with new
processes and without written data, as a ratio to importing PyTorch in a new process.
Bar: 1.75 to the first unit.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cerebro
from benchmarks.harness import Bench, parser


def import_seconds() -> float:
    """Return the seconds that a new process takes to import PyTorch and to exit."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, os; os._exit(0)"], check=True)
    return time.perf_counter() - begun


def demo_seconds(epochs: int) -> tuple[float, float]:
    """Run the demo; return the seconds to its first unit and to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cerebro", "demo", "--epochs", str(epochs), "--run", "run"]
        path = os.pathsep.join(filter(None, sys.path))
        begun = time.time()
        subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        end = time.time()
        saved = cerebro.open(Path(folder) / "run").saved
        first = min(unit["start"] for unit in saved.units())
        return saved.meta["started"] + first - begun, end - begun


def main() -> None:
    options = parser(__doc__ or "")
    arguments = options.parse_args()
    rounds = 3 if arguments.quick else 7
    bench = Bench("Startup", arguments.json)
    found = [(import_seconds(), *demo_seconds(2)) for _ in range(rounds)]
    reference, first, end = (statistics.median(column) for column in zip(*found, strict=True))
    bench.add("importing PyTorch", reference, "s")
    name = "importing PyTorch"
    bench.add("demo: first unit", first, "s", reference=name, ratio=first / reference, bar="1.75")
    bench.add("demo, 2 epochs: end", end, "s", reference=name, ratio=end / reference)
    bench.report()


if __name__ == "__main__":
    main()
