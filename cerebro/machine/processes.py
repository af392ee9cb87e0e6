"""Read the attributes that a process passes on to programs it starts; set the parents of processes.

Linux only; on other systems the functions raise OSError, unless their docstrings say otherwise.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


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
