"""The key of a cluster, and the ticket with which an agent finds its coordinator.

One key of 32 random bytes is shared by the coordinator and its agents. Two key pairs for CurveZMQ
are derived from it: one for sockets that listen, one for sockets that connect. A peer without the
key can neither connect nor pose as the coordinator.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cerebro.errors import InputError
from cerebro.machine.imports import import_extra

KEY_BYTES = 32
VARIABLE = "CEREBRO_CLUSTER_KEY"  # environment variable of agents: the key, hexadecimal
OTHERS = 0o027  # permissions that a key should not have: any for others, and writing for the group


def import_zmq() -> Any:
    """Return ZeroMQ; raise InputError if it is not installed."""
    return import_extra("zmq", "cluster", "cerebro.cluster needs pyzmq on every node")


class Keys:
    """The key pairs that are derived from a cluster's key of `KEY_BYTES`."""

    def __init__(self, key: bytes) -> None:
        zmq = import_zmq()
        self.key = key
        self.server_secret = _derive_secret(key, b"cerebro server")
        self.server_public: bytes = zmq.curve_public(self.server_secret)
        self.client_secret = _derive_secret(key, b"cerebro client")
        self.client_public: bytes = zmq.curve_public(self.client_secret)

    @classmethod
    def generate(cls) -> Keys:
        return cls(secrets.token_bytes(KEY_BYTES))


def _derive_secret(key: bytes, purpose: bytes) -> bytes:
    from zmq.utils import z85

    encoded: bytes = z85.encode(hmac.new(key, purpose, hashlib.sha256).digest())
    return encoded


def parse_key(text: str, source: str) -> bytes:
    """Return the key in a text; raise InputError, which names `source` and hides the text."""
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(text.strip())
        if len(key) == KEY_BYTES:
            return key
    raise InputError(
        f"{source} is not a key: a key has {2 * KEY_BYTES} hexadecimal digits, such as from "
        f"'openssl rand -hex {KEY_BYTES}'"
    )


def read_key_file(path: Path, *, create: bool = False) -> bytes:
    """Return the key in a file; with `create`, write a new key if the file does not exist.

    Warns if others can read or replace the file: who has the key can run code here. Raises
    InputError if there is no readable file with a key, or it cannot be created.
    """
    if create:
        try:
            with contextlib.suppress(FileExistsError):
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(fd, "w") as file:
                    file.write(secrets.token_hex(KEY_BYTES) + "\n")
        except OSError as error:
            raise InputError(f"cannot create the key: {error}") from error
    try:
        key, mode = parse_key(path.read_text(), str(path)), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the key: {error}") from error
    if mode & OTHERS:
        warnings.warn(f"others can read or replace the key in {path}: chmod 600 it", stacklevel=2)
    return key


def parse_address(text: Any, source: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of ``host:port``; may raise InputError."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    is_number = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
    if not host or "/" in host or not is_number:
        raise InputError(f"{source} is not an address: give 'host:port'")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_listening_host(host: str) -> str:
    """Return where to listen for peers that connect to `host`, an address of this machine."""
    if host in ("127.0.0.1", "::1"):
        return host
    return "::" if ":" in host else "0.0.0.0"


@dataclass(frozen=True)
class Ticket:
    """The data that an agent needs to join a run. It contains the key, so keep it secret."""

    address: str  # ``host:port`` of the coordinator
    key: bytes = field(repr=False)
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables to set for the agent's program; None: to remove."""
    listen: str = "0.0.0.0"  # the address of its machine at which it serves states to other agents

    def to_json(self) -> str:
        return json.dumps({**vars(self), "key": self.key.hex()})

    @classmethod
    def from_json(cls, text: str) -> Ticket:
        """Read a ticket; raise InputError if the text is not a ticket."""
        try:
            parts = json.loads(text)
            key = parse_key(parts["key"], "the ticket's key")
            return cls(str(parts["address"]), key, dict(parts["variables"]), str(parts["listen"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError("this is not a ticket of a cluster") from None
