"""Datasets in object storage, here folders of this machine through fsspec."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("fsspec")

import cerebro
from cerebro.data.cache import PULLING, Cache
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine import disk
from cerebro.machine import objects as module
from cerebro.machine.objects import Objects, StorageError
from cerebro.worker.data_diagnosis import find_not_finite

ROWS = {"x": np.arange(60.0).reshape(30, 2), "y": np.arange(30)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("CEREBRO_CACHE", str(folder))
    return folder


@pytest.fixture
def url(tmp_path):
    """The URL of an uploaded dataset that this machine's cache does not have."""
    made = cerebro.shard(ROWS, tmp_path / "local", shards=3)
    (tmp_path / "bucket").mkdir()
    made.path.rename(tmp_path / "bucket" / "set")
    return f"file://{tmp_path}/bucket/set"


@pytest.fixture
def read(monkeypatch):
    """The names of the objects that were read, in order."""
    names = []
    for method in ("read", "get"):
        plain = getattr(Objects, method)

        def noting(self, name, *rest, plain=plain):
            names.append(name)
            return plain(self, name, *rest)

        monkeypatch.setattr(Objects, method, noting)
    return names


def stored(data):
    return {n: np.concatenate([data.shard(i)[n] for i in range(data.num_shards)]) for n in "xy"}


def test_scanning_for_nonfinite_values_copies_no_shard(tmp_path, read):
    made = cerebro.shard({"x": np.full(30, np.nan)}, tmp_path / "nan", shards=3)
    data = cerebro.Dataset(f"file://{made.path}")
    assert find_not_finite(data, ["x"]) == {}
    data.shard(1)
    read.clear()
    assert "has NaN (10 values in 10 rows, first in row" in find_not_finite(data, ["x"])["x"]
    again = cerebro.Dataset(f"file://{made.path}")  # which has read no shard itself
    assert list(find_not_finite(again, ["x"])) == ["x"]
    assert not [name for name in read if "shard" in name]


def test_shards_are_copied_on_first_read_and_reused(url, read, cache):
    data = cerebro.Dataset(url)
    assert (data.num_rows, data.num_shards, data.url) == (30, 3, url)
    assert data.path.parent == cache / "data"
    assert repr(data).startswith(f"Dataset('{url}'): 30 rows")
    assert read == ["manifest.json"]
    data.shard(1)
    assert read == ["manifest.json", "shard-00001/x.npy", "shard-00001/y.npy"]
    assert len(list(data.batches(8, framework="numpy"))) == 4  # of 7 or 8 rows
    files = [f"shard-0000{i}/{name}.npy" for i in range(3) for name in "xy"]
    assert sorted(read) == ["manifest.json", *files]
    again = cerebro.Dataset(url)
    again.verify()
    assert sorted(read) == ["manifest.json", "manifest.json", *files]
    assert again.checksum == data.checksum
    assert sorted(stored(again)["y"]) == list(range(30))
    assert list(cache.glob("scratch/*")) == []


def test_a_description_copies_nothing(tmp_path, read):
    url = f"file://{tmp_path}/bucket/ragged"
    ragged = [np.arange(n % 5) for n in range(30)]
    local = cerebro.shard({"x": ragged, "y": np.arange(30)}, tmp_path / "set", shards=3)
    size = local.nbytes
    (tmp_path / "bucket").mkdir()
    local.path.rename(tmp_path / "bucket" / "ragged")
    data = cerebro.Dataset(url)
    assert "30 rows, 3 shards" in repr(data)
    assert size <= data.nbytes <= size + 9 * 128  # with the files' headers
    assert read == ["manifest.json"]


def test_views_and_pickles_do_not_fetch_the_manifest_again(url, read, cache):
    train, valid = cerebro.Dataset(url).split(0.8, 0.2)
    assert read == ["manifest.json"]
    copy = pickle.loads(pickle.dumps(valid))
    assert copy.spec() == valid.spec() and copy.spec()["path"] == url
    assert copy.checksum == valid.checksum != train.checksum
    assert read == ["manifest.json"]
    assert np.array_equal(stored(copy)["x"], stored(valid)["x"])
    assert len(read) == 7


def test_another_process_waits_and_finds_the_shards(url, read, cache):
    code = "import sys, cerebro; cerebro.Dataset(sys.argv[1]).verify()"
    others = [subprocess.Popen([sys.executable, "-c", code, url]) for _ in range(2)]
    assert [other.wait() for other in others] == [0, 0]
    cerebro.Dataset(url).verify()
    assert read == ["manifest.json"]
    assert list(cache.glob("scratch/*")) == []


@pytest.fixture
def pulled(url, cache):
    """A cache with the dataset's manifest, and the arguments for pulling all of its shards."""
    objects = Objects(url)
    one = Cache(cache)
    one.begin(objects.read("manifest.json"))
    yield one, (objects, cerebro.Dataset(url).checksum, range(3))
    one.close()


def test_a_forked_child_leaves_its_parents_scratch(cache):
    shared = Cache(cache)
    scratch = shared.scratch()
    child = os.fork()
    if child == 0:
        try:
            shared.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert scratch.exists()
    shared.close()
    assert not scratch.exists()


def test_closing_a_cache_finishes_only_objects_in_progress(pulled, monkeypatch, cache):
    one, arguments = pulled
    plain, begun, closing = Objects.get, [], threading.Event()

    def slow(self, name, path):
        begun.append(name)
        assert closing.wait(30)
        time.sleep(0.2)
        plain(self, name, path)

    monkeypatch.setattr(Objects, "get", slow)
    with ThreadPoolExecutor(1) as thread:
        pull = thread.submit(one.pull, *arguments)
        while len(begun) < 3:  # one of each shard
            time.sleep(0.01)
        one.stop()
        closing.set()
        one.close()
        assert list(cache.glob("scratch/*")) == []
        with pytest.raises(StorageError, match="is being closed"):
            pull.result(30)
    assert len(begun) == 3
    with pytest.raises(StorageError, match="is being closed"):
        one.scratch()
    assert list(cache.glob("scratch/*")) == []


def test_a_cache_that_is_closed_waits_for_no_other_process(pulled, read):
    one, arguments = pulled
    fd = os.open(one.data(arguments[1]) / PULLING, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with ThreadPoolExecutor(1) as thread:
            pull = thread.submit(one.pull, *arguments)
            time.sleep(0.2)
            assert not pull.done()
            one.stop()
            with pytest.raises(StorageError, match="is being closed"):
                pull.result(30)
    finally:
        os.close(fd)
    assert not any(name.startswith("shard") for name in read)


def test_the_error_names_a_truncated_altered_or_missing_object(url, tmp_path, cache):
    file = tmp_path / "bucket" / "set" / "shard-00001" / "x.npy"
    whole = file.read_bytes()
    for content, words in (
        (whole[:-1], f"shard-00001/x.npy is cut or altered: it has {len(whole) - 1} bytes"),
        (whole[:-1] + b"!", "shard-00001/x.npy is damaged: its checksum differs"),
        (None, "shard-00001/x.npy is missing"),
    ):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with pytest.raises(CorruptDataError) as error:
            cerebro.Dataset(url).shard(1)
        assert str(error.value).startswith(f"{url}/{words}")
        assert list(cache.glob("data/*/shard-00001")) == []
        assert list(cache.glob("scratch/*")) == []
    file.write_bytes(whole)
    cerebro.Dataset(url).verify()
    manifest = tmp_path / "bucket" / "set" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    with pytest.raises(CorruptDataError, match=r"bucket/set/manifest.json"):
        cerebro.Dataset(url)


KILLED = """
import os, signal, sys
import cerebro
from cerebro.data import cache

plain = cache.verify_shard

def killed(folder, manifest, shard):
    if (folder / f"shard-{shard:05d}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    plain(folder, manifest, shard)

cache.verify_shard = killed
cerebro.Dataset(sys.argv[1]).shard(1)
"""


def test_a_kill_before_verification_leaves_no_damaged_shard(url, tmp_path, cache):
    file = tmp_path / "bucket" / "set" / "shard-00001" / "x.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    done = subprocess.run([sys.executable, "-c", KILLED, url], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert list(cache.glob("data/*/shard-*")) == []
    with pytest.raises(CorruptDataError, match=r"shard-00001/x\.npy is damaged"):
        list(cerebro.Dataset(url).batches(8, framework="numpy"))


def test_a_shard_is_renamed_into_place_only_after_sync(url, cache, monkeypatch):
    before, after = set(), set()
    plain = disk.sync_descriptor

    def noting(fd):
        named = list(cache.glob("data/*/shard-00001"))
        (after if named else before).add(os.fstat(fd).st_ino)
        plain(fd)

    monkeypatch.setattr(disk, "sync_descriptor", noting)
    cerebro.Dataset(url).shard(1)
    (whole,) = cache.glob("data/*/shard-00001")
    names = sorted(file.name for file in whole.iterdir())
    assert names == ["x.npy", "y.npy"]
    assert {path.stat().st_ino for path in (whole, *whole.iterdir())} <= before
    assert after == {whole.parent.stat().st_ino}


def test_a_copy_that_is_damaged_here_is_copied_again(url, read, cache):
    data = cerebro.Dataset(url)
    data.verify()
    before = stored(data)
    (file,) = cache.glob("data/*/shard-00002/y.npy")
    file.write_bytes(file.read_bytes()[:-8] + b"12345678")
    data.verify()
    assert read.count("shard-00002/y.npy") == 2 and read.count("shard-00001/y.npy") == 1
    (file,) = cache.glob("data/*/shard-00000/y.npy")
    file.write_bytes(file.read_bytes()[:-8])
    again = cerebro.Dataset(url)
    assert np.array_equal(stored(again)["y"], before["y"])
    assert read.count("shard-00000/y.npy") == 2


def test_a_dataset_in_use_is_not_removed_from_the_cache(url, cache):
    data = cerebro.Dataset(url)
    data.verify()
    view = data.select(slice(0, 10))
    checksum = data.shards.manifest.checksum
    del data
    assert not Cache(cache)._remove_unused(checksum)
    assert len(list(cache.glob("data/*/shard-*"))) == 3
    del view
    assert Cache(cache)._remove_unused(checksum)
    assert list(cache.glob("data/*")) == []


def test_upload(tmp_path, read, cache):
    url = f"file://{tmp_path}/bucket/a/set"
    local = cerebro.shard(ROWS, tmp_path / "local", shards=3)
    data = cerebro.shard(ROWS, url, shards=3)
    assert (data.url, data.checksum) == (url, local.checksum)
    assert np.array_equal(stored(data)["x"], stored(local)["x"])
    assert read == ["manifest.json"] * 2  # nothing was copied back
    there = tmp_path / "bucket" / "a" / "set"
    assert {file.relative_to(there): file.read_bytes() for file in there.rglob("*.*")} == {
        file.relative_to(local.path): file.read_bytes() for file in local.path.rglob("*.*")
    }
    assert list(cache.glob("scratch/*")) == []
    with pytest.raises(InputError, match=r"exists: pass exist_ok=True"):
        cerebro.shard(ROWS, url, shards=3)
    assert cerebro.shard(ROWS, url, shards=3, exist_ok=True).checksum == local.checksum
    with pytest.raises(InputError, match="made with shards=3, not 2"):
        cerebro.shard(ROWS, url, shards=2, exist_ok=True)
    with pytest.raises(InputError, match="made from other data"):
        cerebro.shard({"x": ROWS["x"], "y": ROWS["y"] + 1}, url, shards=3, exist_ok=True)


def test_an_upload_that_fails_leaves_no_dataset(tmp_path, monkeypatch, cache):
    url = f"file://{tmp_path}/bucket/set"
    put = Objects.put

    def failing(self, file, name):
        if name == "shard-00001/y.npy":
            raise StorageError("the bucket is full")
        put(self, file, name)

    monkeypatch.setattr(Objects, "put", failing)
    with pytest.raises(OSError, match="the bucket is full"):
        cerebro.shard(ROWS, url, shards=3)
    assert Objects(url).names() == set()
    assert list(cache.glob("*/*")) == []
    with pytest.raises(InputError, match=f"no dataset at '{url}': make one"):
        cerebro.Dataset(url)
    # Killed, it leaves objects without a manifest, which the next upload replaces.
    monkeypatch.setattr(Objects, "put", put)
    Objects(url).write("shard-00009/x.npy", b"old")
    cerebro.shard(ROWS, url, shards=3).verify()
    assert "shard-00009/x.npy" not in Objects(url).names()


def test_other_objects_are_never_replaced(tmp_path):
    url = f"file://{tmp_path}/bucket"
    Objects(url).write("notes.txt", b"mine")
    with pytest.raises(InputError, match="exists, and is not a dataset"):
        cerebro.shard(ROWS, url)
    assert Objects(url).names() == {"notes.txt"}


def test_cli_shard_and_verify_accept_a_url(tmp_path, capsys, cache):
    from cerebro.cli import main

    np.savez(tmp_path / "rows.npz", **ROWS)
    url = f"file://{tmp_path}/bucket/set"
    assert main(["shard", str(tmp_path / "rows.npz"), url, "--shards", "3"]) == 0
    assert main(["verify", url]) == 0
    assert f"{url}: 3 shards" in capsys.readouterr().out
    shutil.rmtree(cache)
    file = tmp_path / "bucket" / "set" / "shard-00002" / "y.npy"
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["verify", url]) == 1
    assert f"{url}/shard-00002/y.npy is cut or altered" in capsys.readouterr().err


def test_bad_urls(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="not a URL of object storage"):
        cerebro.Dataset("nowhere://bucket/set")
    with pytest.raises(InputError, match="run must be a path on this machine, not the URL"):
        cerebro.open("s3://bucket/run")
    data = cerebro.shard(ROWS, tmp_path / "set")
    with pytest.raises(InputError, match="path must be a path on this machine"):
        data.derive("s3://bucket/other", lambda batch: {"z": batch["x"]})

    def absent(module, extra, need):
        raise InputError(f"{need} (No module named {module!r}): install [{extra}]")

    monkeypatch.setattr(module, "import_extra", absent)
    with pytest.raises(InputError, match=r"s3://b/set needs fsspec .*install \[storage\]"):
        cerebro.Dataset("s3://b/set")
