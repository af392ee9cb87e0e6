"""What the coordinator and agents send about themselves when they connect."""

from __future__ import annotations

import os
import platform
import uuid
from pathlib import Path

from cerebro.machine.environment import version

PROTOCOL = 4
"""Increased when messages change."""


def list_versions() -> dict[str, str]:
    """Return the versions that both ends must share to understand messages."""
    return {
        "protocol": str(PROTOCOL),
        "cerebro": version(),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def read_machine_id() -> str:
    """Return the identity of this machine since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{os.uname().nodename} {uuid.getnode()}"
