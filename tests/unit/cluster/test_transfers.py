"""What follows when a shard does not reach a node: who is lost, and what the run says."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

pytest.importorskip("zmq")

from cerebro.cluster.agents import Call
from cerebro.cluster.executor import ClusterExecutor
from cerebro.cluster.hub import AgentError
from cerebro.errors import CorruptDataError

KEY = "cache", 5


class Waiting(ClusterExecutor):
    """Three workers of one cache that wait for a shard, which the first one is sent."""

    def __init__(self):
        super().__init__(3, 1, None)
        self._remotes = {n: SimpleNamespace(number=n, name=f"host-{n}") for n in range(3)}
        self._out = {n: Call(n, None) for n in range(3)}
        self._parked = {KEY: [0, 1, 2]}
        self._loading = {KEY}
        self.failed, self.sent_again = [], []

    def _join(self, context):
        raise AssertionError

    def _handle_failed_agent(self, remote, error):
        self.failed.append(remote.number)

    def _send_when_loaded(self, remote, call, *, damaged=False):
        self.sent_again.append(remote.number)

    def fails_with(self, error):
        done = Future()
        done.set_exception(error)
        self._finish_loading(KEY, self._remotes[0], done)
        return self._trouble


def test_a_failed_transfer_loses_only_the_receiving_agent():
    executor = Waiting()
    assert executor.fails_with(AgentError("it has closed the connection")) is None
    assert (executor.failed, executor.sent_again) == ([0], [1, 2])
    assert not executor._loading


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
