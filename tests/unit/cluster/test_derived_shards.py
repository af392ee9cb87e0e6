"""Which worker makes which shard of a derived dataset, with a stand-in for the cluster."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import cerebro
from cerebro.cluster.derived_shards import MAX_LOSSES, MadeShards, make_context
from cerebro.data.derivation import Order, ShardWork, make_derivation
from cerebro.errors import CorruptDataError, InputError, WorkerError
from cerebro.worker.messages import (
    Note,
    ShardFailed,
    ShardMade,
    ShardTask,
    WorkerJoined,
    WorkerLost,
)


class Cluster:
    """Workers that hold shards; each task is done, unless the script has another event for it.

    Parameters
    ----------
    held
        The shards of each worker; None: every worker reads all.
    script
        Events instead of a task's result, by the number of entries of the log before the task.
    """

    def __init__(self, held, script=()):
        self.held = held
        self.script = dict(script)
        self.log = []
        self.out = []
        self.spares = []

    def holders(self):
        if self.held is None:
            return None
        shards = range(1 + max(s for own in self.held.values() for s in own))
        return {s: [w for w, own in sorted(self.held.items()) if s in own] for s in shards}

    def load(self, worker, shard):
        self.log.append(("load", worker, shard))
        self.held[worker].append(shard)

    def submit(self, worker, task):
        self.out.append((len(self.log), worker, task))
        self.log.append((worker, task.shard))

    def wait(self):
        number, worker, task = self.out.pop(0)
        return self.script.get(number, [ShardMade(worker, task, {})])

    def replace(self, worker):
        if self.held is not None:
            del self.held[worker]
        if not self.spares:
            raise WorkerError("no spare worker")
        return self.spares.pop(0)


def make(cluster, workers, shards):
    order = Order(None, None, Path(), [10] * 10, 1)
    return sorted(arrived.shard for arrived in MadeShards(cluster, order, workers).make(shards))


def lost(worker, *, began=True):
    return WorkerLost(worker, "it was killed", began=began)


def test_every_worker_takes_the_next_shard_if_all_read_all():
    cluster = Cluster(None)
    assert make(cluster, [0, 1], range(5)) == list(range(5))
    assert cluster.log == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4)]


def test_a_shard_is_derived_by_a_worker_that_holds_it():
    cluster = Cluster({0: [1, 2], 1: [0, 3]})
    assert make(cluster, [0, 1], [0, 1, 2, 3]) == [0, 1, 2, 3]
    assert cluster.log == [(0, 1), (1, 0), (0, 2), (1, 3)]


def test_finished_shards_are_not_derived_again():
    cluster = Cluster({0: [0, 1], 1: [2, 3]})
    assert make(cluster, [0, 1], [3]) == [3]
    assert cluster.log == [(1, 3)]


def test_a_shard_that_fewer_hold_is_first():
    cluster = Cluster({0: [0, 1], 1: [0]})
    assert make(cluster, [0, 1], [0, 1]) == [0, 1]
    assert cluster.log == [(0, 1), (1, 0)]


def test_a_lost_worker_s_shards_are_sent_to_another():
    cluster = Cluster({0: [0, 1], 1: [2]}, {0: [lost(0)]})
    with pytest.warns(UserWarning, match="was computing shard 0; the others continue without it"):
        assert make(cluster, [0, 1], [0, 1, 2]) == [0, 1, 2]
    assert cluster.log == [
        *[(0, 0), (1, 2)],
        *[("load", 1, 0), (1, 0), ("load", 1, 1), (1, 1)],
    ]


def test_a_joining_worker_takes_shards_waiting_elsewhere():
    cluster = Cluster({0: [0, 1, 2], 1: []})
    events, wait = [[WorkerJoined(1), Note("node not used", "a note")]], cluster.wait
    cluster.wait = lambda: events.pop() if events else wait()
    with pytest.warns(UserWarning, match="a note"):
        assert make(cluster, [0], [0, 1, 2]) == [0, 1, 2]
    # It takes the last; the next is not sent, because only one is left.
    assert cluster.log == [(0, 0), ("load", 1, 2), (1, 2), (0, 1)]


def test_a_shard_that_kills_its_workers_is_given_up():
    cluster = Cluster(None, {n: [lost(n)] for n in range(MAX_LOSSES)})
    cluster.spares = [1, 2, 3, 4]
    with (
        pytest.warns(UserWarning, match="another worker takes its place"),
        pytest.raises(WorkerError, match="4 workers were lost while they computed shard 0; the"),
    ):
        make(cluster, [0], [0, 1])


def test_no_worker_is_left():
    cluster = Cluster(None, {0: [lost(0)]})
    with (
        pytest.warns(UserWarning, match="continue without it"),
        pytest.raises(WorkerError, match="no worker is left, and none joins: no spare worker"),
    ):
        make(cluster, [0], [0, 1])


def test_a_worker_can_join_as_the_last_one_is_lost():
    cluster = Cluster(None, {0: [lost(0), WorkerJoined(7)]})
    with pytest.warns(UserWarning, match="continue without it"):
        assert make(cluster, [0], [0, 1]) == [0, 1]
    assert cluster.log == [(0, 0), (7, 0), (7, 1)]


def test_workers_that_fail_to_start_are_replaced_a_few_times():
    cluster = Cluster(None, {n: [lost(n, began=False)] for n in range(9)})
    cluster.spares = list(range(1, 9))
    with (
        pytest.warns(UserWarning, match="takes its place|continue without it"),
        pytest.raises(WorkerError, match="no worker is left, and none joins: it was killed"),
    ):
        make(cluster, [0], [0])
    assert len(cluster.log) == MAX_LOSSES


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("error", InputError, "derive: the function fails in shard 0, node box: it is so"),
        ("input", InputError, "it is so"),
        ("memory", InputError, "it is so (shard 0, node box)"),
        ("data", CorruptDataError, "it is so (shard 0, node box)"),
        ("storage", OSError, "a node's disk is full: it is so (shard 0, node box)"),
    ],
)
def test_a_failure_ends_the_derive(kind, error, text):
    failed = ShardFailed(0, ShardTask(0), kind, "it is so", node="box")
    with pytest.raises(error) as caught:
        make(Cluster(None, {0: [failed]}), [0], [0, 1])
    assert str(caught.value) == text


def same(batch):
    return {"same": batch["x"]}


@pytest.mark.parametrize(
    ("ours", "theirs", "sent"),
    [("cpu", "cpu", "cpu"), ("cpu", "cuda:0", "cpu"), ("cuda:1", "cuda:0", "cuda:0")],
)
def test_batches_are_on_the_device_that_the_worker_sees(tmp_path, ours, theirs, sent):
    """Batches of a network on the second GPU here are on the worker's only one."""
    data = cerebro.shard({"x": [[1.0], [2.0]]}, tmp_path / "data", progress=False)
    options = {"reads": None, "batch_size": 2, "copies": None, "seed": 0, "dtypes": None}
    work = make_derivation(data, same, framework="torch", device=ours, **options)
    order = Order(data, ShardWork(work, (), ()), tmp_path, [1], 1, theirs)
    context = make_context(order)
    assert context.device == theirs
    assert pickle.loads(pickle.dumps(context.build)).derivation.device == sent
    assert order.work.derivation.device == ours
