"""A search on a cluster gives what it gives on one machine, and moves no more than it must."""

from __future__ import annotations

import sqlite3
from itertools import pairwise

import pytest

pytest.importorskip("ray")

import resumable

import cerebro


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    return resumable.search(tmp_path_factory.mktemp("runs") / "local", data, workers=2)


def same(found, expected):
    assert resumable.hashes(found) == resumable.hashes(expected)
    assert [t.config for t in found.trials] == [t.config for t in expected.trials]
    assert [t.status for t in found.trials] == [t.status for t in expected.trials]
    assert [t.metrics for t in found.trials] == [t.metrics for t in expected.trials]
    assert found.best.number == expected.best.number


def moves(result):
    """Sizes of the states that hopped, and of those at epochs' ends, by the run's record."""
    with sqlite3.connect(result.path / "run.sqlite") as connection:
        rows = connection.execute(
            "SELECT trial, step, hopped, state_bytes FROM units ORDER BY trial, epoch, step"
        ).fetchall()
    hops = [before[3] for before, (*_, hopped, _) in pairwise(rows) if hopped]
    return hops, [size for _, step, _, size in rows if step == max(row[1] for row in rows)]


def test_a_search_on_three_nodes_is_that_of_two_local_workers(
    cluster, data, tmp_path, expected, apart
):
    executor = cluster.executor()
    result = resumable.search(tmp_path / "run", data, executor=executor)
    same(result, expected)
    assert result.status == "finished"
    assert not result.verify().problems
    traffic = executor.traffic
    # Every shard went to one node, once, and the validation rows to each.
    sent = {place: [s for p, s in traffic.shards if p == place] for place, _ in traffic.shards}
    assert len(sent) == 3
    assert sorted(s for shards in sent.values() for s in shards if s >= 0) == list(range(6))
    assert set(traffic.shards.values()) == {1}
    # A state was fetched for every hop, and for nothing else.
    hops, ends = moves(result)
    assert traffic.states == len(hops) > 0
    assert traffic.state_bytes == sum(hops)
    assert traffic.kept_bytes == sum(ends)


def test_shards_are_kept_for_the_next_search(cluster, data, tmp_path, expected):
    executor = cluster.executor()
    result = resumable.search(tmp_path / "run", data, executor=executor)
    same(result, expected)
    assert executor.traffic.data_bytes == 0


def test_it_can_be_opened_replayed_and_resumed_here(cluster, data, tmp_path, apart):
    first = resumable.search(tmp_path / "run", data, executor=cluster.executor(), epochs=2)
    again = cerebro.open(tmp_path / "run", build=resumable.build)
    assert resumable.hashes(again) == resumable.hashes(first)
    assert cerebro.replay(again, 1, resumable.build).identical
    longer = cerebro.resume(tmp_path / "run", resumable.build, epochs=3, workers=0, progress=False)
    assert [len(trial.history) for trial in longer.trials] == [3] * 4
    assert cerebro.replay(longer, 2, resumable.build).identical
