"""Sockets between a coordinator and its agents: ZeroMQ with CURVE, and their messages.

CURVE encrypts, and both ends prove that they have the cluster's key before the first message is
read. ZeroMQ frames the messages, limits a frame's size, sends heartbeats, and disconnects a peer
that is silent, breaks the protocol or exceeds a limit. A message of more than a few MB is split
into frames.

All messages are pickles, except `hello` and its answer, which name versions.

Only one thread at a time may use a ZeroMQ socket. If a dedicated thread owned it, each message
would wake that thread and then the one that needs the message. So a lock guards each call of
ZeroMQ, and the thread that is waiting for messages receives them itself: see `SharedSocket`.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import select
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cerebro.cluster.keys import Keys, import_zmq
from cerebro.machine.signals import WakePipe, defer_interrupts, wait_for

FRAME_BYTES = 4 << 20
MAX_FRAME_BYTES = 2 * FRAME_BYTES  # a peer that announces a larger frame is disconnected
HANDSHAKE_SECONDS = 10
BEAT_SECONDS = 2
SILENCE_SECONDS = 10  # the time without a message after which a connection counts as broken
DOMAIN = "cerebro"  # the domain of ZeroMQ's authentication
LOAN_SECONDS = 0.02  # to a borrower that has stopped waiting: it usually waits again at once
LOOK_SECONDS = 0.1  # how often the background thread checks whether the socket is back


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


def split_frames(packed: Any) -> list[memoryview]:
    """Return a buffer, such as a pickled message, in frames: at least one."""
    view = memoryview(packed).cast("B")
    return [view[begin : begin + FRAME_BYTES] for begin in range(0, max(1, len(view)), FRAME_BYTES)]


def decode_message(messages: list[Any]) -> Any:
    """Return the message in the frames of an authenticated peer."""
    if len(messages) == 1:
        return pickle.loads(messages[0].buffer)
    return pickle.loads(b"".join(message.buffer for message in messages))


class SharedSocket:
    """A socket and its monitor, shared by threads: any of them sends, one that waits receives.

    It belongs to a background thread, which waits for messages all the time (`wait_in_background`).
    Another thread borrows it while it waits for its own descriptors (`borrow`), and the background
    thread leaves the messages to it until a moment later.

    From now on only this object uses `socket`. `handle` is called with each message's frames, in
    order, by one thread at a time; `heard` with each of the connection's monitored `events`. Events
    that happen before a message is received are handled before it.
    """

    def __init__(
        self,
        socket: Any,
        events: int,
        handle: Callable[[list[Any]], None],
        heard: Callable[[dict[str, Any]], None],
    ) -> None:
        zmq = import_zmq()
        self._zmq = zmq
        self._socket = socket
        # As plain integers: each operation on an enumeration would cost as much as a call.
        self._now = int(zmq.NOBLOCK)
        self._more = int(zmq.NOBLOCK | zmq.SNDMORE)
        self._readable = int(zmq.POLLIN)
        self._monitor = socket.get_monitor_socket(events)
        self._handle = handle
        self._heard = heard
        self._using = threading.Lock()  # for each call of ZeroMQ
        self._handling = threading.Lock()
        self._stirred = WakePipe()  # there may be messages although no descriptor says so
        self._returned = WakePipe()
        self._lent_until = 0.0
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        for source in (socket.FD, self._monitor.FD, self._stirred):
            self._selector.register(source, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `handle_messages` may have something to do."""
        return self._selector.fileno()

    def send(self, frames: Sequence[Any]) -> None:
        """Send a message; does nothing after `close`.

        The main thread must use `defer_interrupts`: half a message would spoil the next one.
        """
        with self._using:
            if self._is_closed:
                return
            # There is no high-water mark, so only a peer that has been given up does not take it.
            with contextlib.suppress(self._zmq.Again):
                for frame in frames[:-1]:
                    self._socket.send(frame, self._more, copy=False)
                self._socket.send(frames[-1], self._now, copy=False)
            # Sending may use up the signal that a message has come.
            has_come = self._has_message(self._socket)
        if has_come:
            self.wake()

    def wake(self) -> None:
        self._stirred.wake()

    def handle_messages(self) -> None:
        """Handle all messages and events that have arrived, without waiting."""
        with self._handling:
            self._stirred.clear()
            while True:
                frames = self._receive_next()
                self._handle_events()
                if frames is None:
                    break
                self._handle(frames)
            if not hasattr(select, "epoll"):  # a kqueue stays readable until it is asked
                self._selector.select(0)

    def wait_in_background(self, seconds: float, others: Sequence[int] = ()) -> set[int]:
        """Wait up to `seconds` as the background thread; return which of `others` are readable.

        Handles what arrives, unless another thread has borrowed the socket.
        """
        is_lent = self._is_lent
        descriptors = [self._returned.fileno(), *others]
        if not is_lent:
            descriptors.append(self.fileno())
        ready = wait_for(descriptors, min(seconds, LOOK_SECONDS) if is_lent else seconds)
        if self._returned.fileno() in ready:
            self._returned.clear()
        if self.fileno() in ready and not self._is_lent:
            self.handle_messages()
        return ready

    def wait(self, seconds: float, others: Sequence[int]) -> set[int]:
        """Wait up to `seconds` as a borrower; return which of `others` are readable.

        Handles what arrives. Ctrl-C interrupts the waiting, but not the handling: a message would
        be lost.
        """
        try:
            self.borrow()
            ready = wait_for([self.fileno(), *others], seconds)
        finally:
            self.borrow(LOAN_SECONDS)
        if self.fileno() in ready:
            with defer_interrupts():
                self.handle_messages()
        return ready

    def borrow(self, seconds: float = math.inf) -> None:
        """Promise to call `handle_messages` whenever the descriptor is readable, for this time."""
        self._lent_until = time.monotonic() + seconds

    def give_back(self) -> None:
        """End a loan now; otherwise, just wake the background thread."""
        self._lent_until = 0.0
        self._returned.wake()

    def close(self) -> None:
        """Close the socket; the other end sees a disconnect."""
        with self._handling, self._using:
            if self._is_closed:
                return
            self._is_closed = True
            self._selector.close()
            self._socket.disable_monitor()  # else it would write to the monitor's other end
            self._monitor.close()
            self._socket.close()

    @property
    def has_come(self) -> bool:
        """Whether messages may be waiting that no borrower of the socket will handle."""
        return not self._is_lent and self.fileno() in wait_for([self.fileno()], 0.0)

    @property
    def _is_lent(self) -> bool:
        return time.monotonic() < self._lent_until

    def _receive_next(self) -> list[Any] | None:
        with self._using:
            # Asked for, because an exception would cost more.
            if self._is_closed or not self._has_message(self._socket):
                return None
            frames = [self._socket.recv(self._now, copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(self._now, copy=False))
        return frames

    def _has_message(self, socket: Any) -> bool:
        """Return whether a socket has a message; `poll` costs ten times as much."""
        return bool(socket.get(self._zmq.EVENTS) & self._readable)

    def _handle_events(self) -> None:
        while not self._is_closed and self._has_message(self._monitor):
            from zmq.utils.monitor import recv_monitor_message

            self._heard(recv_monitor_message(self._monitor))
