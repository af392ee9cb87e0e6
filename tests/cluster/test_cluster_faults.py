"""What a search survives on a cluster: workers, nodes and the coordinator that are killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

import ballast  # noqa: E402
import resumable  # noqa: E402
from clusters import living_actors, wait_until  # noqa: E402

import cerebro  # noqa: E402
from cerebro.cluster import executor as module  # noqa: E402
from cerebro.worker.messages import Task  # noqa: E402

EPOCHS = 4


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "local"
    return resumable.search(folder, data, workers=2, epochs=EPOCHS, build=ballast.build)


@pytest.fixture
def cluster(cluster):
    """The module's cluster with three nodes again, which know nothing."""
    cluster.restore()
    return cluster


class AtUnit:
    """Does something when so many units are done."""

    def __init__(self, unit, do):
        self.left = unit
        self.do = do

    def on_unit_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            self.do()


def search(folder, data, executor, **options):
    options = {"epochs": EPOCHS, "build": ballast.build} | options
    return resumable.search(folder, data, executor=executor, **options)


def rows(result, sql, *values):
    with sqlite3.connect(result.path / "run.sqlite") as connection:
        return connection.execute(sql, values).fetchall()


def events(result, kind):
    return [text for (text,) in rows(result, "SELECT text FROM events WHERE kind = ?", kind)]


def pid_of(hand):
    return hand.agent.control("ping").result()


def worker_processes(folder):
    """Worker processes of the cluster whose caches are in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if b"cerebro._worker" in (entry / "cmdline").read_bytes():
                environment = (entry / "environ").read_bytes()
                if f"CEREBRO_CACHE={folder}".encode() in environment:
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_node_that_dies_costs_little(cluster, data, tmp_path, expected, apart):
    victim = cluster.nodes[1]
    executor = cluster.executor()
    result = search(
        tmp_path / "run", data, executor, callbacks=[AtUnit(15, lambda: cluster.kill(victim))]
    )
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert result.best.number == expected.best.number
    assert result.status == "finished"
    assert any("is gone" in text for text in events(result, "worker lost"))
    # Each node had all shards, and nothing was copied again.
    sent = sorted(shard for (_, shard) in executor.traffic.shards if shard >= 0)
    assert sent == sorted([*range(6)] * 3)
    assert set(executor.traffic.shards.values()) == {1}
    assert result.trials[2].log.count("a model for trial 2\n") >= 1
    assert not living_actors()


def test_an_actor_that_dies_is_replaced_on_its_node(cluster, data, tmp_path, expected, apart):
    executor = cluster.executor()

    def kill():
        os.kill(pid_of(next(iter(executor._members.workers.values()))), signal.SIGKILL)

    result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(9, kill)])
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert len(events(result, "worker lost")) == 1
    assert not events(result, "worker not replaced")
    assert all("are trained again" in text for text in events(result, "state lost"))
    assert set(executor.traffic.shards.values()) == {1}
    assert not living_actors()


def test_a_process_that_dies_is_replaced_in_its_actor(cluster, data, tmp_path, expected, apart):
    executor = cluster.executor()
    actors = set()

    def kill():
        actors.update(pid_of(hand) for hand in executor._members.workers.values())
        os.kill(worker_processes(cluster.folder)[0], signal.SIGKILL)

    def compare():
        assert {pid_of(hand) for hand in executor._members.workers.values()} == actors

    callbacks = [AtUnit(9, kill), AtUnit(60, compare)]
    result = search(tmp_path / "run", data, executor, callbacks=callbacks)
    assert resumable.hashes(result) == resumable.hashes(expected)
    (lost,) = events(result, "worker lost")
    assert "SIGKILL" in lost
    assert not events(result, "state lost")


def test_a_run_resumes_on_fewer_nodes_after_its_coordinator_dies(cluster, data, tmp_path, expected):
    command = [sys.executable, ballast.__file__, tmp_path / "run", data, cluster.address, "40"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    ray.init(address=cluster.address, log_to_driver=False, ignore_reinit_error=True)
    wait_until(lambda: not living_actors())
    wait_until(lambda: not worker_processes(cluster.folder))
    cluster.kill(cluster.nodes[0])
    result = cerebro.resume(
        tmp_path / "run", ballast.build, executor=cluster.executor(workers=2), progress=False
    )
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert result.best.number == expected.best.number
    # The first one's validation rows went when the second one wrote its own.
    cache = cluster.folder / "coordinator"
    assert {entry.name for entry in cache.iterdir()} == {"data", "scratch"}
    assert not list((cache / "scratch").iterdir())


def test_an_actor_without_a_heartbeat_is_given_up(
    cluster, data, tmp_path, expected, apart, monkeypatch
):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.5)
    executor = cluster.executor()

    def stop():
        os.kill(pid_of(executor._members.workers[0]), signal.SIGSTOP)

    result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(20, stop)])
    assert resumable.hashes(result) == resumable.hashes(expected)
    (lost,) = events(result, "worker lost")
    assert "no heartbeat for 3" in lost
    assert not living_actors()


def open_when_ready(gate, executor, worker):
    """Open the trials' gate, in a thread, when a worker that joins has shards and can have units.

    Otherwise the other workers could train the rest before it has any.
    """

    def has_shards():
        holders = executor.holders()  # None: every worker has all before it joins
        return holders is None or any(worker in workers for workers in holders.values())

    def is_ready():
        remote = executor._members.workers.get(worker)
        if remote is None or not remote.has_answered:
            return False
        # Which may wait at the gate:
        return remote.call is None or isinstance(remote.call.job, Task)

    def open_gate():
        wait_until(has_shards)
        wait_until(is_ready)
        gate.touch()

    threading.Thread(target=open_gate, daemon=True).start()


def test_nodes_may_join_during_a_search(cluster, data, tmp_path, expected, apart, frequent_looks):
    gate = tmp_path / "gate"
    executor = cluster.executor()

    def join():
        cluster.add()
        open_when_ready(gate, executor, 3)

    space = {"lr": cerebro.loguniform(1e-2, 1e-1), "gate": str(gate)}
    result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(5, join)], space=space)
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert events(result, "worker joined") == ["worker 3"]
    assert {unit["worker"] for unit in result.units()} == {0, 1, 2, 3}
    # The first nodes have kept what they had.
    assert set(executor.traffic.shards.values()) == {1}
    assert not living_actors()


def kill_node_of(cluster, executor, worker):
    gone = executor.nodes()[worker]
    (node,) = [node for node in cluster.nodes if node.node_id == gone]
    cluster.kill(node)


def test_an_idle_node_replaces_the_only_node_when_it_dies(cluster, data, tmp_path, expected, apart):
    executor = cluster.executor(workers=1)
    kill = AtUnit(5, lambda: kill_node_of(cluster, executor, 0))
    result = search(tmp_path / "run", data, executor, callbacks=[kill])
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert len(events(result, "worker lost")) == 1
    assert {unit["worker"] for unit in result.units()} == {0, 1}
    assert not living_actors()


def test_an_idle_node_takes_the_place_of_one_that_dies(
    cluster, data, tmp_path, expected, apart, frequent_looks
):
    gate = tmp_path / "gate"
    executor = cluster.executor(workers=2)

    def kill():
        kill_node_of(cluster, executor, 1)
        open_when_ready(gate, executor, 2)

    space = {"lr": cerebro.loguniform(1e-2, 1e-1), "gate": str(gate)}
    with pytest.warns(UserWarning, match="is gone"):
        result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(5, kill)], space=space)
    assert resumable.hashes(result) == resumable.hashes(expected)
    assert events(result, "worker joined") == ["worker 2"]
    assert {unit["worker"] for unit in result.units()} == {0, 1, 2}
    assert not living_actors()


def test_a_node_without_room_for_a_state_ends_the_search_with_a_reason(
    cluster, data, tmp_path, expected, apart
):
    def fill():
        for scratch in cluster.folder.glob("node-*/scratch/*/"):
            (scratch / "state.in").unlink(missing_ok=True)
            (scratch / "state.in").symlink_to("/dev/full")

    with pytest.raises(OSError, match=r"node .* has no room for a state .*No space left.*: free"):
        search(tmp_path / "run", data, cluster.executor(), callbacks=[AtUnit(9, fill)])
    assert not living_actors()
    result = cerebro.resume(
        tmp_path / "run", ballast.build, executor=cluster.executor(), progress=False
    )
    assert resumable.hashes(result) == resumable.hashes(expected)
