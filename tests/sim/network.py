"""A simulated network between a coordinator and its agents, in place of ZeroMQ's sockets.

As there, a socket that dials says what it was given once it is connected, and connects again after
an end. Messages of one connection come whole and in their order. A peer that dies hangs up; one
whose machine is lost, or that is stopped for long, is silent, until its connection counts as ended.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from faults import ProcessDied
from fibers import SimulatedPipe
from world import Process, SimulatedClock

from cerebro.cluster.keys import import_zmq
from cerebro.cluster.states import Fetcher
from cerebro.cluster.wire import BEAT_SECONDS, LOAN_SECONDS, LOOK_SECONDS, SILENCE_SECONDS
from cerebro.errors import InputError

DIAL_SECONDS = 0.1  # between two attempts to connect
PORT = 7070


class Frame:
    """A part of a message, as zmq has it."""

    def __init__(self, content: bytes, fd: int = -1) -> None:
        self.bytes = self.buffer = content
        self._fd = fd

    def get(self, name: str) -> object:
        return self._fd if name == "__fd" else "127.0.0.1"


class Network:
    """What one can connect to: the coordinator, and the states of agents."""

    def __init__(self, latency: float) -> None:
        self.latency = latency  # the seconds that a message is under way at most
        self.listener: Listening | None = None
        self.states: dict[str, SimulatedStates] = {}
        self._ports = itertools.count(40_000)
        self._peers = itertools.count(1)
        self.used: set[int] = set()  # descriptors

    def take_port(self) -> int:
        return next(self._ports)

    def take_peer(self) -> bytes:
        return b"peer-%d" % next(self._peers)

    def take_descriptor(self) -> int:
        """Return the smallest that is free, as the system does."""
        fd = next(number for number in itertools.count(10) if number not in self.used)
        self.used.add(fd)
        return fd


class SimulatedSocket:
    """What `SharedSocket` is; subclasses send.

    The thread that waits in the background, in a fiber or as a task, leaves messages to one that
    has borrowed the socket.
    """

    def __init__(
        self,
        process: Process,
        handle: Callable[[list[Any]], None],
        heard: Callable[[dict[str, Any]], None],
    ) -> None:
        self.process = process
        self.is_closed = False
        self._handle = handle
        self._heard = heard
        self._messages: deque[list[Frame]] = deque()
        self._happened: deque[dict[str, Any]] = deque()
        self._stirred = False
        self._returned = False
        self._lent_until = 0.0
        self._number = SimulatedPipe(process).fileno()

    def fileno(self) -> int:
        return self._number

    @property
    def is_readable(self) -> bool:
        return bool(self._messages or self._happened or self._stirred) and not self.is_closed

    @property
    def has_come(self) -> bool:
        return not self._is_lent and (self.is_readable or self._returned)

    @property
    def _is_lent(self) -> bool:
        return self.process.world.now < self._lent_until

    def take(self, frames: list[Frame]) -> None:
        self._messages.append(frames)

    def hear(self, event: int, value: int = 0) -> None:
        self._happened.append({"event": event, "value": value})

    def send(self, frames: Sequence[Any]) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        self._stirred = True

    def handle_messages(self) -> None:
        self._stirred = False
        while True:
            frames = self._messages.popleft() if self._messages and not self.is_closed else None
            while self._happened and not self.is_closed:
                self._heard(self._happened.popleft())
            if frames is None:
                break
            self._handle(frames)

    def wait_in_background(self, seconds: float, others: Sequence[int] = ()) -> set[int]:
        assert not others, "not simulated"
        is_lent = self._is_lent
        if self.process.world.fiber is not None:  # else this is a step of a task, which has work
            self.process.call("wait")
            if is_lent:
                self.process.wait(min(seconds, LOOK_SECONDS), lambda: self._returned)
            else:
                self.process.wait(seconds, lambda: self._returned or self.is_readable)
        self._returned = False
        if self.is_readable and not self._is_lent:
            self.handle_messages()
        return set()

    def wait(self, seconds: float, others: Sequence[int]) -> set[int]:
        pipes = [self.process.pipes[number] for number in others]
        self.process.call("wait")
        limit = None if math.isinf(seconds) else max(0.0, seconds)
        self.borrow()
        self.process.wait(limit, lambda: self.is_readable or any(pipe.is_set for pipe in pipes))
        self.borrow(LOAN_SECONDS)
        ready = {pipe.fileno() for pipe in pipes if pipe.is_set}
        if self.is_readable:
            self.handle_messages()
        return ready

    def borrow(self, seconds: float = math.inf) -> None:
        self._lent_until = self.process.world.now + seconds

    def give_back(self) -> None:
        self._lent_until = 0.0
        self._returned = True

    def close(self) -> None:
        self.is_closed = True


class Connection:
    """A connection of a `Dialing` to a `Listening`; each knows it until it hears of its end."""

    def __init__(self, dialing: Dialing, listening: Listening) -> None:
        self.dialing = dialing
        self.listening = listening
        network = listening.network
        self._latency = network.latency
        self.peer = network.take_peer()
        self.fd = network.take_descriptor()
        self._last = {True: 0.0, False: 0.0}  # when the last message comes, by direction
        self._is_ending = False
        for socket in (dialing, listening):
            socket.process.on_death.append(partial(self._end_with, socket.process))
            socket.process.on_silence.append(partial(self._end_if_silent, socket))

    def carry(self, frames: Sequence[Any], *, to_agent: bool) -> None:
        if self._is_ending:  # the message is lost, without an error
            return
        sender, receiver = self.listening, self.dialing
        if not to_agent:
            sender, receiver = receiver, sender
        process = sender.process
        delay, times = self._latency * process.random.random(), 1
        fault = process.take_message_fault()
        if fault is not None and fault.kind == "cut":
            self.end(0.0, 0.0)
            return
        if fault is not None:
            times += fault.kind == "double" and not to_agent
            delay += fault.seconds
        message = [bytes(frame) for frame in frames]
        for _ in range(times):
            self._deliver(receiver, message, delay, to_agent=to_agent)

    def _deliver(
        self, receiver: Any, message: list[bytes], delay: float, *, to_agent: bool
    ) -> None:
        world = receiver.process.world
        when = self._last[to_agent] = max(world.now + delay, self._last[to_agent])

        def arrive() -> None:
            if to_agent:
                self.dialing.take([Frame(part) for part in message])
            else:
                self.listening.take([Frame(part, self.fd) for part in (self.peer, *message)])

        world.at_time(when, arrive, receiver.process)

    def end(self, at_agent: float, at_coordinator: float) -> None:
        """Let both ends hear, in so many seconds and after what is under way, that it has ended."""
        if self._is_ending:
            return
        self._is_ending = True
        world = self.dialing.process.world
        for seconds, socket, to_agent in (
            (at_agent, self.dialing, True),
            (at_coordinator, self.listening, False),
        ):
            when = max(world.now + seconds, self._last[to_agent])
            world.at_time(when, partial(socket.lose, self), socket.process)

    def hang_up(self, process: Process) -> None:
        delay = self._latency * process.random.random()
        self.end(delay, delay)

    def _end_with(self, process: Process) -> None:
        if process.loses_power:
            seconds = SILENCE_SECONDS + BEAT_SECONDS * process.random.random()
            self.end(seconds, seconds)
        else:
            self.hang_up(process)

    def _end_if_silent(self, socket: Any, seconds: float) -> None:
        if SILENCE_SECONDS < seconds < math.inf:  # else it dies
            self.end(SILENCE_SECONDS, SILENCE_SECONDS)


class Listening(SimulatedSocket):
    """The coordinator's socket."""

    def __init__(self, process: Process, network: Network, *handlers: Any) -> None:
        super().__init__(process, *handlers)
        self.network = network
        self._peers: dict[bytes, Connection] = {}
        network.listener = self
        process.on_death.append(self._stop)

    def _stop(self) -> None:
        if self.network.listener is self:
            self.network.listener = None

    def accept(self, connection: Connection) -> None:
        self._peers[connection.peer] = connection
        self.hear(int(import_zmq().EVENT_ACCEPTED), connection.fd)

    def send(self, frames: Sequence[Any]) -> None:
        self.process.call("send")
        connection = self._peers.get(frames[0])
        if connection is not None and not self.is_closed:
            connection.carry(frames[1:], to_agent=True)

    def lose(self, connection: Connection) -> None:
        if self._peers.pop(connection.peer, None) is not None:
            self.network.used.discard(connection.fd)
            self.hear(int(import_zmq().EVENT_DISCONNECTED), connection.fd)

    def close(self) -> None:
        super().close()
        self._stop()
        for connection in self._peers.values():
            connection.hang_up(self.process)


class Dialing(SimulatedSocket):
    """An agent's socket."""

    def __init__(self, process: Process, network: Network, *handlers: Any) -> None:
        super().__init__(process, *handlers)
        self._network = network
        self._connection: Connection | None = None
        self._unsent: list[list[bytes]] = []
        self._dial()

    def _dial(self) -> None:
        if self.is_closed or self._connection is not None:
            return
        process, listener = self.process, self._network.listener
        delay = DIAL_SECONDS * process.random.random()
        if listener is None or listener.process.stopped_until > process.world.now:
            process.world.at(delay, self._dial, process)
            return
        self._connection = connection = Connection(self, listener)
        listener.process.world.at(0.0, partial(listener.accept, connection), listener.process)
        self.hear(int(import_zmq().EVENT_HANDSHAKE_SUCCEEDED))
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            connection.carry(message, to_agent=False)

    def send(self, frames: Sequence[Any]) -> None:
        self.process.call("send")
        if self.is_closed:
            return
        if self._connection is None:
            self._unsent.append([bytes(frame) for frame in frames])
        else:
            self._connection.carry(frames, to_agent=False)

    def lose(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
            self.hear(int(import_zmq().EVENT_DISCONNECTED))
            self._dial()

    def close(self) -> None:
        super().close()
        if self._connection is not None:
            self._connection.hang_up(self.process)


class SimulatedStates:
    """What `BlobServer` is."""

    def __init__(self, process: Process, network: Network) -> None:
        self.process = process
        self.blobs: dict[int, Any] = {}
        self.port = network.take_port()
        self._network = network
        network.states[str(self.port)] = self
        process.on_death.append(self.close)

    def close(self) -> None:
        self._network.states.pop(str(self.port), None)

    def answer(self, asked: bytes, asking: StatesSocket) -> None:
        if str(self.port) not in self._network.states:
            return
        packed = self.blobs.get(int(asked))
        try:
            self.process.call("send")
        except ProcessDied:
            return
        delay = self._network.latency * self.process.random.random()
        fault = self.process.take_message_fault()
        if fault is not None and fault.kind == "cut":
            return
        content = b"" if packed is None else bytes(packed)
        size = b"" if packed is None else b"%d" % len(content)
        # In two pieces, as large states come.
        half = len(content) // 2 if packed is not None else 0
        pieces = [content[:half], content[half:]] if half else [content]
        for number, piece in enumerate(pieces):
            message = [Frame(size), Frame(piece)]
            delay += number * self._network.latency + (fault.seconds if fault is not None else 0.0)
            asking.process.world.at(delay, partial(asking.arrived.append, message), asking.process)


class StatesSocket:
    """A socket that is connected to `SimulatedStates`."""

    def __init__(self, process: Process, network: Network, address: str) -> None:
        self.process = process
        self.arrived: deque[list[Frame]] = deque()
        self._network = network
        self._port = address.rpartition(":")[2]

    def send(self, asked: bytes) -> None:
        self.process.call("send")
        server = self._network.states.get(self._port)
        if server is not None:
            delay = self._network.latency * self.process.random.random()
            server.process.world.at(delay, partial(server.answer, asked, self), server.process)

    def poll(self, milliseconds: float, _: object) -> bool:
        return self.process.wait(milliseconds / 1000, lambda: bool(self.arrived))

    def recv_multipart(self, *, copy: bool) -> list[Frame]:
        return self.arrived.popleft()

    def close(self) -> None:
        self.arrived = deque()  # what comes later goes elsewhere


class SimulatedConnections:
    """What `Connections` is, in a process of the world."""

    def __init__(self, process: Process, network: Network, keys: object = None) -> None:
        self._process = process
        self._network = network

    def listen(self, host: str, port: int, *handlers: Any) -> tuple[Listening, int]:
        self._process.call("listen")
        if self._network.listener is not None:
            raise InputError(f"cannot listen at {host}:{port}")
        return Listening(self._process, self._network, *handlers), port

    def dial(self, address: str, *handlers: Any) -> Dialing:
        self._process.call("dial")
        return Dialing(self._process, self._network, *handlers)

    def is_refused(self, address: str) -> bool:
        return self._network.listener is None

    def serve_states(self, host: str) -> SimulatedStates:
        self._process.call("listen")
        return SimulatedStates(self._process, self._network)

    def make_fetcher(self, host: str) -> Fetcher:
        dial = partial(StatesSocket, self._process, self._network)
        return Fetcher(dial, host, SimulatedClock(self._process))

    def close(self) -> None:
        """Nothing is left."""
