"""Which GPU a worker of a cluster has, and how many workers share one.

Ray, a batch system or an engine starts an agent and assigns its GPU. Code here never chooses
between GPUs: an agent that sees several and was not told which one to use is refused.
"""

from __future__ import annotations

import os
from typing import Any

from cerebro.errors import DeviceError, InputError
from cerebro.machine import devices
from cerebro.machine.devices import CPU, Device, Found, restrict_visible

VISIBLE = "CUDA_VISIBLE_DEVICES"
AUTO = "auto"
"""The device of an agent that uses a GPU if the search needs one."""


def check_gpus(gpus: Any) -> float:
    """Return the share of a GPU that each worker gets; None gives 0.

    Raises InputError unless it is a number above 0 and at most 1.
    """
    if gpus is None:
        return 0.0
    if isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not gpus > 0:
        raise InputError(
            f"gpus must be 1, or the fraction of a GPU that each worker uses, such as 0.5, not "
            f"{gpus!r}: leave it out to train on the CPU"
        )
    if gpus > 1:
        raise InputError(
            f"gpus={gpus!r}: a worker uses one GPU, or a fraction of one: give gpus=1, and as many "
            "workers as there are GPUs"
        )
    return float(gpus)


def count_fitting_workers(gpus: float, share: float) -> int:
    return int(gpus) * int(1 / share + 1e-9)


def get_gpu(found: Found, index: int) -> Device:
    """Return a GPU of this machine; raise DeviceError if it does not exist."""
    if index >= len(found.devices):
        raise DeviceError(found.problem or f"there is no GPU {index}")
    return found.devices[index]


def find_own_gpu(device: str) -> Device:
    """Return the GPU of this agent.

    `device` is the agent's ``--device``: "auto" or "cuda" for the only GPU that it sees, a name
    such as "cuda:1", or "cpu". Raises DeviceError if the agent has no usable GPU, or was not told
    which one is its own.
    """
    if device == CPU:
        raise DeviceError("its agent was started with --device cpu")
    gpus = devices.lookup()
    _, _, index = device.partition(":")
    if not index and len(gpus.devices) > 1:
        raise DeviceError(
            f"its agent sees {len(gpus.devices)} GPUs and was not told which one is its own: "
            f"start it with --device cuda:0 and so on, or with one of them in {VISIBLE}"
        )
    return get_gpu(gpus, int(index or 0))


def format_visible_gpu(index: int) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for a process that sees only one of this process's GPUs.

    Raises InputError if the variable names fewer.
    """
    visible = os.environ.get(VISIBLE)
    try:
        return restrict_visible(index, visible)
    except IndexError:
        raise InputError(
            f"there is no GPU {index} for an agent here: {VISIBLE} is {visible!r}"
        ) from None


def assign_gpus(workers: int | None, share: float) -> list[dict[str, str]]:
    """Return the variables that give each agent on this machine its GPU.

    With ``workers=None`` there are as many agents as fit. Raises InputError if there is no GPU
    here, or the agents do not fit.
    """
    gpus = devices.lookup()
    if not gpus.devices:
        raise InputError(
            f"gpus={share:g}: no GPU can be used here ({gpus.problem}); leave gpus= out, or run "
            "`python -m cerebro doctor` to see what is missing"
        )
    room = count_fitting_workers(len(gpus.devices), share)
    count = room if workers is None else workers
    if count > room:
        raise InputError(
            f"{count} worker(s) with {share:g} GPU each do not fit on this machine, which has "
            f"{len(gpus.devices)}: ask for fewer workers=, or for smaller parts with gpus="
        )
    return [{VISIBLE: gpus.devices[i % len(gpus.devices)].visible} for i in range(count)]
