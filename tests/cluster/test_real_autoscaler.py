"""Ray's own autoscaler, of both versions, starts the nodes of a search, and ends them after it."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import psutil
import pytest

ray = pytest.importorskip("ray")

import ballast  # noqa: E402
import resumable  # noqa: E402
from autoscaling import AutoscaledCluster, requested  # noqa: E402
from clusters import kill_raylet, wait_until  # noqa: E402
from test_cluster_faults import AtUnit, events  # noqa: E402

import cerebro  # noqa: E402
from cerebro.worker.messages import Task  # noqa: E402

SHARDS = 6
ONE, RARE = {"CPU": 1.0}, {"CPU": 1.0, "rare": 1.0}
UNITS = resumable.TRIALS * resumable.EPOCHS * (SHARDS + 1)
TYPES = {"usual": (ONE, 2), "rare": (RARE, 1)}


@pytest.fixture(scope="module", params=["v1", "v2"])
def cluster(request):
    """A head without CPUs; there may be three nodes, one of them rare."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        made = AutoscaledCluster(Path(name), TYPES, request.param)
        try:
            made.connect()
            yield made
        finally:
            made.close()
        assert made.processes() == []


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path, frequent_looks):
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "coordinator"))


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "local"
    return resumable.search(folder, data, workers=2, build=ballast.build)


class AtFirstUnit:
    """Opens the trials' gate when as many workers have units, which a thread waits for."""

    def __init__(self, executor, gate, workers):
        self._executor, self._gate, self._workers = executor, gate, workers
        self._thread = threading.Thread(target=self._open, daemon=True)

    def on_unit_end(self, trial, metrics):
        if self._thread.ident is None:
            self._thread.start()

    def _open(self):
        wait_until(self._are_busy)
        self._gate.touch()

    def _are_busy(self):
        calls = [remote.call for remote in list(self._executor._members.workers.values())]
        return sum(call is not None and isinstance(call.job, Task) for call in calls) == (
            self._workers
        )


def search(folder, data, executor, gate, workers, look):
    space = {"lr": cerebro.loguniform(1e-2, 1e-1), "gate": str(gate)}
    callbacks = [AtFirstUnit(executor, gate, workers), AtUnit(UNITS - 5, look)]
    options = {"build": ballast.build, "space": space, "callbacks": callbacks}
    return resumable.search(folder, data, executor=executor, **options)


def test_nodes_are_started_for_a_search_and_ended_after_it(cluster, data, tmp_path, expected):
    result = check(cluster, data, tmp_path, None, 2, [ONE] * 2)
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert events(result, "worker joined") == ["worker 1"]


def test_a_search_starts_with_as_many_nodes_as_the_cluster_allows(
    cluster, data, tmp_path, expected
):
    """Of the rare nodes there may be one, and the search wants two.

    The second autoscaler starts none until it is asked for one.
    """
    if cluster.version == "v1":
        result = check(cluster, data, tmp_path, {"rare": 1}, 1, [RARE] * 2)
    else:
        with pytest.warns(UserWarning, match="cannot make room for 2 workers .* only for 1, "):
            result = check(cluster, data, tmp_path, {"rare": 1}, 1, [RARE])
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert events(result, "worker joined") == []


class KillsNode(AtFirstUnit):
    """Kills a node when all workers have units, and opens the gate when they have again."""

    def __init__(self, executor, gate, workers, cluster):
        super().__init__(executor, gate, workers)
        self._cluster = cluster
        self.nodes = []

    def _open(self):
        wait_until(self._are_busy)
        self.nodes = self._cluster.nodes()
        actor = self._executor._members.workers[0].agent.control("ping").result()
        kill_raylet(psutil.Process(actor).parent())
        wait_until(lambda: 0 not in self._executor._members.workers)
        wait_until(self._are_busy)
        self._gate.touch()


def test_a_node_that_dies_is_replaced(cluster, data, tmp_path, expected):
    """The request for two workers stays, so the autoscaler starts another node."""
    if cluster.version == "v1":
        pytest.skip("version 1 keeps dead nodes of this provider, which reports no node as ready")
    executor = cerebro.ray.Executor(cluster.address, 2, autoscale=True)
    gate, seen = tmp_path / "gate", []
    kills = KillsNode(executor, gate, 2, cluster)
    space = {"lr": cerebro.loguniform(1e-2, 1e-1), "gate": str(gate)}
    look = AtUnit(UNITS - 5, lambda: seen.append(cluster.nodes()))
    try:
        with pytest.warns(UserWarning, match="room for 0 of 2 workers"):
            result = resumable.search(
                *(tmp_path / "run", data),
                executor=executor,
                build=ballast.build,
                space=space,
                callbacks=[kills, look],
            )
        assert resumable.hashes(result) == resumable.hashes(expected)
        assert len(events(result, "worker lost")) == 1
        assert events(result, "worker joined") == ["worker 1", "worker 2"]
        assert len(seen[0]) == 2 and len(set(seen[0]) & set(kills.nodes)) == 1
        wait_until(lambda: cluster.nodes() == [])
    except BaseException:
        print(cluster.log())
        raise


def check(cluster, data, tmp_path, resources, comes, asked):
    """Search for two workers, of which `comes` find nodes; return the result."""
    assert cluster.nodes() == []
    seen = []

    def look():
        seen.append((len(cluster.nodes()), requested(cluster.version)))

    executor = cerebro.ray.Executor(cluster.address, 2, resources, autoscale=True)
    try:
        with pytest.warns(UserWarning, match="room for 0 of 2 workers .* waits for the first"):
            result = search(tmp_path / "run", data, executor, tmp_path / "gate", comes, look)
        assert seen == [(comes, asked)]
        assert requested(cluster.version) == []
        assert {unit["worker"] for unit in result.units()} == set(range(comes))
        wait_until(lambda: cluster.nodes() == [])
    except BaseException:
        print(cluster.log())
        raise
    return result
