"""A search over a Dask cluster gives what it gives here; its workers may die and come back."""

from __future__ import annotations

import copy
import os
import signal
import socket
import warnings
from multiprocessing import resource_tracker

import pytest

pytest.importorskip("zmq")
pytest.importorskip("distributed")

import distributed
from clusters import wait_until
from dialing import AtUnit, events, left_over, same, same_derived, search

import cerebro
from cerebro.errors import InputError
from cerebro.run.settings import Exactness


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """One folder for the caches of all nodes: a worker's processes are known by it."""
    folder = tmp_path_factory.mktemp("dask")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CEREBRO_CACHE", str(folder / "cache"))
        yield folder
    # Dask's nannies start it. It would live as long as this process, but later tests look for
    # children left over.
    resource_tracker._resource_tracker._stop()


@pytest.fixture(scope="module")
def client(caches):
    with (
        distributed.LocalCluster(
            n_workers=3, threads_per_worker=1, dashboard_address=":0", local_directory=caches
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected(data, client, tmp_path_factory):
    return search(tmp_path_factory.mktemp("runs") / "here", data)


def agents(client):
    """The agents that Dask still knows of."""
    found = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
    return [key for key in found if "cerebro-agent" in str(key)]


def test_states_match_those_of_a_single_process(data, tmp_path, caches, client, expected):
    result = search(tmp_path / "run", data, cerebro.dask.Executor(client))
    same(result, expected)
    assert {unit["worker"] for unit in result.units()} == {0, 1, 2}
    wait_until(lambda: not left_over(caches) and not agents(client))
    assert client.submit(lambda: 7).result() == 7  # the client is still the user's


def test_a_worker_that_is_killed_comes_back(data, tmp_path, caches, client, expected):
    executor = cerebro.dask.Executor(client, 3)
    before = client.scheduler_info(n_workers=-1)["workers"]
    joined = []

    def strike():
        victim = next(iter(before))
        pid = client.run(os.getpid, workers=[victim])[victim]
        os.kill(pid, signal.SIGKILL)
        before_it = {node.id for node in executor._cluster.nodes()}
        wait_until(lambda: {node.id for node in executor._cluster.nodes()} - before_it)
        joined.append(True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(8, strike)])
    same(result, expected)
    assert joined
    assert len(events(result, "worker lost")) == 1
    wait_until(lambda: not left_over(caches) and not agents(client))


def test_a_derived_dataset_has_the_files_of_one_process(data, tmp_path, caches, client):
    same_derived(data, cerebro.dask.Executor(client), tmp_path)
    wait_until(lambda: not left_over(caches) and not agents(client))


def test_dask_workers_may_be_threads_of_this_process(data, tmp_path, monkeypatch):
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "cache"))
    with distributed.Client(
        processes=False, n_workers=1, threads_per_worker=4, dashboard_address=":0"
    ) as client:
        executor = cerebro.dask.Executor(client)
        assert executor._make_engine(_Context(threads=2)).size == 2
        result = search(tmp_path / "run", data, cerebro.dask.Executor(client, 2))
    same(result, search(tmp_path / "here", data))
    assert left_over(tmp_path) == []


def test_agents_connect_where_dask_uses_ipv6(data, tmp_path, monkeypatch):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "cache"))
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, host="[::1]", dashboard_address=":0",
            local_directory=tmp_path,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):  # fmt: skip
        result = search(tmp_path / "run", data, cerebro.dask.Executor(client))
    same(result, search(tmp_path / "here", data))


class _Context:
    def __init__(self, threads):
        self.exactness = Exactness(threads=threads)


def test_an_unusable_client_is_refused(client, data, tmp_path):
    with pytest.raises(InputError, match=r"must be a dask.distributed.Client, not str"):
        cerebro.dask.Executor("tcp://10.0.0.1:8786")
    with pytest.raises(InputError, match="workers"):
        cerebro.dask.Executor(client, 0)
    executor = cerebro.dask.Executor(client, 2, replicas=2)
    assert "workers=2, replicas=2" in repr(executor)
    assert repr(copy.deepcopy(executor)) == repr(executor)
    with distributed.LocalCluster(n_workers=0, dashboard_address=":0") as empty:
        other = distributed.Client(empty)
        with pytest.raises(InputError, match="no workers"):
            search(tmp_path / "run", data, cerebro.dask.Executor(other))
        other.close()
        with pytest.raises(InputError, match="is closed"):
            search(tmp_path / "run", data, cerebro.dask.Executor(other))
    assert not (tmp_path / "run").exists()
