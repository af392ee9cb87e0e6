"""A socket that several threads use: any thread sends, and one that waits anyway receives.

Only one thread at a time may use a ZeroMQ socket. If a dedicated thread owned it, each message
would wake that thread and then the one that needs the message. So a lock guards each call of
ZeroMQ, and the thread that is waiting for messages receives them itself.

A socket belongs to a background thread, which waits for messages all the time
(`SharedSocket.wait_in_background`). Another thread borrows it while it waits for its own
descriptors (`borrow`), and the background thread leaves the messages to it until a moment later.
"""

from __future__ import annotations

import contextlib
import math
import select
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cerebro.cluster.keys import import_zmq
from cerebro.machine.signals import WakePipe, defer_interrupts, wait_for

LOAN_SECONDS = 0.02
"""How long a borrower that has stopped waiting keeps the socket: it usually waits again at once."""
LOOK_SECONDS = 0.1  # how often the background thread checks whether the socket is back


class SharedSocket:
    """A socket with its monitor; see the module's docstring.

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
    def _is_lent(self) -> bool:
        return time.monotonic() < self._lent_until

    def _receive_next(self) -> list[Any] | None:
        with self._using:
            if self._is_closed:
                return None
            if not self._has_message(self._socket):  # an exception would cost more
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
