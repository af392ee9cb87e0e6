"""What follows when a shard does not reach a node: who is lost, and what the run says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("zmq")

from cerebro.cluster.executor import ClusterExecutor
from cerebro.cluster.hub import AgentError
from cerebro.cluster.supply import EVERYWHERE, Transfers
from cerebro.cluster.workers import Call, Events, Placement
from cerebro.errors import CorruptDataError
from cerebro.worker.messages import ShardsPlaced


class Waiting(ClusterExecutor):
    """Three workers of one cache that wait for a shard, which the first one is sent."""

    def __init__(self):
        super().__init__(3, 1, None)
        self._events = Events()
        for n in range(3):
            worker = SimpleNamespace(number=n, name=f"host-{n}", call=Call(None))
            self._members.workers[n] = worker
        self.failed, self.sent_again = [], []

    def _join(self, context):
        raise AssertionError

    def _handle_failed_agent(self, remote, error):
        self.failed.append(remote.number)

    def _send_when_loaded(self, remote, call, *, damaged=False):
        self.sent_again.append(remote.number)

    def fails_with(self, error):
        self._resume_waiting(self._members.workers[0], 5, error, [0, 1, 2])
        return self._events.trouble


def test_a_failed_transfer_loses_only_the_receiving_agent():
    executor = Waiting()
    assert executor.fails_with(AgentError("it has closed the connection")) is None
    assert (executor.failed, executor.sent_again) == ([0], [1, 2])


def test_a_full_disk_of_a_node_is_reported_as_such():
    executor = Waiting()
    trouble = executor.fails_with(AgentError("failed", OSError(28, "No space left on device")))
    assert type(trouble) is OSError
    assert "node host-0 cannot store its shards ([Errno 28] No space left on device)" in str(
        trouble
    )
    assert (executor.failed, executor.sent_again) == ([], [])


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CorruptDataError("x.npy differs"), "x.npy differs"),
        (AgentError("failed", CorruptDataError("x.npy differs")), "node host-0: x.npy differs"),
        (FileNotFoundError("no x.npy"), "no x.npy"),
    ],
)
def test_damaged_data_are_reported_as_corrupt(error, text):
    trouble = Waiting().fails_with(error)
    assert type(trouble) is CorruptDataError and str(trouble) == text


# --- which lots are on their way -----------------------------------------------------


class Sender:
    """Has sent some lots to places; sends others when it is told that they have arrived."""

    def __init__(self):
        self.arrived = {"a": {0, EVERYWHERE}, "b": {1, EVERYWHERE}}
        self.placement = Placement([10, 10], lots={"a": {0}, "b": {1}})
        self.derives = False
        self.sent = []

    def is_there(self, remote, lot):
        return lot in self.arrived.get(remote.place, ())

    def send(self, remote, lots):
        self.sent.append(("send", remote.place, *lots))

    def resend_damaged(self, remote, lot):
        self.sent.append(("resend", remote.place, lot))

    def describe_lot(self, lot):
        return f"shard {lot} is"

    def forget(self, place):
        self.placement.remove_place(place)
        del self.arrived[place]


class Lots:
    """Two places with a lot and a worker each, and what `Transfers` says about them."""

    def __init__(self):
        self.supply, self.events, self.arrivals = Sender(), Events(), []
        self.a, self.b = (SimpleNamespace(number=n, place="ab"[n]) for n in range(2))
        self.transfers = Transfers(self.supply, self.events, self.hear)
        for remote in (self.a, self.b):
            self.transfers.add_worker(remote)

    def hear(self, receiver, lot, error, workers):
        self.arrivals.append((receiver.number, lot, error, list(workers)))

    def finish(self):
        """Wait for all that is on its way."""
        self.events.fetch_pool.shutdown()
        self.events.process()
        return self.arrivals


@pytest.fixture
def lots():
    return Lots()


def test_workers_of_a_place_wait_for_one_copy(lots):
    assert lots.transfers.is_there(lots.b, 1) and not lots.transfers.is_there(lots.b, 0)
    for worker in (lots.b, SimpleNamespace(number=7, place="b")):
        lots.transfers.wait_for(worker, 0)
    assert lots.finish() == [(1, 0, None, [1, 7])]
    assert lots.supply.sent == [("send", "b", 0)]
    assert lots.transfers.holders() == {0: [0, 1], 1: [1]}
    assert lots.events.take() == [ShardsPlaced()]


def test_a_damaged_lot_is_sent_again(lots):
    assert lots.transfers.mark_damaged(lots.a, 0) == "shard 0 is"
    lots.transfers.wait_for(lots.a, 0, damaged=True)
    assert lots.finish() == [(0, 0, None, [0])]
    assert lots.supply.sent == [("resend", "a", 0)]
    assert lots.events.take() == []  # it has been there all along


def test_a_failed_copy_is_reported_and_may_be_tried_again(lots):
    def send(remote, numbers):
        raise AgentError("it has closed the connection")

    lots.supply.send = send
    lots.transfers.load(lots.b, 0)
    ((receiver, lot, error, workers),) = lots.finish()
    assert (receiver, lot, workers) == (1, 0, []) and isinstance(error, AgentError)
    assert not lots.transfers.is_there(lots.b, 0)
    assert not lots.transfers._loading


def test_a_slow_place_is_relieved_of_one_lot_at_a_time(lots):
    workers = [lots.a, lots.b]
    for _ in range(9):
        for trial in range(2):
            lots.transfers.pace.add(0, trial, 10, 10.0)
            lots.transfers.pace.add(1, trial, 10, 1.0)
    lots.transfers.rebalance(workers)
    lots.transfers.rebalance(workers)
    assert lots.finish() == [(1, 0, None, [])]
    assert lots.supply.sent == [("send", "b", 0)]


def test_a_lost_place_has_no_lots_and_its_speed_is_forgotten(lots):
    lots.transfers.remove_worker(lots.b, with_place=False)
    assert lots.transfers.holders() == {0: [0], 1: []}
    lots.transfers.remove_worker(lots.b, with_place=True)
    assert lots.supply.arrived == {"a": {0, EVERYWHERE}}
    newcomer = SimpleNamespace(number=2, place="a")
    lots.transfers.add_worker(newcomer, with_node=True)
    assert lots.transfers.holders() == {0: [0, 2], 1: []}
