"""Events per second of the scheduler, and its memory per trial.

An event is the end of a unit and the resulting commands. In C: only the state machine, compiled
into a small program. In Python: the same through ``cerebro._core.Schedule``. The reference, in the
same run, is the simplest possible scheduler: a Python list of ready trials, first in, first out.

    python -m benchmarks.bench_schedule [--quick]
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections import deque
from pathlib import Path

from benchmarks.harness import Bench, parser
from cerebro._core import Schedule

ROOT = Path(__file__).resolve().parent.parent
WORKERS, SHARDS = 8, 8
REACH = {1_000: 300_000, 10_000: 100_000}  # events per second in C
REACH_BYTES = 2_048


def build(folder: Path) -> Path:
    """Compile benchmarks/c/bench_schedule.c with the files that it needs."""
    core = ROOT / "csrc" / "core"
    sources = [core / "alloc.c", core / "base.c", core / "heap.c", core / "rng.c"]
    sources += sorted(core.glob("schedule*.c"))
    program = folder / "bench_schedule"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    subprocess.run(
        [
            *compiler[:1],
            *("-std=c11", "-D_GNU_SOURCE", "-O3", "-ffp-contract=off", f"-I{core}"),
            *map(str, [ROOT / "benchmarks" / "c" / "bench_schedule.c", *sources]),
            *("-lm", "-o", str(program)),
        ],
        check=True,
    )
    return program


def in_c(program: Path, trials: int, epochs: int, mode: str) -> tuple[float, float]:
    """Return events per second and bytes per trial."""
    command = [program, str(trials), str(WORKERS), str(epochs), str(SHARDS), mode]
    events, seconds, size = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    return int(events) / float(seconds), float(size)


def in_python(trials: int, epochs: int, mode: str) -> float:
    schedule = Schedule(shards=SHARDS, exclusive=mode == "exclusive", stagger=mode != "two-open")
    for _ in range(WORKERS):
        schedule.add_worker(0.0)
    for trial in range(trials):
        schedule.add_trial(trial, epochs=epochs)
    running: deque[int] = deque()
    now, events = 0.0, 0
    start = time.perf_counter()
    while True:
        while (command := schedule.next(now)) is not None:
            if command[0] == "run":
                running.append(command[1])
        if not running:
            return events / (time.perf_counter() - start)
        now += 1.0 / WORKERS
        schedule.unit_done(running.popleft(), now)
        events += 1


def plain_python(trials: int, epochs: int) -> float:
    ready = deque((trial, 0) for trial in range(trials))
    idle, running = deque(range(WORKERS)), deque()
    events = 0
    start = time.perf_counter()
    while True:
        while ready and idle:
            running.append((idle.popleft(), *ready.popleft()))
        if not running:
            return events / (time.perf_counter() - start)
        worker, trial, unit = running.popleft()
        events += 1
        idle.append(worker)
        if unit + 1 < epochs * SHARDS:
            ready.append((trial, unit + 1))


def main() -> None:
    arguments = parser("Events per second of the scheduler, and its memory per trial.")
    options = arguments.parse_args()
    rounds = 1 if options.quick else options.rounds
    bench = Bench(f"schedule: {WORKERS} workers, {SHARDS} shards", options.json)
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for mode in ("shared", "exclusive", "two-open"):
            for trials in (100, 1_000, 10_000):
                epochs = max(1, (10_000 if options.quick else 50_000) // trials)
                measure(bench, program, trials, epochs, mode, rounds)
    bench.report()


def measure(bench: Bench, program: Path, trials: int, epochs: int, mode: str, rounds: int) -> None:
    """Add the medians over rounds, each of which measures all three in turn."""
    figures = []
    for _ in range(rounds):
        fast, size = in_c(program, trials, epochs, mode)
        figures.append((fast, in_python(trials, epochs, mode), plain_python(trials, epochs), size))
    fast, slow, plain, size = (statistics.median(column) for column in zip(*figures, strict=True))
    bar = f">= {REACH[trials]:,} events/s" if trials in REACH else ""
    name = f"{mode}, {trials:,} trials"
    bench.add(f"{name}: C", fast, "events/s", reference="plain Python", ratio=fast / plain, bar=bar)
    bench.add(
        f"{name}: binding", slow, "events/s", reference="plain Python", ratio=slow / plain, bar=bar
    )
    bench.add(f"{name}: memory", size, "B/trial", bar=f"<= {REACH_BYTES:,}")


if __name__ == "__main__":
    main()
