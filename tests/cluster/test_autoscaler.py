"""A search asks Ray's autoscaler for the nodes that it lacks, and takes the request back."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")

import ballast  # noqa: E402
import resumable  # noqa: E402
from autoscaling import requested  # noqa: E402
from clusters import running, wait_until  # noqa: E402
from test_cluster_faults import AtUnit, events  # noqa: E402

import cerebro  # noqa: E402
from cerebro.cluster.engines import ray_nodes  # noqa: E402
from cerebro.errors import InputError  # noqa: E402
from cerebro.worker.messages import Task  # noqa: E402

ONE = {"CPU": 1.0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with one node."""
    with running(tmp_path_factory.mktemp("cluster"), nodes=1) as made:
        yield made


@pytest.fixture(params=["v1", "v2"])
def asked(request, cluster, monkeypatch):
    """Returns the request that Ray keeps for its autoscaler of this version."""
    from ray.autoscaler.v2 import utils

    cluster.restore(1)
    ray.init(address=cluster.address, log_to_driver=False, ignore_reinit_error=True)
    monkeypatch.setattr(utils, "cached_is_autoscaler_v2", request.param == "v2")
    return lambda: requested(request.param)


def search(folder, data, executor, **options):
    return resumable.search(folder, data, executor=executor, build=ballast.build, **options)


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "local"
    return resumable.search(folder, data, workers=2, build=ballast.build)


class AtStart:
    def __init__(self, do):
        self.do = do

    def on_run_start(self, run):
        self.do()


def test_a_search_starts_with_available_nodes_and_uses_later_ones(
    cluster, asked, data, tmp_path, expected, apart, frequent_looks
):
    gate, seen = tmp_path / "gate", []
    executor = cluster.executor(workers=3, autoscale=True)

    def are_ready():
        """Whether the new workers have units, which wait at the gate sooner or later."""
        workers = dict(executor._members.workers)
        calls = [workers[n].call for n in (1, 2) if n in workers]
        return [call is not None and isinstance(call.job, Task) for call in calls] == [True, True]

    def open_gate():
        wait_until(are_ready)
        gate.touch()

    def join():
        seen.append((list(executor.nodes()), asked()))
        for _ in range(2):
            cluster.add()
        threading.Thread(target=open_gate, daemon=True).start()

    def look():
        seen.append((list(executor.nodes()), asked()))

    space = {"lr": cerebro.loguniform(1e-2, 1e-1), "gate": str(gate)}
    callbacks = [AtUnit(5, join), AtUnit(3 * 4 * 7 - 5, look)]
    with pytest.warns(UserWarning, match="room for 1 of 3 workers .* begins with 1 "):
        result = search(tmp_path / "run", data, executor, callbacks=callbacks, space=space)
    assert seen == [([0], [ONE] * 3), ([0, 1, 2], [ONE] * 3)]
    assert asked() == []
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert events(result, "worker joined") == ["worker 1", "worker 2"]
    assert {unit["worker"] for unit in result.units()} == {0, 1, 2}


def test_a_search_that_fits_on_the_cluster_requests_no_nodes(
    cluster, asked, data, tmp_path, recwarn
):
    seen = []
    ray_nodes.request_nodes([ONE] * 5)  # left by a search that was killed
    executor = cluster.executor(workers=1, autoscale=True)
    search(tmp_path / "run", data, executor, callbacks=[AtStart(lambda: seen.append(asked()))])
    assert seen == [[ONE] * 5]
    assert asked() == []
    assert not [warning for warning in recwarn if "autoscaler" in str(warning.message)]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failed_or_interrupted_search_withdraws_its_request(
    cluster, asked, data, tmp_path, error
):
    seen = []

    def fail():
        seen.append(asked())
        raise error

    executor = cluster.executor(workers=2, autoscale=True)
    with (
        pytest.warns(UserWarning, match="room for 1 of 2"),
        pytest.raises(error),
    ):
        search(tmp_path / "run", data, executor, callbacks=[AtUnit(3, fail)])
    assert seen == [[ONE] * 2]
    assert asked() == []


def test_a_search_without_room_waits_for_the_first_node(
    cluster, asked, data, tmp_path, expected, monkeypatch
):
    cluster.restore(0)
    seen = []

    def sleep(seconds):  # in this thread, because Ray starts nodes in no other
        seen.append(asked())
        cluster.add()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(ray_nodes, "time", clock)
    executor = cluster.executor(workers=2, autoscale=True)
    with pytest.warns(UserWarning, match="room for 0 of 2 workers .* waits for the first"):
        result = search(tmp_path / "run", data, executor)
    assert seen == [[ONE] * 2]
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert asked() == []


def test_nodes_that_do_not_come_end_the_search(cluster, asked, data, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_nodes, "NODE_SECONDS", 0.0)
    executor = cluster.executor(workers=2, resources={"fast": 1}, autoscale=True)
    with (
        pytest.warns(UserWarning, match="room for 0 of 2 workers with 1 CPU, 1 fast each"),
        pytest.raises(InputError, match=r"no node with room for a worker .* have an autoscaler"),
    ):
        search(tmp_path / "run", data, executor)
    assert asked() == []
    assert not (tmp_path / "run").exists()


def test_a_new_cluster_here_has_no_autoscaler(data, tmp_path):
    ray.shutdown()
    executor = cerebro.ray.Executor(workers=2, resources={"fast": 1}, autoscale=True)
    with pytest.raises(InputError, match=r"2 worker.* do not fit on the cluster"):
        search(tmp_path / "run", data, executor)
