"""Startup: ``python -m benchmarks.bench_start``.

Seconds from the start of ``python -m cerebro demo`` to its first unit and to its end, with new
processes and without written data, as a ratio to importing PyTorch in a new process.
Bar: 1.75 to the first unit.

Seconds from the call of `search` to its first unit and to its end: the first, second and third of a
process that has imported PyTorch, with two workers on the CPU, as a ratio to that import. If there
is a GPU, also there, in a process that is the first to use the card and in one that is not, as a
ratio to importing PyTorch and starting CUDA. Bars on a GPU: 8 s to the first unit at the card's
first use, 1.5 for the first search of another process, 0.5 s for later searches of a process.

Seconds from the call of `search`, the first in its process, to the first word that it shows, in a
terminal and as plain lines. Bar: 0.5 s.

Then workers that are forked, beside some that are started as programs: private memory of one of two
that have trained, and of another that waits for its first run; and the seconds from the SIGKILL of
the only worker until its unit runs again. Bars for forked ones: 10 MB for the one that waits, and
0.2 s.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cerebro
from benchmarks.harness import Bench, parser
from cerebro.machine import devices


def import_seconds(more: str = "pass") -> float:
    """Return the seconds that a new process takes to import PyTorch, to do `more` and to exit."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import torch, os; {more}; os._exit(0)"], check=True)
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


SEARCHES = """
import json, sys, time
import numpy as np, torch
import cerebro

FOLDER, DEVICE, WORKERS = sys.argv[1], sys.argv[2], int(sys.argv[3])

def build(config):
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(network.parameters(), lr=config["lr"])
    return cerebro.torch.Model(network, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)

rng = np.random.default_rng(0)
data = {"x": rng.normal(size=(2000, 64)).astype("f4"), "y": rng.integers(10, size=2000)}
found = []
for number in range(3):
    begun = time.time()
    result = cerebro.search(
        build, {"lr": cerebro.loguniform(1e-4, 1e-2)}, data, validation=0.2, n_trials=4, epochs=2,
        batch_size=32, workers=WORKERS, threads=1, devices=DEVICE, run=f"{FOLDER}/{number}",
        progress=False,
    )
    end = time.time()
    first = min(unit["start"] for unit in result.saved.units())
    found.append((result.saved.meta["started"] + first - begun, end - begun))
print(json.dumps(found))
"""


def search_seconds(device: str, workers: int, cache: str) -> list[list[float]]:
    """Return the seconds to the first unit and to the end, of three searches of a new process."""
    path = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SEARCHES, folder, device, str(workers)],
            env={**os.environ, "PYTHONPATH": path, "CEREBRO_CACHE": cache},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def add_searches(bench: Bench, rounds: int, reference: float) -> None:
    """Add the searches of new processes, on the CPU and on a GPU if there is one."""
    name = "importing PyTorch"
    with tempfile.TemporaryDirectory() as cache:
        rows = [search_seconds("cpu", 2, cache) for _ in range(rounds)]
        _add_rows(bench, "CPU, 2 workers", rows, (name, reference), ("", "", ""))
    found = devices.lookup()
    if not found.devices:
        bench.note(f"no GPU here ({found.problem}): the start of searches on one was not measured")
        return
    name = "importing PyTorch and starting CUDA"
    more = "torch.zeros(1, device='cuda')"
    reference = statistics.median(import_seconds(more) for _ in range(rounds))
    bench.add(name, reference, "s")
    firsts, others = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            firsts.append(search_seconds("cuda:0", 1, cache))
            others.append(search_seconds("cuda:0", 1, cache))
    later = ("0.5 s", "0.5 s")
    _add_rows(bench, "GPU, first use", firsts, (name, reference), ("8 s", *later))
    _add_rows(bench, "GPU, new process", others, (name, reference), ("1.5", *later))


def _add_rows(
    bench: Bench,
    where: str,
    rows: list[list[list[float]]],
    reference: tuple[str, float],
    bars: tuple[str, str, str],
) -> None:
    name, seconds = reference
    for number, bar in enumerate(bars):
        which = ("first", "second", "third")[number]
        first, end = (statistics.median(row[number][i] for row in rows) for i in (0, 1))
        bench.add(
            f"{where}: {which} search, first unit",
            first,
            "s",
            reference=name,
            ratio=first / seconds,
            bar=bar,
        )
        bench.add(f"{where}: {which} search, end", end, "s", reference=name, ratio=end / seconds)


WORD = """
import io, sys, time
import numpy as np, torch
import cerebro

class Seen(BaseException):
    pass

class Out(io.StringIO):
    def isatty(self):
        return sys.argv[1] == "table"
    def write(self, text):
        if text.strip():
            raise Seen
        return len(text)

x = np.zeros((1000, 64), "f4")
before, sys.stdout = sys.stdout, Out()
begun = time.perf_counter()
try:
    cerebro.search(print, {"lr": [0.1]}, (x, x[:, 0]), epochs=1,
                   validation=0.2, n_trials=1, batch_size=10, run=sys.argv[2] + "/run")
except Seen:
    seen = time.perf_counter() - begun
sys.stdout = before
print(seen)
"""


def first_word(display: str) -> float:
    """Return the seconds from the call of `search` to the first word in a display."""
    path = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", WORD, display, folder],
            env={**os.environ, "PYTHONPATH": path, "TERM": "xterm-256color"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return float(found.stdout)


SEARCH = """
import os, signal, statistics, sys, time
from pathlib import Path
import numpy as np, torch
import cerebro
from cerebro.executors.process import WorkerKind, WorkerProcess, warm_workers

FOLDER = sys.argv[1]

def build(config, info):
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    class Model(cerebro.torch.Model):
        def begin_epoch(self, epoch):
            with open(FOLDER + "/begun", "a") as file:
                file.write(f"{info.trial} {epoch} {time.time()}\\n")
            if config["killed"] and epoch == 2 and not os.path.exists(FOLDER + "/killed"):
                Path(FOLDER, "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config["lr"])
    return Model(network, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)

def search(workers, killed):
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(2000, 64)).astype("f4"), "y": rng.integers(10, size=2000)}
    space = {"lr": cerebro.loguniform(1e-4, 1e-2), "killed": killed}
    cerebro.search(build, space, data, validation=0.2, n_trials=workers, epochs=3, batch_size=32,
                   workers=workers, threads=1, run=FOLDER + f"/run{workers}", progress=False)

def private(worker):
    lines = Path(f"/proc/{worker.process.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1000

search(2, False)
trained = statistics.median(map(private, warm_workers._idle))
spawned = WorkerProcess.spawn(WorkerKind(1), fork=True)
spawned.send(("preload", list(sys.path), ["torch"]))
while spawned.beat.beats == 0:
    time.sleep(0.01)
size = -1
while size != (size := private(spawned)):  # it imports
    time.sleep(1)
waiting = size
spawned.stop(kill=True)
warm_workers.close()
os.remove(FOLDER + "/begun")
search(1, True)
killed = float(Path(FOLDER, "killed").read_text())
begun = [line.split() for line in Path(FOLDER, "begun").read_text().splitlines()]
print(waiting, trained, min(float(at) for _, _, at in begun if float(at) > killed) - killed)
"""


def further_worker(*, fork: bool) -> tuple[float, float, float]:
    """Return a worker's private MB, waiting and trained, and seconds to replace a killed one."""
    path = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SEARCH, folder],
            env={**os.environ, "PYTHONPATH": path, "CEREBRO_FORK": str(int(fork))},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    waiting, trained, again = map(float, found.stdout.split()[-3:])
    return waiting, trained, again


def main() -> None:
    options = parser(__doc__ or "")
    arguments = options.parse_args()
    rounds = 1 if arguments.quick else 7
    bench = Bench("Startup", arguments.json)
    found = [(import_seconds(), *demo_seconds(2)) for _ in range(rounds)]
    reference, first, end = (statistics.median(column) for column in zip(*found, strict=True))
    bench.add("importing PyTorch", reference, "s")
    name = "importing PyTorch"
    bench.add("demo: first unit", first, "s", reference=name, ratio=first / reference, bar="1.75")
    bench.add("demo, 2 epochs: end", end, "s", reference=name, ratio=end / reference)
    add_searches(bench, max(1, rounds // 2), reference)
    for display, shown in (("table", "in a terminal"), ("lines", "as lines")):
        word = statistics.median(first_word(display) for _ in range(rounds))
        ratio = word / reference
        bench.add(f"first word, {shown}", word, "s", reference=name, ratio=ratio, bar="0.5 s")
    bars = ("10", "", "0.2")
    names = ("private memory, waiting", "private memory, trained", "SIGKILL to its unit")
    ways = [
        (further_worker(fork=False), further_worker(fork=True)) for _ in range(max(1, rounds // 2))
    ]
    for number, name in enumerate(names):
        started, forked = (statistics.median(way[i][number] for way in ways) for i in (0, 1))
        unit = "s" if number == 2 else "MB"
        bench.add(f"started worker: {name}", started, unit)
        ratio = forked / started
        bench.add(
            f"forked worker: {name}",
            forked,
            unit,
            reference="started",
            ratio=ratio,
            bar=bars[number],
        )
    bench.report()


if __name__ == "__main__":
    main()
