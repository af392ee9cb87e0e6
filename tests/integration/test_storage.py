"""Searches whose data and runs are in a bucket of a real S3 server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import buckets
import pytest
import resumable
from buckets import rows, split

import cerebro
from cerebro.errors import CorruptDataError


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "cache"))
    with buckets.serving(monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The same data and search without a bucket."""
    folder = tmp_path_factory.mktemp("local")
    data = cerebro.shard(rows(), folder / "set", shards=resumable.SHARDS)
    return data, resumable.search(folder / "run", data.path)


def objects_of(data):
    return sorted(
        f"set/shard-{shard:05d}/{name}.npy" for shard in range(data.num_shards) for name in "xy"
    )


# --- data ---------------------------------------------------------------------------


def test_a_search_here_reads_each_object_once(server, tmp_path, local, monkeypatch):
    """Its workers, a second search and an evaluation take the copies."""
    data, expected = local
    made = cerebro.shard(rows(), "s3://bkt/set", shards=resumable.SHARDS)
    assert made.checksum == data.checksum
    assert server.names("bkt/set") == sorted([*objects_of(data), "set/manifest.json"])
    assert list(server.written())[-1] == "bkt/set/manifest.json"  # nothing is a set before it
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "empty"))
    server.requests.clear()
    found = resumable.search(tmp_path / "run", "s3://bkt/set", workers=2)
    assert resumable.hashes(found) == resumable.hashes(expected)
    assert server.read() == dict.fromkeys([f"bkt/{name}" for name in objects_of(data)], 1) | {
        "bkt/set/manifest.json": 1
    }
    server.requests.clear()
    resumable.search(tmp_path / "again", "s3://bkt/set", workers=2, epochs=1)
    opened = cerebro.open(tmp_path / "run", build=resumable.build)
    assert opened.best.evaluate("s3://bkt/set")["loss"] > 0
    assert opened.verify().problems == []
    longer = cerebro.resume(tmp_path / "run", resumable.build, epochs=4, progress=False)
    assert {len(trial.history) for trial in longer.trials} == {4}
    assert set(server.read()) <= {"bkt/set/manifest.json"}


def test_an_altered_object_ends_the_search_before_it_begins(server, tmp_path, monkeypatch):
    cerebro.shard(rows(), "s3://bkt/set", shards=resumable.SHARDS)
    content = server.system.cat_file("bkt/set/shard-00002/x.npy")
    server.system.pipe_file("bkt/set/shard-00002/x.npy", content[:-1] + b"!")
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "empty"))
    with pytest.raises(CorruptDataError, match=r"^s3://bkt/set/shard-00002/x.npy is damaged"):
        resumable.search(tmp_path / "run", "s3://bkt/set", workers=2)
    assert not (tmp_path / "run").exists()
    server.system.pipe_file("bkt/set/shard-00002/x.npy", content)
    server.system.rm_file("bkt/set/shard-00001/y.npy")
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "another"))
    with pytest.raises(CorruptDataError, match=r"s3://bkt/set/shard-00001/y.npy is missing"):
        cerebro.Dataset("s3://bkt/set").verify()


def test_an_unreachable_bucket_is_named_in_the_error(server, monkeypatch):
    with pytest.raises(cerebro.InputError, match="no dataset at 's3://bkt/other'"):
        cerebro.Dataset("s3://bkt/other")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(OSError, match=r"cannot read s3://bkt/set/manifest.json: .*127.0.0.1:9"):
        cerebro.Dataset("s3://bkt/set")


def nodes(tmp_path, monkeypatch, **options):
    """An executor over agents that share no files with each other or with this process."""
    pytest.importorskip("zmq")
    from cerebro.cluster import admission, hub
    from cerebro.cluster.connected_executor import EngineExecutor
    from cerebro.cluster.engine import Processes

    class Apart(EngineExecutor):
        def __init__(self, shared_path=None):
            super().__init__(2, 1, shared_path)
            self.caches = [tmp_path / f"node-{number}" for number in range(2)]

        def _make_engine(self, context):
            return Processes([{"CEREBRO_CACHE": str(cache)} for cache in self.caches])

    class NoToken:
        def __init__(self, folder, disk): ...

        def __enter__(self):
            return "/nowhere"

        def __exit__(self, *error): ...

    monkeypatch.setattr(admission, "make_run_token", NoToken)
    monkeypatch.setattr(hub, "read_machine_id", lambda: "another one")
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "coordinator"))
    path = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    monkeypatch.setenv("PYTHONPATH", ":".join([*path, str(Path(cerebro.__file__).parent.parent)]))
    return Apart(**options)


def test_each_node_copies_its_own_shards_and_the_coordinator_sends_none(
    server, tmp_path, monkeypatch
):
    train, valid = split(tmp_path / "local")
    expected = resumable.search(tmp_path / "here", train, validation=cerebro.Dataset(valid))
    urls = split("s3://bkt")
    executor = nodes(tmp_path, monkeypatch)
    server.requests.clear()
    found = resumable.search(
        tmp_path / "run", urls[0], validation=cerebro.Dataset(urls[1]), executor=executor
    )
    assert resumable.hashes(found) == resumable.hashes(expected)
    assert executor.traffic.data_bytes == 0
    assert list((tmp_path / "coordinator").glob("data/*/shard-*")) == []
    # A node may have been relieved of a shard; all places together read each one that they have.
    have = [sorted(p.name for p in c.glob("data/*/shard-*")) for c in executor.caches]
    copies = sum(map(len, have))
    assert 12 <= copies <= 16
    assert sum(server.read().values()) == 2 * copies + 2  # x and y; two manifests, once
    assert all(count <= 2 for count in server.read().values())
    assert [list(cache.glob("scratch/*")) for cache in executor.caches] == [[], []]


def test_a_view_for_validation_needs_every_shard_on_every_node(
    server, tmp_path, local, monkeypatch
):
    data, expected = local
    cerebro.shard(rows(), "s3://bkt/set", shards=resumable.SHARDS)
    executor = nodes(tmp_path, monkeypatch)
    server.requests.clear()
    found = resumable.search(tmp_path / "run", "s3://bkt/set", executor=executor)
    assert resumable.hashes(found) == resumable.hashes(expected)
    assert executor.traffic.data_bytes == 0
    assert server.read() == {f"bkt/{name}": 2 for name in objects_of(data)} | {
        "bkt/set/manifest.json": 1
    }


def test_shared_path_may_be_a_url(server, tmp_path, monkeypatch):
    """The coordinator has the data here, and nodes take it from the bucket."""
    from cerebro.cluster.supply import find_dataset_url

    train, valid = split(tmp_path / "local")
    split("s3://bkt")
    expected = resumable.search(tmp_path / "here", train, validation=cerebro.Dataset(valid))
    executor = nodes(tmp_path, monkeypatch, shared_path="s3://bkt")
    found = resumable.search(
        tmp_path / "run", train, validation=cerebro.Dataset(valid), executor=executor
    )
    assert resumable.hashes(found) == resumable.hashes(expected)
    assert executor.traffic.data_bytes == 0
    with pytest.raises(cerebro.InputError, match="train is not at shared_path='s3://bkt/nowhere'"):
        find_dataset_url("s3://bkt/nowhere", cerebro.Dataset(train))


def test_a_node_refuses_an_altered_object_by_name(server, tmp_path, monkeypatch):
    cerebro.shard(rows(), "s3://bkt/set", shards=resumable.SHARDS)
    content = server.system.cat_file("bkt/set/shard-00000/y.npy")
    server.system.pipe_file("bkt/set/shard-00000/y.npy", content[:-9])
    executor = nodes(tmp_path, monkeypatch)
    with pytest.raises(CorruptDataError, match=r"s3://bkt/set/shard-00000/y.npy is cut or altered"):
        resumable.search(tmp_path / "run", "s3://bkt/set", executor=executor)
    assert not (tmp_path / "run").exists()


# --- runs ---------------------------------------------------------------------------


class Stop:
    """Ends a search as Ctrl-C does, after some epochs."""

    def __init__(self, epochs):
        self.left = epochs

    def on_epoch_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_run_resumes_from_the_bucket_when_its_folder_is_deleted(
    server, tmp_path, local, monkeypatch
):
    """Its data are there, too, so the new machine needs nothing but the two URLs."""
    _, expected = local
    monkeypatch.chdir(tmp_path)
    cerebro.shard(rows(), "s3://bkt/set", shards=resumable.SHARDS)
    mirror = cerebro.callbacks.Mirror("s3://bkt/runs/x")
    with pytest.raises(KeyboardInterrupt):
        resumable.search(tmp_path / "run", "s3://bkt/set", workers=2, callbacks=[mirror, Stop(5)])
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "another machine"))
    before = {name for name in server.names("bkt/runs/x") if "/states/" in name}
    assert before
    server.requests.clear()
    found = cerebro.resume("s3://bkt/runs/x", resumable.build, progress=False)
    assert found.path == Path("runs/x") and found.status == "finished"
    assert resumable.hashes(found) == resumable.hashes(expected)
    assert found.verify().problems == []
    states = [name for name in server.read() if "/states/" in name]
    assert sorted(states) == sorted(f"bkt/{name}" for name in before)  # and each once:
    assert {server.read()[name] for name in states} == {1}
    # A state that is there is never written again.
    written = server.written()
    assert {count for name, count in written.items() if "/states/" in name} == {1}
    assert not {f"bkt/{name}" for name in before} & written.keys()
    pointers = [name for name in written if name.endswith("run.json")]
    assert pointers == ["bkt/runs/x/run.json"]


def test_an_unavailable_bucket_delays_the_copy_but_not_the_search(
    server, tmp_path, local, monkeypatch
):
    """Every write is refused until the last epoch."""
    _, expected = local
    monkeypatch.setattr("cerebro.callbacks.mirror.RETRY_SECONDS", 0.0)
    mirror = cerebro.callbacks.Mirror("s3://bkt2/runs/x")  # there is no such bucket yet

    class MakeBucket:
        left = 12

        def on_epoch_end(self, trial, metrics):
            self.left -= 1
            if self.left == 0:
                server.system.mkdir("bkt2")

    data = expected.saved.meta["data"]["path"]
    with pytest.warns(UserWarning, match="the run cannot be copied to s3://bkt2/runs/x: .*bucket"):
        found = resumable.search(tmp_path / "run", data, callbacks=[mirror, MakeBucket()])
    assert resumable.hashes(found) == resumable.hashes(expected)
    monkeypatch.chdir(tmp_path)
    again = cerebro.resume("s3://bkt2/runs/x", resumable.build)
    assert resumable.hashes(again) == resumable.hashes(expected)


def test_the_cloud_example_resumes_when_its_pod_restarts(server, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    program = Path(__file__).parent.parent.parent / "examples" / "cloud" / "search.py"
    command = [sys.executable, program, "--data=s3://bkt/digits", "--mirror=s3://bkt/runs/x"]
    command += ["--epochs=1", "--trials=2", "--workers=0"]
    said = []
    for pod in ("first", "second"):
        (tmp_path / pod).mkdir()
        done = subprocess.run(
            command, cwd=tmp_path / pod, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines()[-1])
    assert said[0] == said[1] and "Trial" in said[0]
    assert [path.name for path in (tmp_path / "second" / "runs").iterdir()] == ["x"]
