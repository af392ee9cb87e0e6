"""Datasets in object storage on Ray's nodes: each node copies its own shards, once."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("ray")
pytest.importorskip("moto")
pytest.importorskip("s3fs")

import buckets
import resumable
from buckets import split
from clusters import content, running
from derivable import OPTIONS, norms

import cerebro
from cerebro.errors import CorruptDataError

SHARDS = 4  # of each dataset that `split` writes


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, buckets.serving(patch) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(server, tmp_path_factory):
    """Two nodes, which know the storage's address from this process's variables."""
    with running(tmp_path_factory.mktemp("cluster"), nodes=2) as made:
        yield made


@pytest.fixture(autouse=True)
def empty_caches(cluster):
    cluster.restore(2)
    shutil.rmtree(cluster.folder / "coordinator" / "data", ignore_errors=True)


def search(folder, places, **options):
    return resumable.search(folder, places[0], validation=cerebro.Dataset(places[1]), **options)


def test_each_node_copies_its_own_shards_and_the_coordinator_sends_none(
    server, cluster, tmp_path, monkeypatch
):
    expected = search(tmp_path / "here", split(tmp_path / "local"))
    with monkeypatch.context() as elsewhere:  # the machine that writes shards keeps them
        elsewhere.setenv("CEREBRO_CACHE", str(tmp_path / "writer"))
        places = split("s3://bkt")
    executor = cluster.executor()
    server.requests.clear()
    found = search(tmp_path / "run", places, executor=executor)
    assert resumable.hashes(found) == resumable.hashes(expected)
    assert executor.traffic.data_bytes == 0
    folders = {cache.name: cache for cache in cluster.folder.iterdir()}
    copies = {name: len(list(cache.glob("data/*/shard-*"))) for name, cache in folders.items()}
    assert copies.pop("coordinator") == copies.pop("head", 0) == 0
    # All validation shards on each node, and each training shard on at least one of the two.
    assert len(copies) == 2
    assert 3 * SHARDS <= sum(copies.values()) <= 4 * SHARDS
    read = server.read()
    assert sum(read.values()) == 2 * sum(copies.values()) + 2  # x and y; two manifests, once
    assert all(count <= 2 for count in read.values())


def test_an_altered_object_is_refused_by_name(server, cluster, tmp_path):
    places = split("s3://bkt/altered")
    content = server.system.cat_file("bkt/altered/train/shard-00002/y.npy")
    server.system.pipe_file("bkt/altered/train/shard-00002/y.npy", content[:-9])
    name = "s3://bkt/altered/train/shard-00002/y.npy is cut or altered"
    with pytest.raises(CorruptDataError, match=name):
        search(tmp_path / "run", places, executor=cluster.executor())


def test_a_dataset_is_derived_where_its_shards_lie(server, cluster, tmp_path, monkeypatch):
    """Each machine copies a shard at most once: nodes to compute, the coordinator to keep `y`."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("CEREBRO_CACHE", str(tmp_path / "writer"))
        place, _ = split("s3://bkt/derived")
    here, _ = split(tmp_path / "local")
    expected = cerebro.Dataset(here).derive(tmp_path / "here", norms, **OPTIONS)
    executor = cluster.executor()
    server.requests.clear()
    source = cerebro.Dataset(place)
    made = source.derive(tmp_path / "made", norms, executor=executor, **OPTIONS)
    assert content(made.path) == content(expected.path)
    assert executor.traffic.data_bytes == 0
    read = server.read()
    shards = [name for name in read if "/shard-" in name]
    assert sorted({name.split("/")[3] for name in shards}) == [
        f"shard-{number:05d}" for number in range(SHARDS)
    ]
    # A node that had nothing left to do may have taken over a shard of the other one.
    files = [*cluster.folder.glob(f"*/data/{source.checksum}/shard-*/*.npy")]
    assert sum(read[name] for name in shards) == len(files)
    assert all(2 <= read[name] <= 3 for name in shards)
