"""``python -m cerebro agent``: a worker on a node, which connects to a coordinator.

It supervises one worker process (`cerebro.cluster.supervisor`). It ends when the coordinator tells
it to or closes the connection, or when the program that started it ends. Restarting it is the
engine's task.

On SIGTERM it hands its states over to the coordinator and leaves the run, which loses only the unit
in progress.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from cerebro.cluster.connections import Connections
from cerebro.cluster.engine import AUTO, find_own_gpu
from cerebro.cluster.keys import Keys, Ticket, import_zmq
from cerebro.cluster.messages import list_versions, read_machine_id
from cerebro.cluster.states import CARRIED_BYTES, BlobServer, Fetcher
from cerebro.cluster.supervisor import Supervisor
from cerebro.cluster.wire import SharedSocket, decode_message, split_frames
from cerebro.errors import InputError, text_of
from cerebro.executors.wire import pickle_event
from cerebro.machine.devices import is_gpu
from cerebro.machine.local import LOCAL, Machine
from cerebro.machine.signals import TERMINATED, call_on_sigterm, defer_interrupts

STEP_SECONDS = 0.5
ENDED, REFUSED, UNHEARD = 0, 1, 2
"""Exit statuses: the run has ended; the coordinator rejects this agent, or has given it up (ENDED
if an engine has started it); there is no coordinator.
"""
CUT = 3  # from `Agent.run`: the connection has ended, but the coordinator has not ended it
QUEUE_SECONDS = 2.0  # for queued units, which are short, to end before states are handed over
LEAVE_SECONDS = 25.0  # to hand states over on SIGTERM; batch systems usually kill after 30 s


class Answers:
    """An agent's answers and the states that they leave, until these are handed over."""

    def __init__(self, socket: SharedSocket, states: BlobServer) -> None:
        self.states = states
        self._socket = socket
        self._lock = threading.Lock()
        self._has_handed_over = False

    def send(self, number: int, done: Future[Any], *, has_state: bool) -> None:
        """Send the answer of a call; `has_state`: its value is a result and the state it left.

        A small state is sent with it. Another one stays here, and is served to other agents.
        """
        error, value, packed, carried = done.exception(), None, None, None
        if error is None:
            value, packed = done.result() if has_state else (done.result(), None)
        elif not isinstance(error, Exception):
            error = RuntimeError(text_of(error))
        if packed is not None and memoryview(packed).nbytes <= CARRIED_BYTES:
            carried, packed = bytes(packed), None
        try:
            frames = split_frames(pickle_event((number, value, error, carried)))
        except Exception as cause:  # an exception that cannot be pickled
            trouble = RuntimeError(text_of(error or cause))
            frames = split_frames(pickle_event((number, None, trouble, None)))
        with self._lock:
            if self._has_handed_over:
                return
            if packed is not None:
                self.states.blobs[number] = packed
            self._socket.send([b"answer", *frames])

    def hand_over(self) -> None:
        """Send all states to the coordinator, and no answer from now on."""
        with self._lock:
            # A unit that is done later is not answered: its state would not be handed over.
            held, self._has_handed_over = list(self.states.blobs.items()), True
        for number, packed in held:
            self._socket.send([b"state", str(number).encode(), *split_frames(packed)])
        self._socket.send([b"leaving"])


class Agent:
    """One agent; `run` returns its exit status.

    `patience` is the time in seconds to wait for a coordinator that does not listen yet. The agent
    ends when the descriptor `stdin` is at its end, because its parent is then gone. `number` is its
    id; None: a new one. Only `supervisor`, `machine` and `connect` lead out of this process.
    """

    def __init__(
        self,
        ticket: Ticket,
        patience: float,
        stdin: int | None = None,
        *,
        number: str | None = None,
        supervisor: Callable[[str, Fetcher, SharedSocket], Supervisor] = Supervisor,
        machine: Machine = LOCAL,
        connect: Callable[[Keys], Connections] = Connections,
    ) -> None:
        self._id = number or uuid.uuid4().hex
        self._patience = patience
        self._stdin = stdin
        self._address = ticket.address
        self._machine = machine
        self._connections = connections = connect(Keys(ticket.key))
        states = connections.serve_states(ticket.listen)
        self._socket = connections.dial(ticket.address, self._receive, self._handle_event)
        self._answers = Answers(self._socket, states)
        fetcher = connections.make_fetcher(ticket.address.rpartition(":")[0])
        self._supervisor = supervisor(self._id, fetcher, self._socket)
        self._lanes = {
            "ordered": machine.tasks.pool(1, "cerebro-unit"),
            "control": machine.tasks.pool(2, "cerebro-control"),
        }
        self._status: int | None = None
        self._trouble: Exception | None = None
        self._is_welcome = False
        self._is_cut = False
        self._must_leave = False

    def leave(self) -> None:
        """Have `run` hand the states over and return; may be called by a signal handler."""
        self._must_leave = True
        self._socket.give_back()

    def run(self, *, returns: bool = False) -> int:
        """Serve the coordinator; `returns`: it was cut off before, so a closed port ends it."""
        hello = {
            "versions": list_versions(),
            "id": self._id,
            "host": os.uname().nodename,
            "machine": read_machine_id(),
            "pid": os.getpid(),
            "states": self._answers.states.port,
        }
        self._socket.send([b"hello", json.dumps(hello).encode()])
        now = self._machine.clock.monotonic
        begun = now()
        others = [] if self._stdin is None else [self._stdin]
        while True:
            ready = self._socket.wait_in_background(STEP_SECONDS, others)
            if self._trouble is not None:
                raise self._trouble
            if self._must_leave and self._status is None:
                handed_over = self._hand_over_states()
                tell(f"told to end (SIGTERM): {handed_over}")
                return TERMINATED
            if self._stdin in ready and not os.read(self._stdin or 0, 4096):
                return ENDED
            if self._status is not None:
                return self._status
            if returns and not self._is_welcome and self._is_refused():
                return ENDED
            if not self._is_welcome and now() - begun > self._patience:
                tell(
                    f"no coordinator with this key answers at {self._address} within "
                    f"{self._patience:g} s"
                )
                return UNHEARD

    def _is_refused(self) -> bool:
        return self._connections.is_refused(self._address)

    def close(self) -> None:
        """End the worker process, remove the files of this agent, and hang up."""
        self._supervisor.stop()
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)
        # A call that goes on would use what is closed, or leave files where they were removed.
        self._lanes["ordered"].shutdown()
        with contextlib.suppress(Exception):  # a process that does not end may use its files
            self._supervisor.process.close()
            self._lanes["control"].shutdown()
            self._supervisor.end()
        self._answers.states.close()
        self._socket.close()

    def release(self) -> None:
        """After `close`, free what otherwise only the end of the process would free."""
        self._supervisor.fetcher.close()
        self._connections.close()

    def _hand_over_states(self) -> str:
        """Send all states to the coordinator and await its confirmation; return what happened."""
        if not self._is_welcome:
            return "it was in no search"
        # A queued unit would overwrite the newest state that the coordinator knows. One that the
        # process has already got is short: it may end.
        self._supervisor.process.is_leaving = True
        if self._supervisor.process.has_queue:
            self._machine.tasks.wait_for([self._lanes["ordered"].submit(int)], QUEUE_SECONDS)
        self._answers.hand_over()
        now = self._machine.clock.monotonic
        end = now() + LEAVE_SECONDS
        while now() < end and self._status is None:
            self._socket.wait_in_background(STEP_SECONDS)
        if self._status == ENDED:
            return "the search has its states and goes on without it"
        return "the search has not confirmed that it has its states"

    def _receive(self, frames: list[Any]) -> None:
        """Handle a message, in the thread that has received it."""
        kind, *rest = frames
        if kind.bytes == b"end":
            self._end(ENDED)
        elif kind.bytes == b"refused" and self._status is None:
            tell(rest[0].bytes.decode())
            # An engine's task that fails may end those of the other agents, as on Spark.
            is_given_up = self._is_welcome and self._stdin is not None
            self._end(ENDED if is_given_up else REFUSED)
        elif kind.bytes == b"welcome":
            self._is_welcome = True
            if self._is_cut:  # the end of the connection was heard of first
                self._end(CUT)
        elif kind.bytes == b"call" and not (self._must_leave or self._supervisor.process.is_ending):
            try:
                self._begin_call(*decode_message(rest))
            except Exception as error:  # the call cannot be read here
                self._trouble = error
                self._socket.give_back()

    def _handle_event(self, event: dict[str, Any]) -> None:
        """Handle the beginning or the end of the connection."""
        self._is_cut = event["event"] == import_zmq().EVENT_DISCONNECTED
        if self._is_welcome and self._is_cut:
            self._end(CUT)

    def _end(self, status: int) -> None:
        if self._status is None:
            self._status = status
        self._socket.give_back()

    def _begin_call(
        self,
        number: int,
        lane: str,
        method: str,
        arguments: tuple[Any, ...],
        freed: list[int],
        has_state: bool,
    ) -> None:
        for blob in freed:
            self._answers.states.blobs.pop(blob, None)
        if method == "run":
            self._supervisor.process.offer(arguments[0])
        # The coordinator gives the names: `agent.call("begin", ...)`, `agent.control("ping")`.
        job = self._lanes[lane].submit(getattr(self._supervisor, method), *arguments)
        job.add_done_callback(lambda done: self._answer(number, lane, done, has_state))

    def _answer(self, number: int, lane: str, done: Future[Any], has_state: bool) -> None:
        process = self._supervisor.process
        if process.is_ending:
            # The coordinator learns that the agent is gone. A dropped call has no result.
            return
        self._answers.send(number, done, has_state=has_state)
        if lane == "ordered" and not process.has_queue:
            self._socket.give_back()  # this thread will not wait for messages


def main(ticket: Ticket, patience: float, stdin: int | None = None, device: str = AUTO) -> int:
    """Be an agent; return the exit status.

    The coordinator gives up an agent that is cut off, because of the network or because one end was
    stopped for a while. The agent then returns as a new one.

    Raises InputError if pyzmq is not installed or the address is invalid, and DeviceError if
    `device` is a GPU that cannot be used.
    """
    zmq = import_zmq()
    if is_gpu(device):
        find_own_gpu(device)  # now, and not when a search has begun
    supervisor = partial(Supervisor, find_gpu=partial(find_own_gpu, device))

    def make_agent() -> Agent:
        try:
            return Agent(ticket, patience, stdin, supervisor=supervisor)
        except zmq.ZMQError as error:
            raise InputError(
                f"{ticket.address!r} is not an address ({text_of(error)}): give host:port of the "
                "coordinator"
            ) from error

    return run_agents(make_agent)


def run_agents(make_agent: Callable[[], Agent]) -> int:
    """Run one agent after the other until one is not cut off; return its exit status."""
    status = None
    while True:
        returns = status == CUT
        agent = make_agent()
        try:
            with call_on_sigterm(agent.leave):
                status = agent.run(returns=returns)
        finally:
            with defer_interrupts():
                agent.close()
        if status != CUT:
            return ENDED if returns and status == UNHEARD else status
        tell("the connection was lost; reconnecting")
        agent.release()


def tell(text: str) -> None:
    """Say what has become of this agent in its output."""
    print(f"cerebro agent: {text}", file=sys.stderr)
