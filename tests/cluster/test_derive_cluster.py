"""A dataset that is derived on a cluster has the files of one that is derived here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zmq")

import derivable
from clusters import bytes_of, content, wait_until
from derivable import OPTIONS, Failing, Narrow, Once, first_of, norms
from dialing import Apart, left_over

import cerebro
from cerebro.data.derivation import check_executor
from cerebro.data.manifest import read_manifest, shard_folder
from cerebro.transforms import RandomCrop, Scale, ToCHW

SHARDS = 6


@pytest.fixture
def source(data):
    return cerebro.Dataset(data)


@pytest.fixture
def expected(source, tmp_path):
    return content(source.derive(tmp_path / "here", norms, **OPTIONS).path)


def shards_in(folder, number):
    """The shards of each file that an unfinished dataset has."""
    (part,) = folder.glob(f".{number}.part-*")
    return sorted(path.stem for path in part.glob("shard-*.json"))


def nothing_is_left(folder):
    assert left_over(folder) == []
    assert list(folder.glob("cache-*/scratch/*")) == []


def test_the_files_match_those_of_a_single_process(source, tmp_path, expected, elsewhere):
    """Each node makes the shards that were sent to it, and keeps them for a search."""
    executor = Apart(tmp_path)
    made = source.derive(tmp_path / "made", norms, executor=executor, **OPTIONS)
    assert content(made.path) == expected
    assert executor.traffic.made_bytes == bytes_of(made)
    sent = executor.traffic.shards
    assert sorted(shard for _, shard in sent) == list(range(SHARDS))
    assert len({place for place, _ in sent}) == 3
    nothing_is_left(tmp_path)
    kept = [cache / "data" / made.checksum for cache in executor.caches]
    found = {path.name: path.parent for folder in kept for path in folder.glob("shard-*")}
    assert sorted(found) == [shard_folder(shard) for shard in range(SHARDS)]
    for name, folder in found.items():
        assert content(folder / name) == content(made.path / name)
    again = Apart(tmp_path)
    made.derive(tmp_path / "next", twice, reads=["norm"], key="twice", executor=again)
    assert (again.traffic.data_bytes, again.traffic.shards) == (0, {})
    nothing_is_left(tmp_path)


def twice(batch):
    return {"twice": 2 * batch["norm"]}


def test_a_complete_dataset_is_reused_without_workers(source, tmp_path, expected, elsewhere):
    """A complete dataset starts no workers, whether one process or a cluster made it."""
    made = source.derive(tmp_path / "here", norms, executor=Apart(tmp_path), **OPTIONS)
    assert content(made.path) == expected
    assert list(tmp_path.glob("cache-*")) == []


def test_a_view_with_kept_columns_is_derived_from_data_in_place(source, tmp_path, monkeypatch):
    """Rows of a view keep their order; agents of this machine read the data where it is."""
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "cache"))
    view, _ = source.select(np.random.default_rng(0).permutation(source.num_rows)).split(0.7, 0.3)
    view = view.with_transforms({"x": [Scale(2.0)]})
    here = view.derive(tmp_path / "here", norms, **OPTIONS)
    executor = cerebro.cluster.Executor(2)
    made = view.derive(tmp_path / "made", norms, executor=executor, **OPTIONS)
    assert list(made.columns) == ["y", "norm", "parts"]
    assert content(made.path) == content(here.path)
    assert executor.traffic.data_bytes == 0
    assert not (tmp_path / "cache" / "data" / made.checksum).exists()
    nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("agent", "node .* is gone, which was computing shard 4; the others continue without it"),
        ("worker", "SIGKILL.*, which was computing shard 4; another worker takes its place"),
    ],
)
def test_a_killed_worker_or_agent_does_not_change_the_files(
    source, tmp_path, expected, elsewhere, what, match
):
    function = Once(first_of(source, 4), what, tmp_path / "flag")
    executor = Apart(tmp_path)
    with pytest.warns(UserWarning, match=match):
        made = source.derive(tmp_path / "made", function, executor=executor, **OPTIONS)
    assert (tmp_path / "flag").exists()
    assert content(made.path) == expected
    wait_until(lambda: left_over(tmp_path) == [])


class Restarted(Apart):
    """Its agents can be started again, as by an engine."""

    def _make_engine(self, context):
        processes = super()._make_engine(context)
        start = processes.start

        def start_with(ticket):
            self.ticket = ticket
            start(ticket)

        processes.start = start_with
        processes.failure = lambda: None  # an agent that has ended comes back
        return processes


def test_the_last_agent_may_be_replaced(source, tmp_path, expected, elsewhere):
    """Another one, of an engine that starts it again, makes the shards that are missing."""
    executor = Restarted(tmp_path, 1)
    function = Once(first_of(source, 2), "agent", tmp_path / "flag")

    def start_again():
        wait_until((tmp_path / "flag").exists)
        executor.processes.start(executor.ticket)

    starter = threading.Thread(target=start_again)
    starter.start()
    with pytest.warns(UserWarning, match="is gone, which was computing shard 2"):
        made = source.derive(tmp_path / "made", function, executor=executor, **OPTIONS)
    starter.join()
    assert content(made.path) == expected
    wait_until(lambda: left_over(tmp_path) == [])


def test_an_exception_names_its_shard_and_the_rest_is_kept(source, tmp_path, expected, elsewhere):
    executor = Apart(tmp_path, 1)
    options = {"executor": executor, **OPTIONS}
    with pytest.raises(cerebro.InputError) as caught:
        source.derive(tmp_path / "made", Failing(first_of(source, 4)), **options)
    text = str(caught.value)
    assert text.startswith("derive: the function fails in shard 4, node ")
    assert ": LookupError: no such word (derivable.py:" in text and "in __call__)" in text
    assert 'raise LookupError("no such word")' in str(caught.value.__cause__)
    assert not (tmp_path / "made").exists()
    assert shards_in(tmp_path, "made") == [shard_folder(shard) for shard in range(4)]
    nothing_is_left(tmp_path)
    made = source.derive(tmp_path / "made", norms, **options)
    assert content(made.path) == expected
    left = read_manifest(made.path).shards[4:]
    assert executor.traffic.made_bytes == sum(
        entry.bytes for shard in left for entry in shard.files.values()
    )


def test_unfit_results_give_the_same_error_as_in_a_single_process(source, tmp_path, elsewhere):
    messages = []
    for executor in (None, Apart(tmp_path, 2)):
        with pytest.raises(cerebro.InputError, match=r"in shard 3, unlike in the first") as caught:
            function = Narrow(first_of(source, 3))
            source.derive(tmp_path / "made", function, executor=executor, **OPTIONS)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    nothing_is_left(tmp_path)


def test_a_worker_that_computes_different_values_is_detected(source, tmp_path, elsewhere):
    options = {**OPTIONS, "executor": Apart(tmp_path, 1)}
    with pytest.raises(cerebro.InputError, match=r"computes other values of column 'norm'.*shard"):
        source.derive(tmp_path / "made", derivable.of_the_machine, **options)
    assert shards_in(tmp_path, "made") == []
    (part,) = tmp_path.glob(".made.part-*")
    assert sorted(path.name for path in part.iterdir()) == [".lock"]
    nothing_is_left(tmp_path)


def test_shards_made_before_the_coordinator_is_killed_are_reused(source, tmp_path, expected):
    """Its agents end, and what has arrived is used."""
    script = Path(derivable.__file__)
    target, flag = tmp_path / "made", tmp_path / "flag"
    command = [sys.executable, str(script), str(source.path), str(target), str(flag)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    assert shards_in(tmp_path, "made") == [shard_folder(shard) for shard in range(3)]
    wait_until(lambda: left_over(tmp_path) == [])
    computed = []

    def counted(batch):
        computed.append(len(batch["x"]))
        return norms(batch)

    made = source.derive(target, counted, **OPTIONS)
    assert content(made.path) == expected
    rows = made.shards.stored_rows[3:]
    assert len(computed) == 2 + sum(-(-n // derivable.BATCH) for n in rows)


def test_a_damaged_shard_is_sent_again(source, tmp_path, expected, elsewhere):
    source.derive(tmp_path / "first", norms, executor=Apart(tmp_path, 1), **OPTIONS)
    file = tmp_path / "cache-0" / "data" / source.checksum / shard_folder(2) / "x.npy"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(damaged)
    executor = Apart(tmp_path, 1)
    with pytest.warns(UserWarning, match="shard 2 is sent again"):
        made = source.derive(tmp_path / "made", norms, executor=executor, **OPTIONS)
    assert content(made.path) == expected
    assert list(executor.traffic.shards.values()) == [1]


def test_features_of_a_network_match_those_of_a_single_process(tmp_path, elsewhere):
    """With PyTorch, a network that is sent to the workers, and augmented copies."""
    torch = pytest.importorskip("torch")
    from torch import nn

    rng = np.random.default_rng(0)
    data = {"x": rng.integers(0, 255, (90, 8, 8, 3), np.uint8), "y": rng.integers(0, 3, 90)}
    images = cerebro.shard(data, tmp_path / "images", shards=4)
    view = images.with_transforms({"x": [RandomCrop(6), Scale(1 / 255), ToCHW()]})
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("block", nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True)))
    net.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)))
    options = {"layers": ["block", "pool"], "batch_size": 8, "copies": 2, "dtypes": "bfloat16"}
    here = cerebro.torch.features(view, net, path=tmp_path / "here", **options)
    made = cerebro.torch.features(
        view, net, path=tmp_path / "made", executor=Apart(tmp_path, 2), **options
    )
    assert content(made.path) == content(here.path)
    assert made.checksum == here.checksum
    assert (made.layers, made.same_bits) == (here.layers, here.same_bits)
    nothing_is_left(tmp_path)


def test_one_executor_derives_and_searches(source, tmp_path, elsewhere):
    import ballast

    executor = Apart(tmp_path)
    made = source.derive(tmp_path / "made", same, reads=["x"], keep=["x", "y"], executor=executor)
    result = cerebro.search(
        *(ballast.build, {"lr": [0.1, 0.01]}, made),
        validation=0.2,
        searcher="grid",
        epochs=1,
        batch_size=16,
        run=tmp_path / "run",
        progress=False,
        executor=executor,
    )
    assert result.status == "finished"
    sent = [shard for _, shard in executor.traffic.shards if shard >= 0]
    # Each of three nodes has kept what it made, and gets what the other two made.
    assert sorted(sent) == sorted([*range(made.num_shards)] * 2)
    nothing_is_left(tmp_path)


def same(batch):
    return {"same": batch["x"]}


def test_derive_works_on_a_ray_cluster(source, tmp_path, expected, cluster):
    made = source.derive(tmp_path / "made", norms, executor=cluster.executor(), **OPTIONS)
    assert content(made.path) == expected
    kept = [path.name for path in cluster.folder.glob(f"node-*/data/{made.checksum}/shard-*")]
    assert sorted(kept) == [shard_folder(shard) for shard in range(SHARDS)]


def test_an_unfit_executor_is_refused(source, tmp_path):
    with pytest.raises(cerebro.InputError, match="cannot derive: give one of"):
        source.derive(tmp_path / "made", norms, executor=object(), **OPTIONS)


@pytest.mark.parametrize(
    ("gpus", "device", "match"),
    [
        (1, "cpu", "have GPUs, but the network is on cpu: move it with net.cuda"),
        (None, "cuda:1", "compute on the CPU, but the network is on cuda:1: move it with net.cpu"),
        (None, "meta", "compute on the CPU, but the network is on meta"),
    ],
)
def test_a_network_on_another_device_than_the_workers_is_refused(gpus, device, match):
    with pytest.raises(cerebro.InputError, match=match):
        check_executor(cerebro.cluster.Executor(gpus=gpus), "features(...)", device)


def test_a_function_that_cannot_be_sent_is_refused(source, tmp_path):
    lock = threading.Lock()

    def locked(batch):
        with lock:
            return norms(batch)

    with pytest.raises(cerebro.InputError, match=r"function cannot be sent to workers \(.*lock"):
        source.derive(tmp_path / "made", locked, executor=cerebro.cluster.Executor(1), **OPTIONS)
    assert not (tmp_path / "made").exists()


def test_the_test_process_has_no_node_variable():
    """Else the functions would do to this process what they do to workers."""
    assert "NODE" not in os.environ
