"""Pickle messages between the processes of a run, and send them without blocking.

Messages to workers and from them, and between the peers of a cluster, are pickles. `pickle` takes a
third of the time of `cloudpickle`, which only objects of the user's code need. An object that is
pickled by name is imported, and its module may be a script that trains.

A worker may stop, hang or die in the middle of a message, in either direction. If the coordinator
waited for the rest, all other workers would wait, too. So a `Channel` buffers bytes that cannot be
sent yet and messages that have only partly arrived, until the event loop calls again. On the wire,
a message is its length, as four big-endian bytes, followed by its bytes.
`multiprocessing.connection`, used at the worker's end, has the same format.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import socket
import struct
import sys
import types
from collections import deque
from collections.abc import Sequence
from typing import Any

import cloudpickle

from cerebro.errors import InputError
from cerebro.machine.guard import guard_import
from cerebro.machine.imports import list_unfindable_modules, sent_whole

SHORT = 2**31  # from this length on, the header is -1 followed by the length in eight bytes
LENGTH = struct.Struct("!i")
LONG = struct.Struct("!Q")
MAX_ANSWER = 256 << 20  # bytes; an answer usually has a few kilobytes
PIECE = 1 << 16
BEHIND = b"+"  # the byte that carries descriptors
FILES_SECONDS = 120.0  # for a worker that starts to receive descriptors: its disk may be slow


def pickle_message(message: object, *, is_plain: bool) -> bytes:
    """Pickle a message; `is_plain` promises that it contains no object of the user's code."""
    dumps = pickle.dumps if is_plain else cloudpickle.dumps
    return dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def pickle_event(event: object) -> bytes:
    """Pickle an event, or a message that contains one, which may have objects of the user's."""
    try:
        return pickle_message(event, is_plain=True)
    except (pickle.PicklingError, AttributeError, TypeError):
        return pickle_message(event, is_plain=False)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles every module by name, including instances of subclasses such as ``torch.classes``."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def pickle_context(context: object) -> bytes:
    """Pickle the run's context for workers; raise InputError if ``build`` cannot be sent."""
    try:
        return pickle_by_value(context)
    except UNSENDABLE as error:
        text = (
            f"build cannot be sent to worker processes ({error}): create the objects that it needs "
            "inside build"
        )
        # A build that the user has not written says what the user has given instead.
        unsent = getattr(getattr(context, "build", None), "unsent", None)
        if unsent is not None:
            text = (
                f"{unsent} cannot be sent to worker processes ({error}): give objects that pickle "
                "can copy"
            )
        raise InputError(f"{text}, or train in this process with workers=0") from error


UNSENDABLE = (TypeError, AttributeError, pickle.PicklingError)
"""What `pickle_by_value` raises for an object that cannot be pickled."""


def pickle_by_value(value: object) -> bytes:
    """Pickle what another process gets, with the code that it would not find by name."""
    out = io.BytesIO()
    # `multiprocessing` gives the program's main module this name in a new process.
    for name in {*sent_whole, *list_unfindable_modules(), "__mp_main__"} & sys.modules.keys():
        cloudpickle.register_pickle_by_value(sys.modules[name])
    _Pickler(out).dump(value)
    return out.getvalue()


def unpickle(message: bytes) -> Any:
    """Unpickle a message from a process of the same run.

    Raise InputError if a module that the message names starts a search before it defines the name.
    """
    with guard_import():
        return _make_unpickler()(io.BytesIO(message)).load()


@functools.cache
def _make_unpickler() -> type[pickle.Unpickler]:
    """Make the class when the first message arrives: a process that only reads files has none."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            """Import a name; the import of its module may stop as soon as the name is defined."""
            if module in sys.modules:
                return super().find_class(module, name)
            with guard_import(name.partition(".")[0], target=module):
                return super().find_class(module, name)

    return Unpickler


def receive_files(connection: int, count: int) -> list[int]:
    """Return the descriptors that follow the last message; raise EOFError if they do not come."""
    with socket.socket(fileno=os.dup(connection)) as theirs:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        _, files, _, _ = socket.recv_fds(theirs, len(BEHIND), count, flags)
    if len(files) < count:
        raise EOFError
    return files


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

    def send_files(self, files: Sequence[int]) -> None:
        """Send copies of descriptors behind all messages; see `receive_files`.

        Waits for a peer that starts and does not read yet; raise OSError if it takes too long.
        """
        self._socket.settimeout(FILES_SECONDS)
        try:
            self.flush()
            socket.send_fds(self._socket, [BEHIND], files)
        finally:
            self._socket.setblocking(False)

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
