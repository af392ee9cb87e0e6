"""Which thread sends and receives between a coordinator and its agents, and what may go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("zmq")

import zmq
from clusters import wait_until
from dialing import run_to_the_end

from cerebro.cluster import hub as module
from cerebro.cluster import wire
from cerebro.cluster.agent import CUT, Agent
from cerebro.cluster.engine import Engine
from cerebro.cluster.keys import Keys, Ticket
from cerebro.cluster.messages import list_versions
from cerebro.cluster.supervisor import Supervisor
from cerebro.machine.signals import wait_for
from cerebro.worker.messages import Task


@pytest.fixture
def hub():
    one = module.Hub(Keys.generate(), Engine(), "127.0.0.1")
    yield one
    one.close()


@contextlib.contextmanager
def running_agent(hub, supervisor):
    """Run an agent in a thread of this process; yields it and the hub's end of its connection."""
    ticket = Ticket(f"127.0.0.1:{hub.port}", hub.keys.key, listen="127.0.0.1")
    agent = Agent(ticket, 20.0, supervisor=supervisor)
    thread = threading.Thread(target=run_to_the_end, args=[agent])
    thread.start()
    try:
        wait_until(hub.nodes)
        yield agent, hub.nodes()[0]
    finally:
        hub.close()
        thread.join(30)
        assert not thread.is_alive()


class MakesStates(Supervisor):
    """Each unit leaves a state that is too large for an answer."""

    begun = threading.Event()
    may_end = threading.Event()

    def run(self, job, state):
        self.begun.set()
        assert self.may_end.wait(30)
        return job, np.zeros(1 << 20, np.uint8)


def test_a_unit_ending_while_its_agent_leaves_is_answered_only_with_its_state(hub, monkeypatch):
    """Else the coordinator would believe in a state that is gone."""
    with running_agent(hub, MakesStates) as (agent, line):
        MakesStates.may_end.set()
        first, of_first = line.run("first", None)
        assert first.result(30) == "first"
        MakesStates.may_end.clear()
        MakesStates.begun.clear()
        second, of_second = line.run("second", None)
        assert MakesStates.begun.wait(30)
        send = agent._socket.send

        def a_unit_ends_then(frames):
            send(frames)
            if frames[0] == b"state":
                MakesStates.may_end.set()
                time.sleep(0.3)  # it would be answered now

        monkeypatch.setattr(agent._socket, "send", a_unit_ends_then)
        agent.leave()
        with pytest.raises(module.AgentError, match="closed the connection"):
            second.result(30)
        assert of_first.packed is not None and of_second.packed is None


class WritesLate(Supervisor):
    """Each call writes a file after it was told to stop."""

    begun: ClassVar[list[str]] = []
    ended: ClassVar[list[str]] = []

    def run(self, job, state):
        folder = self._the_cache.scratch()
        self.begun.append(job)
        wait_until(lambda: self.process.is_ending)
        time.sleep(0.3)
        (folder / "late").touch()
        self.ended.append(job)
        return None, None

    def begin_data(self, manifest):
        self.run(manifest, None)


@pytest.mark.parametrize(("lane", "threads"), [("ordered", 1), ("control", 2)])
def test_files_are_removed_when_the_calls_in_progress_have_ended(
    hub, monkeypatch, tmp_path, caplog, lane, threads
):
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path))
    monkeypatch.setattr(WritesLate, "begun", begun := [])
    monkeypatch.setattr(WritesLate, "ended", ended := [])
    with running_agent(hub, WritesLate) as (_, line):
        for _ in range(3):
            if lane == "ordered":
                line.run("unit", None)
            else:
                line.control("begin_data", b"manifest")
        wait_until(lambda: len(begun) == threads)
    assert len(begun) == len(ended) == threads  # the other calls were dropped
    assert list((tmp_path / "scratch").iterdir()) == []
    assert [record for record in caplog.records if record.name == "concurrent.futures"] == []


class Silent:
    """A process that never answers."""

    def __init__(self):
        self.is_awaited = self.is_closed = False
        self.tasks = []

    def submit(self, worker, task):
        self.tasks.append(task)

    def wait(self, wake):
        self.is_awaited = True
        wait_for([wake.fileno()], 60)
        self.is_awaited = False
        return []

    def close(self, kill):
        assert not self.is_awaited
        self.is_closed = True


def test_a_process_is_closed_when_no_thread_waits_for_it(hub):
    process = Silent()

    class WithProcess(Supervisor):
        def __init__(self, *given):
            super().__init__(*given)
            self.process._local = process

    with running_agent(hub, WithProcess) as (_, line):
        call, _ = line.run(Task(0, {}, 0, 1, 1, 0, position=1, dispatch=1), None)
        line.run(Task(1, {}, 0, 1, 1, 0, position=1, dispatch=1), None)
        wait_until(lambda: process.is_awaited)
        hub.end(line)
        with pytest.raises(module.AgentError, match="closed the connection"):
            call.result(30)
    assert process.is_closed and len(process.tasks) == 1


def test_an_agent_ends_if_its_coordinator_dies_during_the_welcome():
    keys = Keys.generate()
    context = zmq.Context()
    guard = wire.start_authenticator(context, keys)
    socket, port = wire.open_listener(context, keys, "127.0.0.1")
    agent = Agent(Ticket(f"127.0.0.1:{port}", keys.key, listen="127.0.0.1"), patience=60.0)
    agent._socket.send([b"hello", b"{}"])
    peer, *_ = socket.recv_multipart()
    socket.send_multipart([peer, b"welcome"])
    time.sleep(0.3)
    guard.stop()
    context.destroy(linger=0)
    time.sleep(0.3)  # it has been welcomed and cut off, and has heard of neither
    assert agent.run() == CUT
    agent.close()


class Noted(dict):
    """Calls that wait for an answer; `futures` has those that do not wait any more, too."""

    def __init__(self):
        self.futures = []

    def __setitem__(self, number, call):
        self.futures.append(call[0])
        super().__setitem__(number, call)


@pytest.mark.parametrize("name", ["send", "_handle"])
def test_an_interrupt_waits_until_a_message_is_sent_or_handled(hub, monkeypatch, name):
    """Half a message would spoil the next one, and an answer that was taken would be lost."""
    with running_agent(hub, Supervisor) as (_, line):
        line.pending = noted = Noted()
        plain = getattr(hub._socket, name)

        def interrupted(frames):
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGINT)
            plain(frames)

        with monkeypatch.context() as patched:
            patched.setattr(hub._socket, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    line.control("ping")
                    hub.wait(0.1, [])
        assert [future.result(30) for future in noted.futures] == [os.getpid()] * len(noted.futures)
        assert noted.futures and not noted


def test_calls_after_a_wait_are_answered_at_once(hub):
    """A thread returns the socket to the background thread before it waits for a future."""
    with running_agent(hub, Supervisor) as (_, line):
        for _ in range(3):
            hub.wait(0.0, [])
            hub.release()
            assert hub._socket._lent_until == 0.0
            assert line.control("ping").result(30) == os.getpid()


def test_an_agent_that_ends_before_its_hello_is_read_is_not_taken(hub):
    context = zmq.Context()
    address = f"127.0.0.1:{hub.port}"
    hello = {
        "versions": list_versions(),
        "id": "x",
        "host": "x",
        "machine": "x",
        "pid": 1,
        "states": 1,
    }
    with hub._socket._handling:  # keeps the hub from reading
        socket = wire.dial(context, hub.keys, address)
        socket.send_multipart([b"hello", json.dumps(hello).encode()])
        time.sleep(0.5)
        socket.close()
        time.sleep(0.5)
    with running_agent(hub, Supervisor) as (agent, _):  # its hello comes later
        assert [node.id for node in hub.nodes()] == [agent._id]
    context.destroy(linger=0)
