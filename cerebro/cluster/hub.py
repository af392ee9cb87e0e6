"""The coordinator's end of the connections to agents.

The executor knows a cluster by the methods of `Hub`, and an agent by those of `RemoteAgent`. A node
is the machine of agents that Ray starts (`cerebro.cluster.engines.ray`), or else each agent by
itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

import cerebro._core as _core
from cerebro.cluster.connections import Connections
from cerebro.cluster.engine import Engine
from cerebro.cluster.keys import Keys, format_address, import_zmq
from cerebro.cluster.messages import JobResult, StateIn, list_versions, read_machine_id
from cerebro.cluster.states import Blob, HeldState, StateRefs
from cerebro.cluster.wire import decode_message, split_frames
from cerebro.errors import CorruptDataError, InputError, WorkerError, text_of
from cerebro.executors.wire import pickle_message
from cerebro.machine.local import LOCAL, Machine
from cerebro.machine.signals import defer_interrupts
from cerebro.worker.messages import Job, Task

START_SECONDS = 120.0  # the time within which the first agents must connect
LATE_SECONDS = 20.0  # the time after which a run begins with fewer agents than it wants
LEAVE_SECONDS = 10.0  # the time within which agents must disconnect after they are told to end
STEP_SECONDS = 0.2


class AgentError(Exception):
    """A call of an agent has failed; `cause` is the exception of its method, if it raised."""

    def __init__(self, text: str, cause: BaseException | None = None) -> None:
        super().__init__(text)
        self.cause = cause


def describe_cause(error: BaseException) -> str:
    """Return the cause of a failed call, as one line."""
    return text_of(getattr(error, "cause", None) or error)


class Node(Protocol):
    """A machine of a cluster, or an agent that counts as one."""

    @property
    def id(self) -> str:
        """Its number in the cluster."""

    @property
    def address(self) -> str: ...

    def answers(self) -> bool:
        """Whether it still accepts connections."""


AnyNode = TypeVar("AnyNode", bound=Node)


class RemoteAgent:
    """An agent as the coordinator calls it: the supervisor of a worker, and a `Node` by itself.

    It holds the states that its worker has made. The coordinator calls the methods of
    `cerebro.cluster.supervisor.Supervisor` by name. Every call returns at once; its future raises
    AgentError if the method raises or the agent is lost. Calls that are made before the agent has
    connected are sent when it does.
    """

    def __init__(self, hub: Hub, number: str) -> None:
        self.id = number  # different from all other agents' and nodes'
        self.machine = self.address = ""
        self.peer: bytes | None = None
        self.fd = self.pid = -1
        self.early: list[list[Any]] = []
        self.states = StateRefs()
        self.pending: dict[int, tuple[Future[Any], Any, Blob | None]] = {}
        self.is_taken = False
        self.is_gone = False
        self.is_killed = False  # the connection is closed, and `is_gone` set, when it has ended
        self.has_left = False  # whether it has said that it leaves, because it was told to end
        self._hub = hub

    def connect(self, peer: bytes, fd: int, host: str, hello: dict[str, Any]) -> None:
        """Take the connection over which the agent has sent its hello."""
        self.machine, self.address = str(hello["machine"]), str(hello["host"])
        self.pid = int(hello["pid"])
        host = host.removeprefix("::ffff:")  # a peer with IPv4 at a socket for both
        port = int(hello["states"])
        is_local = host in ("127.0.0.1", "::1")
        self.states.move_to(f":{port}" if is_local else format_address(host, port))
        self.fd, self.peer = fd, peer

    def answers(self) -> bool:
        return not (self.is_gone or self.is_killed)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method after all earlier calls have ended."""
        return self._hub.send(self, "ordered", method, arguments)[0]

    def control(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method without waiting for earlier calls."""
        return self._hub.send(self, "control", method, arguments)[0]

    def run(self, job: Job, state: StateIn | None) -> tuple[Future[JobResult], Any]:
        """Run a job; return its future result, and a reference to the state that it will leave."""
        return self._hub.send(self, "ordered", "run", (job, state))

    def kill(self, trouble: str | None = None) -> None:
        """End the agent and its worker process; `trouble` is why, if the run still needs them."""
        self.is_killed = True
        self._hub.end(self, trouble)


class Hub:
    """Accepts agents, and calls them: a cluster whose agents are started by `engine`.

    The engine is closed with the hub. Port 0 is any free one. Raises InputError if the hub cannot
    listen there. Only `machine` and `connect` lead out of this process.
    """

    dials_in = True  # whether nodes come and go with their agents: a new node replaces a lost one
    late_advice = "is its machine overloaded, or its disk slow? Use fewer workers="

    def __init__(
        self,
        keys: Keys,
        engine: Engine,
        host: str,
        port: int = 0,
        *,
        machine: Machine = LOCAL,
        connect: Callable[[Keys], Connections] = Connections,
    ) -> None:
        self.keys = keys
        self.engine = engine
        self.changed: Callable[[], None] = lambda: None
        """What is called, in any thread, when an agent joins or leaves."""
        self.refusals: list[str] = []
        self._machine = machine
        self._connect = connect
        self._cut: set[int] = set()  # descriptors of connections that ended before their hello
        self._lock = threading.RLock()
        self._moved = machine.tasks.event()  # set when an agent has joined or left
        self._agents: dict[bytes, RemoteAgent] = {}
        self._expected: dict[str, RemoteAgent] = {}
        self._numbers = count(1)
        self._is_closing = False
        self._connections = connect(keys)
        try:
            self._socket, self.port = self._connections.listen(
                host, port, self._receive, self._handle_event
            )
        except BaseException:
            self._connections.close()
            raise
        self._task = machine.tasks.repeat(self._serve, self._has_work, "cerebro-hub")

    # --- nodes -----------------------------------------------------------------

    def choose_nodes(self, workers: int | None) -> Sequence[Node]:
        """Return the node of each first worker; None for `workers`: as many as fit.

        There may be fewer than `workers` if other nodes can join later. Raises InputError if the
        workers do not fit, or no node joins.
        """
        needed = workers if workers is not None else self.engine.size
        clock = self._machine.clock
        begun = clock.monotonic()
        while True:
            self._moved.clear()
            free = [agent for agent in self._list_agents() if not agent.is_taken]
            if free and len(free) >= (needed or 1):
                return free[:needed]
            failure = self.engine.failure()
            waited = clock.monotonic() - begun
            if waited > START_SECONDS or failure or (free and waited > LATE_SECONDS):
                break
            self._moved.wait(STEP_SECONDS)
        if free and not failure:
            return free
        text = "; ".join([*dict.fromkeys(self.refusals), *([failure] if failure else [])])
        raise InputError(
            f"no agent has connected{f' ({text})' if text else ''}: start agents that have "
            "the run's key and the same versions of Cerebro and Python, and that reach this "
            f"machine at port {self.port}"
        )

    def nodes(self) -> Sequence[Node]:
        """Return the nodes that are alive, or are assumed to be."""
        return self._list_agents()

    def select_reachable(self, nodes: Sequence[AnyNode]) -> list[AnyNode]:
        """Return the nodes that answer: Ray takes half a minute to notice a lost node."""
        if not nodes:
            return []
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda node: node.answers(), nodes))
        return [node for node, there in zip(nodes, answers, strict=True) if there]

    def count_room(self, node: Node) -> int:
        """Return how many workers a new node takes."""
        return 1

    def is_here(self, node: Node) -> bool:
        """Whether a node is the coordinator's machine, which has the data."""
        return isinstance(node, RemoteAgent) and node.machine == read_machine_id()

    def acquire_agent(self, node: Node) -> RemoteAgent:
        """Start or take an agent on a node; raise WorkerError if the node has none left."""
        assert isinstance(node, RemoteAgent)
        if not node.answers():
            raise WorkerError(f"node {node.address} is gone")
        node.is_taken = True
        return node

    def fetch_to_file(self, held: HeldState, gone: Collection[str], path: Path) -> None:
        """Write a state to a file, unless its agent is among those that are `gone`."""
        # Its own connections: a socket must not be closed by another thread, as `close` would.
        connections = self._connect(self.keys)
        try:
            fetcher = connections.make_fetcher("127.0.0.1")
            packed = fetcher.fetch(held.ref, lambda: held.agent in gone or self._is_closing)
            if _core.hash_state(packed) != held.state_hash:
                raise CorruptDataError("its hash differs")
            self._machine.disk.write_over(path, packed)
        finally:
            connections.close()

    def wait_for_calls(self, calls: Collection[Future[Any]], seconds: float) -> None:
        """Wait up to `seconds` until all calls are answered, after `release` if this had waited."""
        self._machine.tasks.wait_for(calls, seconds)

    def close(self) -> None:
        """End everything that was started for the run; the agents have been told to end."""
        with contextlib.suppress(Exception):
            self.engine.stop()
        self._socket.give_back()
        for agent in self._list_agents():
            self.end(agent)
        clock = self._machine.clock
        end = clock.monotonic() + LEAVE_SECONDS
        while self._list_agents() and (seconds := end - clock.monotonic()) > 0:
            self._moved.wait(min(STEP_SECONDS, seconds))
            self._moved.clear()
        self.engine.close()
        self._is_closing = True
        self._socket.give_back()
        self._task.join()
        self._socket.close()
        self._connections.close()

    # --- agents that are known before they connect -----------------------------

    def expect(self, agent: RemoteAgent) -> None:
        """Use `agent` for the one with its number, which has yet to connect."""
        with self._lock:
            self._expected[agent.id] = agent

    def mark_lost(self, agent: RemoteAgent, error: AgentError) -> None:
        """Consider an agent lost, whether it has connected or not."""
        with self._lock:
            self._expected.pop(agent.id, None)
        self._drop_agent(agent, error)

    # --- calls ---------------------------------------------------------------

    def send(
        self, agent: RemoteAgent, lane: str, method: str, arguments: tuple[Any, ...]
    ) -> tuple[Future[Any], Blob | None]:
        """Call a method of an agent; return its future, and the state that it will leave."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        has_state = method == "run"  # no other method leaves a state
        ref = agent.states.make(number) if has_state else None
        is_plain = has_state and isinstance(arguments[0], Task)
        message = number, lane, method, arguments, agent.states.take_freed(), has_state
        frames = split_frames(pickle_message(message, is_plain=is_plain))
        with defer_interrupts(), self._lock:
            is_gone = agent.is_gone  # later, `_drop_agent` finds the future
            if not is_gone:
                # The arguments refer to states, which must live until the answer.
                agent.pending[number] = future, arguments, ref
                if agent.peer is None:
                    agent.early.append([b"call", *frames])
                else:
                    self._socket.send([agent.peer, b"call", *frames])
        if is_gone:
            future.set_exception(AgentError("it has closed the connection"))
        return future, ref

    def end(self, agent: RemoteAgent, trouble: str | None = None) -> None:
        """Tell a connected agent to end at once; `trouble` is why, if its run has given it up."""
        frames: list[Any] = [b"end"]
        if trouble is not None:
            frames = [b"refused", f"its search has given it up: {trouble}".encode()]
        with defer_interrupts():
            self._socket.send([agent.peer, *frames])

    # --- messages of agents ----------------------------------------------------

    def wait(self, seconds: float, others: Sequence[int]) -> set[int]:
        """Wait for an answer, at most `seconds`; return which of the descriptors are readable."""
        return self._socket.wait(seconds, others)

    def release(self) -> None:
        """Prepare for a wait of this thread on futures, other than by `wait`."""
        self._socket.give_back()

    def _serve(self) -> bool:
        """Wait for messages once; return whether there may be more."""
        if not self._is_closing:
            self._socket.wait_in_background(math.inf)
            return True
        for agent in self._list_agents():
            self._drop_agent(agent)
        return False

    def _has_work(self) -> bool:
        return self._is_closing or self._socket.has_come

    def _list_agents(self) -> list[RemoteAgent]:
        with self._lock:
            return list(self._agents.values())

    def _handle_event(self, event: dict[str, Any]) -> None:
        fd = event["value"]
        if event["event"] == import_zmq().EVENT_ACCEPTED:
            self._cut.discard(fd)
            return
        agents = [agent for agent in self._list_agents() if agent.fd == fd]
        if not agents:
            self._cut.add(fd)
        for agent in agents:
            self._drop_agent(agent)

    def _drop_agent(self, agent: RemoteAgent, error: AgentError | None = None) -> None:
        with self._lock:
            if agent.peer is not None:
                self._agents.pop(agent.peer, None)
            agent.is_gone = True
            pending, agent.pending = agent.pending, {}
        self._moved.set()
        for future, *_ in pending.values():
            future.set_exception(error or AgentError("it has closed the connection"))
        self.changed()

    def _receive(self, frames: list[Any]) -> None:
        peer, kind, *rest = frames
        if kind.bytes == b"hello" and rest:
            self._handle_hello(peer.bytes, rest[0])
        agent = self._agents.get(peer.bytes)
        if agent is None:
            return
        if kind.bytes == b"state" and rest and rest[0].bytes.isdigit():
            held = agent.states.by_number.get(int(rest[0].bytes))
            if held is not None:
                held.packed = b"".join(part.buffer for part in rest[1:])
        elif kind.bytes == b"leaving":  # its states came before
            agent.has_left = True
            self.end(agent)
            self._drop_agent(agent)
        elif kind.bytes == b"answer":
            try:
                number, value, error, packed = decode_message(rest)
            except Exception as cause:  # what a broken pickle raises: this agent is unusable
                self.end(agent, f"its answer cannot be read: {text_of(cause)}")
                self._drop_agent(agent)
                return
            with self._lock:  # `mark_lost` may be called by another thread
                future, _, ref = agent.pending.pop(number, (None, None, None))
            if future is None:
                return
            if packed is not None and ref is not None:
                ref.packed = packed
            if error is not None:
                future.set_exception(AgentError(text_of(error), error))
            else:
                future.set_result(value)

    def _handle_hello(self, peer: bytes, frame: Any) -> None:
        """Accept an agent, or reject it by name; its hello is JSON, which cannot run code."""
        try:
            hello = json.loads(frame.bytes)
            here = list_versions()
            wrong = [
                f"{name} is {hello['versions'].get(name)} there and {here[name]} here"
                for name in here
                if hello["versions"].get(name) != here[name]
            ]
            number, host = str(hello["id"]), str(hello["host"])
            if not wrong:
                self._accept(peer, frame, number, hello)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._socket.send([peer, b"refused", f"a wrong hello: {error}".encode()])
            return
        if wrong:
            text = f"an agent on {host} is refused: {', '.join(wrong)}"
            self.refusals.append(text)
            self._socket.send([peer, b"refused", text.encode()])
            expected = self._expected.get(number)
            if expected is not None:
                self.mark_lost(expected, AgentError(text))
        else:
            self.changed()

    def _accept(self, peer: bytes, frame: Any, number: str, hello: dict[str, Any]) -> None:
        fd = int(frame.get("__fd"))
        if fd in self._cut:
            return
        with self._lock:
            agent = self._expected.get(number) or RemoteAgent(self, number)
            agent.connect(peer, fd, str(frame.get("Peer-Address")), hello)
            self._expected.pop(number, None)
            self._socket.send([peer, b"welcome"])
            for frames in agent.early:
                self._socket.send([peer, *frames])
            agent.early.clear()
            self._agents[peer] = agent
        self._moved.set()
