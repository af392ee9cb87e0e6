"""States on their way between agents: each agent serves those that its worker has made.

An agent refers to a state by a number. The state is a buffer that maps the worker's slot: this
needs no copy, and the buffer stays readable after the slot's file is removed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from cerebro.cluster.keys import Keys, import_zmq
from cerebro.cluster.states import STATE_SECONDS, StateGone
from cerebro.cluster.wire import dial, open_listener, split_frames

STEP_MILLISECONDS = 100  # how often to check whether the node that sends a state is still alive


class Blob:
    """Where a state is; small ones are carried along."""

    def __init__(self, address: str, number: int, packed: bytes | None = None) -> None:
        self.address = address
        """``host:port`` of the agent that has it; without a host: the coordinator's."""
        self.number = number
        self.packed = packed  # the state, if it is small or its agent has left


class Ref(Blob):
    """A state as the coordinator refers to it; its agent may free it once this is collected."""

    def __init__(self, address: str, number: int, freed: deque[int]) -> None:
        super().__init__(address, number)
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(self.number)

    def __reduce__(self) -> tuple[type[Blob], tuple[str, int, bytes | None]]:
        return Blob, (self.address, self.number, self.packed)


class StateRefs:
    """The coordinator's references to the states of one agent, and the numbers of freed ones."""

    def __init__(self) -> None:
        self.address = ""  # as in `Blob`; unknown until the agent has connected
        self._refs: WeakValueDictionary[int, Ref] = WeakValueDictionary()
        self._freed: deque[int] = deque()

    def move_to(self, address: str) -> None:
        self.address = address
        for ref in self._refs.values():
            ref.address = address

    def make(self, number: int) -> Ref:
        ref = self._refs[number] = Ref(self.address, number, self._freed)
        return ref

    def find(self, number: int) -> Ref | None:
        return self._refs.get(number)

    def take_freed(self) -> list[int]:
        freed = []
        with contextlib.suppress(IndexError):
            while self._freed:  # another thread may take some
                freed.append(self._freed.popleft())
        return freed


class BlobServer:
    """Serves the states in `blobs` in a separate thread."""

    def __init__(self, context: Any, keys: Keys, host: str) -> None:
        self._socket, self.port = open_listener(context, keys, host)
        self.blobs: dict[int, Any] = {}
        threading.Thread(target=self._serve, name="cerebro-states", daemon=True).start()

    def _serve(self) -> None:
        zmq = import_zmq()
        try:
            while True:
                peer, asked, *_ = self._socket.recv_multipart()
                packed = self.blobs.get(int(asked)) if asked.isdigit() else None
                if packed is None:
                    self._socket.send_multipart([peer, b"", b""])
                    continue
                size = str(memoryview(packed).nbytes).encode()
                for piece in split_frames(packed):
                    self._socket.send_multipart([peer, size, piece], copy=False)
        except zmq.ContextTerminated:
            self._socket.close()
        except zmq.ZMQError:  # closed
            pass


def fetch(socket: Any, number: int, is_gone: Callable[[], bool]) -> Any:
    """Return a state's bytes from the `BlobServer` that a socket is connected to.

    Raises StateGone if the state is lost or does not arrive. The socket must then be closed.
    """
    zmq = import_zmq()
    socket.send(str(number).encode())
    end = time.monotonic() + STATE_SECONDS
    whole, filled = None, 0
    while whole is None or filled < len(whole):
        while not socket.poll(STEP_MILLISECONDS, zmq.POLLIN):
            if is_gone():
                raise StateGone("the node that made it is gone")
            if time.monotonic() >= end:
                raise StateGone(f"it did not arrive within {STATE_SECONDS:g} s")
        size, piece = socket.recv_multipart(copy=False)
        if not size.bytes:
            raise StateGone("the node that made it no longer has it")
        if whole is None:
            if int(size.bytes) == len(piece.buffer):
                return piece.buffer
            whole = np.empty(int(size.bytes), np.uint8)
        part = np.frombuffer(piece.buffer, np.uint8)
        whole[filled : filled + len(part)] = part
        filled += len(part)
    return whole


class Fetcher:
    """Fetches states and keeps the connections open; for use by one thread."""

    def __init__(self, context: Any, keys: Keys, host: str) -> None:
        self._context = context
        self._keys = keys
        self._host = host
        self._sockets: dict[str, Any] = {}

    def fetch(self, blob: Blob, is_gone: Callable[[], bool]) -> Any:
        """Return a state; see `fetch`. Its agent may hand it over to `blob` in the meantime."""
        packed = blob.packed
        if packed is not None:
            return packed
        address = f"{self._host}{blob.address}" if blob.address.startswith(":") else blob.address
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._sockets[address] = dial(self._context, self._keys, address)
        try:
            return fetch(socket, blob.number, is_gone)
        except BaseException as error:
            self._sockets.pop(address).close()
            packed = blob.packed
            if isinstance(error, StateGone) and packed is not None:
                return packed
            raise

    def close(self) -> None:
        while self._sockets:
            self._sockets.popitem()[1].close()
