"""``python -m cerebro agent``: a worker on a node, which connects to a coordinator.

It supervises one worker process (`cerebro.cluster.supervisor`) until the coordinator tells it to
end or closes the connection, or the program that started it ends. Restarting it is the engine's
task.

On SIGTERM it hands its states over to the coordinator and leaves the run: only the unit in progress
is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

from cerebro.cluster.blobs import BlobServer, Fetcher
from cerebro.cluster.gpus import AUTO, own_gpu
from cerebro.cluster.hello import machine, versions
from cerebro.cluster.keys import Keys, Ticket, import_zmq
from cerebro.cluster.messages import StateIn
from cerebro.cluster.states import CARRIED_BYTES
from cerebro.cluster.supervisor import Supervisor
from cerebro.cluster.wire import dial, doorman, frames_of_answer, message_of, pieces
from cerebro.errors import InputError, text_of
from cerebro.machine.devices import Device, is_gpu
from cerebro.machine.signals import TERMINATED, hears_sigterm
from cerebro.machine.wake_pipe import WakePipe

STEP_MILLISECONDS = 500
ENDED, REFUSED, UNHEARD = 0, 1, 2
"""Exit statuses: the run has ended; the coordinator rejects this agent; there is no coordinator."""
QUEUE_SECONDS = 2.0
"""The time for queued units, which are short, to end before states are handed over."""
LEAVE_SECONDS = 25.0
"""The time to hand states over on SIGTERM; batch systems usually kill after 30 s."""


class AgentSupervisor(Supervisor):
    """The supervisor in an agent.

    Parameters
    ----------
    node
        The number of its node: the agent's own, unless nodes can have several agents.
    fetcher
        Fetches the states of other agents.
    device
        See `cerebro.cluster.gpus.own_gpu`.
    """

    def __init__(self, node: str, fetcher: Fetcher, device: str = AUTO) -> None:
        super().__init__()
        self._device = device
        self._number = node
        self._fetcher = fetcher
        self.is_ending = False

    def _node(self) -> str:
        return self._number

    def _given_gpu(self) -> Device:
        return own_gpu(self._device)

    def _fetch(self, state: StateIn) -> Any:
        return self._fetcher.fetch(state.ref, lambda: self.is_ending or state.agent in self._gone)


class Agent:
    """One agent; `run` returns its exit status.

    Parameters
    ----------
    patience
        Seconds to wait for a coordinator that does not listen yet.
    stdin
        A descriptor whose end means that the program that started this one is gone.
    number
        The number by which the coordinator knows it; None: a new one.
    supervisor
        Makes the supervisor of its worker, given the agent's number and the states of others.
    """

    def __init__(
        self,
        ticket: Ticket,
        patience: float,
        stdin: int | None = None,
        *,
        number: str | None = None,
        supervisor: Callable[[str, Fetcher], AgentSupervisor] = AgentSupervisor,
    ) -> None:
        zmq = import_zmq()
        self._id = number or uuid.uuid4().hex
        self._patience = patience
        self._stdin = stdin
        self._address = ticket.address
        keys = Keys(ticket.key)
        self._context = zmq.Context()
        self._guard = doorman(self._context, keys)
        self._states = BlobServer(self._context, keys, ticket.listen)
        self._socket = dial(self._context, keys, ticket.address)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        host = ticket.address.rpartition(":")[0]
        self._supervisor = supervisor(self._id, Fetcher(self._context, keys, host))
        self._ordered = ThreadPoolExecutor(1, "cerebro-unit")
        self._control = ThreadPoolExecutor(2, "cerebro-control")
        self._answers: deque[list[Any]] = deque()
        self._pipe = WakePipe()
        self._is_welcome = False
        self._must_leave = False

    def leave(self) -> None:
        """Have `run` hand the states over and return; may be called by a signal handler."""
        self._must_leave = True
        self._pipe.wake()

    def run(self) -> int:
        zmq = import_zmq()
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._pipe.fileno()):
            poller.register(source, zmq.POLLIN)
        if self._stdin is not None:
            poller.register(self._stdin, zmq.POLLIN)
        with contextlib.suppress(zmq.Again):  # what listens there speaks no CURVE: wait no longer
            hello = json.dumps(self._hello()).encode()
            self._socket.send_multipart([b"hello", hello], zmq.NOBLOCK)
        begun = time.monotonic()
        while True:
            ready = dict(poller.poll(STEP_MILLISECONDS))
            if self._pipe.fileno() in ready:
                self._pipe.clear()
            self._send_answers()
            if self._must_leave:
                self._hand_over()
                return TERMINATED
            if self._stdin in ready and not os.read(self._stdin or 0, 4096):
                return ENDED
            if self._socket in ready:
                status = self._receive()
                if status is not None:
                    return status
            if self._monitor in ready and self._has_hung_up():
                return ENDED if self._is_welcome else UNHEARD
            if not self._is_welcome and time.monotonic() - begun > self._patience:
                print(
                    f"cerebro agent: no coordinator with this key answers at {self._address} "
                    f"within {self._patience:g} s",
                    file=sys.stderr,
                )
                return UNHEARD

    def close(self) -> None:
        """End the worker process and remove the files of this agent."""
        self._supervisor.is_ending = True  # its thread may wait for a state
        with contextlib.suppress(Exception):
            self._supervisor.end()

    # --- inside ----------------------------------------------------------------

    def _send_answers(self) -> None:
        while self._answers:
            self._socket.send_multipart(self._answers.popleft(), copy=False)

    def _hand_over(self) -> None:
        """Send all states to the coordinator, and wait until it has them or is gone."""
        if not self._is_welcome:
            return
        # A queued unit would overwrite the newest state that the coordinator knows. One that the
        # process has already got is short: it may end.
        self._supervisor.is_leaving = True
        if self._supervisor.has_queue:
            with contextlib.suppress(FutureTimeoutError):
                self._ordered.submit(int).result(QUEUE_SECONDS)
        self._send_answers()
        for number, packed in self._states.held():
            name = str(number).encode()
            self._socket.send_multipart([b"state", name, *pieces(packed)], copy=False)
        self._socket.send(b"leaving")
        end = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < end and not self._has_hung_up():
            if self._socket.poll(STEP_MILLISECONDS) and self._receive(calls=False) is not None:
                return

    def _hello(self) -> dict[str, Any]:
        return {
            "versions": versions(),
            "id": self._id,
            "host": os.uname().nodename,
            "machine": machine(),
            "pid": os.getpid(),
            "states": self._states.port,
        }

    def _receive(self, *, calls: bool = True) -> int | None:
        """Handle what has come; return the exit status if that ends the agent."""
        zmq = import_zmq()
        with contextlib.suppress(zmq.Again):
            while True:
                kind, *rest = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                if kind.bytes == b"end":
                    return ENDED
                if kind.bytes == b"refused":
                    print(f"cerebro agent: {rest[0].bytes.decode()}", file=sys.stderr)
                    return REFUSED
                if kind.bytes == b"welcome":
                    self._is_welcome = True
                if kind.bytes == b"call" and calls:
                    self._begin_call(*message_of(rest))
        return None

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
            self._states.free(blob)
        lanes = {"ordered": self._ordered, "control": self._control}
        if method == "run":
            self._supervisor.offer(arguments[0])
        job = lanes[lane].submit(getattr(self._supervisor, method), *arguments)
        job.add_done_callback(lambda done: self._answer(number, done, has_state))

    def _answer(self, number: int, done: Future[Any], has_state: bool) -> None:
        error, value, carried = done.exception(), None, None
        if error is None:
            value = done.result()
            if has_state:
                value, packed = value
                if packed is not None and memoryview(packed).nbytes <= CARRIED_BYTES:
                    carried = bytes(packed)
                elif packed is not None:
                    self._states.add(number, packed)
        if error is not None and not isinstance(error, Exception):
            error = RuntimeError(text_of(error))
        try:
            frames = frames_of_answer((number, value, error, carried))
        except Exception as cause:  # an exception that cannot be pickled
            frames = frames_of_answer((number, None, RuntimeError(text_of(error or cause)), None))
        self._answers.append([b"answer", *frames])
        self._pipe.wake()

    def _has_hung_up(self) -> bool:
        """Whether the coordinator, once connected, is gone."""
        from zmq.utils.monitor import recv_monitor_message

        zmq = import_zmq()
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED and self._is_welcome:
                return True
        return False


def main(ticket: Ticket, patience: float, stdin: int | None = None, device: str = AUTO) -> int:
    """Be an agent; return the exit status.

    Raises
    ------
    InputError
        If pyzmq is not installed or the address is invalid.
    DeviceError
        If `device` is a GPU that cannot be used.
    """
    zmq = import_zmq()
    if is_gpu(device):
        own_gpu(device)  # now, and not when a search has begun
    try:
        agent = Agent(ticket, patience, stdin, supervisor=partial(AgentSupervisor, device=device))
    except zmq.ZMQError as error:
        raise InputError(
            f"{ticket.address!r} is not an address ({text_of(error)}): give host:port of the "
            "coordinator"
        ) from error
    try:
        with hears_sigterm(agent.leave):
            return agent.run()
    finally:
        agent.close()
