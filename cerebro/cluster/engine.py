"""Engines start the agents of a run. They place, restart and count processes; Cerebro does not."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from typing import Protocol

from cerebro.cluster.keys import Ticket
from cerebro.cluster.placement import VISIBLE
from cerebro.errors import InputError, text_of
from cerebro.machine import environment

END_SECONDS = 10.0
PATIENCE_SECONDS = 60
"""The time for an agent to reach the coordinator, which listens when it is started."""


class Engine(Protocol):
    """Starts agents, which connect with the ticket that the engine is given.

    An engine may restart an agent that has ended; it then joins as a new one.
    """

    size: int | None
    """The number of agents that it starts; None: unknown."""

    def start(self, ticket: Ticket) -> None:
        """Begin to start agents and return at once; raise InputError if this fails."""

    def failure(self) -> str | None:
        """Return why no more agents will connect; None: some may."""

    def stop(self) -> None:
        """Start no more agents."""

    def close(self) -> None:
        """End the remaining agents, which have already been told to end."""


class Outside:
    """Agents that others start: a batch system, Kubernetes, ssh."""

    size: int | None = None

    def start(self, ticket: Ticket) -> None:
        pass

    def failure(self) -> str | None:
        return None

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class Processes:
    """Agents as processes on this machine; one that dies is not started again.

    `variables` has the environment variables to add for each.
    """

    def __init__(self, count: int, variables: list[dict[str, str]] | None = None) -> None:
        self.size: int | None = count
        self._variables = variables or [{} for _ in range(count)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, ticket: Ticket) -> None:
        for more in self._variables:
            agent_ticket = replace(ticket, variables={**ticket.variables, **more})
            self.processes.append(start_agent(agent_ticket))

    def failure(self) -> str | None:
        codes = [process.poll() for process in self.processes]
        if None in codes:
            return None
        return f"all agents have ended, with status {', '.join(map(str, codes))}"

    def stop(self) -> None:
        pass  # all agents were started together

    def close(self) -> None:
        for process in self.processes:
            end_agent(process)
        self.processes.clear()


def start_agent(ticket: Ticket) -> subprocess.Popen[bytes]:
    """Start an agent as a separate program; closing its standard input ends it."""
    variables = dict(make_environment(ticket))
    process = subprocess.Popen(
        [sys.executable, "-m", "cerebro", "agent", "--stdin", "--patience", str(PATIENCE_SECONDS)],
        stdin=subprocess.PIPE,
        env=variables,
        start_new_session=True,  # Ctrl-C is the coordinator's
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(ticket.to_json().encode() + b"\n")
        process.stdin.flush()
    return process


def end_agent(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def run_agent(text: str, gpu: str | None = None) -> None:
    """Start an agent and wait for its end; for tasks of engines, in processes of theirs.

    `text` is the ticket, `gpu` the agent's ``CUDA_VISIBLE_DEVICES`` (None: that of this process).
    Raises RuntimeError if the agent does not end with its run: the engine may start it again.
    """
    ticket = Ticket.from_json(text)
    if gpu is not None:
        ticket = replace(ticket, variables={**ticket.variables, VISIBLE: gpu})
    process = start_agent(ticket)
    try:
        status = process.wait()
    finally:
        end_agent(process)
    if status:
        raise RuntimeError(f"an agent of Cerebro has ended with status {status}: see its output")


def find_own_address(peer: str) -> str:
    """Return this machine's address on the way to another host, without sending anything.

    Raises InputError if there is no way to the host.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    except OSError as error:
        raise InputError(f"this machine cannot reach {peer!r} ({text_of(error)})") from error


def make_environment(ticket: Ticket) -> dict[str, str]:
    variables = dict(os.environ)
    for name, value in ticket.variables.items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    return variables


def collect_variables() -> dict[str, str | None]:
    here = environment.read_variables()
    return {name: here.get(name) for name in environment.VARIABLES}
