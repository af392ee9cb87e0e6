"""The process in which one rival runs: ``python -m benchmarks.comparison.cell``.

It has its own network, so that the bytes on its loopback are its own, and joins the control group
that limits its memory. Where either cannot be made (not root, not Linux) it runs without.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1


def own_network() -> bool:
    """Enter a new network with nothing but a loopback; return whether that worked."""
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK) != 0:
            return False
        with socket.socket() as any_socket:
            name = struct.pack("16sH14s", b"lo", 0, b"")
            _, flags, _ = struct.unpack("16sH14s", fcntl.ioctl(any_socket, GET_FLAGS, name))
            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14s", b"lo", flags | UP, b""))
    except (OSError, AttributeError):
        return False
    return True


def main() -> None:
    made = argparse.ArgumentParser()
    for name in ("--rival", "--workload", "--size", "--data", "--place", "--group"):
        made.add_argument(name)
    options = made.parse_args()
    if options.group:
        Path(options.group, "cgroup.procs").write_text(str(os.getpid()))
    alone = own_network()
    from benchmarks.comparison.rivals import RIVALS
    from benchmarks.comparison.rivals.one_thread import one_thread
    from benchmarks.comparison.training import Work

    one_thread()
    work = Work(options.workload, options.size, options.data, options.place)
    work.log.write("alone", alone)
    RIVALS[options.rival].load()(work)
    work.ended()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
