"""Who takes part in a run on a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("zmq")

from cerebro.cluster.workers import Call, Membership, RemoteWorker


class Node:
    def __init__(self, number):
        self.id = number
        self.is_alive = True

    def answers(self):
        return self.is_alive


def add(members, node, agent, place="cache"):
    remote = RemoteWorker(-1, SimpleNamespace(id=agent), node, None, place, False, None)
    members.add(remote)
    return remote


@pytest.fixture
def members():
    """Workers 0 and 1 on node x, worker 2 on node y."""
    members = Membership()
    x, y = Node("x"), Node("y")
    for node, agent, place in ((x, "a", "p"), (x, "b", "p"), (y, "c", "q")):
        add(members, node, agent, place)
    return members


def test_a_lost_worker_has_no_calls_and_its_number_is_not_used_again(members):
    lost = members.workers[1]
    lost.call, lost.queued = Call(None), Call(None)
    members.remove(lost)
    assert list(members.workers) == [0, 2] and members.lost == {1: lost}
    assert lost.call is lost.queued is None
    assert add(members, lost.node, "d").number == 3


def test_an_agent_is_lost_alone_and_a_node_with_all_its_agents(members):
    (lost,) = members.mark_gone(members.workers[0])
    assert lost is members.workers[0] and not lost.node_is_gone
    assert members.mark_gone(lost) == []  # known already
    members.workers[1].node.is_alive = False
    assert [other.number for other in members.mark_gone(members.workers[1])] == [1]
    assert members.gone_agents == {"a", "b"}
    assert not members.is_used("p") and members.is_used("q")


def test_a_node_that_the_cluster_does_not_list_is_gone(members):
    y = members.workers[2].node
    gone = []
    for remote in members.drop_dead_nodes([y]):
        gone += members.mark_gone(remote)
    assert [remote.number for remote in gone] == [0, 1]
    assert all(remote.node_is_gone for remote in gone)


@pytest.mark.parametrize(("limit", "reserved"), [(None, 2), (4, 1), (3, 0), (2, 0)])
def test_a_new_node_gets_as_many_workers_as_are_missing(members, limit, reserved):
    z = Node("z")
    members.know(["x", "y"], set())
    assert members.find_unknown([members.workers[0].node, z]) == [z]
    assert members.reserve(z, 2, limit) == reserved == members.arriving
    assert members.find_unknown([z]) == []


def test_a_node_with_more_room_is_asked_again_after_a_loss(members):
    z = Node("z")
    assert members.reserve(z, 1, 3) == 0
    members.remove(members.workers[1])
    assert members.find_unknown([z]) == [z]
    assert members.reserve(z, 1, 3) == 1
    assert members.reserve(Node("w"), 1, 3) == 0  # the missing one is arriving
