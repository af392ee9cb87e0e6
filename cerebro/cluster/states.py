"""The states of live trials: which are held, where, and how they travel.

An agent holds the states that its worker has made, refers to each by a number, and serves them to
other agents. A state is a buffer that maps the worker's slot: this needs no copy, and the buffer
stays readable after the slot's file is removed.

Two states of each trial are kept: the newest, and the newest from a different node, or else from a
different agent. If an agent is lost, its states are, too. The trial then returns to its other state
and repeats the units since.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np

from cerebro.cluster.keys import Keys, import_zmq
from cerebro.cluster.wire import open_listener, split_frames
from cerebro.machine.local import LOCAL, Clock

CARRIED_BYTES = 65_536
"""States up to this size travel in messages: the coordinator holds them, and they survive the loss
of an agent."""
MAX_DIGITS = 20  # of a state's number
STATE_SECONDS = 300.0  # the time within which a state must arrive from a different agent
STEP_MILLISECONDS = 100  # how often to check whether the other end, or the server, is to stop


class StateGone(Exception):
    """A state is lost."""


@dataclass(eq=False)
class Blob:
    """Where a state is; small ones are carried along."""

    address: str  # ``host:port`` of the agent that has it; without a host: the coordinator's
    number: int
    packed: bytes | None = None  # the state, if it is small or its agent has left


class StateRefs:
    """The coordinator's references to the states of one agent, and the numbers of freed ones.

    The agent may free a state once its reference is collected.
    """

    def __init__(self) -> None:
        self.address = ""  # as in `Blob`; unknown until the agent has connected
        self.by_number: WeakValueDictionary[int, Blob] = WeakValueDictionary()
        self._freed: deque[int] = deque()

    def move_to(self, address: str) -> None:
        self.address = address
        for ref in self.by_number.values():
            ref.address = address

    def make(self, number: int) -> Blob:
        ref = self.by_number[number] = Blob(self.address, number)
        finalize(ref, self._freed.append, number)
        return ref

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
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="cerebro-states", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; at the interpreter's end, sending without a copy would fail."""
        self._is_closing = True
        self._thread.join()

    def _serve(self) -> None:
        zmq = import_zmq()
        try:
            while not self._is_closing:
                if not self._socket.poll(STEP_MILLISECONDS):
                    continue
                peer, asked, *_ = self._socket.recv_multipart()
                is_number = asked.isdigit() and len(asked) <= MAX_DIGITS
                packed = self.blobs.get(int(asked)) if is_number else None
                if packed is None:
                    self._socket.send_multipart([peer, b"", b""])
                    continue
                size = str(memoryview(packed).nbytes).encode()
                for piece in split_frames(packed):
                    self._socket.send_multipart([peer, size, piece], copy=False)
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()


def fetch(socket: Any, number: int, is_gone: Callable[[], bool], clock: Clock = LOCAL.clock) -> Any:
    """Return a state's bytes from the `BlobServer` that a socket is connected to.

    Raises StateGone if the state is lost or does not arrive. The socket must then be closed.
    """
    zmq = import_zmq()
    socket.send(str(number).encode())
    end = clock.monotonic() + STATE_SECONDS
    whole, filled = None, 0
    while whole is None or filled < len(whole):
        while not socket.poll(STEP_MILLISECONDS, zmq.POLLIN):
            if is_gone():
                raise StateGone("the node that made it is gone")
            if clock.monotonic() >= end:
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
    """Fetches states and keeps the connections open; for use by one thread.

    `dial` returns a socket that connects to the `BlobServer` at ``host:port``; the states without a
    host are at `host`.
    """

    def __init__(self, dial: Callable[[str], Any], host: str, clock: Clock = LOCAL.clock) -> None:
        self._dial = dial
        self._host = host
        self._clock = clock
        self._sockets: dict[str, Any] = {}

    def fetch(self, blob: Blob, is_gone: Callable[[], bool]) -> Any:
        """Return a state; see `fetch`. Its agent may hand it over to `blob` in the meantime."""
        packed = blob.packed
        if packed is not None:
            return packed
        address = f"{self._host}{blob.address}" if blob.address.startswith(":") else blob.address
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._sockets[address] = self._dial(address)
        try:
            return fetch(socket, blob.number, is_gone, self._clock)
        except BaseException as error:
            self._sockets.pop(address).close()
            packed = blob.packed
            if isinstance(error, StateGone) and packed is not None:
                return packed
            raise

    def close(self) -> None:
        while self._sockets:
            self._sockets.popitem()[1].close()


@dataclass(frozen=True)
class HeldState:
    position: int  # the number of units done before it
    ref: Any
    node: str  # the node that made it
    agent: str  # the number of the agent there that holds it
    worker: int
    state_hash: str
    nbytes: int

    @property
    def is_here(self) -> bool:
        """Whether the reference itself has the state; see `cerebro.cluster.states.Blob`."""
        return getattr(self.ref, "packed", None) is not None


class HeldStates:
    """The states of all live trials; see the module's docstring."""

    def __init__(self) -> None:
        self._states: dict[int, list[HeldState]] = {}
        self.keeping: dict[int, int] = {}  # by trial: the position of a state on its way to the run

    def add(self, trial: int, state: HeldState) -> None:
        """Add the state of a unit; of the older ones, keep the newest from elsewhere."""
        older = [s for s in self._states.get(trial, []) if s.position < state.position]
        elsewhere = [s for s in older if s.node != state.node]
        elsewhere = elsewhere or [s for s in older if s.agent != state.agent]
        self._states[trial] = [*elsewhere[-1:], state]

    def find_state(self, trial: int, position: int) -> HeldState | None:
        states = [s for s in self._states.get(trial, []) if s.position == position]
        return states[-1] if states else None

    def find_newest(self, trial: int) -> HeldState | None:
        states = self._states.get(trial)
        return states[-1] if states else None

    def remove_lost_state(self, trial: int, position: int) -> int | None:
        """Remove a lost state; return the position of the one before it, if any."""
        earlier = [s for s in self._states.get(trial, []) if s.position < position]
        if trial in self._states:
            self._states[trial] = earlier
        return earlier[-1].position if earlier else None

    def remove_agent(self, agent: str) -> None:
        for trial, states in self._states.items():
            self._states[trial] = [
                s for s in states if s.agent != agent or s.nbytes <= CARRIED_BYTES or s.is_here
            ]

    def forget(self, trial: int) -> None:
        self._states.pop(trial, None)
