"""16 small CNNs on one GPU: ``python -m benchmarks.gpu_search``.

Learning rates, widths, batch sizes and dropouts of a three-layer network on CIFAR-sized images
(uint8, normalized in the loader), 2 epochs. Compared:

- Cerebro with 1, 2 and 4 lanes on the device, ordinary steps and CUDA graphs; with graphs also with
  as many lanes as it chooses;
- one process for each trial with its own copy of the data on the GPU, 1, 2 and 4 at a time, as
  tuners with fractions of a GPU run them;
- the trials one after the other in one process, ordinary and under ``torch.compile``.

The last two gather and normalize on the GPU from resident data. Figures: seconds from the start of
the first program to the end of the last trial (including start-up; Cerebro's dataset already
exists); for Cerebro also from the first unit's start to the last one's end; mean GPU use and peak
memory from ``nvidia-smi``; bytes of data in device memory. Ratios are to the ordinary sequential
trials, with which every run begins. The total is a quarter of an hour, mostly starting programs and
``torch.compile``; ``--ways`` selects.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

import cerebro
from benchmarks.harness import Bench, attempt, parser
from cerebro.machine import devices
from cerebro.transforms import Normalize, Scale, ToCHW

SPACE = {"lr": [1e-3, 3e-3], "width": [16, 32], "batch_size": [64, 128], "dropout": [0.0, 0.3]}
CONFIGS = [dict(zip(SPACE, values, strict=True)) for values in product(*SPACE.values())]
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
EPOCHS, SHARDS = 2, 8
ROWS, QUICK_ROWS = 20_000, 2_000
AT_A_TIME = (1, 2, 4)
REFERENCE = "one after the other"
WAYS = ("ordinary", "graphs", "processes", "compile")


def network(config: dict[str, object]) -> torch.nn.Module:
    width = config["width"]

    def block(before: int, after: int) -> list[torch.nn.Module]:
        return [
            torch.nn.Conv2d(before, after, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(after),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
        ]

    return torch.nn.Sequential(
        *block(3, width), *block(width, 2 * width), *block(2 * width, 4 * width),
        torch.nn.Flatten(), torch.nn.Dropout(config["dropout"]),
        torch.nn.Linear(4 * width * 16, 10),
    )  # fmt: skip


def build(config: dict[str, object]) -> cerebro.torch.Model:
    net = network(config)
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=functional.cross_entropy)


def build_graph(config: dict[str, object]) -> cerebro.torch.Model:
    net = network(config)
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=functional.cross_entropy, graph=True)


def images(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, size=rows)
    x = rng.integers(0, 200, size=(rows, 32, 32, 3), dtype=np.uint8)
    x[np.arange(rows), y, y] = 255
    return x, y


# --- trials by hand -----------------------------------------------------------------


def train_by_hand(
    config: dict[str, object], x: torch.Tensor, y: torch.Tensor, compiled: bool
) -> None:
    """Train on data in device memory, gathered and normalized there."""
    torch.manual_seed(0)
    net = network(config).cuda()
    called = torch.compile(net) if compiled else net
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
    mean, std = (torch.tensor(v, device="cuda")[:, None, None] for v in (MEAN, STD))
    size = config["batch_size"]
    for _ in range(EPOCHS):
        order = torch.randperm(len(x), device="cuda")
        for start in range(0, len(x) - size + 1, size):
            rows = order[start : start + size]
            batch = x.index_select(0, rows).permute(0, 3, 1, 2).float().div_(255)
            loss = functional.cross_entropy(
                called(batch.sub_(mean).div_(std)), y.index_select(0, rows)
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def by_hand(numbers: list[int], data: str, compiled: bool) -> None:
    """The program of one process: its own copy of the data, then its trials."""
    arrays = np.load(data)
    x, y = (torch.from_numpy(arrays[name]).cuda() for name in ("x", "y"))
    for number in numbers:
        train_by_hand(CONFIGS[number], x, y, compiled)
    torch.cuda.synchronize()
    print(json.dumps({"data": x.nbytes + y.nbytes}), flush=True)


def run_processes(lists: list[list[int]], data: str, at_a_time: int, compiled: bool) -> int:
    """Run programs, `at_a_time` in parallel; return bytes of data in device memory at one time."""
    command = [sys.executable, "-m", "benchmarks.gpu_search", "--by-hand", data]
    command += ["--compile"] if compiled else []

    def run(numbers: list[int]) -> int:
        done = subprocess.run(
            [*command, "--trials", *map(str, numbers)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return int(json.loads(done.stdout.splitlines()[-1])["data"])

    with ThreadPoolExecutor(at_a_time) as pool:
        sizes = list(pool.map(run, lists))
    return max(sizes) * min(at_a_time, len(lists))


# --- watching the GPU -----------------------------------------------------------------


class Watch:
    """`nvidia-smi`'s figures during a run: mean use in percent, peak memory in MB."""

    def __init__(self) -> None:
        self.use: list[float] = []
        self.memory: list[float] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        command = ["nvidia-smi", "-i", "0", "--query-gpu=utilization.gpu,memory.used"]
        command += ["--format=csv,noheader,nounits", "-lms", "200"]
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:  # not installed: no figures
            yield
            return
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        try:
            yield
        finally:
            process.terminate()
            process.wait()
            reader.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                use, memory = map(float, line.split(","))
                self.use.append(use)
                self.memory.append(memory)

    def __str__(self) -> str:
        if not self.use:
            return "use unknown"
        return f"use {np.mean(self.use):.0f} %, peak {max(self.memory):.0f} MB"


# --- Cerebro ------------------------------------------------------------------------


def search(
    folder: Path, data: cerebro.Dataset, graph: bool, lanes: int | None
) -> tuple[float, int, int]:
    """Search; return seconds from the first unit's start to the last one's end, the number of
    lanes, and the number of trials that could not use a requested graph.
    """
    run = folder / f"run-{graph}-{lanes}"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no validation data")
        result = cerebro.search(
            build_graph if graph else build, SPACE, data, epochs=EPOCHS, searcher="grid",
            run=run, progress=False, devices="cuda:0", workers_per_device=lanes, keep="last",
        )  # fmt: skip
    assert all(trial.status == "finished" for trial in result.trials)
    units = result.saved.units()
    refused = sum("not replayed" in trial.log for trial in result.trials)
    seconds = max(u["end"] for u in units) - min(u["start"] for u in units)
    return seconds, result.saved.settings["workers"], refused


def measure(bench: Bench, rows: int, ways: Sequence[str]) -> bool:
    """Measure these ways and their reference; return whether all succeeded."""
    x, y = images(rows)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        arrays = str(folder / "data.npz")
        np.savez(arrays, x=x, y=y)
        data = cerebro.shard(
            {"x": x, "y": y}, folder / "data", shards=SHARDS, progress=False
        ).with_transforms({"x": [Scale(1 / 255), Normalize(MEAN, STD), ToCHW()]})
        everything = [list(range(len(CONFIGS)))]
        each = [[number] for number in range(len(CONFIGS))]
        times: dict[str, float] = {}

        def add(name: str, seconds: float, note: str) -> None:
            times[name] = seconds
            ratio = seconds / times[REFERENCE] if REFERENCE in times else None
            bench.add(name, seconds, "s", reference=REFERENCE, ratio=ratio)
            bench.note(f"{name}: {note}")
            print(f"  {name}: {seconds:.1f} s, {note}", flush=True)

        def timed(name: str, work: Callable[[], str]) -> None:
            def one() -> None:
                watch = Watch()
                begun = time.perf_counter()
                with watch.watching():
                    note = work()
                add(name, time.perf_counter() - begun, f"{watch}; {note}")

            nonlocal failed
            failed |= not attempt(bench, name, one)

        def hand(lists: list[list[int]], at_a_time: int, compile_it: bool = False) -> str:
            size = run_processes(lists, arrays, at_a_time, compile_it)
            return f"{size / 1e6:.0f} MB of data on the GPU"

        def ours(graph: bool, lanes: int | None) -> str:
            seconds, count, refused = search(folder, data, graph, lanes)
            text = (
                f"{count} lanes; units within {seconds:.1f} s; {data.nbytes / 1e6:.0f} MB of data"
            )
            return text + (f"; {refused} trials without a graph" if refused else "")

        timed(REFERENCE, lambda: hand(everything, 1))
        for way, graph in (("ordinary", False), ("graphs", True)):
            counts = (*AT_A_TIME, None) if graph else AT_A_TIME
            for count in counts if way in ways else ():
                name = f"Cerebro, {count or 'its choice of'} lane(s){', graphs' if graph else ''}"
                timed(name, lambda g=graph, n=count: ours(g, n))
        for count in AT_A_TIME if "processes" in ways else ():
            timed(f"a process for each trial, {count} at a time", lambda n=count: hand(each, n))
        if "compile" in ways:  # it needs a C compiler
            timed(f"{REFERENCE}, torch.compile", lambda: hand(everything, 1, True))
    return not failed


def main() -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what to measure, all otherwise"
    )
    options.add_argument("--by-hand", metavar="DATA", help="(one of its own processes)")
    options.add_argument("--trials", nargs="*", type=int, default=[])
    options.add_argument("--compile", action="store_true")
    arguments = options.parse_args()
    if arguments.by_hand:
        by_hand(arguments.trials, arguments.by_hand, arguments.compile)
        return 0
    found = devices.lookup()
    if not found.devices:
        print(f"no GPU here: {found.problem}; nothing was measured")
        return 3
    bench = Bench(f"16 small CNNs on one {found.devices[0].label}", arguments.json)
    good = measure(bench, QUICK_ROWS if arguments.quick else ROWS, arguments.ways)
    bench.report()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
