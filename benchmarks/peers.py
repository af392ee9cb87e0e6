"""Other programs besides Cerebro: each is measured in a separate process, including all that it
starts.

A *cell* is one function of a benchmark module, ``CELLS[name](out, arguments)``. `run_cell` starts
``python -m benchmarks.<module> --cell NAME ...`` on two cores with one compute thread, watches the
memory of the whole process tree, and kills it after the time limit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CORES = 2
WATCH_PAUSE = 100
"""The pause between two samples of memory, as a multiple of the processor time of one."""
TEMPORARY = "temporary-folder"
"""A file in a cell's folder that names its other folder."""
Cell = Callable[[Path, Any], None]
PACKAGES = {
    "Ray Tune": "ray.tune",
    "Optuna": "optuna",
    "Dask-ML": "dask_ml",
    "Dask": "distributed",
    "Spark": "pyspark",
    "ZeroMQ": "zmq",
}
"""Peers, and the packages they need."""

ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "CUDA_VISIBLE_DEVICES": "",
}


def missing(peer: str) -> str | None:
    """Return the package that a peer lacks here, or None."""
    package = PACKAGES.get(peer)
    if package is None:
        return None
    with contextlib.suppress(ImportError):
        if importlib.util.find_spec(package) is not None:
            return None
    return package.partition(".")[0]


def processes_below(root: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in os.scandir("/proc") if Path("/proc").exists() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path(entry.path, "stat").read_text()
                parent = int(stat.rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += parents.get(found[-1], [])
    return found


def tree_bytes(root: int) -> int:
    """Return the memory of a process and its descendants; shared memory counts once.

    Bytes of the proportional set size, 0 if the system does not report it (not Linux).
    """
    total = 0
    for process in processes_below(root) if Path("/proc/self/smaps_rollup").exists() else ():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
                    break
    return total


@dataclass
class Outcome:
    """The outcome of a cell."""

    name: str
    seconds: float
    began: float
    """`time.time` when its process was started."""
    peak: int
    """Peak bytes of the whole process tree."""
    record: dict[str, Any] = field(default_factory=lambda: {"log": []})
    """Its record."""
    why: str = ""
    """Why it did not finish, if so."""


class _Watch(threading.Thread):
    """Samples the memory of a process tree and tracks its members."""

    def __init__(self, root: int, every: float) -> None:
        super().__init__(daemon=True)
        self._root, self._every = root, every
        self._over = threading.Event()
        self.peak = 0
        self.seen: dict[int, str] = {}

    def run(self) -> None:
        pause = self._every
        while not self._over.wait(pause):
            before = time.thread_time()
            for process in processes_below(self._root):
                self.seen.setdefault(process, _birth(process))
            self.peak = max(self.peak, tree_bytes(self._root))
            # A sample takes longer the more processes there are, and must not slow them down.
            pause = max(self._every, WATCH_PAUSE * (time.thread_time() - before))

    def end(self) -> None:
        """End the thread and every remaining process of the tree."""
        self._over.set()
        self.join()
        for process in processes_below(self._root):
            self.seen.setdefault(process, _birth(process))
        for process, birth in self.seen.items():
            if birth and _birth(process) == birth:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)


def _birth(process: int) -> str:
    """A process's start time in ticks, because process ids are reused."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def run_cell(
    module: str,
    name: str,
    folder: Path,
    limit: float,
    options: Sequence[str] = (),
    peer: str = "",
) -> Outcome:
    """Run one cell in a separate process for at most `limit` seconds.

    It needs `peer`, one of `PACKAGES`, to be installed.
    """
    lacking = missing(peer)
    if lacking:
        return Outcome(name, 0.0, time.time(), 0, why=f"skipped, {lacking} is not installed")
    place = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", module, "--cell", name, "--place", str(place), *options]
    if shutil.which("taskset"):  # Linux
        cores = sorted(os.sched_getaffinity(0))[:CORES]
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    errors = place / "stderr"
    began = time.time()
    with errors.open("wb") as stderr:
        child = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(_paths())},
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
        )
    watch = _Watch(child.pid, 1.0)
    watch.start()
    why = ""
    try:
        if child.wait(limit) != 0:
            why = f"failed: {_last_line(errors) or f'exit status {child.returncode}'}"
    except subprocess.TimeoutExpired:
        why = f"over {limit:.0f} s"
    finally:
        watch.end()
        child.wait()
    outcome = Outcome(name, time.time() - began, began, watch.peak, why=why)
    print(f"  ({name}: {outcome.seconds:.0f} s)", flush=True)
    record = place / "record.json"
    if record.exists():
        outcome.record = json.loads(record.read_text(encoding="utf-8"))
    outcome.record["log"] = _log(place)
    with contextlib.suppress(OSError):  # left by a killed Ray
        shutil.rmtree((place / TEMPORARY).read_text(), ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    return outcome


def _last_line(file: Path) -> str:
    said = file.read_text(errors="replace").strip().splitlines()
    if os.environ.get("BENCH_DEBUG"):
        print(*said, sep="\n", file=sys.stderr)
    return said[-1] if said else ""


def _paths() -> list[str]:
    here = str(Path(__file__).resolve().parent.parent)
    return [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _log(place: Path) -> list[list[Any]]:
    path = place / "log"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("]")]


class Log:
    """A file to which all processes of a cell append whole lines without blocking."""

    def __init__(self, place: str | Path) -> None:
        self.path = Path(place, "log")

    def write(self, *words: Any) -> None:
        """Add a line: the time and the message."""
        line = json.dumps([time.time(), *words]) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


def write_record(place: str | Path, **record: Any) -> None:
    """Save a cell's result for the process that started it."""
    Path(place, "record.json").write_text(json.dumps(record), encoding="utf-8")


@contextlib.contextmanager
def ray_of(place: str | Path, cores: int = CORES, **options: Any) -> Iterator[Any]:
    """A small private Ray: no dashboard, no statistics, shut down at the end."""
    import ray

    # Socket paths are limited to 107 characters, so it is not in the cell's folder.
    temporary = tempfile.mkdtemp(prefix="cb-ray-", dir="/tmp")
    Path(place, TEMPORARY).write_text(temporary)
    ray.init(
        num_cpus=cores,
        include_dashboard=False,
        object_store_memory=400 << 20,
        _temp_dir=temporary,
        logging_level="ERROR",
        log_to_driver=False,
        **options,
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def dask_of(place: str | Path, workers: int = CORES) -> Iterator[Any]:
    """A Dask cluster on this machine: processes with one thread each, no dashboard."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=str(place),
            silence_logs="ERROR",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is deleted at the end."""
    folder = Path(tempfile.mkdtemp(prefix="cerebro-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
