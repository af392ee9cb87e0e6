"""Runs a cell and measures its process tree from outside: memory, CPU, bytes; kills a worker."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.comparison.workloads import WORKLOADS
from benchmarks.peers import CORES, ENVIRONMENT, TEMPORARY, processes_below, tree_bytes

EVERY = 0.2  # seconds between samples
MEMORY_EVERY = 4  # samples between those of memory, which take longer
TICKS = os.sysconf("SC_CLK_TCK")
MORE_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "SPARK_LOCAL_IP": "127.0.0.1",
    "PYSPARK_PYTHON": sys.executable,
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass
class Cell:
    """What was seen of one rival on one workload."""

    rival: str
    workload: str
    round: int
    kill: bool
    began: float = 0.0
    seconds: float = 0.0
    """From the start of its first process until the search had ended."""
    cpu: float = 0.0
    peak: int = 0
    read: int = 0
    """Bytes read from the disk."""
    loopback: int | None = None
    why: str = ""
    """Why it did not finish, if so."""
    log: list[list[Any]] = field(default_factory=list)


def cpu_seconds(processes: list[int]) -> float:
    """Return the CPU time of living processes and of the children that they have waited for."""
    ticks = 0
    for process in processes:
        with contextlib.suppress(OSError, IndexError, ValueError):
            after = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, after[11:15]))
    return ticks / TICKS


def bytes_read(processes: list[int]) -> int:
    """Return the bytes that living processes, and children they waited for, read from disks."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError, IndexError, ValueError):
            for line in Path(f"/proc/{process}/io").read_text().splitlines():
                if line.startswith("read_bytes:"):
                    total += int(line.split()[1])
    return total


def loopback_bytes(process: int) -> int | None:
    """Return the bytes that the loopback of a process's network has received; None: it ended."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "lo":
                return int(counts.split()[0])
    return None


class Group:
    """A control group that limits the memory of a cell, page cache included."""

    def __init__(self, limit: int) -> None:
        self.path: Path | None = None
        self.peak = 0
        for folder, file in _groups():
            path = folder / f"comparison-{os.getpid()}"
            with contextlib.suppress(OSError):
                path.mkdir()
                self.path = path
                (path / file).write_text(str(limit))
                return
            self.remove()

    def remove(self) -> None:
        """Remove the group; its processes have ended."""
        for _ in range(50):
            if self.path is None:
                return
            with contextlib.suppress(OSError):
                self.path.rmdir()
                self.path = None
                return
            time.sleep(0.1)


def _groups() -> list[tuple[Path, str]]:
    """Return where this process may make a group, and the file that has its limit."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names == "memory":
                found.append((Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"))
            elif names == "":
                found.append((Path("/sys/fs/cgroup" + path), "memory.max"))
    return found


class Watch(threading.Thread):
    """Samples a process tree until it ends; kills one of its workers if told to."""

    def __init__(self, root: int, log: Path, kill_after: int) -> None:
        super().__init__(daemon=True)
        self.root, self.path, self.kill_after = root, log, kill_after
        self.over = threading.Event()
        self.cpu, self.peak, self.read = 0.0, 0, 0
        self.loopback = 0
        self.seen: set[int] = set()
        self.killed: float | None = None

    def run(self) -> None:
        count = 0
        while not self.over.wait(EVERY):
            processes = processes_below(self.root)
            self.seen.update(processes)
            self.cpu = max(self.cpu, cpu_seconds(processes))
            self.read = max(self.read, bytes_read(processes))
            seen = loopback_bytes(self.root)
            if seen is not None:  # the last one: the first was of the network that it left
                self.loopback = seen
            if count % MEMORY_EVERY == 0:
                self.peak = max(self.peak, tree_bytes(self.root))
            count += 1
            if self.kill_after and self.killed is None:
                self.kill(set(processes))

    def kill(self, processes: set[int]) -> None:
        """Kill the worker that reported last, once enough epochs have been trained."""
        log = read_log(self.path)
        if sum(line[1] == "epoch" for line in log) < self.kill_after:
            return
        reported = [line[4] for line in log if line[1] == "begin"]
        reported += [line[2] for line in log if line[1] == "worker"]
        for process in reversed(reported):
            if process in processes:
                self.killed = time.time()
                os.kill(process, signal.SIGKILL)
                return

    def end(self) -> None:
        """End every process that is left."""
        self.over.set()
        self.join()
        alive = set(processes_below(self.root)) | self._left()
        for process in alive:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def _left(self) -> set[int]:
        """Processes of the tree whose parent has ended: they have the cell's place in their
        environment."""
        mark = str(self.path.parent).encode()
        found = set()
        for process in self.seen:
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{process}/environ").read_bytes():
                    found.add(process)
        return found


def read_log(path: Path) -> list[list[Any]]:
    """Return the whole lines of a cell's log, by time."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sorted((json.loads(line) for line in lines if line.endswith("]")), key=lambda x: x[0])


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that a cell reads them itself."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_cell(
    rival: str, workload: str, size: str, data: Path, folder: Path, limit: float,
    number: int = 0, kill_after: int = 0,
) -> Cell:  # fmt: skip
    """Run a rival on a workload for at most `limit` seconds."""
    place = Path(tempfile.mkdtemp(dir=folder))
    cell = Cell(rival, workload, number, kill_after > 0)
    command = [sys.executable, "-m", "benchmarks.comparison.cell"]
    for name, value in (("rival", rival), ("workload", workload), ("size", size),
                        ("data", str(data)), ("place", str(place))):  # fmt: skip
        command += [f"--{name}", value]
    limits = WORKLOADS[workload].limit
    group = Group(limits[size]) if limits else None
    if group:
        if group.path is None:
            cell.why = "not run, no control group can be made here"
            return cell
        command += ["--group", str(group.path)]
        forget(data)
    if shutil.which("taskset"):
        cores = sorted(os.sched_getaffinity(0))[:CORES]
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, **ENVIRONMENT, **MORE_ENVIRONMENT}
    environment.update(PYTHONPATH=os.pathsep.join(paths), COMPARISON_PLACE=str(place))
    cell.began = time.time()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    errors = place / "stderr"
    with errors.open("wb") as stderr:
        child = subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr,
                                 start_new_session=True)  # fmt: skip
    watch = Watch(child.pid, place / "log", kill_after)
    watch.start()
    try:
        if child.wait(limit) != 0:
            cell.why = f"failed: {last_line(errors) or f'exit status {child.returncode}'}"
            if child.returncode == -signal.SIGKILL:
                cell.why = "killed: over the memory" if group else "killed"
    except subprocess.TimeoutExpired:
        cell.why = f"over {limit:.0f} s"
    finally:
        watch.end()
        child.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    waited = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    cell.log = read_log(place / "log")
    ended = [line[0] for line in cell.log if line[1] == "ended"]
    cell.seconds = (ended[0] if ended else time.time()) - cell.began
    cell.cpu, cell.peak, cell.read = max(watch.cpu, waited), watch.peak, watch.read
    if any(line[1] == "alone" and line[2] for line in cell.log):
        cell.loopback = watch.loopback
    if os.environ.get("BENCH_DEBUG"):
        print(errors.read_text(errors="replace"), file=sys.stderr)
    if group:
        group.remove()
    with contextlib.suppress(OSError):  # left by a killed Ray
        shutil.rmtree((place / TEMPORARY).read_text(), ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    return cell


def last_line(file: Path) -> str:
    """Return the last line that says something, without a path."""
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or [""])[-1][:160]
