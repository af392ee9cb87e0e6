"""What the Ray executor decides without Ray: shards, states, nodes, caches, compatibility."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import re
import shutil
import socket
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

import cerebro
from cerebro.cluster.admission import find_differences
from cerebro.cluster.engines import ray_nodes
from cerebro.cluster.engines.ray import RayAgent
from cerebro.cluster.engines.ray_nodes import (
    ClusterNode,
    _explain_no_cluster,
    connect,
    spread_workers,
)
from cerebro.cluster.hub import AgentError
from cerebro.cluster.messages import Sent, Traffic
from cerebro.cluster.states import CARRIED_BYTES, Blob, HeldState, HeldStates
from cerebro.cluster.supply import Supply
from cerebro.cluster.workers import Pace, Placement
from cerebro.data.cache import Cache
from cerebro.data.placed import PlacedDataset, write_view
from cerebro.data.shards import verify_shard
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine import environment
from cerebro.machine.signals import WakePipe

# --- which shards lie where ---------------------------------------------------------


def placed(rows, places):
    placement = Placement(rows)
    for worker, place in enumerate(places):
        placement.add_worker(worker, place)
    return placement


def test_shards_are_dealt_in_proportion_to_a_places_workers():
    placement = placed([10] * 9, "abb")
    dealt = placement.assign_lots()
    assert sorted(dealt["a"] + dealt["b"]) == list(range(9))
    assert (len(dealt["a"]), len(dealt["b"])) == (3, 6)
    assert placement.holders()[dealt["b"][0]] == [1, 2]


def test_unequal_shards_are_dealt_by_their_rows():
    dealt = placed([60, 10, 10, 10, 10, 20], "ab").assign_lots()
    assert dealt == {"a": [0], "b": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_replicas_lie_at_different_places(replicas):
    placement = placed([10] * 8, "abc")
    placement.assign_lots(replicas)
    counts = {len({*holders}) for holders in placement.holders().values()}
    assert counts == {min(replicas, 3)}


def test_a_place_keeps_the_shards_it_already_has():
    dealt = placed([10] * 6, "abc").assign_lots(1, {"a": [4, 5], "b": [0], "c": []})
    assert {4, 5} <= set(dealt["a"])
    assert 0 in dealt["b"]
    assert {len(shards) for shards in dealt.values()} == {2}


def test_a_place_that_has_everything_gets_no_more_than_its_share():
    dealt = placed([10] * 6, "abc").assign_lots(1, {"b": range(6)})
    assert {len(shards) for shards in dealt.values()} == {2}


def relieve(placement, speeds=None):
    copies = []
    while (wish := placement.choose_lot_to_copy(speeds)) is not None:
        copies.append(wish)
        placement.add_lot(wish[1], wish[0])
    return copies


def test_equal_places_need_no_relief():
    placement = placed([10] * 8, "abcd")
    placement.assign_lots()
    assert relieve(placement) == []


def test_a_slow_place_is_helped_and_nothing_is_taken_away():
    placement = placed([10] * 8, "abcd")
    dealt = placement.assign_lots()
    copies = relieve(placement, {0: 0.5})
    assert {shard for shard, _ in copies} <= {*dealt["a"]}
    assert 0 < len(copies) <= 4
    assert {*dealt["a"]} <= placement.lots["a"]


def test_a_place_that_joins_gets_its_share():
    placement = placed([10] * 12, "abc")
    placement.assign_lots()
    placement.add_worker(3, "d")
    copies = relieve(placement)
    assert {place for _, place in copies} == {"d"}
    assert 3 <= len(copies) <= 4
    assert len({shard for shard, _ in copies}) == len(copies)


def test_a_removed_place_holds_no_shards():
    placement = placed([10] * 4, "ab")
    dealt = placement.assign_lots()
    placement.remove_place("a")
    assert all(placement.holders()[shard] == [] for shard in dealt["a"])
    assert all(placement.holders()[shard] == [1] for shard in dealt["b"])


def test_pace_compares_workers_on_the_same_trials():
    pace = Pace()
    for _ in range(40):
        for trial, cost in enumerate([1.0, 7.0]):  # trials differ sevenfold
            for worker, factor in enumerate([1.0, 1.0, 2.0]):
                pace.add(worker, trial, 100, 100 * cost * factor)
    speeds = pace.speeds()
    assert speeds[0] == pytest.approx(speeds[1], rel=0.1)
    assert speeds[0] / speeds[2] == pytest.approx(2.0, rel=0.1)
    pace.forget(2)
    assert set(pace.speeds()) == {0, 1}


# --- which states there are ----------------------------------------------------------


def state(position, node, nbytes=10**6):
    return HeldState(position, f"ref {position}", node, f"agent of {node}", 0, "hash", nbytes)


def test_the_newest_state_and_the_newest_on_another_node_are_kept():
    held = HeldStates()
    for position, node in enumerate("aabbba", 1):
        held.add(3, state(position, node))
    assert held.find_newest(3) == state(6, "a")
    assert held.find_state(3, 5) == state(5, "b")
    assert held.find_state(3, 4) is None
    assert held.find_state(3, 2) is None


def test_on_one_node_the_newest_of_another_agent_is_kept():
    held = HeldStates()
    for position, agent in enumerate("aabba", 1):
        held.add(0, HeldState(position, None, "node", agent, 0, "hash", 10**6))
    assert [held.find_state(0, position) is not None for position in (1, 2, 3, 4, 5)] == 3 * [
        False
    ] + [
        True,
        True,
    ]
    held.remove_agent("a")
    assert held.find_newest(0).position == 4


def test_a_lost_node_returns_a_trial_to_its_remaining_state():
    held = HeldStates()
    for position, node in enumerate("abb", 1):
        held.add(0, state(position, node))
    held.remove_agent("agent of b")
    assert held.find_state(0, 3) is None
    assert held.remove_lost_state(0, 3) == 1
    assert held.find_state(0, 1) == state(1, "a")
    held.remove_agent("agent of a")
    assert held.remove_lost_state(0, 1) is None


def test_small_states_lie_with_the_coordinator():
    held = HeldStates()
    held.add(0, state(1, "a", CARRIED_BYTES))
    held.remove_agent("agent of a")
    assert held.find_state(0, 1) is not None


def test_states_that_were_handed_over_survive_their_node():
    held = HeldStates()
    blob = Blob("a:1", 7)
    held.add(0, HeldState(1, blob, "a", "agent of a", 0, "hash", 10**6))
    assert not held.find_state(0, 1).is_here
    blob.packed = b"state"
    held.remove_agent("agent of a")
    assert held.find_state(0, 1).is_here


def test_ended_trials_hold_no_states():
    held = HeldStates()
    held.add(0, state(1, "a"))
    held.forget(0)
    assert held.find_newest(0) is None
    assert held.remove_lost_state(0, 1) is None


# --- nodes ----------------------------------------------------------------------------


def node(name, cpus, **resources):
    return ClusterNode(name, "10.0.0.1", 1, {"CPU": cpus, **resources})


def test_workers_are_dealt_in_turn_and_begin_with_the_coordinators_node():
    nodes = [node("a", 2.0), node("b", 1.0), node("c", 0.0), node("d", 4.0)]
    chosen = spread_workers(nodes, {"CPU": 1.0}, 5, "d")
    assert [n.id for n in chosen] == ["d", "a", "b", "d", "a"]
    assert len(spread_workers(nodes, {"CPU": 1.0}, None, "a")) == 7
    assert [n.id for n in spread_workers(nodes, {"CPU": 2.0}, None, "a")] == ["a", "d", "d"]


def test_workers_that_do_not_fit_are_refused():
    nodes = [node("a", 2.0), node("b", 1.0, GPU=1.0)]
    with pytest.raises(InputError, match=r"4 worker.* 1 CPU each do not fit .* 2 CPU; 1 CPU"):
        spread_workers(nodes, {"CPU": 1.0}, 4, "a")
    with pytest.raises(InputError, match="fewer workers= or resources="):
        spread_workers(nodes, {"CPU": 2.0, "GPU": 1.0}, None, "a")


def test_the_error_for_another_ray_version_says_what_to_install():
    error = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1.0")
    told = str(_explain_no_cluster("10.0.0.1:6379", error))
    assert told.startswith("Version mismatch")
    assert told.endswith("install the same versions of Ray and Python on every node")
    assert "\n" not in told


def test_a_cluster_that_requires_a_token_is_not_reported_as_missing():
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    error.__cause__ = RuntimeError("InvalidAuthToken: Authentication token is missing")
    told = str(_explain_no_cluster("10.0.0.1:6379", error))
    assert "requires a token" in told and "RAY_AUTH_MODE=token" in told


def test_localhost_is_replaced_by_rays_address_of_this_machine(monkeypatch):
    """Ray replaces localhost by the node's own address when it joins a cluster."""
    own = ["127.0.0.1", "::1", "10.0.0.5"]
    names = {"localhost": own[:2], "head": ["10.0.0.5"], "other": ["10.0.0.6"]}

    class Socket:
        def __init__(self, family, kind): ...

        def __enter__(self):
            return self

        def __exit__(self, *error): ...

        def bind(self, place):
            if place[0] not in own:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    def found(host, port, **options):
        if host == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, 0, 0, "", (ip, 0)) for ip in names.get(host, [host])]

    joined = SimpleNamespace(gcs_address="10.0.0.5:6379", get_node_id=lambda: "node")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: joined)
    monkeypatch.setattr(ray_nodes, "import_ray", lambda: ray)
    monkeypatch.setattr(ray_nodes.socket, "getaddrinfo", found)
    monkeypatch.setattr(ray_nodes.socket, "socket", Socket)
    for host in ("localhost", "127.0.0.1", "[::1]", "head", "10.0.0.5"):
        assert connect(f"{host}:6379", None) == ray_nodes.Connection(ray, "node", False)
        with pytest.raises(InputError, match=r"belongs to the Ray cluster at 10\.0\.0\.5:6379"):
            connect(f"{host}:6380", None)
    for host in ("other", "10.0.0.6", "nowhere"):
        with pytest.raises(InputError, match=f"address='{host}:6379', but this process belongs"):
            connect(f"{host}:6379", None)
    joined.gcs_address = "10.0.0.6:6379"  # of another machine
    connect("other:6379", None)
    with pytest.raises(InputError, match=r"belongs to the Ray cluster at 10\.0\.0\.6:6379"):
        connect("localhost:6379", None)


def test_an_executor_is_copied_and_sent_as_it_was_made():
    made = cerebro.ray.Executor("auto", 3, {"fast": 1}, 2, "/shared", True)
    for other in (copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert repr(other) == repr(made)


def test_an_actor_that_outlives_the_connection_starts_no_new_cluster():
    """As `ray.kill` would: it calls `ray.init` if need be."""
    RayAgent(None, SimpleNamespace(is_initialized=lambda: False), None).kill()


def test_the_autoscaler_is_asked_for_all_workers_and_only_if_some_are_missing(monkeypatch):
    asked, joined = [], [node("a", 0.0), node("b", 2.0), node("c", 4.0)]
    monkeypatch.setattr(ray_nodes, "request_nodes", asked.append)
    monkeypatch.setattr(ray_nodes, "STEP_SECONDS", 0.0)
    one = {"CPU": 1.0}

    def find_room(nodes, workers):
        return ray_nodes.Demand(one, workers).find_room(lambda: nodes)

    assert find_room(joined, 6) == (joined, 6)
    assert find_room(joined, 2) == (joined, 2)
    assert asked == []
    with pytest.warns(UserWarning, match="room for 6 of 7 workers with 1 CPU each.* begins with 6"):
        assert find_room(joined, 7) == (joined, 6)
    assert asked == [[one] * 7]
    seen = iter([[], joined[:1], joined[:2]])  # nodes join one by one
    with pytest.warns(UserWarning, match="room for 0 of 3 workers .* waits for the first"):
        assert ray_nodes.Demand(one, 3).find_room(lambda: next(seen)) == (joined[:2], 2)
    assert asked[1:] == [[one] * 3]


FULL = OSError(errno.ENOSPC, "No space left on device", "/cache/data")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            AgentError("it has failed", FULL),
            r"cannot store the data.* No space left .*: is there room",
        ),
        (AgentError("it has closed the connection"), "lost while it .* closed the connection"),
    ],
    ids=["full", "lost"],
)
def test_a_node_that_cannot_be_given_the_data_is_reported(error, text):
    answer = Future()
    answer.set_exception(error)
    agent = SimpleNamespace(call=lambda *what: answer)
    remote = SimpleNamespace(agent=agent, report=SimpleNamespace(at=()), reads_all=False)
    data = SimpleNamespace(shards=SimpleNamespace(manifest=SimpleNamespace(checksum="")))
    context = SimpleNamespace(build=None, train=data, validation=None)
    supply = Supply(None, context, None, 1, Traffic(), None)
    with pytest.raises(InputError, match=text):
        supply.set_data_paths(remote)


def test_bad_arguments_are_refused():
    for options, word in [
        ({"workers": 0}, "workers"),
        ({"replicas": 0}, "replicas"),
        ({"address": ""}, "address"),
        ({"address": 6379}, "address"),
        ({"resources": {"GPU": -1}}, "resources"),
        ({"resources": ["GPU"]}, "resources"),
        ({"autoscale": "yes", "workers": 2}, "autoscale"),
        ({"autoscale": True}, "autoscale=True needs workers="),
    ]:
        with pytest.raises(InputError, match=word):
            cerebro.ray.Executor(**options)


# --- compatibility ----------------------------------------------------------------------


def altered(here, path, value):
    there = {name: dict(part) if isinstance(part, dict) else part for name, part in here.items()}
    *folders, name = path
    (there[folders[0]] if folders else there)[name] = value
    return there


@pytest.mark.parametrize(
    "path",
    [("cerebro",), ("python",), ("packages", "numpy"), ("system",), ("cpu", "features"),
     ("variables", "ATEN_CPU_CAPABILITY"), ("blas",)],
)  # fmt: skip
def test_differences_that_change_results_are_refused(path):
    here = environment.describe(1)
    refused, noted = find_differences(here, altered(here, path, "another"))
    assert len(refused) == 1
    assert path[-1] in refused[0]
    assert not noted


def test_harmless_differences_are_noted_or_ignored():
    here = environment.describe(1)
    assert find_differences(here, here) == ([], [])
    refused, noted = find_differences(here, altered(here, ("cpu", "model"), "another"))
    assert not refused
    assert "here and another there" in noted[0]
    assert find_differences(here, altered(here, ("packages", "pillow"), "0")) == ([], [])
    assert find_differences(here, altered(here, ("variables", "OMP_NUM_THREADS"), "8")) == ([], [])


# --- a dataset in parts ------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.normal(size=(100, 3)),
        "tokens": [np.arange(n % 5) for n in range(100)],
        "kind": np.array(["cat", "dog"])[rng.integers(0, 2, 100)],
    }
    return cerebro.shard(columns, tmp_path / "set", shards=4)


def in_parts(data, folder, shards):
    """The view of a copy that lacks some shards."""
    shutil.copytree(data.path, folder)
    for shard in set(range(data.num_shards)) - set(shards):
        shutil.rmtree(folder / f"shard-{shard:05d}")
    return PlacedDataset.from_spec({**data.spec(), "path": str(folder)})


def batches_of(data, shard):
    found = data.batches(7, seed=3, epoch=2, shard=shard, framework="numpy")
    return [{name: np.array(values) for name, values in batch.items()} for batch in found]


def equal(left, right):
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all((a[n] == b[n]).all() for n in a)
        for a, b in zip(left, right, strict=True)
    )


def test_a_part_gives_the_batches_of_the_whole(data, tmp_path):
    view, _ = data.split(0.8, 0.2)
    part = in_parts(view, tmp_path / "part", [1, 3])
    assert part.num_rows == view.num_rows
    assert part.view.shard_rows == view.view.shard_rows
    assert part.checksum == view.checksum
    for shard in (1, 3):
        assert equal(batches_of(part, shard), batches_of(view, shard))
    again = pickle.loads(pickle.dumps(part))
    assert isinstance(again, PlacedDataset)
    assert equal(batches_of(again, 3), batches_of(view, 3))


def test_the_error_for_a_shard_on_another_node_says_what_to_do(data, tmp_path):
    part = in_parts(data, tmp_path / "part", [1])
    with pytest.raises(InputError, match=r"shard 0 of the data is on another node: .*replicas="):
        part.stats("x")
    with pytest.raises(InputError, match="before the search"):
        part.split(0.5, 0.5)
    file = tmp_path / "part" / "shard-00001" / "x.npy"
    file.write_bytes(file.read_bytes()[:-8])
    cut = PlacedDataset.from_spec({**data.spec(), "path": str(tmp_path / "part")})
    with pytest.raises(CorruptDataError, match=r"x\.npy"):
        cut.shards.check_sizes(1)
    with pytest.raises(InputError, match="no shard of the dataset is in"):
        in_parts(data, tmp_path / "none", []).view.loader_parts()


def test_a_shard_that_comes_later_is_found(data, tmp_path):
    part = in_parts(data, tmp_path / "part", [0])
    before = part.shards.generation
    with pytest.raises(CorruptDataError):
        part.shards.verify(2)
    (data.path / "shard-00002").rename(tmp_path / "part" / "shard-00002")
    part.shards.check_sizes(2)
    assert part.shards.generation > before
    assert len(batches_of(part, 2)) > 0


def test_folds_of_a_dataset_in_parts_are_those_of_the_whole(data, tmp_path):
    folds = cerebro.data.validation.make_folds(data, cerebro.KFold(4, stratify="kind"))
    part = in_parts(data, tmp_path / "part", [0, 1, 3])
    there = pickle.loads(
        pickle.dumps(cerebro.data.validation.Folds.from_json(part, folds.to_json()))
    )
    assert there.checksum == folds.checksum
    (data.path / "shard-00002").rename(tmp_path / "part" / "shard-00002")
    there.data.shards.check_sizes(2)  # what comes later is there for every fold
    for fold in range(4):
        for view, expected in zip(there.get_views(fold), folds.get_views(fold), strict=True):
            assert view.shards.generation == there.data.shards.generation > 0
            assert view.checksum == expected.checksum
            for shard in range(4):
                assert equal(batches_of(view, shard), batches_of(expected, shard))


def test_a_view_is_written_as_a_dataset(data, tmp_path):
    transforms = {"x": cerebro.transforms.Scale(0.5)}
    view = data.split(0.7, 0.3)[1].with_transforms(transforms)
    folder = tmp_path / "view"
    folder.mkdir()
    written = write_view(view, folder)
    written.verify()
    assert written.view.shard_rows == view.view.shard_rows
    assert written.classes == view.classes
    assert equal(list(written.in_order(8, "numpy")), [*map(dict, view.in_order(8, "numpy"))])
    labels = data.split(0.5, 0.5, stratify="kind")[1]
    other = tmp_path / "labels"
    other.mkdir()
    assert equal(
        list(write_view(labels, other).in_order(8, "numpy")), list(labels.in_order(8, "numpy"))
    )


def test_shards_without_rows_are_left_out(data, tmp_path):
    view = data.select(np.arange(30, 60))
    assert 0 in view.view.shard_rows
    folder = tmp_path / "view"
    folder.mkdir()
    written = write_view(view, folder)
    assert written.view.shard_rows == [rows for rows in view.view.shard_rows if rows]
    assert equal(list(written.in_order(8, "numpy")), list(view.in_order(8, "numpy")))


# --- a node's cache --------------------------------------------------------------------------


def ship(cache, data, shard, piece=1000, spoil=False):
    checksum = data.shards.manifest.checksum
    for name in data.shards.manifest.shards[shard].files:
        content = bytearray((data.path / f"shard-{shard:05d}" / name).read_bytes())
        if spoil:
            content[-1] ^= 1
        for offset in range(0, len(content), piece):
            cache.receive(checksum, shard, name, offset, bytes(content[offset : offset + piece]))
    cache.finish(checksum, shard)


def test_shards_received_in_pieces_stay_in_the_cache(data, tmp_path):
    cache = Cache(tmp_path / "cache")
    manifest = (data.path / "manifest.json").read_bytes()
    assert cache.begin(manifest) == []
    ship(cache, data, 2)
    ship(cache, data, 0)
    again = Cache(tmp_path / "cache")
    assert again.begin(manifest) == [0, 2]
    assert again.place == cache.place != Cache(tmp_path / "other").place
    folder = cache.data(data.shards.manifest.checksum)
    part = PlacedDataset.from_spec({**data.spec(), "path": str(folder)})
    assert equal(batches_of(part, 2), batches_of(data, 2))
    file = next((folder / "shard-00002").iterdir())
    file.write_bytes(b"damaged" + file.read_bytes()[7:])
    cache.forget_damaged(data.shards.manifest.checksum, [0, 2, 3])
    assert again.begin(manifest) == [0]


def test_a_shard_that_was_altered_on_the_way_is_refused(data, tmp_path):
    cache = Cache(tmp_path / "cache")
    manifest = (data.path / "manifest.json").read_bytes()
    cache.begin(manifest)
    with pytest.raises(CorruptDataError, match="shard-00001"):
        ship(cache, data, 1, spoil=True)
    assert cache.begin(manifest) == []
    with pytest.raises(CorruptDataError, match="no file"):
        cache.receive(data.shards.manifest.checksum, 1, "../escape", 0, b"")


@pytest.mark.parametrize("way", ["sent", "adopted"])
def test_a_shard_is_not_renamed_into_place_before_verification(data, tmp_path, monkeypatch, way):
    cache = Cache(tmp_path / "cache")
    manifest = (data.path / "manifest.json").read_bytes()
    cache.begin(manifest)
    whole = cache.data(data.shards.manifest.checksum) / "shard-00001"
    seen = []

    def noting(folder, *rest):
        seen.append(whole.exists())
        verify_shard(folder, *rest)

    monkeypatch.setattr("cerebro.data.cache.verify_shard", noting)
    with pytest.raises(CorruptDataError, match=re.escape(f"{whole}/")):
        if way == "sent":
            ship(cache, data, 1, spoil=True)
        else:
            made = shutil.copytree(data.path, cache.scratch() / "set")
            file = made / "shard-00001" / "x.npy"
            file.write_bytes(file.read_bytes()[:-1] + b"!")
            cache.adopt(made, manifest, [1])
    assert seen == [False]
    assert not whole.exists()
    cache.close()


def test_a_good_copy_is_kept_and_a_damaged_one_replaced(data, tmp_path):
    one, other = (Cache(tmp_path / "cache") for _ in range(2))
    for cache in (one, other):
        cache.begin((data.path / "manifest.json").read_bytes())
    ship(one, data, 1)
    folder = one.data(data.shards.manifest.checksum) / "shard-00001"
    file = next(folder.iterdir())
    good = file.read_bytes()
    with file.open("rb") as first:  # held, so that no other file gets its number
        with pytest.raises(CorruptDataError):
            ship(other, data, 1, spoil=True)
        assert os.path.samestat(file.stat(), os.fstat(first.fileno()))
        ship(other, data, 1)
        assert os.path.samestat(file.stat(), os.fstat(first.fileno()))
    file.write_bytes(b"damaged" + good[7:])
    ship(other, data, 1)
    assert file.read_bytes() == good
    for cache in (one, other):
        cache.close()
    assert list(tmp_path.glob("cache/scratch/*")) == []


def test_a_partly_received_shard_is_kept_in_scratch(data, tmp_path):
    """Where it is removed if the process that receives it is killed."""
    cache = Cache(tmp_path)
    manifest = (data.path / "manifest.json").read_bytes()
    cache.begin(manifest)
    cache.receive(
        data.shards.manifest.checksum,
        0,
        next(iter(data.shards.manifest.shards[0].files)),
        0,
        b"part",
    )
    assert [f.name for f in cache.data(data.shards.manifest.checksum).iterdir()] == [
        "manifest.json"
    ]
    assert [f.read_bytes() for f in cache.scratch().glob("*/shard-00000/*")] == [b"part"]
    cache.close()


def test_scratch_of_a_dead_process_is_removed(tmp_path):
    cache = Cache(tmp_path)
    mine = cache.scratch()
    left = mine.with_name("worker-left")
    left.mkdir()
    (left / ".lock").touch()
    (left / "3.a").write_bytes(b"state")
    other = Cache(tmp_path)
    theirs = other.scratch()
    assert not left.exists()
    assert mine.exists()
    assert theirs != mine
    other.close()
    assert not theirs.exists()
    cache.close()
    assert list((tmp_path / "scratch").iterdir()) == []


# --- what a cache keeps ---------------------------------------------------------------------------


@pytest.fixture
def full(tmp_path, data):
    """A cache folder with three datasets of one size; their checksums, the oldest use first."""
    folder, checksums = tmp_path / "cache", []
    for number in range(3):
        x = np.random.default_rng(number).normal(size=(64, 16))
        other = cerebro.shard({"x": x}, tmp_path / f"set-{number}", shards=2)
        cache = Cache(folder)
        cache.begin((other.path / "manifest.json").read_bytes())
        for shard in range(2):
            ship(cache, other, shard)
        cache.close()
        checksums.append(other.shards.manifest.checksum)
        os.utime(folder / "data" / f"{checksums[-1]}.used", (1000 - number, number))
    return folder, checksums


def kept(folder, checksums):
    return [(folder / "data" / checksum / "shard-00001").is_dir() for checksum in checksums]


def receive(folder, data, monkeypatch, limit):
    """Let a shard of another dataset come into a cache of so many bytes."""
    monkeypatch.setenv("CEREBRO_CACHE_LIMIT", limit)
    cache = Cache(folder)
    cache.begin((data.path / "manifest.json").read_bytes())
    ship(cache, data, 0)
    return cache


def test_the_least_recently_used_dataset_is_evicted(full, data, monkeypatch):
    folder, checksums = full
    receive(folder, data, monkeypatch, "1GB").close()
    assert kept(folder, checksums) == [True, True, True]
    each = sum(f.stat().st_size for f in (folder / "data" / checksums[0]).rglob("*.npy"))
    shutil.rmtree(folder / "data" / data.shards.manifest.checksum)
    cache = receive(folder, data, monkeypatch, f"{2.9 * each / 1000} kB")
    assert kept(folder, checksums) == [False, True, True]
    ship(cache, data, 1)  # its own dataset is in use
    assert cache.begin((data.path / "manifest.json").read_bytes()) == [0, 1]
    assert not (folder / "data" / f"{checksums[0]}.used").exists()
    cache.close()


def test_datasets_of_a_live_run_are_not_evicted(full, data, monkeypatch):
    folder, checksums = full
    user = Cache(folder)
    user.use(checksums[0])
    user.use(checksums[0])
    receive(folder, data, monkeypatch, "1").close()
    assert kept(folder, checksums) == [True, False, False]
    user.close()
    shutil.rmtree(folder / "data" / data.shards.manifest.checksum)
    receive(folder, data, monkeypatch, "1").close()
    assert kept(folder, checksums) == [False, False, False]


def test_a_full_disk_makes_room_too(full, data, monkeypatch):
    folder, checksums = full

    def usage(path):
        free = 10**9 if kept(folder, checksums)[1] is False else 1000
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    receive(folder, data, monkeypatch, "").close()
    assert kept(folder, checksums) == [False, False, True]


@pytest.mark.parametrize("text", ["much", "-1", "10 parsecs", "1e9"])
def test_an_invalid_cache_limit_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("CEREBRO_CACHE_LIMIT", text)
    with pytest.raises(InputError, match=f"CEREBRO_CACHE_LIMIT='{text}' is not a size"):
        Cache(tmp_path)


# --- messages -----------------------------------------------------------------------------------


def test_a_pipe_deleted_at_interpreter_exit_raises_nothing(monkeypatch):
    pipe = WakePipe()
    pipe.close()
    with monkeypatch.context() as ending:  # modules are emptied when Python ends
        for name in ("contextlib", "os"):
            ending.setattr(sys.modules[WakePipe.__module__], name, None)
        pipe.__del__()


def test_a_sent_pickle_is_unpickled_on_arrival():
    sent = Sent(pickle.dumps({"secret": 7}))
    with pytest.raises(TypeError):
        sent({})
    assert pickle.loads(pickle.dumps({"inside": sent})) == {"inside": {"secret": 7}}


# --- the request to an autoscaler -----------------------------------------------------


class Judge:
    """An autoscaler with a limit, which judges a request some looks after it was made."""

    def __init__(self, monkeypatch, limit):
        self.limit, self.delay = limit, 2
        self.version = self.seen = 0
        self.fits = True
        self.requests = []
        monkeypatch.setattr(
            ray_nodes, "request_nodes", lambda bundles: self.requests.append(bundles)
        )
        monkeypatch.setattr(ray_nodes, "_read_versions", self.versions)

    def versions(self):
        self.version += 1
        if self.limit is not None and self.version - self.seen > self.delay:
            self.seen, self.fits = self.version, len(self.requests[-1]) <= self.limit
        return self.version, self.seen, self.fits

    def asked(self):
        return [len(bundles) for bundles in self.requests]


def demanded(judge, workers, room):
    demand = ray_nodes.Demand({"CPU": 2.0}, workers)
    demand.adjust_request()  # before the request: nothing to judge
    demand.make_request(room)
    for _ in range(100):
        demand.adjust_request()
    return judge.asked()


@pytest.mark.parametrize(("limit", "room"), [(37, 0), (37, 5), (1, 0), (63, 1)])
def test_the_largest_request_the_autoscaler_can_fulfill_is_found(monkeypatch, limit, room):
    judge = Judge(monkeypatch, limit)
    with pytest.warns(UserWarning, match=rf"room for 64 workers with 2 CPU each, only for {limit}"):
        asked = demanded(judge, 64, room)
    assert asked[0] == 64 and asked[-1] == limit and len(asked) <= 9
    assert judge.requests[-1] == [{"CPU": 2.0}] * limit


def test_a_request_that_can_be_fulfilled_stays(monkeypatch, recwarn):
    assert demanded(Judge(monkeypatch, 64), 64, 3) == [64]
    assert demanded(Judge(monkeypatch, None), 64, 0) == [64]  # an autoscaler that does not judge
    assert not recwarn.list


def test_a_request_that_cannot_be_fulfilled_stays_visible(monkeypatch):
    with pytest.warns(UserWarning, match="only for 0"):
        assert demanded(Judge(monkeypatch, 0), 4, 0) == [4, 2, 1, 4]


def test_a_cluster_that_reports_no_versions_is_not_an_error(monkeypatch):
    internal_kv = pytest.importorskip("ray.experimental.internal_kv")
    monkeypatch.setattr(internal_kv, "internal_kv_get_gcs_client", lambda: None)
    assert ray_nodes._read_versions() == (0, 0, True)
