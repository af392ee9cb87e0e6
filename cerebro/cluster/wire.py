"""Sockets between a coordinator and its agents: ZeroMQ with CURVE, and their messages.

CURVE encrypts, and both ends prove that they have the cluster's key before the first message is
read. ZeroMQ frames the messages, limits a frame's size, sends heartbeats, and disconnects a peer
that is silent, breaks the protocol or exceeds a limit. A message of more than a few MB is split
into frames.

All messages are pickles, except `hello` and its answer, which name versions.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from cerebro.cluster.keys import Keys, import_zmq
from cerebro.executors.wire import pickle_event, pickle_message

FRAME_BYTES = 4 << 20
MAX_FRAME_BYTES = 2 * FRAME_BYTES  # a peer that announces a larger frame is disconnected
HANDSHAKE_SECONDS = 10
BEAT_SECONDS = 2
SILENCE_SECONDS = 10  # the time without a message after which a connection counts as broken
DOMAIN = "cerebro"  # the domain of ZeroMQ's authentication


def open_listener(context: Any, keys: Keys, host: str, port: int = 0) -> tuple[Any, int]:
    """Return a socket, for peers that `start_authenticator` admits, and its port."""
    zmq = import_zmq()
    socket = _set_limits(context.socket(zmq.ROUTER))
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.server_public, keys.server_secret
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
    socket.setsockopt(zmq.IPV6, ":" in host)
    host = f"[{host}]" if ":" in host else host
    try:
        if port:
            socket.bind(f"tcp://{host}:{port}")
        else:
            port = socket.bind_to_random_port(f"tcp://{host}")
    except zmq.ZMQError:
        socket.close()
        raise
    return socket, port


def dial(context: Any, keys: Keys, address: str) -> Any:
    """Return a socket that connects to a socket of `open_listener` at ``host:port``."""
    zmq = import_zmq()
    socket = _set_limits(context.socket(zmq.DEALER))
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
    socket.setsockopt(zmq.IPV6, address.startswith("["))
    socket.connect(f"tcp://{address}")
    return socket


def _set_limits(socket: Any) -> Any:
    zmq = import_zmq()
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, 0),  # a router drops messages beyond this number
        (zmq.RCVHWM, 0),
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        (zmq.HANDSHAKE_IVL, 1000 * HANDSHAKE_SECONDS),
        (zmq.HEARTBEAT_IVL, 1000 * BEAT_SECONDS),
        (zmq.HEARTBEAT_TIMEOUT, 1000 * SILENCE_SECONDS),
        (zmq.HEARTBEAT_TTL, 1000 * SILENCE_SECONDS),
    ):
        socket.setsockopt(option, value)
    return socket


def start_authenticator(context: Any, keys: Keys) -> Any:
    """Start the thread that admits only clients with the cluster's key; it has ``stop``."""
    from zmq.auth.thread import ThreadAuthenticator

    class OnlyOurs:
        def callback(self, domain: str, key: bytes) -> bool:
            return key == keys.client_public

    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(DOMAIN, credentials_provider=OnlyOurs())
    return guard


def split_frames(packed: Any) -> Iterator[memoryview]:
    """Return a buffer in frames."""
    view = memoryview(packed).cast("B")
    for begin in range(0, max(1, len(view)), FRAME_BYTES):
        yield view[begin : begin + FRAME_BYTES]


def encode_message(message: Any, *, is_plain: bool = False) -> list[Any]:
    """Return a message's frames; `is_plain`: it has no object of the user's code."""
    return list(split_frames(pickle_message(message, is_plain=is_plain)))


def encode_answer(answer: Any) -> list[Any]:
    """Return the frames of an agent's answer, which may contain a worker's event."""
    return list(split_frames(pickle_event(answer)))


def decode_message(messages: list[Any]) -> Any:
    """Return the message in the frames of an authenticated peer."""
    if len(messages) == 1:
        return pickle.loads(messages[0].buffer)
    return pickle.loads(b"".join(message.buffer for message in messages))
