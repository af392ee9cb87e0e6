"""Send and receive whole messages on a worker's socket without blocking the coordinator.

A worker may stop, hang or die in the middle of a message, in either direction. If the coordinator
waited for the rest, all other workers would wait, too. So it buffers bytes that cannot be sent yet
and messages that have only partly arrived, until the event loop calls again. On the wire, a message
is its length, as four big-endian bytes, followed by its bytes. `multiprocessing.connection`, used
at the worker's end, has the same format.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

SHORT = 2**31  # from this length on, the header is -1 followed by the length in eight bytes
LENGTH = struct.Struct("!i")
LONG = struct.Struct("!Q")
MAX_ANSWER = 256 << 20  # bytes; an answer usually has a few kilobytes
PIECE = 1 << 16


class BrokenMessage(Exception):
    """Raised if the received bytes are not a message."""


class Channel:
    """Sends and receives messages over a connected stream socket."""

    def __init__(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        self._socket = ours
        self._out: deque[memoryview] = deque()
        self._in = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` must be called when the socket becomes writable."""
        return bool(self._out)

    def send(self, message: bytes) -> None:
        """Send what the socket accepts without blocking; raise OSError if the peer is gone."""
        length = len(message)
        head = LENGTH.pack(length) if length < SHORT else LENGTH.pack(-1) + LONG.pack(length)
        if length < 16384:
            self._out.append(memoryview(head + message))
        else:
            self._out += [memoryview(head), memoryview(message)]
        self.flush()

    def flush(self) -> None:
        """Send as much of the rest as the socket accepts; raise OSError if the other end left."""
        while self._out:
            piece = self._out[0]
            try:
                sent = self._socket.send(piece)
            except BlockingIOError:
                return
            if sent == len(piece):
                self._out.popleft()
            else:
                self._out[0] = piece[sent:]

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived completely, if any.

        Raise EOFError if the other end is closed and no message is left, BrokenMessage if the bytes
        are not a message, and OSError if the socket is broken.
        """
        ended = False
        while len(self._in) <= MAX_ANSWER:
            try:
                piece = self._socket.recv(PIECE)
            except BlockingIOError:
                break
            except ConnectionResetError:
                piece = b""
            if not piece:
                ended = True
                break
            self._in += piece
            if len(piece) < PIECE:  # that was all: to read again would cost a failing call
                break
        messages = self._take_whole_messages()
        if ended and not messages:
            raise EOFError
        return messages

    def _take_whole_messages(self) -> list[bytes]:
        messages = []
        while len(self._in) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._in)
            if not 0 <= length <= MAX_ANSWER:
                raise BrokenMessage(f"a message of {length} bytes")
            end = LENGTH.size + length
            if len(self._in) < end:
                break
            messages.append(bytes(self._in[LENGTH.size : end]))
            del self._in[:end]
        return messages

    def close(self) -> None:
        self._socket.close()
        self._out.clear()
        self._in.clear()
