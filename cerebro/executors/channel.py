"""The coordinator's end of a worker's socket: whole messages, without blocking.

A worker may stop, hang or die in the middle of a message, in either direction. If the coordinator
waited for the rest, it would hang too, and with it all other workers. So it buffers bytes that
cannot be sent yet and messages that have arrived in part, until the event loop calls again. On
the wire a message is its length, four bytes in big-endian order, and its bytes, as in
`multiprocessing.connection`, which is the worker's end.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

SHORT = 2**31
"""From this length on, the header is -1 and then the length in eight bytes."""
LENGTH = struct.Struct("!i")
LONG = struct.Struct("!Q")
MAX_ANSWER = 256 << 20
"""Bytes; an answer has a few kilobytes. A greater length is not that of an answer."""
PIECE = 1 << 18


class BrokenMessage(Exception):
    """The received bytes are not a message."""


class Channel:
    """Send and receive messages over a connected stream socket."""

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
        """Whether to call `flush` when the socket becomes writable."""
        return bool(self._out)

    def send(self, message: bytes) -> None:
        """Send a message, as much of it as the socket takes without blocking.

        Raises
        ------
        OSError
            If the other end is gone.
        """
        length = len(message)
        head = LENGTH.pack(length) if length < SHORT else LENGTH.pack(-1) + LONG.pack(length)
        if length < 16384:
            self._out.append(memoryview(head + message))
        else:
            self._out += [memoryview(head), memoryview(message)]
        self.flush()

    def flush(self) -> None:
        """Send as much of the rest as the socket takes; raise OSError if the other end is gone."""
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

        Raises
        ------
        EOFError
            If the other end is closed and all complete messages have been returned.
        BrokenMessage
            If the received bytes are not a message.
        OSError
            If the socket is broken.
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
        messages = self._whole_messages()
        if ended and not messages:
            raise EOFError
        return messages

    def _whole_messages(self) -> list[bytes]:
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
