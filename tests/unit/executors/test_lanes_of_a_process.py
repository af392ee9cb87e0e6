"""Further workers of a process: real processes, whose threads answer on their own sockets."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator

import cloudpickle
import pytest

from cerebro.errors import WorkerError
from cerebro.executors.process import WorkerKind, WorkerProcess

psutil = pytest.importorskip("psutil")
SECONDS = 60.0


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    worker = WorkerProcess.spawn(WorkerKind(1))
    lanes = worker.lanes
    yield worker
    for lane in [*lanes]:
        lane.stop(kill=True)


def ask(lane: WorkerProcess) -> object:
    """Let a worker that has no run end one; return its answer, which has imported modules."""
    lane.send(("end",), is_plain=True)
    assert select.select([lane.channel], [], [], SECONDS)[0]
    (message,) = lane.channel.receive()
    return cloudpickle.loads(message)


def test_each_lane_answers_on_its_own_socket(worker: WorkerProcess) -> None:
    worker.add_lanes(2)  # while the process is starting
    lanes = worker.lanes
    assert lanes[0] is worker and len(lanes) == 3
    for lane in reversed(lanes):
        assert isinstance(ask(lane), dict)
    worker.add_lanes(1)  # and once it works
    assert len(lanes) == 4 and all(lane.lanes is lanes for lane in lanes)
    assert all(isinstance(ask(lane), dict) for lane in lanes)
    assert len({lane.process.pid for lane in lanes}) == 1
    threads = psutil.Process(worker.process.pid).num_threads()
    assert threads >= 2 * len(lanes)  # each has a thread that beats
    while not all(lane.beat.beats > 0 for lane in lanes):  # its first beat may come a little later
        time.sleep(0.01)


def test_a_process_gets_many_lanes_before_it_reads(worker: WorkerProcess) -> None:
    os.kill(worker.process.pid, signal.SIGSTOP)
    worker.add_lanes(101)  # in two messages
    os.kill(worker.process.pid, signal.SIGCONT)
    assert all(isinstance(ask(lane), dict) for lane in worker.lanes)
    assert len(worker.lanes) == 102


def test_lanes_end_with_their_process_and_leave_nothing(worker: WorkerProcess) -> None:
    here = psutil.Process()
    before = here.num_fds()
    worker.add_lanes(1)
    lane = worker.lanes[1]
    ask(lane)
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait(SECONDS)
    with pytest.raises((EOFError, ConnectionError)):
        while select.select([lane.channel], [], [], SECONDS)[0]:
            lane.channel.receive()
    try:
        worker.add_lanes(1)
    except OSError:
        lane.stop(kill=True)
    del worker.lanes[1:], lane
    assert here.num_fds() == before


def test_a_lane_without_descriptors_is_an_error(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("socket.socketpair", none_left)
    with pytest.raises(WorkerError, match=r"cannot start a worker process: .*Too many open files"):
        worker.add_lanes(1)
    monkeypatch.undo()
    assert isinstance(ask(worker), dict) and worker.lanes == [worker]
