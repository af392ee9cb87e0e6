"""Measure the cores and memory that this process may use."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Usage:
    """The memory of a process, in bytes."""

    resident: int
    """All resident memory, including mapped files."""
    private: int
    """Resident memory without mapped files; the system may reclaim mapped files at any time."""


def read_usage(process: str = "self") -> Usage | None:
    """Return a process's memory usage; None if the system does not report it (not Linux)."""
    try:
        file = os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        words = os.read(file, 200).split()
    finally:
        os.close(file)
    resident, shared = int(words[1]), int(words[2])
    return Usage(resident * PAGE_BYTES, max(0, resident - shared) * PAGE_BYTES)


def count_kills(groups: Path = GROUPS, proc: Path = Path("/proc")) -> int:
    """Return how many processes the kernel's out-of-memory killer has killed near this one.

    Count the kills in this process's control group if it has a counter, else those on the machine;
    0 if there is no counter at all.
    """
    for file in _list_counters(groups, proc):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdigit():
                return int(number)
    return 0


def _list_counters(groups: Path, proc: Path) -> list[Path]:
    """Return files that may count processes killed for lack of memory, closest group first."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    files = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inside = path.lstrip("/")
        if number == "0":  # version 2
            files.append(groups / inside / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(groups / "memory" / inside / "memory.oom_control")
            # In a container, the path is often the host's, and the group is the root.
            files.append(groups / "memory" / "memory.oom_control")
    return [*files, groups / "memory.events", proc / "vmstat"]


def usable_cores() -> int:
    """Return how many cores this process may use, given its affinity and the container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    quota = _cgroup_cores()
    return max(1, min(cores, math.ceil(quota)) if quota is not None else cores)


def _cgroup_cores() -> float | None:
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def available_memory() -> int:
    """Return how many bytes are available now, on the machine and within the container's limit."""
    available = 4 << 30
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return available if limit == "max" else max(0, min(available, int(limit) - used))
    except (OSError, ValueError):
        return available


def total_memory() -> int:
    return PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
