"""Ask the system about cores, memory and processes; set the parents of processes.

The functions about processes are for Linux: elsewhere they raise OSError, unless their docstrings
say otherwise.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    with suppress(OSError, ValueError):  # ValueError: "max"
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(limit) / int(period)))
    return max(1, cores)


def available_memory() -> int:
    """Return how many bytes are available now, on the machine and within the container's limit."""
    available = 4 << 30
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # ValueError: "max"
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return max(0, min(available, limit - used))
    return available


def total_memory() -> int:
    return PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")


# --- processes -----------------------------------------------------------------

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

_PASSED_ON = (
    "Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "NoNewPrivs", "Seccomp", "CapInh",
    "CapPrm", "CapEff", "CapBnd", "CapAmb", "Cpus_allowed", "Mems_allowed",
)  # fmt: skip
"""The lines of ``/proc/.../status`` about attributes that a new program inherits."""


def read_inherited_attributes() -> tuple[str, ...]:
    """Return the attributes that a program inherits when this thread starts it.

    These are its users, umask, blocked and ignored signals, limits, CPUs, control groups, priority
    and root folder, but not its environment variables, working directory and descriptors.
    """
    status = Path("/proc/thread-self/status").read_text()
    lines = [line for line in status.splitlines() if line.partition(":")[0] in _PASSED_ON]
    files = [Path("/proc/self", name).read_text() for name in ("limits", "cgroup", "oom_score_adj")]
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    return (*lines, *files, str(priority), str(Path("/proc/self/root").readlink()))


def threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process; False if this is unknown."""
    return _fields(pid)[:1] in (["T"], ["t"])


def start_of(pid: int) -> str | None:
    """Return when a process began, as text that no other process of this number has.

    Return None if there is no such process, if it has ended but is not reaped, or if the system
    does not say.
    """
    fields = _fields(pid)
    if not fields or fields[0] in ("Z", "X", "x"):
        return None
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {fields[19]}"
    return fields[19]


def _fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` after the program's name; none if unknown."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def end_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


@contextmanager
def adopt_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose own parent ends within the block."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _prctl(option: int, argument: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if library.prctl(option, ctypes.c_ulong(argument), zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
