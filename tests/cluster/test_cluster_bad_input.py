"""What cannot work on a cluster is said before anything is trained, and nothing hangs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading

import pytest

ray = pytest.importorskip("ray")

import ballast  # noqa: E402
import resumable  # noqa: E402
from clusters import living_actors  # noqa: E402

import cerebro  # noqa: E402
from cerebro.cluster import admission  # noqa: E402
from cerebro.cluster.engines import ray_nodes  # noqa: E402
from cerebro.errors import CorruptDataError, InputError  # noqa: E402
from cerebro.machine import environment  # noqa: E402
from cerebro.machine.installation import install_hint  # noqa: E402


def refused(folder, data, executor, match, error=InputError, **options):
    with pytest.raises(error, match=match) as caught:
        resumable.search(folder / "run", data, executor=executor, **options)
    assert "\n" not in str(caught.value)
    assert not (folder / "run").exists()
    assert not ray.is_initialized() or not living_actors()


def test_without_ray_it_says_what_to_install(data, tmp_path):
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import resumable, cerebro\n"
        f"run, data = {str(tmp_path / 'run')!r}, {str(data)!r}\n"
        "resumable.search(run, data, executor=cerebro.ray.Executor())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "InputError: cerebro.ray needs Ray on every node" in ended.stderr
    assert install_hint("ray") in ended.stderr


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("127.0.0.1:1", "no Ray cluster at address='127.0.0.1:1' .*: start one"),
        ("nowhere", "'auto' or 'host:port'"),
        ("127.0.0.1:port", "'auto' or 'host:port'"),
        ("ray://127.0.0.1:10001", "cannot run through Ray Client"),
    ],
)
def test_addresses_without_a_cluster_are_refused(data, tmp_path, address, match):
    assert not ray.is_initialized()
    refused(tmp_path, data, cerebro.ray.Executor(address=address), match)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_an_address_of_another_service_is_refused(data, tmp_path, monkeypatch, answer):
    monkeypatch.setattr(ray_nodes, "CONNECT_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            other, _ = server.accept()
            other.recv(1)
            if answer is None:  # it says nothing, and does not hang up either
                other.recv(1000)
            other.sendall(answer or b"")
            other.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        refused(tmp_path, data, cerebro.ray.Executor(address=address), "no Ray cluster at address")


def test_a_recorded_cluster_that_no_longer_exists_is_refused(data, tmp_path, monkeypatch):
    noted = tmp_path / "ray" / "ray_current_cluster"
    noted.parent.mkdir()
    noted.write_text("127.0.0.1:1")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    refused(tmp_path, data, cerebro.ray.Executor(address="auto"), "no Ray cluster at address")


def test_workers_that_do_not_fit_on_the_cluster_are_refused(cluster, data, tmp_path):
    refused(tmp_path, data, cluster.executor(workers=9), r"9 worker.* do not fit .* 4 node")
    refused(tmp_path, data, cluster.executor(), "more nodes before the search", threads=2)
    refused(tmp_path, data, cluster.executor(resources={"GPU": 1}), "1 GPU each do not fit")


def test_a_search_fails_if_other_jobs_use_the_processors(cluster, data, tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "START_SECONDS", 1.0)
    ray.init(address=cluster.address, log_to_driver=False, ignore_reinit_error=True)
    others = [ray.remote(num_cpus=1)(Idle).remote() for _ in range(3)]
    ray.get([other.ping.remote() for other in others])
    assert len(living_actors()) == 3  # what other tests find none of
    with pytest.raises(InputError, match=r"has not started a worker in 1 s: .* in use by others"):
        resumable.search(tmp_path / "run", data, executor=cluster.executor())
    for other in others:
        ray.kill(other)


class Idle:
    def ping(self):
        return True


def test_a_shared_folder_that_nodes_do_not_see_is_refused(cluster, data, tmp_path):
    cerebro.shard({"x": [1.0]}, tmp_path / data.name)  # another one of that name
    executor = cluster.executor(shared_path=tmp_path)
    refused(tmp_path, data, executor, "does not find the dataset .* mount the same folder")


def test_a_shared_folder_with_a_missing_file_is_refused(cluster, data, tmp_path):
    shutil.copytree(data, tmp_path / data.name)
    (tmp_path / data.name / "shard-00003" / "x.npy").unlink()
    with pytest.raises(CorruptDataError, match=r"^node .*: cannot open .*shard-00003/x\.npy: No"):
        resumable.search(tmp_path / "run", data, executor=cluster.executor(shared_path=tmp_path))
    assert not living_actors()


def test_nodes_with_a_different_environment_are_refused(cluster, data, tmp_path, monkeypatch):
    here = environment.describe(1)
    other = {**here, "packages": {**here["packages"], "torch": "2.99.0", "numpy": "1.0"}}
    monkeypatch.setattr(environment, "describe", lambda threads=None: other)
    match = "would compute different results: packages.numpy is 1.0 here and .*Install"
    refused(tmp_path, data, cluster.executor(), match)


def test_a_joining_node_with_a_different_environment_is_not_used(
    cluster, data, tmp_path, monkeypatch, frequent_looks
):
    gate = tmp_path / "gate"
    executor = cluster.executor(workers=2)
    admitted = executor._finish_admission

    def hear(node, count, done):
        admitted(node, count, done)
        gate.touch()

    class Join:
        """Lets the third node be a new one, where another NumPy is installed."""

        def on_run_start(self, run):
            here = environment.describe(1)
            other = {**here, "packages": {**here["packages"], "numpy": "1.0"}}
            monkeypatch.setattr(environment, "describe", lambda threads=None: other)
            executor.workers = None
            known = {*executor.nodes().values(), cluster.cluster.head_node.node_id}
            executor._members._known_nodes = known

    monkeypatch.setattr(executor, "_finish_admission", hear)
    with pytest.warns(UserWarning, match=r"has joined and is not used: .*numpy is 1\.0 here"):
        result = resumable.search(
            tmp_path / "run", data, build=ballast.build, executor=executor, callbacks=[Join()],
            space={"lr": cerebro.loguniform(1e-2, 1e-1), "gate": str(gate)}, n_trials=2, epochs=3,
        )  # fmt: skip
    assert result.status == "finished"
    assert {unit["worker"] for unit in result.units()} == {0, 1}
    assert not living_actors()


def test_a_build_that_cannot_be_sent_is_refused_before_connecting(data, tmp_path):
    lock = threading.Lock()

    def build(config, info):
        return lock

    executor = cerebro.ray.Executor(address="127.0.0.1:1")
    refused(tmp_path, data, executor, "build cannot be sent", build=build)


def test_an_executor_runs_one_search_at_a_time(cluster, data, tmp_path):
    executor = cluster.executor()

    class Again:
        def on_run_start(self, run):
            with pytest.raises(InputError, match="runs a different search"):
                resumable.search(tmp_path / "other", data, executor=executor)

    resumable.search(tmp_path / "run", data, executor=executor, callbacks=[Again()], epochs=1)


def test_data_that_are_damaged_here_end_the_search(cluster, tmp_path, data):
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    file = copy / "shard-00003" / "x.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    # The nodes may have the shards from before, under the same checksum.
    for cache in cluster.folder.glob("node-*/data"):
        shutil.rmtree(cache)
    refused(tmp_path, copy, cluster.executor(), "shard-00003", error=(InputError, CorruptDataError))


def test_a_node_whose_cache_cannot_be_written_is_reported(cluster, data, tmp_path):
    file = tmp_path / "file"
    file.touch()
    node = cluster.cluster.add_node(
        num_cpus=1, object_store_memory=80_000_000, env_vars={"CEREBRO_CACHE": str(file)}
    )
    try:
        refused(tmp_path, data, cluster.executor(), "cannot start a worker: .*CEREBRO_CACHE")
    finally:
        cluster.cluster.remove_node(node)
