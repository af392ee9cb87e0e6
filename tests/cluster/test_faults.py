"""What a search survives on a cluster: workers, nodes and the coordinator that are killed."""

from __future__ import annotations

import os
import sqlite3

import pytest

ray = pytest.importorskip("ray")

import resumable  # noqa: E402
from clusters import running  # noqa: E402

EPOCHS = 4


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "local"
    return resumable.search(folder, data, workers=2, epochs=EPOCHS)


@pytest.fixture
def cluster(tmp_path):
    """A cluster of a test's own: it will lose nodes."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    with running(folder) as made:
        yield made


class AtUnit:
    """Does something when so many units are done."""

    def __init__(self, *, unit, do):
        self.left = unit
        self.do = do

    def on_unit_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            self.do()


def events(result, kind):
    with sqlite3.connect(result.path / "run.sqlite") as connection:
        return [
            text
            for (text,) in connection.execute("SELECT text FROM events WHERE kind = ?", (kind,))
        ]


def living_actors():
    from ray._private.state import actors

    return [a for a in actors().values() if a["State"] not in ("DEAD",)]


def test_a_node_that_dies_costs_little(cluster, data, tmp_path, expected, apart):
    victim = cluster.nodes[1]
    strike = AtUnit(unit=15, do=lambda: cluster.kill(victim))
    executor = cluster.executor()
    result = resumable.search(
        tmp_path / "run", data, executor=executor, epochs=EPOCHS, callbacks=[strike]
    )
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert result.status == "finished"
    assert any("is gone" in text for text in events(result, "worker lost"))
    # Its shards went to nodes that were left, and nothing else was copied again.
    sent = [shard for (_, shard) in executor.traffic.shards if shard >= 0]
    assert sorted(sent) != list(range(6))
    assert set(sent) == set(range(6))
    assert not living_actors()


def test_an_actor_that_dies_is_replaced_on_its_node(cluster, data, tmp_path, expected, apart):
    executor = cluster.executor()

    def kill():
        hand = next(iter(executor._hands.values()))
        os.kill(ray.get(hand.actor.ping.options(concurrency_group="control").remote()), 9)

    strike = AtUnit(unit=9, do=kill)
    result = resumable.search(
        tmp_path / "run", data, executor=executor, epochs=EPOCHS, callbacks=[strike]
    )
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert len(events(result, "worker lost")) == 1
    assert set(executor.traffic.shards.values()) == {1}
    assert not events(result, "worker not replaced")
    assert not living_actors()
