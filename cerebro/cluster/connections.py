"""The ZeroMQ sockets of a coordinator or an agent: all ways from here to other machines.

A simulation gives `cerebro.cluster.hub.Hub` and `cerebro.cluster.agent.Agent` others
(``tests/sim``).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from cerebro.cluster.keys import Keys, import_zmq
from cerebro.cluster.states import BlobServer, Fetcher
from cerebro.cluster.wire import SharedSocket, dial, open_listener, start_authenticator
from cerebro.errors import InputError, text_of

Handle = Callable[[list[Any]], None]
Heard = Callable[[dict[str, Any]], None]

REFUSAL_SECONDS = 0.5


class Connections:
    """Opens the sockets of one process of a cluster; raises InputError without pyzmq."""

    def __init__(self, keys: Keys) -> None:
        self._zmq = import_zmq()
        self._keys = keys
        self._context = self._zmq.Context()
        self._guard: Any = None  # started with the first socket that others connect to

    def listen(
        self, host: str, port: int, handle: Handle, heard: Heard
    ) -> tuple[SharedSocket, int]:
        """Return a socket to which agents connect, and its port; port 0 is any free one.

        `handle` and `heard` are as for `SharedSocket`, of accepted and ended connections. Raises
        InputError if it cannot listen there.
        """
        self._start_guard()
        try:
            listener, port = open_listener(self._context, self._keys, host, port)
        except self._zmq.ZMQError as error:
            raise InputError(
                f"cannot listen at {host}:{port} ({text_of(error)}): give a free port of this "
                "machine in listen="
            ) from error
        events = self._zmq.EVENT_ACCEPTED | self._zmq.EVENT_DISCONNECTED
        return SharedSocket(listener, events, handle, heard), port

    def dial(self, address: str, handle: Handle, heard: Heard) -> SharedSocket:
        """Return a socket that connects to a coordinator; it hears of beginning and end."""
        dialing = dial(self._context, self._keys, address)
        events = self._zmq.EVENT_DISCONNECTED | self._zmq.EVENT_HANDSHAKE_SUCCEEDED
        return SharedSocket(dialing, events, handle, heard)

    def is_refused(self, address: str) -> bool:
        """Return whether the machine of ``host:port`` says that no program listens there."""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REFUSAL_SECONDS).close()
        except OSError as error:  # any other error says nothing
            return isinstance(error, ConnectionRefusedError)
        return False

    def serve_states(self, host: str) -> BlobServer:
        self._start_guard()
        return BlobServer(self._context, self._keys, host)

    def make_fetcher(self, host: str) -> Fetcher:
        return Fetcher(partial(dial, self._context, self._keys), host)

    def _start_guard(self) -> None:
        if self._guard is None:
            self._guard = start_authenticator(self._context, self._keys)

    def close(self) -> None:
        """Close what is still open, without sending what is unsent."""
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)
