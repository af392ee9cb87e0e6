"""Engines start the agents of a run. They place, restart and count processes; Cerebro does not.

An engine, Ray or a batch system also assigns an agent's GPU. Code here never chooses between GPUs:
an agent that sees several and was not told which one to use is refused.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from cerebro.cluster.keys import Ticket
from cerebro.errors import DeviceError, InputError
from cerebro.machine import devices, environment
from cerebro.machine.devices import CPU, Device, Found, restrict_visible

VISIBLE = "CUDA_VISIBLE_DEVICES"
AUTO = "auto"  # the device of an agent that uses a GPU if the search needs one

END_SECONDS = 10.0
PATIENCE_SECONDS = 60  # for an agent to reach the coordinator, which listens when it is started


class Engine:
    """Starts agents, which connect with the ticket that the engine is given.

    An engine may restart an agent that has ended; it then joins as a new one. This one starts none:
    others do, such as a batch system, Kubernetes or ssh.
    """

    size: int | None = None  # the number of agents that it starts; None: unknown

    def start(self, ticket: Ticket) -> None:
        """Begin to start agents and return at once; raise InputError if this fails."""

    def failure(self) -> str | None:
        """Return why no more agents will connect; None: some may."""
        return None

    def stop(self) -> None:
        """Start no more agents."""

    def close(self) -> None:
        """End the remaining agents, which have already been told to end."""


class Processes(Engine):
    """Runs agents as processes of this machine, each with its own `variables`; restarts none."""

    def __init__(self, variables: list[dict[str, str]]) -> None:
        self.size = len(variables)
        self._variables = variables
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, ticket: Ticket) -> None:
        for own in self._variables:
            self.processes.append(start_agent(ticket, own))

    def failure(self) -> str | None:
        codes = [process.poll() for process in self.processes]
        if None in codes:
            return None
        return f"all agents have ended, with status {', '.join(map(str, codes))}"

    def close(self) -> None:
        for process in self.processes:
            end_agent(process)
        self.processes.clear()


def start_agent(ticket: Ticket, own: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start an agent with variables of its `own`; closing its standard input ends it."""
    variables = {**os.environ, **ticket.variables, **own}
    process = subprocess.Popen(
        [sys.executable, "-m", "cerebro", "agent", "--stdin", "--patience", str(PATIENCE_SECONDS)],
        stdin=subprocess.PIPE,
        env={name: value for name, value in variables.items() if value is not None},
        start_new_session=True,  # Ctrl-C is the coordinator's
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(ticket.to_json().encode() + b"\n")
        process.stdin.flush()
    return process


def end_agent(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_agent(text: str, gpu: str | None = None) -> None:
    """Start an agent and wait for its end; for tasks of engines, in processes of theirs.

    `text` is the ticket, `gpu` the agent's ``CUDA_VISIBLE_DEVICES`` (None: that of this process).
    Raises RuntimeError if the agent does not end with its run: the engine may start it again.
    """
    process = start_agent(Ticket.from_json(text), {} if gpu is None else {VISIBLE: gpu})
    try:
        status = process.wait()
    finally:
        end_agent(process)
    if status:
        raise RuntimeError(f"an agent of Cerebro has ended with status {status}: see its output")


def collect_variables() -> dict[str, str | None]:
    """Return the variables of this process that agents must share; None: it has none."""
    return dict.fromkeys(environment.VARIABLES) | environment.read_variables()


# --- GPUs of agents -------------------------------------------------------------


def check_gpus(gpus: Any) -> float:
    """Return each worker's share of a GPU; raise InputError unless it is in (0, 1] or None."""
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


def find_own_gpu(device: str = AUTO) -> Device:
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
    """Return ``CUDA_VISIBLE_DEVICES`` with one of this process's GPUs, or raise InputError."""
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
