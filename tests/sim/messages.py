"""Simulated sockets, below the real `Channel`, and the wait for them."""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Callable

from world import Process

from cerebro.executors.base import Wake
from cerebro.executors.process import Ready
from cerebro.executors.wire import LENGTH, Channel

CAPACITY = 212_992  # bytes that a socket takes before its peer reads them
MESSAGE_SECONDS = 2e-4  # a message is under way for up to this time
CUT_AT_DEATH = 0.3  # the probability that the last message of a dying process arrives in part

_descriptors = itertools.count(1000)


class Socket:
    """One end of a connection; its process gets `on_arrival` and `on_end`.

    What is sent arrives later, in its order, even if the sender has died meanwhile.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.on_arrival: Callable[[], object] = lambda: None
        self.on_end: Callable[[], object] = lambda: None
        self.ends_at: float | None = None  # when this end learns that the connection has ended
        self._peer = self
        self._number = next(_descriptors)
        self._under_way: deque[tuple[float, bytes]] = deque()  # bytes for this end
        self._unread = 0
        self._is_closed = False
        process.on_death.append(self._end_at_death)

    def setblocking(self, _: bool) -> None:
        """Sockets here never block."""

    def fileno(self) -> int:
        return -1 if self._is_closed else self._number

    def send(self, piece: memoryview) -> int:
        process, peer = self.process, self._peer
        process.call("send")
        if self._is_closed or self.ends_at is not None:
            raise BrokenPipeError(errno.EPIPE, "the peer has gone")
        room = CAPACITY - peer._unread
        if room <= 0:
            raise BlockingIOError
        data = bytes(piece[:room])
        delay = MESSAGE_SECONDS * process.random.random()
        fault = process.take_message_fault()
        if fault is None:
            peer._get(data, delay)
        elif fault.kind == "delay":
            peer._get(data, delay + fault.seconds)
        elif fault.kind == "double":
            # An agent's worker would obey a command twice, as a coordinator's would.
            twice = is_message(data) and not process.name.startswith("agent")
            peer._get(data + data if twice else data, delay)
        else:
            peer._get(data[: process.random.randrange(len(data))], delay)
            peer._end(delay)
            self._end(0.0)
        return len(data)

    def _get(self, data: bytes, delay: float) -> None:
        world = self.process.world
        when = world.now + delay
        if self._under_way:
            when = max(when, self._under_way[-1][0])
        self._under_way.append((when, data))
        self._unread += len(data)
        world.at_time(when, self._arrive, self.process)

    def _arrive(self) -> None:
        if not self._is_closed:
            self.on_arrival()

    def recv(self, most: int) -> bytes:
        now = self.process.world.now
        received = bytearray()
        while self._under_way and self._under_way[0][0] <= now and len(received) < most:
            when, data = self._under_way.popleft()
            room = most - len(received)
            if len(data) > room:
                self._under_way.appendleft((when, data[room:]))
            received += data[:room]
        self._unread -= len(received)
        if not received and not self.has_ended:
            raise BlockingIOError
        return bytes(received)

    @property
    def has_room(self) -> bool:
        return self._unread < CAPACITY

    @property
    def accepts(self) -> bool:
        """Whether `send` would not block."""
        return self._peer.has_room or self.ends_at is not None

    @property
    def is_readable(self) -> bool:
        now = self.process.world.now
        return (bool(self._under_way) and self._under_way[0][0] <= now) or self.has_ended

    @property
    def has_ended(self) -> bool:
        return self.ends_at is not None and self.ends_at <= self.process.world.now

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._peer._end(MESSAGE_SECONDS * self.process.random.random())

    def _end(self, delay: float) -> None:
        """Let this end learn that the connection has ended, after what is under way."""
        if self.ends_at is None and not self._is_closed:
            world = self.process.world
            last = self._under_way[-1][0] if self._under_way else world.now
            self.ends_at = max(world.now + delay, last)
            world.at_time(self.ends_at, self.on_end, self.process)

    def _end_at_death(self) -> None:
        theirs = self._peer._under_way
        world, random = self.process.world, self.process.random
        if theirs and theirs[-1][0] > world.now and random.random() < CUT_AT_DEATH:
            when, data = theirs.pop()
            cut = data[: int(len(data) * random.random())]
            theirs.append((when, cut))
            self._peer._unread -= len(data) - len(cut)
        self.close()


def make_pair(one: Process, other: Process) -> tuple[Socket, Socket]:
    ours, theirs = Socket(one), Socket(other)
    ours._peer, theirs._peer = theirs, ours
    return ours, theirs


def is_message(data: bytes) -> bool:
    """Return whether bytes are one whole message."""
    return len(data) >= LENGTH.size and LENGTH.unpack_from(data)[0] == len(data) - LENGTH.size


class SimulatedChannel(Channel):
    """The real channel over a simulated socket."""

    def __init__(self, socket: Socket) -> None:
        super().__init__(socket)  # type: ignore[arg-type]
        self.socket = socket


class SimulatedListener:
    """What `Listener` is, for simulated workers; `wake` is a `network.SimulatedSocket` or None."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._workers: dict[int, object] = {}
        self._wake: Wake | None = None

    def add(self, number: int, process: object) -> None:
        self._workers[number] = process

    def remove(self, process: object) -> None:
        (number,) = [number for number, its in self._workers.items() if its is process]
        del self._workers[number]

    def update(self, process: object) -> None:
        """Whether bytes are unsent is looked up when it matters."""

    def set_wake(self, wake: Wake | None) -> None:
        self._wake = wake

    def wait(self, seconds: float | None) -> list[tuple[Ready, bool]]:
        self._process.call("wait")
        self._process.wait(seconds, self._is_any_ready)
        ready = [pair for item in self._workers.items() for pair in self._list_ready(*item)]
        if self._wake is not None and self._wake.is_readable:
            ready.append((Ready(-1, is_wake=True), False))
        self._process.random.shuffle(ready)
        return ready

    def _is_any_ready(self) -> bool:
        if self._wake is not None and self._wake.is_readable:
            return True
        for worker in self._workers.values():
            socket = worker.channel.socket
            if socket.is_readable or worker.has_ended:
                return True
            if worker.channel.has_unsent and socket.accepts:
                return True
        return False

    def _list_ready(self, number: int, worker: object) -> list[tuple[Ready, bool]]:
        socket = worker.channel.socket
        writable = worker.channel.has_unsent and socket.accepts
        ready = [(Ready(number), writable)] if writable or socket.is_readable else []
        return [*ready, (Ready(number, has_ended=True), False)] if worker.has_ended else ready

    def close(self) -> None:
        self._workers.clear()
