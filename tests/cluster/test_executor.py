"""A search on a cluster gives what it gives on one machine, and moves no more than it must."""

from __future__ import annotations

import sqlite3
from itertools import pairwise

import numpy as np
import pytest

ray = pytest.importorskip("ray")

import ballast  # noqa: E402
import resumable  # noqa: E402

import cerebro  # noqa: E402


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


def test_a_new_cluster_here_needs_no_address_and_ends_with_the_search(data, tmp_path, expected):
    assert not ray.is_initialized()
    executor = cerebro.ray.Executor(workers=2)
    same(resumable.search(tmp_path / "run", data, executor=executor), expected)
    assert executor.traffic.data_bytes == 0  # both read the data where they are
    assert not ray.is_initialized()


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


def test_shards_with_replicas(cluster, data, tmp_path, expected, apart):
    executor = cluster.executor(replicas=2, workers=3)

    class Look:
        def on_run_start(self, run):
            self.holders = dict(executor.holders())

    look = Look()
    same(resumable.search(tmp_path / "run", data, executor=executor, callbacks=[look]), expected)
    assert {len(holders) for holders in look.holders.values()} == {2}


def test_a_shared_folder_is_read_by_all(cluster, data, tmp_path, expected):
    executor = cluster.executor(shared_path=data.parent)
    assert executor.holders() is None
    same(resumable.search(tmp_path / "run", data, executor=executor), expected)
    assert executor.traffic.data_bytes == 0


def test_clones_carry_their_parents_states(cluster, data, tmp_path, apart):
    def search(folder, **options):
        searcher = cerebro.PBT(interval=1, population=4)
        return resumable.search(
            folder, data, build=ballast.build, epochs=3, searcher=searcher, **options
        )

    found = search(tmp_path / "cluster", executor=cluster.executor())
    here = search(tmp_path / "here", workers=2)
    assert any(trial.parent is not None for trial in here.trials)
    same(found, here)


def test_another_data_set_for_validation(cluster, data, tmp_path, apart):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(90, 3))
    other = cerebro.shard({"x": x, "y": x.sum(1)}, tmp_path / "other", shards=2)
    found = resumable.search(
        tmp_path / "cluster", data, validation=other, executor=cluster.executor()
    )
    same(found, resumable.search(tmp_path / "here", data, validation=other))


@pytest.mark.parametrize("what", ["shard 2 is", "the validation rows are"])
def test_what_was_damaged_on_a_node_is_sent_again(cluster, data, tmp_path, expected, what):
    same(resumable.search(tmp_path / "first", data, executor=cluster.executor()), expected)
    whole = cerebro.Dataset(data).manifest.checksum
    for node in cluster.folder.glob("node-*"):
        for file in node.glob("data/*/shard-00002/x.npy"):
            if (file.parent.parent.name == whole) == what.startswith("shard"):
                content = bytearray(file.read_bytes())
                content[-1] ^= 1
                file.write_bytes(content)
    executor = cluster.executor()
    with pytest.warns(UserWarning, match=f"{what} sent again"):
        result = resumable.search(tmp_path / "run", data, executor=executor)
    same(result, expected)
    assert {shard for _, shard in executor.traffic.shards} == {2 if what[0] == "s" else -1}
