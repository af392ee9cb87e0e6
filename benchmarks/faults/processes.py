"""A run's processes: find them by a mark in their environment, and strike them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "CEREBRO_FAULTS_MARK"
PIDFD_GETFD = 438  # the same number on every architecture

_libc = ctypes.CDLL(None, use_errno=True)


def marked(mark: str) -> list[int]:
    """Return the processes that have inherited a mark, without zombies, which have no
    environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return sorted(found)


def has_mark(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def command_of(pid: int) -> str:
    """A process's command line; empty if it is gone."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        return text.replace("\0", " ").strip()
    except OSError:
        return ""


def is_worker(pid: int) -> bool:
    return "cerebro._worker" in command_of(pid)


def session_of(pid: int) -> int:
    """The session that a process belongs to; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def send(pid: int, number: int) -> bool:
    """Send a signal; False if the process is gone."""
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


def kill_all(mark: str, first: Iterable[int] = ()) -> None:
    """Kill every process of a run, `first` before the others, until none is left."""
    for pid in first:
        send(pid, signal.SIGKILL)
    while True:
        left = marked(mark)
        if not left:
            return
        for pid in left:
            send(pid, signal.SIGKILL)
        wait_gone(left, 1.0)


def wait_gone(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait for processes to end; return those still running after the time limit in seconds."""
    poll = select.poll()
    watched: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            watched[fd] = pid
            poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + seconds
    try:
        while watched:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                del watched[fd]
                os.close(fd)
        return sorted(watched.values())
    finally:
        for fd in watched:
            os.close(fd)


def cut_sockets(pid: int) -> int:
    """Shut down the stream sockets of another process; return their number.

    The descriptors are fetched with ``pidfd_getfd``, which needs the right to trace it.
    """
    cut = 0
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            for number in socket_descriptors(pid):
                fd = _libc.syscall(PIDFD_GETFD, handle, number, 0)
                if fd < 0:
                    continue
                with socket.socket(fileno=fd) as ours, contextlib.suppress(OSError):
                    if ours.type == socket.SOCK_STREAM:
                        ours.shutdown(socket.SHUT_RDWR)
                        cut += 1
        finally:
            os.close(handle)
    return cut


def socket_descriptors(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry).startswith("socket:"):  # noqa: PTH115
                    found.append(int(entry.name))
    return found


def is_stopped(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in "Tt"


def wait_stopped(pid: int) -> None:
    """Wait until a process that is stopping itself has stopped, or is gone."""
    while has_environment(pid) and not is_stopped(pid):
        time.sleep(0.0005)


def has_environment(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return bool(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return False
