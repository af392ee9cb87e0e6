"""``agent``: run a worker for a search on another machine."""

from __future__ import annotations

import argparse
import io
import os
import socket
import sys
from pathlib import Path
from typing import Any

from cerebro.cli.options import new_command, parse_count
from cerebro.errors import InputError, text_of
from cerebro.machine.devices import name_devices

PATIENCE_SECONDS = 300
AGAIN = 3  # the exit status of an agent to be started again: its search may be resumed


def add(commands: Any) -> None:
    parser = new_command(commands, "agent", main, "be a worker of a search on another machine")
    parser.add_argument("--connect", metavar="HOST:PORT", help="where the search listens")
    parser.add_argument(
        "--key", metavar="FILE", help="the search's key (default: $CEREBRO_CLUSTER_KEY)"
    )
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        default="auto",
        help="auto: the GPU that it sees, if the search is on GPUs (default); cuda or cuda:1: this "
        "GPU, or an error at once; cpu: no GPU",
    )
    parser.add_argument(
        "--patience",
        type=parse_count,
        metavar="SECONDS",
        default=PATIENCE_SECONDS,
        help=f"how long to wait for the search to begin ({PATIENCE_SECONDS})",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help=f"for a program that restarts what fails: exit with status {AGAIN} after a search, "
        "and with 0 when none has begun within --patience",
    )
    parser.add_argument("--stdin", action="store_true", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Be an agent; the exit status is 0 when the search has ended, or as for ``--again``."""
    from cerebro.cluster import agent, keys
    from cerebro.machine.signals import raise_on_sigterm

    with raise_on_sigterm():
        try:
            (device,) = name_devices(options.device)
        except InputError:
            text = f"--device {options.device}: give auto, cpu, cuda, or a GPU such as cuda:1"
            raise InputError(text) from None
        if options.stdin:  # started by an engine, which holds the other end of the pipe
            line = io.FileIO(sys.stdin.fileno(), closefd=False).readline()  # and nothing after it
            return agent.main(keys.Ticket.from_json(line.decode()), options.patience, 0, device)
        if options.connect is None:
            raise InputError("an agent needs --connect HOST:PORT")
        host, port = keys.parse_address(options.connect, f"--connect {options.connect}")
        if options.key is not None:
            key = keys.read_key_file(Path(options.key))
        elif keys.VARIABLE in os.environ:
            key = keys.parse_key(os.environ[keys.VARIABLE], f"${keys.VARIABLE}")
        else:
            raise InputError(f"an agent needs --key FILE, or a key in ${keys.VARIABLE}")
        _warn_if_unknown(host, port, options.patience)
        listen = "::" if ":" in host else "0.0.0.0"  # others connect with the same kind of address
        ticket = keys.Ticket(keys.format_address(host, port), key, listen=listen)
        status = agent.main(ticket, options.patience, device=device)
        if options.again:
            return {agent.ENDED: AGAIN, agent.UNHEARD: agent.ENDED}.get(status, status)
        return status


def _warn_if_unknown(host: str, port: int, patience: float) -> None:
    """Report a host without an address at once; its name may still be published."""
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        print(
            f"cerebro agent: cannot resolve the host {host!r} ({text_of(error)}); retrying for "
            f"{patience:g} s",
            file=sys.stderr,
        )
